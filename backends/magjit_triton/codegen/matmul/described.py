"""Operands that the tensor memory accelerator loads, and the order of tiles that goes with it.

    Description ::= buffer, offset, (outer, inner) sizes, stride, turned

A matrix whose rows, or columns, lie in one piece each is loaded by a descriptor: one thread asks
for a whole tile, zeros come from beyond the ends, and no address is computed.  Products then reach
the library's speed, and which tile is made when decides what comes from memory:

* programs take tiles in turn, and each gets as many as the others (``programs_for``);
* tiles follow one another in groups of columns, rows from the last to the first in the first
  group, from the first to the last in the next, so that what was just read, or what the kernel
  before has just written, is read first;
* every second wave goes through ``k`` from its end: the half of both operands that the last wave
  has left in the cache is read before it is pushed out.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch

from magjit_triton.codegen.ir import Builder
from magjit_triton.codegen.printer import expression

__all__ = ["Description", "Descriptor", "describe", "order_of_tiles", "programs_for", "step_along"]

_ALIGNMENT = 16
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Description:
    """A matrix in memory, as a descriptor has it; numbers are elements.

    Attributes:
        buffer: the kernel's name of its memory.
        offset: of the first element.
        sizes: how many rows or columns lie in a piece of their own, and how long they are.
        stride: from one to the next.
        turned: whether a tile is the transpose of what is loaded.
    """

    buffer: str
    offset: sympy.Expr
    sizes: tuple[sympy.Expr, sympy.Expr]
    stride: sympy.Expr
    turned: bool

    def block(self, rows: int, columns: int) -> tuple[int, int]:
        """The box that is loaded for a tile."""
        return (columns, rows) if self.turned else (rows, columns)

    def tile(self, name: str, row: str, column: str) -> str:
        """Text of a tile that begins at a row and a column of the operand."""
        first, second = (column, row) if self.turned else (row, column)
        return f"{name}.load([{first}, {second}])" + (".T" if self.turned else "")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a launch passes for a described operand.

    Attributes:
        of: the matrix.
        block: elements of a box.
    """

    of: Description
    block: tuple[int, int]

    @property
    def buffer(self) -> int:
        """Which of the kernel's pointers its memory is."""
        return int(self.of.buffer.removeprefix("b"))

    @property
    def expressions(self) -> tuple[sympy.Expr, ...]:
        """Offset, sizes, stride."""
        return (self.of.offset, *self.of.sizes, self.of.stride)


def describe(builder: Builder, value: int, dtype: torch.dtype) -> Description | None:
    """An operand as a descriptor loads it; None where none can.

    Args:
        builder: its instructions over two dimensions, rows and columns.
        value: the instruction that is an element.
        dtype: in which it is multiplied.
    """
    instruction = builder.instructions[value]
    if instruction.op != "load" or instruction.args or len(builder.dims) != 2:
        return None
    load = instruction.attribute
    if load.dtype != dtype or dtype not in _DTYPES or builder.indirect:
        return None
    symbols = [dim.symbol for dim in builder.dims]
    offset = sympy.expand(load.offset)
    steps = [offset.coeff(symbol) for symbol in symbols]
    start = sympy.expand(offset - steps[0] * symbols[0] - steps[1] * symbols[1])
    if any(one in expr.free_symbols for one in symbols for expr in (start, *steps)):
        return None
    whole = _ALIGNMENT // dtype.itemsize
    sizes = [dim.size for dim in builder.dims]
    for inner in (1, 0):
        stride = steps[1 - inner]
        if steps[inner] == 1 and _is_multiple(stride, whole) and _is_multiple(start, whole):
            if stride == 0:
                return None
            pair = (sizes[1 - inner], sizes[inner])
            return Description(load.buffer, start, pair, stride, turned=inner == 0)
    return None


def _is_multiple(expr: sympy.Expr, whole: int) -> bool:
    """Whether an expression is one for all sizes."""
    factor, _ = expr.as_content_primitive()
    return bool(expr == 0 or (factor.is_Integer and int(factor) % whole == 0))


def programs_for(tiles: int, multiprocessors: int, group: int) -> int:
    """Programs that get equally many tiles each, whole groups of them at a time where they fit."""
    waves = max(1, -(-tiles // multiprocessors))
    programs = -(-tiles // waves)
    whole = -(-programs // group) * group
    return whole if whole <= multiprocessors else programs


def order_of_tiles(group: int, rows: str) -> list[str]:
    """Lines that give a program's ``row`` and ``column`` of tiles.

    Args:
        group: columns of tiles that follow one another.
        rows: text of how many rows of tiles there are.
    """
    return [
        f"group = program // ({group} * {rows})",
        f"width = tl.minimum(columns - group * {group}, {group})",
        f"place = program - group * ({group} * {rows})",
        "row = place // width",
        f"row = tl.where(group % 2 == 0, {rows} - 1 - row, row)",
        f"column = group * {group} + place % width",
        "backwards = program // tl.num_programs(0) % 2",
    ]


def step_along(k: sympy.Expr, block: int) -> tuple[str, str]:
    """The loop over ``k``, and the place in ``k`` of one of its steps."""
    size = expression(k)
    last = f"({size} - 1) // {block} * {block}"
    if k.is_Integer:
        last = str((int(k) - 1) // block * block)
    loop = f"for count in range(0, {size}, {block}):"
    return loop, f"step = count + backwards * ({last} - 2 * count)"
