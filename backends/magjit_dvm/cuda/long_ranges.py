"""Which int64 the GPU's words can compute with: those that 32 bits hold.

A register has the nearest int32 of an int64.  One that was loaded may be any: where the nearest is
the least or the largest int32, the number itself may be beyond it.  Comparisons with numbers
between these are right all the same, and so are the larger or smaller of some and choices of one.
All else asks for numbers that are known to be held exactly, as positions, sizes, and what is
computed of them are, if the largest that can come of them still is.

``csrc/cuda_ranges.cpp`` does the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind

__all__ = ["LEAST", "MOST", "NOT_HELD", "LongRanges", "NotHeld"]

LEAST, MOST = -(1 << 31), (1 << 31) - 1
NOT_HELD = "an int64 that may need more than 32 bits"
_RANGED = (NodeKind.BROADCAST, NodeKind.REDUCE, NodeKind.SCAN)
_NUMBERS = (NodeKind.CONSTANT, NodeKind.SCALAR, NodeKind.NUMEL)
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_SAME = frozenset({"copy", "relu", "sign", "minimum", "maximum", "select"})
"""Operators whose result is the nearest int32 if those of their operands are."""


class NotHeld(Exception):
    """Words would compute with an int64 that 32 bits may not hold."""


@dataclass(frozen=True, slots=True)
class _Range:
    """What a register may have; ``exact``: it is the number itself, not the nearest."""

    low: int
    high: int
    exact: bool

    @property
    def between(self) -> bool:
        """Whether it is neither the least nor the largest int32."""
        return self.low > LEAST and self.high < MOST


class LongRanges:
    """Of the nodes of a program that are int64.

    Args:
        nodes: of the program.
        number: the value of an int64 that is a number.
        positions: how many there are along a dimension.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        number: Callable[[int], int],
        positions: Callable[[int], int],
    ) -> None:
        self.nodes, self.number, self.positions = nodes, number, positions
        self.known: dict[int, _Range] = {}

    def check(self, n: int) -> None:
        """That words compute rightly a node which has int64 for operand or result.

        Raises:
            NotHeld: they may not.
        """
        node = self.nodes[n]
        if node.kind is NodeKind.INDEX:
            self.of(node.args[0])
        elif node.kind is NodeKind.CAST:
            self.cast(n)
        elif node.kind in _RANGED and node.dtype is DType.I64:
            self.of(n)
        elif node.kind is NodeKind.COMPUTE:
            if node.dtype is DType.I64:
                self.of(n)
            elif self.dtype(node.args[0]) is DType.I64:
                self.test(node)

    def stored(self, n: int) -> None:
        """That what is stored of a node is the number itself.

        Raises:
            NotHeld: it may not be.
        """
        if not self.of(n).exact:
            raise NotHeld

    def dtype(self, n: int) -> DType:
        return self.nodes[n].dtype

    def is_number(self, n: int) -> bool:
        while self.nodes[n].kind is NodeKind.CAST:
            n = self.nodes[n].args[0]
        return self.nodes[n].kind in _NUMBERS

    def cast(self, n: int) -> None:
        """Loads are converted as they are read; of other int64, all but a test wants the number."""
        (arg,) = self.nodes[n].args
        to = self.dtype(n)
        if self.dtype(arg) is not DType.I64 or to is DType.I64:
            return
        loads = self.nodes[arg].kind is NodeKind.LOAD and to in (DType.F32, DType.I32)
        if not loads and not self.of(arg).exact and to is not DType.BOOL:
            raise NotHeld

    def test(self, node: Node) -> None:
        """A result that is bool."""
        found = [self.of(arg) for arg in node.args]
        held = all(one.exact for one in found) or any(one.between for one in found)
        if not held if node.op in _COMPARES else node.op != "logical_not":
            raise NotHeld

    def of(self, n: int) -> _Range:
        """What a register has of an int64."""
        if n not in self.known:
            self.known[n] = self.find(n)
        return self.known[n]

    def find(self, n: int) -> _Range:
        node = self.nodes[n]
        if self.is_number(n):
            value = self.number(n)
            if not LEAST < value < MOST:
                raise NotHeld
            return _Range(value, value, True)
        if node.kind is NodeKind.IOTA:
            return _Range(0, max(self.positions(node.aux) - 1, 0), True)
        if node.kind in (NodeKind.LOAD, NodeKind.INDEX):
            return _Range(LEAST, MOST, False)
        if node.kind is NodeKind.BROADCAST:
            return self.of(node.args[0])
        if node.kind is NodeKind.CAST:
            return self.find_cast(node.args[0])
        if node.kind in (NodeKind.REDUCE, NodeKind.SCAN):
            return self.reduced(node)
        if node.kind is NodeKind.COMPUTE:
            return self.computed(node)
        raise NotHeld

    def find_cast(self, arg: int) -> _Range:
        dtype = self.dtype(arg)
        if dtype is DType.I64:
            return self.of(arg)
        if dtype is DType.I32:
            return _Range(LEAST, MOST, True)
        if dtype in (DType.U8, DType.BOOL):
            return _Range(0, 255 if dtype is DType.U8 else 1, True)
        raise NotHeld  # a float may be beyond 32 bits

    def reduced(self, node: Node) -> _Range:
        """Of a sum, whatever comes between: 32 bits of it are right.

        What running sums begin with may be nearer to 0 than what they end with, or farther.
        """
        one = self.of(node.args[0])
        if node.op in ("max", "min"):
            return one
        count = math.prod(self.positions(d) for d in node.dims)
        low, high = min(one.low, one.low * count), max(one.high, one.high * count)
        if node.op not in ("sum", "cumsum") or not one.exact or low < LEAST or high > MOST:
            raise NotHeld
        return _Range(low, high, True)

    def computed(self, node: Node) -> _Range:
        args = node.args[1:] if node.op == "select" else node.args
        found = [self.of(arg) for arg in args]
        exact = all(one.exact for one in found)
        if node.op in _SAME:
            held = _Range(*_ends(node.op, found), exact)
            return _Range(held.low, held.high, exact or held.between)
        if not exact:
            raise NotHeld
        low, high = _ends(node.op, found)
        if low < LEAST or high > MOST:
            raise NotHeld
        return _Range(low, high, True)


