"""What an instruction does to the values that it takes from the stack, done outside of its frame.

    perform(operation, operands) = (offset of the next instruction, values that it leaves)

Only of instructions whose effect is that of one call of Python's: a program that is cut at one does
it between two regions.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from magjit import _C
from magjit.bytecode import optable
from magjit.bytecode.decode import Instr, decode
from magjit.bytecode.depths import RawInstr
from magjit.bytecode.optable import EventKind, count, op_for

Done = tuple[bool, tuple[Any, ...]]
"""Whether it jumps, and what it leaves on the stack."""

_NEW_LAYOUT = sys.version_info >= (3, 13)


@dataclass(frozen=True, slots=True)
class Operation:
    """One instruction of a code object.

    Attributes:
        instr: the instruction.
        base: depth of the stack below its operands.
        following, target: offsets of the instructions after it, without and with a jump.
    """

    instr: Instr
    base: int
    operand_count: int
    following: int
    target: int

    @property
    def is_call(self) -> bool:
        """Whether what it calls can be replaced by something that takes any arguments."""
        return self.instr.opname in _CALLS

    def stand_ins(self, function: Any) -> list[Any]:
        """Operands of a call with which the instruction calls ``function`` instead."""
        fill: list[Any] = [None] * self.instr.arg
        if self.instr.opname == "CALL_FUNCTION_EX":
            fill = [(), {}] if self.instr.arg & 1 else [()]
        elif self.instr.opname == "CALL_KW":
            fill = [*fill, ()]
        return [function, _C.NULL, *fill] if _NEW_LAYOUT else [_C.NULL, function, *fill]

    def callee(self, operands: Sequence[Any]) -> Any:
        """What a call calls, of its operands."""
        first = operands[0]
        return operands[1] if first is _C.NULL and not _NEW_LAYOUT else first

    def named_at(self, code: CodeType) -> int:
        """Where the call begins: at the keyword names, if it has any that are set before it."""
        if not self.instr.kwnames or self.instr.opname != "CALL":
            return self.instr.offset
        raw = decode(code).raw
        index = next(i for i, one in enumerate(raw) if 2 * one.unit == self.instr.offset)
        while raw[index].opname != "KW_NAMES":
            index -= 1
        return 2 * raw[index].unit

    def perform(self, operands: Sequence[Any]) -> tuple[int, tuple[Any, ...]]:
        """Do it; raises what it raises."""
        jumps, left = _PERFORM[self.instr.opname](self.instr, operands)
        return (self.target if jumps else self.following), left


_FOLLOWING_UP = frozenset({"GET_ITER", "FOR_ITER", "UNPACK_SEQUENCE"})


def follow_up(code: CodeType, offset: int, left: int) -> Operation | None:
    """The operation at an instruction, if it belongs to the one before, which left some values.

    What a loop runs over and what an assignment takes apart is of no use to a region as it is.
    """
    if decode(code).instrs[offset].opname not in _FOLLOWING_UP:
        return None
    found = operation_at(code, offset)
    return found if found is not None and found.operand_count <= left else None


def instruction_at(code: CodeType, offset: int) -> RawInstr:
    """The instruction to which an offset belongs: its prefixes, itself, or its caches."""
    unit = offset // 2
    return next(raw for raw in decode(code).raw if raw.first <= unit < raw.end)


def operation_at(code: CodeType, offset: int) -> Operation | None:
    """The operation at an instruction; None where it cannot be done outside of its frame."""
    info = decode(code)
    instr = info.instrs[offset]
    if instr.opname not in _PERFORM:
        return None
    raw = instruction_at(code, offset)
    op = op_for(raw.opname, raw.arg)
    if op.kind in (EventKind.LOAD_ATTR,) and count(op.posts, raw.arg) != 1:
        return None
    operands = count(op.inputs, raw.arg)
    after = next((other for other in info.raw if other.first == raw.end), None)
    target = 2 * optable.landing(raw.opname, raw.target) if raw.target >= 0 else -1
    following = 2 * after.unit if after is not None else -1
    return Operation(
        instr, info.depths.before[raw.unit] - operands, operands, following, _home(code, target)
    )


def _home(code: CodeType, offset: int) -> int:
    """The offset of the instruction whose prefixes begin at an offset."""
    return offset if offset < 0 else 2 * instruction_at(code, offset).unit


# -- each kind of instruction -------------------------------------------------------------------


def _call(instr: Instr, operands: Sequence[Any]) -> Done:
    values = operands[:-1] if instr.opname == "CALL_KW" else operands
    first, second, *args = values
    if _NEW_LAYOUT:
        function = first
        if second is not _C.NULL:
            args.insert(0, second)
    elif first is _C.NULL:
        function = second
    else:
        function = first
        args.insert(0, second)
    split = len(args) - len(instr.kwnames)
    kwargs = dict(zip(instr.kwnames, args[split:], strict=True))
    return False, (function(*args[:split], **kwargs),)


def _call_ex(instr: Instr, operands: Sequence[Any]) -> Done:
    function = operands[0 if _NEW_LAYOUT else 1]
    kwargs = operands[3] if len(operands) > 3 and operands[3] is not _C.NULL else {}
    return False, (function(*operands[2], **kwargs),)


def _pop_jump(instr: Instr, operands: Sequence[Any]) -> Done:
    return bool(operands[0]) is instr.opname.endswith("TRUE"), ()


def _jump_or_pop(instr: Instr, operands: Sequence[Any]) -> Done:
    jumps = bool(operands[0]) is (instr.opname == "JUMP_IF_TRUE_OR_POP")
    return jumps, ((operands[0],) if jumps else ())


def _iterate(instr: Instr, operands: Sequence[Any]) -> Done:
    value = next(operands[0], _C.NULL)
    return (True, ()) if value is _C.NULL else (False, (operands[0], value))


def _binary(instr: Instr, operands: Sequence[Any]) -> Done:
    return False, (_BINARY[instr.argval](*operands),)


def _compare(instr: Instr, operands: Sequence[Any]) -> Done:
    result = optable.COMPARE[instr.argval](*operands)
    if sys.version_info >= (3, 13) and instr.arg & 16:
        result = bool(result)
    return False, (result,)


def _contains(instr: Instr, operands: Sequence[Any]) -> Done:
    item, container = operands
    return False, ((item not in container) if instr.arg else (item in container),)


def _slice(instr: Instr, operands: Sequence[Any]) -> Done:
    container, start, stop = operands
    return False, (container[start:stop],)


def _store_slice(instr: Instr, operands: Sequence[Any]) -> Done:
    value, container, start, stop = operands
    container[start:stop] = value
    return False, ()


def _store_item(instr: Instr, operands: Sequence[Any]) -> Done:
    value, container, key = operands
    container[key] = value
    return False, ()


def _delete_item(instr: Instr, operands: Sequence[Any]) -> Done:
    container, key = operands
    del container[key]
    return False, ()


def _load_attribute(instr: Instr, operands: Sequence[Any]) -> Done:
    return False, (getattr(operands[0], instr.argval),)


def _store_attribute(instr: Instr, operands: Sequence[Any]) -> Done:
    value, owner = operands
    setattr(owner, instr.argval, value)
    return False, ()


def _delete_attribute(instr: Instr, operands: Sequence[Any]) -> Done:
    delattr(operands[0], instr.argval)
    return False, ()


_CONVERSIONS: dict[int, Callable[[Any], Any]] = {1: str, 2: repr, 3: ascii}


def _format(instr: Instr, operands: Sequence[Any]) -> Done:
    """FORMAT_VALUE: a conversion in the low bits, then a specification."""
    value = operands[0]
    if convert := _CONVERSIONS.get(instr.arg & 3):
        value = convert(value)
    return False, (format(value, operands[1] if instr.arg & 4 else ""),)


def _enter(instr: Instr, operands: Sequence[Any]) -> Done:
    """BEFORE_WITH: both methods are looked up first."""
    manager = operands[0]
    enter, leave = type(manager).__enter__, type(manager).__exit__
    bound = leave.__get__(manager, type(manager))
    return False, (bound, enter(manager))


def _unary(function: Callable[[Any], Any]) -> Callable[[Instr, Sequence[Any]], Done]:
    return lambda instr, operands: (False, (function(operands[0]),))


def _unpack(instr: Instr, operands: Sequence[Any]) -> Done:
    values = list(operands[0])
    if len(values) != instr.arg:
        raise ValueError(
            f"not enough values to unpack (expected {instr.arg}, got {len(values)})"
            if len(values) < instr.arg
            else f"too many values to unpack (expected {instr.arg})"
        )
    return False, tuple(reversed(values))


_PLAIN = ("add", "and_", "floordiv", "lshift", "matmul", "mul", "mod", "or_", "pow", "rshift")
_PLAIN_NAMES = (*_PLAIN, "sub", "truediv", "xor")
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **dict(
        zip(
            optable.BINARY_SYMBOLS[:13],
            (getattr(operator, name) for name in _PLAIN_NAMES),
            strict=True,
        )
    ),
    **dict(
        zip(
            optable.BINARY_SYMBOLS[13:],
            (getattr(operator, f"i{name.rstrip('_')}") for name in _PLAIN_NAMES),
            strict=True,
        )
    ),
}
_CALLS = frozenset({"CALL", "CALL_KW", "CALL_FUNCTION_EX"})
_PERFORM: dict[str, Callable[[Instr, Sequence[Any]], Done]] = {
    "CALL": _call,
    "CALL_KW": _call,
    "CALL_FUNCTION_EX": _call_ex,
    **{
        f"POP_JUMP_{way}IF_{value}": _pop_jump
        for way in ("", "FORWARD_", "BACKWARD_")
        for value in ("TRUE", "FALSE")
    },
    "JUMP_IF_TRUE_OR_POP": _jump_or_pop,
    "JUMP_IF_FALSE_OR_POP": _jump_or_pop,
    "TO_BOOL": _unary(bool),
    "UNARY_NOT": _unary(operator.not_),
    "UNARY_NEGATIVE": _unary(operator.neg),
    "UNARY_INVERT": _unary(operator.invert),
    "FOR_ITER": _iterate,
    "BEFORE_WITH": _enter,
    "GET_ITER": _unary(iter),
    "UNPACK_SEQUENCE": _unpack,
    "BINARY_OP": _binary,
    "BINARY_SUBSCR": lambda instr, operands: (False, (operands[0][operands[1]],)),
    "BINARY_SLICE": _slice,
    "COMPARE_OP": _compare,
    "CONTAINS_OP": _contains,
    "STORE_SUBSCR": _store_item,
    "STORE_SLICE": _store_slice,
    "DELETE_SUBSCR": _delete_item,
    "LOAD_ATTR": _load_attribute,
    "STORE_ATTR": _store_attribute,
    "DELETE_ATTR": _delete_attribute,
    "FORMAT_VALUE": _format,
    "FORMAT_SIMPLE": _unary(format),
    "FORMAT_WITH_SPEC": lambda instr, operands: (False, (format(*operands),)),
    "CONVERT_VALUE": lambda instr, operands: (False, (_CONVERSIONS[instr.arg](operands[0]),)),
}
