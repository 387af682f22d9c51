"""Events beside calls and attributes: functions and classes made, ``with`` blocks, imports."""

from __future__ import annotations

import sys
import types
from typing import Any

from magjit import _C
from magjit.bytecode import EventKind
from magjit.refgraph import relations as r
from magjit.refgraph.attributes import read_attribute, read_class_attr
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import HEAP_TYPE
from magjit.refgraph.recorder import Handler, StateRecorder

Args = tuple[Any, ...]


def make_function(rec: StateRecorder, state: FrameState, offset: int, inputs: Args) -> Any:
    def note(top: tuple[Any, ...]) -> None:
        if isinstance(top[-1], types.FunctionType):
            rec.made_codes.add(top[-1].__code__)

    return note


def build_class(rec: StateRecorder, state: FrameState, offset: int, inputs: Args) -> None:
    """The class body's function is made next; the class itself is noted by its call."""


def enter_with(rec: StateRecorder, state: FrameState, offset: int, inputs: Args) -> None:
    manager = inputs[0]
    read_class_attr(rec, type(manager), "__enter__")
    read_class_attr(rec, type(manager), "__exit__")
    if rec.graph.node_of(manager) is not None and not int(type(manager).__flags__) & HEAP_TYPE:
        rec.split(f"enters a {type(manager).__qualname__} that was made outside the program")


def import_name(rec: StateRecorder, state: FrameState, offset: int, inputs: Args) -> Any:
    """An import: what ``sys.modules`` has for the name; the import system is not followed."""
    name = state.info.instrs[offset].argval
    modules = rec.root(sys.modules)
    level, names = inputs
    module = sys.modules.get(name)
    rec.imports(name, known=level == 0 and module is not None and _has(module, names))
    if module is not None:
        rec.read(modules, r.Item.of(name), module)
    return _C.OPAQUE


def _has(module: types.ModuleType, names: Any) -> bool:
    """Whether a module has all names that are wanted of it, so that none is a module to load."""
    return all(name in vars(module) for name in names or ())


def import_from(rec: StateRecorder, state: FrameState, offset: int, inputs: Args) -> None:
    read_attribute(rec, inputs[0], state.info.instrs[offset].argval)


def other(rec: StateRecorder, state: FrameState, offset: int, inputs: Args) -> None:
    if state.info.instrs[offset].opname == "SETUP_ANNOTATIONS":
        return  # of a class body, whose namespace is the run's own
    rec.split(f"uses the instruction {state.info.instrs[offset].opname}")


HANDLERS: dict[EventKind, Handler] = {
    EventKind.MAKE_FUNCTION: make_function,
    EventKind.BUILD_CLASS: build_class,
    EventKind.BEFORE_WITH: enter_with,
    EventKind.IMPORT_NAME: import_name,
    EventKind.IMPORT_FROM: import_from,
    EventKind.OTHER: other,
}
