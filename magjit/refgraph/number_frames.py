"""Numbers of a run that go into a frame of a function, or out of it."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from magjit import _C
from magjit.refgraph.frames import FrameState, arguments
from magjit.refgraph.holder_events import packed
from magjit.refgraph.kinds import class_lookup
from magjit.refgraph.recorder import StateRecorder


def entered(rec: StateRecorder, code: types.CodeType, followed: bool, values: list[Any]) -> None:
    """A frame is entered: what is not followed, and what is packed up, may be used unseen."""
    if followed:
        if rec.state is not None:
            rec.state.entered = True
        named = code.co_argcount + code.co_kwonlyargcount
        many = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        for holder in values[named : named + many.bit_count()]:
            packed(rec, holder)
        return
    if getattr(rec.numbers.offered, "__code__", None) is not code:
        args, kwargs = arguments(code, values)
        rec.numbers.pin(rec.numbers.among((*args, *kwargs.values())))


def returned(rec: StateRecorder, state: FrameState, result: Any) -> None:
    """A frame gives a number to its caller: to the program's own call, or to C code."""
    number = rec.numbers.find(result)
    if number is not None and number.live and not called_directly(state):
        rec.numbers.pin([number])


def called_directly(state: FrameState) -> bool:
    """Whether an instruction of the program, or the compiled call itself, called this function."""
    caller = state.caller
    if caller is None:
        return True
    func = caller.calling
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, _C.Thunk | types.MethodType):
        func = func.function if isinstance(func, _C.Thunk) else func.__func__
    if not isinstance(func, types.FunctionType) and not isinstance(func, type):
        func = class_lookup(type(func), "__call__")
    return isinstance(func, types.FunctionType) and func.__code__ is state.code