def _quotients(op: str, a: _Range, b: _Range) -> list[int]:
    """At the ends of both ranges; between them there is nothing larger or smaller."""
    pairs = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if op == "floor_div":
        return [x // y for x, y in pairs]
    return [(abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in pairs]


def _ends(op: str, found: Sequence[_Range]) -> tuple[int, int]:
    """The least and the largest result of these operands.

    Raises:
        NotHeld: there are no words for it.
    """
    a, b = found[0], found[-1]
    match op:
        case "copy":
            return a.low, a.high
        case "relu":
            return max(a.low, 0), max(a.high, 0)
        case "sign":
            return (a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0)
        case "minimum":
            return min(a.low, b.low), min(a.high, b.high)
        case "maximum":
            return max(a.low, b.low), max(a.high, b.high)
        case "select":
            return min(a.low, b.low), max(a.high, b.high)
        case "neg":
            return -a.high, -a.low
        case "abs":
            ends = (abs(a.low), abs(a.high))
            return 0 if a.low <= 0 <= a.high else min(ends), max(ends)
        case "add":
            return a.low + b.low, a.high + b.high
        case "sub":
            return a.low - b.high, a.high - b.low
        case "mul":
            products = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
            return min(products), max(products)
        case "floor_div" | "trunc_div" if not b.low <= 0 <= b.high:
            quotients = _quotients(op, a, b)
            return min(quotients), max(quotients)
        case "remainder" if not b.low <= 0 <= b.high:
            return min(b.low + 1, 0), max(b.high - 1, 0)
        case "fmod" if not b.low <= 0 <= b.high:
            most = max(abs(b.low), abs(b.high)) - 1
            return max(min(a.low, 0), -most), min(max(a.high, 0), most)
        case "shift_left" | "shift_right" if b.low >= 0 and b.high < 32:
            pairs = [(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
            shifted = [x << y if op == "shift_left" else x >> y for x, y in pairs]
            return min(shifted), max(shifted)
        case "bitwise_and" if a.low >= 0 or b.low >= 0:
            return 0, min(one.high for one in (a, b) if one.low >= 0)
        case "bitwise_or" | "bitwise_xor" if a.low >= 0 and b.low >= 0:
            return 0, (1 << max(a.high, b.high).bit_length()) - 1
        case "bitwise_and" | "bitwise_or" | "bitwise_xor" | "bitwise_not":
            return LEAST, MOST
    raise NotHeld
