"""What the values of a fused operator are on the GPU: of which registers, one of which kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from magjit_dvm.cuda.long_ranges import NOT_HELD, LongRanges, NotHeld
from magjit_dvm.cuda.space import Space
from magjit_dvm.cuda.support import FLOATING, reduction_name
from magjit_dvm.instructions import DType
from magjit_dvm.program import ACROSS, Node, NodeKind
from magjit_dvm.vm import NotEncodable

__all__ = ["WHAT", "Values", "exact_inverse", "float_bits"]

_NUMBERS = frozenset({NodeKind.CONSTANT, NodeKind.SCALAR, NodeKind.NUMEL})
_LONGER = (DType.I32, DType.I64)
_HALVES = {DType.F16: "to_half", DType.BF16: "to_bfloat"}
WHAT = {
    DType.F32: "32",
    DType.I32: "32",
    DType.F16: "f16",
    DType.BF16: "bf16",
    DType.U8: "u8",
    DType.BOOL: "u8",
    DType.I64: "i64s",
}
_READ_AS = {DType.F32: "i64f", DType.I32: "i64"}
"""What loads make of int64 that is cast at once."""


_OF_A_WARP, _OF_FEW_WARPS = 1024, 4096
"""Columns."""


def float_bits(value: float) -> int:
    """A float32 as a word has it."""
    return int(np.float32(value).view(np.uint32))


def exact_inverse(bits: int) -> int:
    """The inverse of a float32 that is a power of two, by bits; 0 of any other."""
    exponent = bits >> 23 & 255
    if bits & 0x7FFFFF or not 1 <= exponent <= 253:
        return 0
    return bits & 0x80000000 | (254 - exponent) << 23


class Values:
    """Facts about nodes.

    Attributes:
        canonical: of each node, the one that it is the same as in registers.
        phase: how many reductions come before it.
        uses: by canonical nodes and outputs.
        folded: row values that are part of another's word.
        online: by the largest of x, the sum of exp(x − largest) that is found with it.
    """

    def __init__(self, space: Space, arguments: Sequence[Any]) -> None:
        self.space, self.program = space, space.program
        self.nodes, self.arguments = space.program.nodes, arguments
        self.canonical: list[int] = []
        self.phase: list[int] = []
        self.uses = [0] * len(self.nodes)
        self.folded: set[int] = set()
        self.online: dict[int, int] = {}

    def dtype(self, n: int) -> DType:
        return self.nodes[n].dtype

    def kind(self, n: int) -> str:
        """Of registers: f or i."""
        return "f" if self.dtype(n) in FLOATING else "i"

    def is_number(self, n: int) -> bool:
        node = self.nodes[n]
        if node.kind is NodeKind.CAST:
            return self.is_number(node.args[0])
        return node.kind in _NUMBERS

    def in_row(self, n: int) -> bool:
        """One for a row (or for the whole), in a row register."""
        has = self.space.has[n]
        return not (has & self.space.reduced if self.space.reduced else has)

    def is_load(self, n: int) -> bool:
        """A tensor, or one of int64 that is read as something else; positions; what is drawn."""
        node = self.nodes[n]
        if node.kind is NodeKind.CAST:
            inner = self.nodes[node.args[0]]
            known = node.dtype in _READ_AS
            return inner.kind is NodeKind.LOAD and inner.dtype is DType.I64 and known
        return node.kind in (NodeKind.LOAD, NodeKind.IOTA, NodeKind.DRAW)

    def loaded(self, n: int) -> tuple[int, str]:
        """The input of a load, and what to make of its elements."""
        node = self.nodes[n]
        if node.kind is NodeKind.LOAD:
            return node.aux, WHAT[node.dtype]
        return self.nodes[node.args[0]].aux, _READ_AS[node.dtype]

    def is_row_value(self, n: int) -> bool:
        if not self.in_row(n) or self.canonical[n] != n or n in self.folded:
            return False
        return not self.is_number(n) and self.uses[n] > 0

    def reduction(self, n: int) -> str:
        """The word's name of a reduction."""
        node = self.nodes[n]
        dtype = self.dtype(node.args[0])
        name = reduction_name(node.op, dtype)
        if not name:
            raise NotEncodable(f"no words for {node.op} of {dtype.text}")
        return name

    def stored(self, n: int) -> str:
        """How a value is stored."""
        if self.dtype(n) is DType.I64:
            return "i64f" if self.is_from_float(n) else "i64"
        return WHAT[self.dtype(n)]

    def survey(self) -> None:
        """Aliases, passes and uses."""
        for n, node in enumerate(self.nodes):
            of = self.alias_of(n, node)
            self.canonical.append(n if of < 0 else of)
        self.find_phases()
        self.check_longs()
        for n, node in enumerate(self.nodes):
            if self.canonical[n] == n and not self.is_number(n) and not self.is_load(n):
                for arg in node.args:
                    self.uses[self.canonical[arg]] += 1
        for out in self.program.outputs:
            self.uses[self.canonical[out.node]] += 1
        for n, node in enumerate(self.nodes):
            if node.op == "rsqrt":
                self.folded.update(self.scaled(n)[1:])

    def find_phases(self) -> None:
        """How many reductions come before each value."""
        self.phase = []
        of = {total: n for n, total in self.online.items()}
        for n, node in enumerate(self.nodes):
            before = [self.phase[arg] for arg in node.args]
            in_row = node.kind is NodeKind.REDUCE and node.aux != ACROSS
            reduces = in_row and node.dims & self.space.active
            found = max(before, default=0) + bool(reduces)
            self.phase.append(self.phase[of[n]] if n in of else found)

    def find_online(self, chunked: bool) -> None:
        """Sums of exponentials that are found with the largest, and phases with them.

        Of rows in one stage, those whose exponentials nothing else asks for; not of rows of a few
        warps that have results of tiles, which wait little for one another and have more to compute
        so.
        """
        few = _OF_A_WARP < self.space.cols <= _OF_FEW_WARPS
        if not chunked and few and self.has_tiles():
            return
        for n in range(len(self.nodes)):
            total = self.sum_beyond(n)
            if total >= 0 and (chunked or self.uses[self.power_of(total)] == 1):
                self.online[n] = total
        if self.online:
            self.find_phases()

    def has_tiles(self) -> bool:
        """Whether results vary along rows."""
        return not all(self.in_row(out.node) for out in self.program.outputs)

    def is_read_once(self) -> bool:
        """Whether rows in chunks are read once, for a loss or the like: no result has tiles."""
        reduces = (NodeKind.REDUCE, NodeKind.SCAN)
        found = [n for n, node in enumerate(self.nodes) if node.kind in reduces and self.uses[n]]
        totals = {self.sum_beyond(n) for n in found} - {-1}
        if not totals or self.has_tiles():
            return False
        return all(self.phase[n] == 1 or n in totals for n in found if self.canonical[n] == n)

    def look_up_late(self) -> None:
        """What is looked up of a row in chunks is so when it is asked for.

        It may be an element of the row, which then is in a cache.
        """
        for n, node in enumerate(self.nodes):
            if node.kind is not NodeKind.INDEX or not self.in_row(n):
                continue
            if any(self.canonical[out.node] == n for out in self.program.outputs):
                continue
            phases = (
                self.phase[k]
                for k, other in enumerate(self.nodes)
                if self.canonical[k] == k and n in (self.canonical[arg] for arg in other.args)
            )
            self.phase[n] = min(phases, default=self.phase[n])

    def power_of(self, total: int) -> int:
        """What a sum is of."""
        return self.canonical[self.nodes[total].args[0]]

    def sum_beyond(self, n: int) -> int:
        """Of the largest of x, if a node is that, the sum of exp(x − largest); −1 without one."""
        largest = self.nodes[n].kind is NodeKind.REDUCE and self.nodes[n].op == "max"
        if not largest or self.kind(n) != "f" or self.canonical[n] != n or not self.uses[n]:
            return -1
        x = self.canonical[self.nodes[n].args[0]]
        for total, node in enumerate(self.nodes):
            if node.kind is not NodeKind.REDUCE or node.op != "sum" or node.aux == ACROSS:
                continue
            if self.canonical[total] != total or not self.uses[total]:
                continue
            power = self.nodes[self.power_of(total)]
            if power.op == "exp":
                away = self.nodes[self.canonical[power.args[0]]]
                of = tuple(self.canonical[one] for one in away.args)
                if away.op == "sub" and of == (x, n):
                    return total
        return -1

    def alias_of(self, n: int, node: Node) -> int:
        """The value that a node is the same as, in registers; −1 if it is one of its own."""
        if self.is_number(n) or self.is_load(n):
            return -1
        over = node.kind in (NodeKind.REDUCE, NodeKind.SCAN)
        if over and not node.dims & self.space.active:
            return self.canonical[node.args[0]]  # over a size of 1
        if node.kind is NodeKind.BROADCAST or node.op == "copy":
            of = self.canonical[node.args[0]]
            same = self.in_row(n) == self.in_row(of) and not self.is_number(of)
            return of if same else -1
        if node.kind is NodeKind.CAST and not self.cast_ops(n):
            of = self.canonical[node.args[0]]
            return -1 if self.is_number(of) else of
        return -1

    def cast_ops(self, n: int) -> tuple[str, ...]:
        """What a cast does to registers."""
        to, of = self.dtype(n), self.dtype(self.nodes[n].args[0])
        if to is of or to is DType.I64 or (to, of) == (DType.I32, DType.I64):
            return ()
        half = () if to not in _HALVES or self.only_stored(n) else (f"f.{_HALVES[to]}",)
        if of in FLOATING:
            names = {DType.I32: "f.to_int", DType.U8: "f.to_byte", DType.BOOL: "f.to_bool"}
            return (names[to],) if to in names else half
        if to in FLOATING:
            return ("i.to_float", *(half if of in _LONGER else ()))  # 8 bits are exact
        if to is DType.BOOL:
            return ("i.to_bool",)
        return ("ik.bitwise_and",) if to is DType.U8 and of in _LONGER else ()

    def only_stored(self, n: int) -> bool:
        return not any(n in node.args for node in self.nodes)

    def check_longs(self) -> None:
        """That 32 bits hold each int64, where that matters.

        Raises:
            NotEncodable: they may not.
        """
        longs = LongRanges(self.nodes, lambda n: int(self.exact(n)), self.space.size.__getitem__)
        try:
            for n in range(len(self.nodes)):
                if not self.is_number(n):
                    longs.check(n)
            for out in self.program.outputs:
                if self.dtype(out.node) is DType.I64 and not self.is_from_float(out.node):
                    longs.stored(out.node)
        except NotHeld:
            raise NotEncodable(NOT_HELD) from None

    def is_from_float(self, n: int) -> bool:
        """Whether an int64 is a float that is converted as it is stored."""
        node = self.nodes[n]
        if node.kind is not NodeKind.CAST or self.is_number(n):
            return False
        return self.kind(node.args[0]) == "f"

    # -- patterns --

    def difference(self, n: int) -> bool:
        """Whether a value is a difference of floats that is used once, or as cheaply made again.

        That is one of a tensor and a row value.
        """
        n = self.canonical[n]
        if self.nodes[n].op != "sub" or self.kind(n) != "f":
            return False
        left, right = (self.canonical[arg] for arg in self.nodes[n].args)
        again = self.is_load(left) and self.in_row(right) and not self.in_row(n)
        return self.uses[n] == 1 or again

    def below_largest(self, n: int, row: int) -> bool:
        """Whether ``row`` is the largest of ``n``, and tiles are stored in 16 bits alone."""
        node = self.nodes[self.canonical[row]]
        if node.kind is not NodeKind.REDUCE or node.op != "max":
            return False
        tiles = [one.node for one in self.program.outputs if not self.in_row(one.node)]
        halves = all(self.dtype(one) in _HALVES for one in tiles)
        return halves and self.canonical[node.args[0]] == self.canonical[n]

    def squared(self, n: int) -> int:
        """What a value that is used once is the square of, a float tile; −1 if it is none."""
        n = self.canonical[n]
        node = self.nodes[n]
        if node.op != "mul" or self.uses[n] != 1 or self.kind(n) != "f" or self.in_row(n):
            return -1
        left, right = (self.canonical[arg] for arg in node.args)
        return left if left == right else -1

    def squares_about_mean(self, n: int) -> int:
        """The sum of squares about the mean that is found from the sum ``n``; −1 without one."""
        if self.reduction(n) != "f.sum":
            return -1
        (arg,) = self.nodes[n].args
        for other, node in enumerate(self.nodes):
            if node.kind is not NodeKind.REDUCE or node.op != "sum" or not self.uses[other]:
                continue
            away = self.squared(node.args[0]) if self.canonical[other] == other else -1
            if away < 0 or self.nodes[away].op != "sub":
                continue
            of, mean = (self.canonical[one] for one in self.nodes[away].args)
            if of == self.canonical[arg] and self.is_mean(mean, n):
                return other
        return -1

    def normalized(self, n: int) -> tuple[int, ...]:
        """Of the sum of x, the parts of (x − mean) · rsqrt(squares / columns + number).

        Returns:
            The mean, the squares' sum, the difference that is squared, the one that is multiplied
            (they may be one), the root and the product; nothing where others ask for what comes
            between, or there is no such product.
        """
        squares = self.squares_about_mean(n)
        if squares < 0 or self.uses[n] != 1 or self.uses[squares] != 1:
            return ()
        away = self.squared(self.nodes[squares].args[0])
        x, mean = (self.canonical[one] for one in self.nodes[away].args)
        for product, node in enumerate(self.nodes):
            if node.op != "mul" or self.canonical[product] != product or self.in_row(product):
                continue
            left, right = (self.canonical[one] for one in node.args)
            again, root = (left, right) if self.nodes[right].op == "rsqrt" else (right, left)
            if self.nodes[root].op != "rsqrt" or self.nodes[again].op != "sub":
                continue
            if tuple(self.canonical[one] for one in self.nodes[again].args) != (x, mean):
                continue
            same = again == away
            alone = self.uses[away] == 2 + same and self.uses[again] == 1 + 2 * same
            if alone and self.uses[product] and self.is_deviation(root, squares):
                return mean, squares, away, again, root, product
        return ()

    def softmaxed(self, n: int) -> tuple[int, ...]:
        """Of the largest of x, the parts of exp(x − largest) · (1 / sum) that is stored in 16 bits.

        Returns:
            The sum, its inverse and the product; nothing as of ``normalized``.
        """
        (x,) = (self.canonical[arg] for arg in self.nodes[n].args)
        if self.uses[n] != 1 or not self.below_largest(x, n) or self.kind(x) != "f":
            return ()
        for product, node in enumerate(self.nodes):
            if node.op != "mul" or self.canonical[product] != product or self.in_row(product):
                continue
            left, right = (self.canonical[one] for one in node.args)
            power, inverse = (left, right) if self.nodes[left].op == "exp" else (right, left)
            if self.nodes[power].op != "exp" or self.nodes[inverse].op != "reciprocal":
                continue
            away = self.canonical[self.nodes[power].args[0]]
            total = self.canonical[self.nodes[inverse].args[0]]
            if self.nodes[away].op != "sub" or self.nodes[total].op != "sum":
                continue
            of = tuple(self.canonical[one] for one in self.nodes[away].args)
            if of != (x, n) or self.canonical[self.nodes[total].args[0]] != power:
                continue
            counts = [self.uses[one] for one in (away, power, total, inverse)]
            if counts == [1, 2, 1, 1] and self.uses[product]:
                return total, inverse, product
        return ()

    def is_deviation(self, root: int, squares: int) -> bool:
        """Whether a value is rsqrt(squares / columns + number)."""
        parts = self.scaled(root)
        if not parts or parts[0] != squares:
            return False
        return self.bits(self.nodes[parts[1]].args[1]) == float_bits(self.space.cols)

    def is_mean(self, mean: int, total: int) -> bool:
        """Whether a value is a sum divided by the row's length."""
        node = self.nodes[mean]
        if node.op != "div" or self.canonical[node.args[0]] != total:
            return False
        return self.is_number(node.args[1]) and self.bits(node.args[1]) == float_bits(
            self.space.cols
        )

    def scaled(self, n: int) -> tuple[int, ...]:
        """Of rsqrt(s / number + number): s, the quotient and the sum; nothing of any other."""
        total = self.canonical[self.nodes[n].args[0]]
        node = self.nodes[total]
        if node.op != "add" or not self.in_row(n) or not self.is_number(node.args[1]):
            return ()
        quotient = self.canonical[node.args[0]]
        if self.nodes[quotient].op != "div" or self.uses[total] != 1 or self.uses[quotient] != 1:
            return ()
        given, by = self.nodes[quotient].args
        if self.is_number(given) or not self.is_number(by) or self.kind(n) != "f":
            return ()
        return self.canonical[given], quotient, total

    # -- numbers --

    def bits(self, n: int) -> int:
        """A number in the register of its dtype."""
        return int(self.number(n).view(torch.int32).item()) & 0xFFFFFFFF

    def inverse_bits(self, n: int) -> int:
        """What a division by a number multiplies with."""
        by = float(self.number(n))
        return float_bits(1.0 / by if by else float("inf"))

    def number(self, n: int) -> torch.Tensor:
        node = self.nodes[n]
        if node.kind is NodeKind.CAST:
            value = self.exact(node.args[0])
        else:
            value = self.exact(n)
        if node.dtype in FLOATING:
            return value.to(node.dtype.torch).float()
        return value.to(node.dtype.torch).to(torch.int32)

    def exact(self, n: int) -> torch.Tensor:
        """A number as its node has it, of its dtype."""
        node = self.nodes[n]
        if node.kind is NodeKind.CAST:
            return self.exact(node.args[0]).to(node.dtype.torch)
        given: Any = node.number
        if node.kind is NodeKind.SCALAR:
            given = self.arguments[node.aux]
        elif node.kind is NodeKind.NUMEL:
            given = int(np.prod([self.space.size[d] for d in node.dims], dtype=np.int64))
        exact = torch.float64 if isinstance(given, float) else torch.int64
        return torch.tensor(given, dtype=exact).to(node.dtype.torch)
