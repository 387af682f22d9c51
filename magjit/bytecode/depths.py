"""Static stack depths: how many values are on the value stack before each instruction.

The interpreter shows a running frame's stack pointer on 3.11 only, so all versions use a table
computed once per code object from the effects of its instructions and from its exception table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from magjit.bytecode.optable import TERMINATORS, stack_effect

UNREACHABLE = 0xFFFF


class RawInstr(NamedTuple):
    """One instruction with its EXTENDED_ARG prefixes folded in; places are units of two bytes."""

    first: int  # unit of the first prefix, or of the instruction
    unit: int
    opcode: int
    opname: str
    arg: int
    end: int  # unit after its inline caches
    target: int  # unit that it may jump to, or -1


class ExceptionRange(NamedTuple):
    """A row of the exception table: units [start, end) are handled at target, depth values kept."""

    start: int
    end: int
    target: int
    depth: int
    lasti: bool


@dataclass(frozen=True, slots=True)
class Depths:
    """Depth before each unit (UNREACHABLE where no execution gets), and units inside handlers."""

    before: list[int]
    handling: frozenset[int]


class DepthError(ValueError):
    """Two paths reach an instruction with different depths: the table's effects are wrong."""


def exception_table(code: CodeType) -> list[ExceptionRange]:
    """The exception table of a code object, decoded."""
    table = iter(code.co_exceptiontable)

    def number(byte: int) -> int:
        value = byte & 63
        while byte & 64:
            byte = next(table)
            value = value << 6 | byte & 63
        return value

    rows = []
    for byte in table:
        start = number(byte)
        length, target, depth_lasti = (number(next(table)) for _ in range(3))
        rows.append(
            ExceptionRange(start, start + length, target, depth_lasti >> 1, bool(depth_lasti & 1))
        )
    return rows


def depths(code: CodeType, instrs: Sequence[RawInstr]) -> Depths:
    """Computes the depths of a code object by following every path once.

    Raises:
        DepthError: if two paths disagree.
    """
    n_units = len(code.co_code) // 2
    at = {instr.unit: index for index, instr in enumerate(instrs)}
    at.update((instr.first, index) for index, instr in enumerate(instrs))
    handlers = _handlers_by_unit(code, n_units)
    before = [UNREACHABLE] * n_units
    handling: set[int] = set()
    # an item: index of an instruction, the depth before it, exceptions being handled there
    work = [(0, 0, 0)]
    while work:
        index, depth, nesting = work.pop()
        instr = instrs[index]
        if before[instr.unit] != UNREACHABLE:
            if before[instr.unit] != depth:
                raise DepthError(
                    f"{code.co_qualname}, {instr.opname} at {2 * instr.unit}: "
                    f"depth {before[instr.unit]} or {depth}"
                )
            continue
        before[instr.unit] = depth
        for prefix in range(instr.first, instr.unit):
            before[prefix] = depth
        if nesting:
            handling.update(range(instr.first, instr.unit + 1))
        row = handlers[instr.unit]
        if row is not None:
            # the exception is on the stack and handled from here on, PUSH_EXC_INFO or not
            work.append((at[row.target], row.depth + row.lasti + 1, nesting + 1))
        if instr.opname == "POP_EXCEPT":
            nesting = max(nesting - 1, 0)
        if instr.target >= 0:
            effect = stack_effect(instr.opcode, instr.opname, instr.arg, True)
            work.append((at[instr.target], depth + effect, nesting))
        if instr.opname not in TERMINATORS:
            effect = stack_effect(instr.opcode, instr.opname, instr.arg, False)
            work.append((index + 1, depth + effect, nesting))
    return Depths(before, frozenset(handling))


def _handlers_by_unit(code: CodeType, n_units: int) -> list[ExceptionRange | None]:
    handlers: list[ExceptionRange | None] = [None] * n_units
    for row in exception_table(code):
        for unit in range(row.start, min(row.end, n_units)):
            handlers[unit] = row
    return handlers
