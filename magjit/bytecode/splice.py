"""Resume functions: a function's code, made to start in its middle (MagPy, §5.3: split points).

    point    ::= offset unbound nulls depth
    spliced  ::= [COPY_FREE_VARS n] head prologue body
    head     ::= the code up to RESUME, in which what makes cells is NOP
    prologue ::= (DELETE_FAST local)* (LOAD_FAST value | PUSH_NULL)* JUMP_FORWARD offset
    body     ::= the code after RESUME, as it was

The original bytes are kept; only the indices of cells and free variables move up, because the
values of the stack are arguments of the new function, after all locals of the old one.  Exception
and line tables are shifted.  Cells of the old frame become free variables of the new function, so
that closures made before go on sharing them; a cell that is also an argument is passed as the cell.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from magjit import _C
from magjit.bytecode import optable
from magjit.bytecode.decode import CodeInfo, decode, fast_local_names
from magjit.bytecode.depths import UNREACHABLE, ExceptionRange, RawInstr, exception_table
from magjit.bytecode.optable import OPCODE
from magjit.errors import MagJITError

_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FUNCTION = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS
_STARS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class SpliceError(MagJITError):
    """Execution cannot be resumed there."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a frame stands, without the values: what the code of a resume function depends on.

    Attributes:
        offset: of the instruction that is executed next.
        unbound: indices of fast locals that have no value.
        nulls: indices of stack slots, from the bottom, that are empty.
        depth: number of stack slots.
        replaced: the instruction is a call whose operands are not those of the frame: keyword
            names that were set for it do not matter.
    """

    offset: int
    unbound: frozenset[int]
    nulls: frozenset[int]
    depth: int
    replaced: bool = False

    @classmethod
    def of(cls, offset: int, fast_locals: Sequence[Any], stack: Sequence[Any]) -> ResumePoint:
        """The point of a frame whose locals and stack are given as ``_C`` reads them."""
        unbound = frozenset(i for i, value in enumerate(fast_locals) if value is _C.NULL)
        nulls = frozenset(i for i, value in enumerate(stack) if value is _C.NULL)
        return cls(offset, unbound, nulls, len(stack))


def obstacle(code: CodeType, offset: int, *, replaced: bool = False) -> str | None:
    """Why execution cannot be resumed at an instruction, or None if it can.

    With ``replaced`` operands, as in `ResumePoint`.
    """
    info = decode(code)
    if code.co_flags & _SUSPENDS:
        return "a generator or coroutine cannot be entered in its middle"
    if code.co_flags & _FUNCTION != _FUNCTION:
        return "not the code of a function"
    if offset not in info.instrs:
        return f"no instruction begins at offset {offset}"
    unit = offset // 2
    if unit <= _resume(info).unit:
        return "the frame has not started yet"
    if info.depths.before[unit] == UNREACHABLE:
        return "the instruction is never executed"
    if unit in info.depths.handling:
        return "an exception is being handled"
    index = next(i for i, raw in enumerate(info.raw) if raw.unit == unit)
    if not replaced and info.raw[index].opname in ("PRECALL", "CALL"):
        before = index - 1
        if info.raw[before].opname == "PRECALL":
            before -= 1
        if info.raw[before].opname == "KW_NAMES":
            return "keyword names of a call were already set"
    return None


def resume_code(code: CodeType, point: ResumePoint) -> CodeType:
    """The code of a function that goes on where a frame of ``code`` stands.

    Its parameters are the locals of the old code (``co_varnames``, None for unbound ones), then the
    stack from the bottom (None for empty slots); its free variables are the old code's cells that
    are not locals, then its free variables.

    Raises:
        SpliceError: if execution cannot be resumed there.
    """
    reason = obstacle(code, point.offset, replaced=point.replaced)
    info = decode(code)
    if reason is None and info.depths.before[point.offset // 2] != point.depth:
        reason = f"the stack has {point.depth} values, not those of the instruction"
    if reason is not None:
        raise SpliceError(f"{code.co_qualname} cannot be resumed at {point.offset}: {reason}")
    return _Splice(code, info, point).build()


def shift(code: CodeType, point: ResumePoint) -> int:
    """How far behind their old places the instructions of the resume code are, in bytes."""
    return _Splice(code, decode(code), point).inserted()


def resume_function(
    function: FunctionType, code: CodeType, fast_locals: Sequence[Any]
) -> FunctionType:
    """A function of resume code that shares the cells of a frame of ``function``."""
    first = function.__code__.co_nlocals
    cells = tuple(CellType() if cell is _C.NULL else cell for cell in fast_locals[first:])
    return FunctionType(code, function.__globals__, function.__name__, None, cells or None)


def resume_arguments(
    code: CodeType, fast_locals: Sequence[Any], stack: Sequence[Any]
) -> tuple[Any, ...]:
    """The arguments of a resume function of ``code``."""
    values = (*fast_locals[: code.co_nlocals], *stack)
    return tuple(None if value is _C.NULL else value for value in values)


def _resume(info: CodeInfo) -> RawInstr:
    return next(raw for raw in info.raw if raw.opname == "RESUME")


def _emit(opname: str, arg: int = 0) -> bytes:
    """An instruction with the prefixes that its argument needs."""
    prefixes = bytearray()
    for shift in (24, 16, 8):
        if arg >> shift:
            prefixes += bytes((OPCODE["EXTENDED_ARG"], arg >> shift & 255))
    return bytes(prefixes) + bytes((OPCODE[opname], arg & 255))


class _Splice:
    """Builds one resume code."""

    def __init__(self, code: CodeType, info: CodeInfo, point: ResumePoint) -> None:
        self.code = code
        self.info = info
        self.point = point
        self.head = _resume(info).end
        self.units = bytearray(code.co_code)
        self.free = fast_local_names(code)[code.co_nlocals :]

    def build(self) -> CodeType:
        code, point = self.code, self.point
        for raw in self.info.raw:
            self.adapt(raw)
        copy = _emit("COPY_FREE_VARS", len(self.free)) if self.free else b""
        prologue = self.prologue()
        head = bytes(self.units[: 2 * self.head])
        body = bytes(self.units[2 * self.head :])
        before, after = len(copy) // 2, (len(copy) + len(prologue)) // 2
        arguments = code.co_nlocals + point.depth
        values = tuple(f".stack{i}" for i in range(point.depth))
        return code.replace(
            co_code=copy + head + prologue + body,
            co_argcount=arguments,
            co_posonlyargcount=arguments,
            co_kwonlyargcount=0,
            co_nlocals=arguments,
            co_varnames=code.co_varnames + values,
            co_cellvars=tuple(name for name in code.co_cellvars if name in code.co_varnames),
            co_freevars=self.free,
            co_flags=code.co_flags & ~_STARS,
            co_stacksize=code.co_stacksize + 1,
            co_exceptiontable=_encode_exceptions(
                row._replace(
                    start=self.shifted(row.start, before, after),
                    end=self.shifted(row.end - 1, before, after) + 1,
                    target=self.shifted(row.target, before, after),
                )
                for row in exception_table(code)
            ),
            co_linetable=_shift_lines(code.co_linetable, self.head, before, after - before),
        )

    def inserted(self) -> int:
        copy = _emit("COPY_FREE_VARS", len(self.free)) if self.free else b""
        return len(copy) + len(self.prologue())

    def shifted(self, unit: int, before: int, after: int) -> int:
        return unit + (after if unit >= self.head else before)

    def prologue(self) -> bytes:
        code, point = self.code, self.point
        out = bytearray()
        for index in sorted(point.unbound):
            if index < code.co_nlocals:
                out += _emit("DELETE_FAST", index)
        for index in range(point.depth):
            if index in point.nulls:
                out += _emit("PUSH_NULL")
            else:
                out += _emit("LOAD_FAST", code.co_nlocals + index)
        target = next(raw for raw in self.info.raw if 2 * raw.unit == point.offset)
        return bytes(out + _emit("JUMP_FORWARD", target.first - self.head))

    def adapt(self, raw: RawInstr) -> None:
        """Moves the indices of cells; takes out what makes them before the function starts."""
        if raw.unit < self.head and raw.opname in ("MAKE_CELL", "COPY_FREE_VARS"):
            for unit in range(raw.first, raw.end):
                self.units[2 * unit : 2 * unit + 2] = bytes((OPCODE["NOP"], 0))
        elif raw.opname in optable.PAIRS:
            if max(raw.arg >> 4, raw.arg & 15) >= self.code.co_nlocals and self.point.depth:
                raise SpliceError(f"{self.code.co_qualname}: {raw.opname} of a cell")
        elif raw.opname in optable.FAST_LOCALS and raw.arg >= self.code.co_nlocals:
            self.set_argument(raw, raw.arg + self.point.depth)

    def set_argument(self, raw: RawInstr, arg: int) -> None:
        n_bytes = raw.unit - raw.first + 1
        if arg >> 8 * n_bytes:
            raise SpliceError(f"{self.code.co_qualname}: {raw.opname} has no room for index {arg}")
        for unit, byte in zip(range(raw.first, raw.unit + 1), arg.to_bytes(n_bytes), strict=True):
            self.units[2 * unit + 1] = byte


def _encode_exceptions(rows: Any) -> bytes:
    """The inverse of ``exception_table``."""

    def number(value: int, first: int = 0) -> bytes:
        digits = [value & 63]
        while value := value >> 6:
            digits.append(value & 63 | 64)
        digits[-1] |= first
        return bytes(reversed(digits))

    out = bytearray()
    row: ExceptionRange
    for row in rows:
        out += number(row.start, 128) + number(row.end - row.start)
        out += number(row.target) + number(row.depth << 1 | row.lasti)
    return bytes(out)


def _shift_lines(table: bytes, head: int, before: int, inserted: int) -> bytes:
    """The line table with units without a line put before everything and after ``head`` units."""
    index = units = 0
    while units < head:
        units += (table[index] & 7) + 1
        index += 1
        while index < len(table) and not table[index] & 128:
            index += 1
    if units != head:
        raise SpliceError("the line table has no entry of its own for RESUME")
    return _no_lines(before) + table[:index] + _no_lines(inserted) + table[index:]


def _no_lines(units: int) -> bytes:
    return bytes(0xF8 | min(8, units - done) - 1 for done in range(0, units, 8))
