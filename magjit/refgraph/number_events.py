"""What instructions do with the numbers of a run that may change; see `magjit.refgraph.numbers`."""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from magjit import _C
from magjit.bytecode import EventKind
from magjit.bytecode.optable import COMPARE, FILLING
from magjit.refgraph import relations as r
from magjit.refgraph.frames import FrameState
from magjit.refgraph.holder_events import (
    ITERATORS,
    SEQUENCES,
    call,
    compares_items,
    fills,
    is_computed,
    is_container,
    is_one_of,
    is_sequence,
    method_of,
    moves_items,
    then_note,
    then_pin,
)
from magjit.refgraph.kinds import (
    HEAP_TYPE,
    class_lookup,
    instance_dict,
    is_atom,
    is_data_descriptor,
)
from magjit.refgraph.nodes import ABSENT, Leaf
from magjit.refgraph.number_values import (
    BINARY,
    NUMBERS,
    Argument,
    Item,
    Number,
    Read,
    Size,
)
from magjit.refgraph.numbers import may_change
from magjit.refgraph.recorder import Handler, StateRecorder
from magjit.refgraph.stack import Post, called, in_place_of, running_frame
from magjit.refgraph.texts import makes_text

_DIVISIONS = frozenset({"/", "//", "%"})
_UNARY: dict[str, Callable[..., Any]] = {
    "UNARY_NEGATIVE": operator.neg,
    "UNARY_POSITIVE": operator.pos,
    "CALL_INTRINSIC_1": operator.pos,
    "UNARY_INVERT": operator.invert,
}
_COMPUTING: tuple[Any, ...] = (float, int, abs, operator.index, min, max)
"""Functions whose result is a number again, if their arguments are."""
_LOOPS = "loops over a number that changes from call to call"
_OF_SIZES: tuple[Any, ...] = (math.sqrt, math.ceil, math.floor, int)
"""Functions whose result is a number for every size."""
_TYPE_ONLY: tuple[Any, ...] = (isinstance, type)
"""Functions that ask for the type, which the guard compares."""


# -- sources ------------------------------------------------------------------------------------


def read_counter(rec: StateRecorder, obj: Any, name: str, read: Callable[..., None]) -> Post | None:
    """An attribute that holds a number; ``read`` is what is done for any attribute."""
    namespace = instance_dict(obj)
    value = namespace.get(name) if type(namespace) is dict else None
    own = obj is rec.numbers.root and type(value) is float
    seen = own or name in rec.numbers.varying
    if type(value) not in NUMBERS or not (seen or may_change(type(obj), name)):
        read(rec, obj, name)
        return None
    relation = r.Item.of(name)
    node = rec.graph.node_of(namespace)
    if node is None or relation not in node.first.refs:
        read(rec, obj, name)
        node = rec.graph.node_of(namespace)
        found = node.first.refs.get(relation) if node is not None else None
        if node is None or type(found) is not Leaf or found.value is not value:
            return None
        varies = own or (seen and rec.graph.path(node) in rec.numbers.varying[name])
        if not varies and not may_change(type(obj), name):
            return None
        return in_place_of(rec, rec.numbers.read(node, relation, value, varies=varies), value)
    number = rec.numbers.known_read(node, relation)
    if number is None or relation in node.written or not number.live:
        read(rec, obj, name)
        return None
    return in_place_of(rec, number, value)


# -- instructions -------------------------------------------------------------------------------


def use_numbers(
    rec: StateRecorder,
    kind: EventKind,
    handler: Handler,
    state: FrameState,
    offset: int,
    inputs: tuple[Any, ...],
) -> Any:
    """An instruction that uses numbers of the run."""
    numbers = rec.numbers.among(inputs)
    if kind is not EventKind.IS_OP and not any(number.live for number in numbers):
        return handler(rec, state, offset, inputs)
    text = makes_text(rec, kind, handler, state, offset, inputs)
    if text is not NotImplemented:
        return text
    use = _USES.get(kind, _pins)
    return use(rec, handler, state, offset, inputs)


