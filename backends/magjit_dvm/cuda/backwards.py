"""Patterns of norms' backwards: what one word, or two, make of a whole row.

With X = (x − mean) · rstd, or x · rstd, of an x that is loaded, and G the gradient that comes, each
element's share of a row's sum being 1 / N::

    dx = (G − sum(G) / N − X · sum(G · X) / N) · rstd         ``row.f.back``
    gradient of the weight: what G · X is across rows         ``acc.norm``

``norms_backward.py`` writes them so; ``csrc/cuda_backwards.cpp`` finds the same.
"""

from __future__ import annotations

from typing import NamedTuple

from magjit_dvm.cuda.values import Values
from magjit_dvm.program import ACROSS, NodeKind

__all__ = ["READY", "Backwards", "NormBackward", "Standardized"]


READY = 2
"""Of ``row.f.back``: T is normalized already."""


class Standardized(NamedTuple):
    """(x − mean) · root, x a tile that is loaded; of x · root, the mean is −1."""

    x: int
    mean: int
    root: int

    @property
    def centered(self) -> bool:
        return self.mean >= 0


class NormBackward(NamedTuple):
    """The gradient of a norm's input.

    Attributes:
        result, gradient, normalized: dx, G and X.
        norm: what X is made of.
        share: 1 / N, by bits.
        folded: the sums, and each element's share of them.
    """

    result: int
    gradient: int
    normalized: int
    norm: Standardized
    share: int
    folded: tuple[int, ...]


class Backwards(Values):
    """Finds them."""

    def factors(self, n: int) -> tuple[int, int]:
        """The operands of a product, that of a row behind the other."""
        left, right = (self.canonical[arg] for arg in self.nodes[n].args)
        return (right, left) if self.in_row(left) else (left, right)

    def standardized(self, n: int) -> Standardized | None:
        """What a tile is the norm of, if row values make it that no reduction comes before."""
        if self.nodes[n].op != "mul" or self.in_row(n) or self.kind(n) != "f":
            return None
        tile, root = self.factors(n)
        if not self.is_early(root):
            return None
        if self.is_loaded_tile(tile):
            return Standardized(tile, -1, root)
        if self.nodes[tile].op != "sub":
            return None
        x, mean = (self.canonical[arg] for arg in self.nodes[tile].args)
        if self.is_loaded_tile(x) and self.is_early(mean):
            return Standardized(x, mean, root)
        return None

    def is_early(self, n: int) -> bool:
        """Whether a value is in a row register before anything is reduced."""
        return self.in_row(n) and not self.is_number(n) and self.phase[n] == 0

    def is_loaded_tile(self, n: int) -> bool:
        return self.nodes[n].kind is NodeKind.LOAD and not self.in_row(n)

    def norm_backward(self, n: int) -> NormBackward | None:
        """What the sum ``n`` is part of, where nothing else asks for what comes between."""
        if self.nodes[n].op != "sum":
            return None
        for result, node in enumerate(self.nodes):
            if node.op == "mul" and self.canonical[result] == result and self.uses[result]:
                found = self.of_result(result)
                if found is not None and n in found.folded:
                    return found
        return None

    def of_result(self, result: int) -> NormBackward | None:
        """What (G − sum(G) / N − X · sum(G · X) / N) · rstd is made of."""
        inner, root = self.factors(result)
        if not self.is_early(root) or not self.made_for_one(inner, "sub"):
            return None
        rest, taken = (self.canonical[arg] for arg in self.nodes[inner].args)
        if not self.made_for_one(taken, "mul") or self.in_row(taken):
            return None
        normalized, shared = self.factors(taken)
        parts = self.standardized(normalized)
        if parts is None or parts.root != root:
            return None
        totals = [shared]
        if parts.centered:
            if not self.made_for_one(rest, "sub"):
                return None
            rest, shared = (self.canonical[arg] for arg in self.nodes[rest].args)
            totals.append(shared)
        folded: list[int] = []
        shares: set[int] = set()
        summed: list[int] = []
        for one in totals:
            total, share = self.share_of_sum(one)
            if total < 0:
                return None
            folded += one, total
            shares.add(share)
            summed.append(self.canonical[self.nodes[total].args[0]])
        product, (gradient, *_) = summed[0], [*summed[1:], rest]
        if gradient != rest or self.in_row(rest) or not self.made_for_one(product, "mul"):
            return None
        factors = {self.canonical[arg] for arg in self.nodes[product].args}
        if factors != {rest, normalized} or len(factors) != 2 or len(shares) != 1:
            return None
        (share,) = shares
        return NormBackward(result, rest, normalized, parts, share, tuple(folded))

    def made_for_one(self, n: int, op: str) -> bool:
        return self.nodes[n].op == op and self.uses[n] == 1 and self.kind(n) == "f"

    def share_of_sum(self, n: int) -> tuple[int, int]:
        """Of a sum of a row times a number, or divided by one, that sum and the factor by bits.

        (−1, 0) of anything else.
        """
        node = self.nodes[n]
        if node.op not in ("mul", "div") or self.uses[n] != 1 or not self.in_row(n):
            return -1, 0
        total, by = (self.canonical[arg] for arg in node.args)
        if node.op == "mul" and self.is_number(total):
            total, by = by, total
        of = self.nodes[total]
        sums = of.kind is NodeKind.REDUCE and of.op == "sum" and of.aux != ACROSS
        if not sums or self.uses[total] != 1 or not self.is_number(by) or self.kind(n) != "f":
            return -1, 0
        if node.op == "mul":
            return total, self.bits(by)
        return total, self.inverse_bits(by)
