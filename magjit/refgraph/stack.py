"""The frame whose instruction is being handled, for handlers that change its value stack."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from magjit import _C
from magjit.refgraph.number_values import Number
from magjit.refgraph.recorder import StateRecorder

Post = Callable[[tuple[Any, ...]], None]

CALLABLE_DEPTH = 1 if sys.version_info >= (3, 13) else 0
"""How far below its arguments a called function lies on the stack."""


def running_frame(code: Any) -> types.FrameType | None:
    """The innermost frame of a code object: the one whose event is being handled."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def observed_frame(rec: StateRecorder) -> types.FrameType | None:
    """The frame whose call instruction is being handled, or None when C code made the call."""
    if rec.state is None:
        return None
    frame = running_frame(rec.state.code)
    if frame is None:
        return None
    return frame if rec.state.info.instrs[rec.offset].opname.startswith("CALL") else None


def called(inputs: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """What a CALL calls and its arguments, of the instruction's inputs."""
    func, receiver, *args = inputs
    return func, args if receiver is _C.NULL else [receiver, *args]


def in_place_of(rec: StateRecorder, number: Number, value: Any) -> Post:
    """After the instruction: the number's own object on the stack, where the value is now."""
    code = rec.state.code if rec.state is not None else None

    def replace(top: tuple[Any, ...]) -> None:
        if len(top) == 1 and type(top[0]) is type(value) and top[0] == value:
            put_on_stack(rec, code, number)
        else:
            rec.numbers.pin([number])

    return replace


def length_of(rec: StateRecorder, verdict: Any) -> Any:
    """``len`` of a tensor, which turns a number into an int of its own."""
    if verdict is not None:
        return verdict
    rec.numbers.offered, rec.numbers.length = len, None
    code = rec.state.code if rec.state is not None else None

    def replace(top: tuple[Any, ...]) -> None:
        if rec.numbers.length is not None:
            put_on_stack(rec, code, rec.numbers.length)

    return replace


def put_on_stack(rec: StateRecorder, code: Any, number: Number) -> None:
    """The number's own object in place of what is on top of the stack."""
    frame = running_frame(code)
    if frame is None:
        rec.numbers.pin([number])
    else:
        _C.replace_stack(frame, 0, number.obj)


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def reads_onto_stack(rec: StateRecorder, name: str) -> bool:
    """Whether metadata of a tensor that is read now goes onto the program's stack, and only there.

    Args:
        rec: the recorder, whose last event is that of the instruction that reads.
        name: of the attribute or method.
    """
    state, frame = rec.state, running_frame(rec.state.code) if rec.state is not None else None
    if state is None or frame is None or _caller() is not frame:
        return False
    instr = state.info.instrs[rec.offset]
    if instr.opname == "LOAD_ATTR":
        return bool(instr.argval == name)
    called = state.calling
    return getattr(called, "__name__", None) == name and not isinstance(called, types.FunctionType)


def _caller() -> types.FrameType | None:
    """The innermost frame that is not MagJIT's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return frame