def _pins(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    numbers = rec.numbers.among(inputs)
    if any(_varies_between_regions(rec, number) for number in numbers) and rec.try_cut(_NEEDS):
        return _C.OPAQUE
    rec.numbers.pin(numbers)
    return handler(rec, state, offset, inputs)


def _varies_between_regions(rec: StateRecorder, number: Number) -> bool:
    """Whether a constant in its place would mean a record for each value that a region is given."""
    return rec.in_region and any(
        isinstance(source, Argument) and source.varies and not source.pinned
        for source in number.sources
    )


_NEEDS = "needs a number that changes from call to call"


def _read(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    instr = state.info.instrs[offset]
    if instr.opname == "COMPARE_OP" and _goes_into_graph(rec, inputs):
        return handler(rec, state, offset, inputs)
    if all(type(value) in NUMBERS for value in inputs):
        if instr.opname == "COMPARE_OP":
            rec.numbers.decided(COMPARE[instr.argval], inputs)
            return None
        if instr.opname in _TESTS or instr.opname.startswith(("POP_JUMP", "JUMP_IF")):
            rec.numbers.decided(operator.truth, inputs)
            return None
        if instr.opname in _UNARY:
            return _compute(rec, _UNARY[instr.opname], inputs)
    if instr.opname == "UNPACK_SEQUENCE":
        return handler(rec, state, offset, inputs)
    if instr.opname in ("GET_ITER", "UNPACK_EX") and type(inputs[0]) in (*SEQUENCES, *ITERATORS):
        return moves_items(rec, handler, state, offset, inputs)
    if instr.opname in _FILLING and is_container(inputs[-1]):
        return fills(rec, handler, state, offset, inputs)
    looks_up = instr.opname == "CONTAINS_OP" and type(inputs[1]) is dict
    if (looks_up and rec.numbers.find(inputs[0]) is None) or _is_test(instr, inputs):
        return handler(rec, state, offset, inputs)
    if instr.opname == "COMPARE_OP" and instr.argval in ("==", "!="):
        if compares_items(rec, inputs):
            return handler(rec, state, offset, inputs)
    return _pins(rec, handler, state, offset, inputs)


_TESTS = frozenset({"UNARY_NOT", "TO_BOOL"})
_FILLING = frozenset({"LIST_EXTEND", "DICT_MERGE", "DICT_UPDATE"})


def _is_test(instr: Any, inputs: tuple[Any, ...]) -> bool:
    """Whether an instruction only asks whether a container is empty."""
    tests = instr.opname in _TESTS or instr.opname.startswith(("POP_JUMP", "JUMP_IF"))
    return is_container(inputs[0]) and tests


def _arithmetic(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    symbol = state.info.instrs[offset].argval.rstrip("=")
    func = BINARY.get(symbol)
    if symbol == "**" and all(type(n.obj) is float for n in rec.numbers.among(inputs)):
        func = operator.pow if any(isinstance(one, torch.Tensor) for one in inputs) else None
    if func is not None and _goes_into_graph(rec, inputs):
        rec.numbers.offered = torch.Tensor.__rsub__  # this and others like it are Python functions
        verdict = handler(rec, state, offset, inputs)
        return then_pin(rec, None, verdict, rec.numbers.among(inputs))
    if symbol == "**" and type(inputs[1]) is int and not rec.numbers.find(inputs[1]):
        func = operator.pow if type(inputs[0]) is int and inputs[1] >= 0 else None
    if symbol == "+" and all(map(is_sequence, inputs)):
        if type(inputs[0]) is list and state.info.instrs[offset].argval == "+=":
            return then_note(rec, inputs[0], handler(rec, state, offset, inputs), inputs)
        return moves_items(rec, handler, state, offset, inputs)
    if func is None or not all(type(value) in NUMBERS for value in inputs):
        return _pins(rec, handler, state, offset, inputs)
    if symbol in _DIVISIONS:
        rec.numbers.decided(operator.truth, inputs[1:])
    return _compute(rec, func, inputs)


def _goes_into_graph(rec: StateRecorder, inputs: tuple[Any, ...]) -> bool:
    """A tensor and a number, in an operator whose result's shape does not depend on the number.

    A random number is drawn when the graph has run already.
    """
    if rec.checkpoint is not None or rec.function_calls:
        return False
    if not any(type(value) in (torch.Tensor, torch.nn.Parameter) for value in inputs):
        return False
    return all(
        isinstance(source, Size)
        or (
            isinstance(source, Read | Argument | Item)
            and type(number.obj) in rec.numbers.into_graph
        )
        for number in rec.numbers.plain(rec.numbers.among(inputs))
        for source in number.sources
    )


def _compute(rec: StateRecorder, func: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """The instruction computes a number; the recorder does the same beside."""
    number = rec.numbers.computed(func, operands)
    if number is None:
        rec.numbers.pin(rec.numbers.among(operands))
        return None
    return in_place_of(rec, number, number.obj)


def _stores(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """An outside place, where the program finds it again by an instruction, or opens it."""
    kept = _keeps_attribute(rec, inputs[1], state.info.instrs[offset].argval)
    if kept and rec.graph.node_of(inputs[1]) is None:
        filled = instance_dict(inputs[1])
        return then_note(rec, filled, handler(rec, state, offset, inputs), inputs)
    rec.numbers.pin(rec.numbers.among(inputs[1:] if kept else inputs))
    return handler(rec, state, offset, inputs)


def _keeps_attribute(rec: StateRecorder, obj: Any, name: Any) -> bool:
    """Whether an attribute gives back the very object that is stored."""
    cls = type(obj)
    setter = class_lookup(cls, "__setattr__")
    if not isinstance(name, str):
        return False
    outside = rec.graph.node_of(obj) is not None
    if not outside and (setter is not object.__setattr__ or isinstance(obj, type)):
        return False
    if setter is not object.__setattr__ and not isinstance(setter, types.FunctionType):
        return False
    found = class_lookup(cls, name)
    if found is ABSENT or not is_data_descriptor(found):
        return type(instance_dict(obj)) is dict
    if not outside:
        return False
    if isinstance(found, types.MemberDescriptorType):
        return bool(found.__objclass__.__flags__ & HEAP_TYPE)
    return isinstance(class_lookup(type(found), "__set__"), types.FunctionType) or (
        type(found) is property and isinstance(found.fset, types.FunctionType)
    )


def pin_inside(rec: StateRecorder, value: Any, depth: int = 0) -> None:
    """C code reads an object as a whole: the numbers in it, and in what it holds."""
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    elif isinstance(value, dict):
        parts = [*dict.keys(value), *dict.values(value)]
    else:
        parts = list((instance_dict(value) or {}).values())
    rec.numbers.pin(rec.numbers.among(parts))
    for part in parts if depth < _DEEPEST else ():
        if not is_atom(part) and not isinstance(part, torch.Tensor | types.ModuleType | type):
            pin_inside(rec, part, depth + 1)


_DEEPEST = 3


def _identity(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """No number is None; two numbers are compared as the objects that they stand for."""
    if any(value is None for value in inputs):
        return handler(rec, state, offset, inputs)
    frame = running_frame(state.code)
    for depth, value in enumerate(reversed(inputs)):
        number = rec.numbers.find(value)
        if frame is not None and number is not None and type(value) in NUMBERS:
            _C.replace_stack(frame, depth, number.original)
    return _pins(rec, handler, state, offset, inputs)


def _call(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    func, args = called(inputs)
    known = call(rec, handler, state, offset, inputs, func, args)
    if known is not NotImplemented:
        return known
    named = bool(state.info.instrs[offset].kwnames)
    if isinstance(func, types.BuiltinFunctionType | type) and not named:
        if is_one_of(func, _TYPE_ONLY) or func.__name__ == "__instancecheck__":
            return handler(rec, state, offset, inputs)
        sizes = is_one_of(func, _OF_SIZES) and rec.numbers.all_sizes(rec.numbers.among(args))
        if sizes or (is_one_of(func, _COMPUTING) and is_computed(func, args)):
            handler(rec, state, offset, inputs)
            return _compute(rec, func, tuple(args))
    numbers = rec.numbers.among(inputs)
    if func is range and any(n.varies for n in numbers) and rec.try_cut(_LOOPS):
        return _C.OPAQUE
    if _asks_for_value(func) and any(_varies_between_regions(rec, number) for number in numbers):
        if rec.try_cut(_NEEDS):
            return _C.OPAQUE
    state.entered = False
    verdict = handler(rec, state, offset, inputs)
    if verdict is None and _is_setattr(rec, func, args):
        return None
    return _unless_followed(rec, state, func, verdict, numbers)


def _asks_for_value(func: Any) -> bool:
    """Whether a C function that is not torch's computes with a number, as `math.exp` does."""
    module = getattr(func, "__module__", None)
    return isinstance(func, types.BuiltinFunctionType) and module in _ASKING_MODULES


_ASKING_MODULES = frozenset({"math", "cmath", "builtins", "_operator"})


def _unless_followed(
    rec: StateRecorder, state: FrameState, func: Any, verdict: Any, numbers: list[Number]
) -> Any:
    """Constants of the numbers that a call gets, if it does not enter a followed frame."""
    if verdict is not None or not _has_code(func):
        rec.numbers.pin(numbers)
        return verdict

    def pin_if_not_followed(top: tuple[Any, ...]) -> None:
        if not state.entered:
            rec.numbers.pin(numbers)

    return pin_if_not_followed


def _call_ex(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    func, args, *rest = inputs
    numbers = rec.numbers.among(inputs)
    named = bool(rest) and rest[0] is not _C.NULL and bool(rest[0])
    if is_sequence(args) and not named:
        known = call(rec, handler, state, offset, inputs, func, list(args))
        if known is not NotImplemented:
            return known
    state.entered = False
    verdict = handler(rec, state, offset, inputs)
    if isinstance(func, types.MethodType):
        func = func.__func__
    return _unless_followed(rec, state, func, verdict, numbers)


def _has_code(func: Any) -> bool:
    """Whether the call enters a frame with just these arguments; `entered` sees if so."""
    if isinstance(func, types.FunctionType):
        return True
    if isinstance(func, type):
        known = class_lookup(func, "__new__"), class_lookup(type(func), "__call__")
        made = known == (vars(object)["__new__"], vars(type)["__call__"])
        return made and isinstance(class_lookup(func, "__init__"), types.FunctionType)
    return isinstance(class_lookup(type(func), "__call__"), types.FunctionType)


def _is_setattr(rec: StateRecorder, func: Any, args: list[Any]) -> bool:
    """Whether ``object.__setattr__`` stores a number where `_stores` would let it."""
    if isinstance(func, types.MethodWrapperType):
        args = [func.__self__, *args]
    elif not isinstance(func, types.WrapperDescriptorType):
        return False
    return func.__name__ == "__setattr__" and len(args) == 3 and _keeps_attribute(rec, *args[:2])


def _holds(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    numbers = rec.numbers.among(inputs)
    opname = state.info.instrs[offset].opname
    if opname == "BUILD_MAP":
        rec.numbers.pin(rec.numbers.among(inputs[::2]))
    if opname == "LIST_APPEND":
        return fills(rec, handler, state, offset, inputs)
    if opname == "MAP_ADD":
        rec.numbers.pin(rec.numbers.among(inputs[1:2]))
        return fills(rec, handler, state, offset, inputs)
    if opname in FILLING:
        rec.numbers.pin(numbers)
    handler(rec, state, offset, inputs)
    if opname == "BUILD_SLICE" and rec.numbers.all_sizes(numbers):
        return lambda top: rec.numbers.held(top[-1], numbers)
    if opname not in _HOLDERS or len(inputs) > _MOST_HELD:
        rec.numbers.pin(numbers)
        return None
    return lambda top: rec.numbers.held(top[-1], numbers)


def _keeps(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """A cell: only the program's own instructions look into it."""
    return handler(rec, state, offset, inputs)


_HOLDERS = frozenset(
    {"BUILD_TUPLE", "BUILD_LIST", "BUILD_CONST_KEY_MAP", "BUILD_MAP"}
    | {"LIST_TO_TUPLE", "CALL_INTRINSIC_1"}
)
_MOST_HELD = 16


def _takes_apart(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """An item of a tuple or a list that holds numbers; or of a tensor, by a number."""
    if isinstance(inputs[0], torch.Tensor) and _goes_into_graph(rec, inputs):
        numbers = rec.numbers.among(inputs)
        if rec.numbers.all_sizes(numbers):
            verdict = handler(rec, state, offset, inputs)
            return then_pin(rec, torch.Tensor.__getitem__, verdict, numbers)
        if type(inputs[1]) in (int, list, tuple):
            return handler(rec, state, offset, inputs)
    if is_sequence(inputs[0]) and type(inputs[1]) is slice and not rec.numbers.among(inputs[1:]):
        return moves_items(rec, handler, state, offset, inputs)
    whole = type(inputs[1]) not in (int, str)
    numbers = rec.numbers.among(inputs if whole else inputs[1:])
    if is_sequence(inputs[0]) and any(_varies_between_regions(rec, one) for one in numbers):
        if rec.try_cut(_NEEDS):
            return _C.OPAQUE
    rec.numbers.pin(numbers)
    return handler(rec, state, offset, inputs)


def _stores_item(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """An item of a tensor, by a number; or of a list or dict of the run."""
    numbers = rec.numbers.among(inputs)
    if isinstance(inputs[1], torch.Tensor) and _goes_into_graph(rec, inputs[1:]):
        if rec.numbers.all_sizes(numbers):
            verdict = handler(rec, state, offset, inputs)
            return then_pin(rec, torch.Tensor.__setitem__, verdict, numbers)
    if type(inputs[1]) in (list, dict) and not rec.numbers.among(inputs[2:]):
        return then_note(rec, inputs[1], handler(rec, state, offset, inputs), inputs)
    return _pins(rec, handler, state, offset, inputs)


def _of_a_sequence(
    rec: StateRecorder, handler: Handler, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> Any:
    """A method of a holder or a text, which its call will judge; or an iterator's next item."""
    if type(inputs[0]) in ITERATORS:
        return moves_items(rec, handler, state, offset, inputs)
    if is_container(inputs[0]) or type(inputs[0]) is str:
        return method_of(rec, inputs[0], handler(rec, state, offset, inputs))
    return _pins(rec, handler, state, offset, inputs)


_USES: dict[EventKind, Callable[..., Any]] = {
    EventKind.READ: _read,
    EventKind.BINARY_OP: _arithmetic,
    EventKind.INPLACE: _arithmetic,
    EventKind.STORE_ATTR: _stores,
    EventKind.STORE_DEREF: _keeps,
    EventKind.IS_OP: _identity,
    EventKind.CALL: _call,
    EventKind.CALL_EX: _call_ex,
    EventKind.STORE_SUBSCR: _stores_item,
    EventKind.LOAD_ATTR: _of_a_sequence,
    EventKind.FOR_ITER: _of_a_sequence,
    EventKind.HOLD: _holds,
    EventKind.LOAD_SUBSCR: _takes_apart,
}
