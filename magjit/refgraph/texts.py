"""Texts that the program makes of numbers that change: a replay makes them again.

    text ::= format(number, spec) | str(number) | repr(number) | pattern % numbers
           | pattern.format(numbers) | text + text | the parts of an f-string

A text is a `Number` whose object is a string of its own; what uses it in any other way pins the
numbers that it comes from.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

from magjit.bytecode import EventKind
from magjit.refgraph.frames import FrameState
from magjit.refgraph.number_values import NUMBERS, TEXTS
from magjit.refgraph.recorder import Handler, StateRecorder
from magjit.refgraph.stack import called, in_place_of

Made = tuple[Callable[..., Any], tuple[Any, ...]]
"""A call that makes a text."""

_CONVERSIONS: tuple[Callable[[Any], Any], ...] = (lambda value: value, str, repr, ascii)


def formatted(value: Any, spec: str = "", conversion: int = 0) -> str:
    """A part of an f-string."""
    return format(_CONVERSIONS[conversion](value), spec)


def joined(*parts: str) -> str:
    """An f-string."""
    return "".join(parts)


def filled(pattern: str, *values: Any) -> str:
    """``pattern % values``."""
    return pattern % values


def filled_in(pattern: str, *values: Any) -> str:
    """``pattern.format(*values)``."""
    return pattern.format(*values)


def makes_text(
    rec: StateRecorder,
    kind: EventKind,
    handler: Handler,
    state: FrameState,
    offset: int,
    inputs: tuple[Any, ...],
) -> Any:
    """An instruction that makes a text of numbers, or prints it.

    Returns:
        The verdict, or NotImplemented for any other instruction.
    """
    instr = state.info.instrs[offset]
    made: Made | None
    if kind is EventKind.CALL:
        func, args = called(inputs)
        if func is print:
            return handler(rec, state, offset, inputs)  # which sees to its numbers itself
        made = None if instr.kwnames else _of_call(func, args)
    else:
        made = _of_instruction(instr, inputs)
    if made is None:
        return NotImplemented
    verdict = handler(rec, state, offset, inputs)
    number = rec.numbers.computed(*made) if verdict is None else None
    if number is None:
        rec.numbers.pin(rec.numbers.among(inputs))
        return verdict
    return in_place_of(rec, number, number.obj)


def _of_instruction(instr: Any, inputs: tuple[Any, ...]) -> Made | None:
    opname = instr.opname
    if opname == "BINARY_OP":
        return _of_operator(instr.argval.rstrip("="), *inputs)
    if not all(type(value) in TEXTS for value in inputs):
        return None
    if opname == "FORMAT_VALUE":
        value, spec = inputs if instr.arg & 4 else (*inputs, "")
        return formatted, (value, spec, instr.arg & 3)
    if opname in ("FORMAT_SIMPLE", "FORMAT_WITH_SPEC"):
        return formatted, inputs
    if opname == "CONVERT_VALUE":
        return formatted, (inputs[0], "", instr.arg)
    return (joined, inputs) if opname == "BUILD_STRING" else None


def _of_operator(symbol: str, left: Any, right: Any) -> Made | None:
    if type(left) is not str:
        return None
    if symbol == "+":
        return (operator.add, (left, right)) if type(right) is str else None
    if symbol != "%":
        return None
    values = right if type(right) is tuple else (right,)
    return (filled, (left, *values)) if all(type(value) in TEXTS for value in values) else None


def _of_call(func: Any, args: list[Any]) -> Made | None:
    if not args or not all(type(value) in TEXTS for value in args):
        return None
    if func is str or func is repr:
        return (func, tuple(args)) if len(args) == 1 else None
    if func is format:
        return (formatted, tuple(args)) if len(args) <= 2 else None
    if func is str.format:
        return filled_in, tuple(args)
    if isinstance(func, types.BuiltinFunctionType) and func.__name__ == "format":
        return (filled_in, (func.__self__, *args)) if type(func.__self__) is str else None
    places = args[1] if len(args) == 2 and func is round else -1
    if type(args[0]) is float and type(places) is int and places >= 0:
        return round, tuple(args)  # raises for no float
    return None


def shown_text(rec: StateRecorder, value: Any) -> str:
    """``str(value)``, as a text of the run where the value is a number that changes."""
    number = rec.numbers.find(value)
    if number is None or not number.live:
        rec.numbers.pin(rec.numbers.among((value,)))
        return str(value)
    if type(value) is str:
        return value
    text = rec.numbers.computed(str, (value,)) if type(value) in NUMBERS else None
    if text is None:
        rec.numbers.pin([number])
        return str(value)
    found: str = text.obj
    return found
