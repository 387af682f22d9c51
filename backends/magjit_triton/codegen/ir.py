"""Straight-line values over a loop nest: what one kernel computes.

    Kernel      ::= Dim* Instruction* Store*
    Dim         ::= symbol < size on axis p | q | r          (p, q: grid; r: reduced)
    Instruction ::= %n = op(%a, …) {attribute} : dtype
    Store       ::= buffer[offset] = %n  if %mask

``op`` is one of

    const {value}            index {expr}              a number; an index expression as a value
    given {name}             a tile that the kernel has made otherwise
    load {buffer, offset}    reads one element; with an operand, only where that is true
    reduce {kind}            over all dimensions of axis r
    cast, round_to {dtype}   change of representation; rounding to a shorter float and back
    NAME                     a row of ``operators.SCALAR``

Offsets are sympy expressions in elements (grammar: ``magjit.plugin.virtual_tensors.indexing``),
over the dims' symbols, size symbols, and ``i<1000+n>``: the integer that instruction n has.
Values of the half types are held as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

__all__ = ["Builder", "Dim", "Instruction", "Load", "Store", "held", "indirect_symbol"]

_FIRST_INDIRECT = 1000
HALVES = (torch.float16, torch.bfloat16)


def held(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are computed."""
    return torch.float32 if dtype in HALVES else dtype


@dataclass(frozen=True, slots=True)
class Dim:
    """One loop: ``0 <= symbol < size``."""

    symbol: sympy.Symbol
    size: sympy.Expr
    axis: str

    def __str__(self) -> str:
        return f"{self.symbol} < {self.size} on {self.axis}"


@dataclass(frozen=True, slots=True)
class Load:
    """Attribute of a load; ``dtype`` is that of the memory."""

    buffer: str
    offset: sympy.Expr
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.buffer}[{self.offset}]"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One value; ``level`` counts the reductions it waits for, ``axes`` are what it varies over."""

    op: str
    args: tuple[int, ...]
    attribute: Any
    dtype: torch.dtype
    level: int
    axes: frozenset[str]

    def __str__(self) -> str:
        operands = ", ".join(f"%{one}" for one in self.args)
        extra = "" if self.attribute is None else f" {{{self.attribute}}}"
        return f"{self.op}({operands}){extra} : {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class Store:
    """``buffer[offset] = %value`` where ``mask`` (an instruction) is true."""

    buffer: str
    offset: sympy.Expr
    value: int
    mask: int | None
    dtype: torch.dtype

    def __str__(self) -> str:
        condition = "" if self.mask is None else f" if %{self.mask}"
        return f"{self.buffer}[{self.offset}] = %{self.value}{condition}"


def indirect_symbol(instruction: int) -> sympy.Symbol:
    """The integer value of an instruction inside an index expression."""
    return sympy.Symbol(f"i{_FIRST_INDIRECT + instruction}", integer=True, nonnegative=True)


@dataclass
class Builder:
    """Makes instructions, each value once."""

    dims: tuple[Dim, ...]
    instructions: list[Instruction] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    ranges: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    indirect: dict[sympy.Symbol, int] = field(default_factory=dict)
    # A condition → the columns for which it holds, from and to (exclusive).
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ranges.update({dim.symbol: dim.size for dim in self.dims})

    def emit(
        self,
        op: str,
        args: Sequence[int] = (),
        attribute: Any = None,
        dtype: torch.dtype = torch.float32,
    ) -> int:
        """The number of this value, which is made where it is new."""
        known = attribute if isinstance(attribute, (str, Load, sympy.Basic)) else repr(attribute)
        key = (op, tuple(args), type(attribute), known, dtype)
        if key not in self._known:
            self._known[key] = len(self.instructions)
            self.instructions.append(self._instruction(op, tuple(args), attribute, dtype))
        return self._known[key]

    def _instruction(
        self, op: str, args: tuple[int, ...], attribute: Any, dtype: torch.dtype
    ) -> Instruction:
        sources = [*args, *self.indirect_of(op, attribute)]
        axes = frozenset().union(*(self.instructions[one].axes for one in sources))
        level = max((self.instructions[one].level for one in sources), default=0)
        if op in ("load", "index"):
            expr = attribute.offset if op == "load" else attribute
            axes |= {dim.axis for dim in self.dims if dim.symbol in expr.free_symbols}
        if op == "given":
            axes = frozenset("pr")
        if op == "reduce":
            axes, level = axes - {"r"}, level + 1
        return Instruction(op, args, attribute, dtype, level, axes)

    def indirect_of(self, op: str, attribute: Any) -> list[int]:
        """The instructions whose values an index expression contains."""
        if op not in ("load", "index"):
            return []
        expr = attribute.offset if op == "load" else attribute
        return [self.indirect[one] for one in sorted_symbols(expr) if one in self.indirect]

    def as_index(self, instruction: int, size: sympy.Expr) -> sympy.Symbol:
        """An integer value as a part of index expressions: at least 0 and less than ``size``."""
        symbol = indirect_symbol(instruction)
        self.indirect[symbol] = instruction
        self.ranges[symbol] = size
        return symbol

    def operands(self, number: int) -> list[int]:
        """All instructions that one needs directly."""
        instruction = self.instructions[number]
        return [*instruction.args, *self.indirect_of(instruction.op, instruction.attribute)]

    def store_operands(self, store: Store) -> list[int]:
        """The instructions that a store needs directly."""
        found = [self.indirect[s] for s in sorted_symbols(store.offset) if s in self.indirect]
        return [store.value, *([] if store.mask is None else [store.mask]), *found]

    def live(self) -> list[int]:
        """The instructions that are kept or that the stores need, in order."""
        needed: set[int] = set()
        stack = [one for store in self.stores for one in self.store_operands(store)] + self.kept
        while stack:
            number = stack.pop()
            if number not in needed:
                needed.add(number)
                stack.extend(self.operands(number))
        return sorted(needed)

    def stores_once_what_varies(self) -> bool:
        """Whether one place of a row would be given a value that varies within the row."""
        along = {dim.symbol for dim in self.dims if dim.axis == "r"}
        return bool(along) and any(
            "r" in self.instructions[store.value].axes
            and along.isdisjoint(store.offset.free_symbols)
            for store in self.stores
        )

    def loads(self) -> Iterator[Load]:
        """Every load that is needed."""
        for number in self.live():
            if self.instructions[number].op == "load":
                yield self.instructions[number].attribute

    def __str__(self) -> str:
        lines = [f"for {', '.join(map(str, self.dims)) or 'one element'}:"]
        lines += [f"  %{number} = {self.instructions[number]}" for number in self.live()]
        return "\n".join(lines + [f"  {store}" for store in self.stores])


def sorted_symbols(expr: sympy.Basic) -> list[sympy.Symbol]:
    """The free symbols by name."""
    return sorted(expr.free_symbols, key=lambda symbol: (len(symbol.name), symbol.name))
