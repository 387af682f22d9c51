"""How contiguous the reads of a virtual tensor are, and whether it is sure to pay (VTC §4.3).

A mapping is ``f(I) = S·I + b(I)`` (Equation 1). Dimension ``d`` is contiguous where the strides
from ``d`` on are those of a dense tensor and the bias does not depend on them (Definition 4). A
tensor is fully contiguous where that holds of its first dimension, partially where the contiguous
run is longer than what memory transfers at once (Definition 5). Fully contiguous ones always pay
(Theorem 1): they are Type I. All others are Type II: to be measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import sympy

from magjit.plugin.virtual_tensors.indexing import (
    index_symbols,
    is_nonnegative,
    linear_terms,
    numel,
)
from magjit.plugin.virtual_tensors.mapping import Mapping, Piece, contiguous_strides

__all__ = ["TRANSFER_BYTES", "Contiguity", "Contiguous", "contiguity"]

TRANSFER_BYTES = 32
"""What a GPU moves at once: a sector of 32 bytes."""


class Contiguous(Enum):
    """Definition 5."""

    FULLY = "fully"
    PARTIALLY = "partially"
    NOT = "not"


@dataclass(frozen=True, slots=True)
class Contiguity:
    """What the analysis finds.

    Attributes:
        kind: Definition 5.
        dimension: the least contiguous dimension, counted from 0; the rank where there is none.
        run: elements that follow one another in memory.
    """

    kind: Contiguous
    dimension: int
    run: sympy.Expr

    @property
    def always_pays(self) -> bool:
        """Type I (Theorem 1)."""
        return self.kind is Contiguous.FULLY


def contiguity(
    mapping: Mapping, element_bytes: int, transfer_bytes: int = TRANSFER_BYTES
) -> Contiguity:
    """The contiguity of a virtual tensor; of several pieces, that of the worst.

    Args:
        mapping: the virtual tensor's.
        element_bytes: size of an element.
        transfer_bytes: what the memory moves at once.
    """
    rank = len(mapping.shape)
    first = max((_first_contiguous(mapping, piece) for piece in mapping.parts), default=0)
    run = numel(mapping.shape[first:])
    if first == 0 and len(mapping.parts) <= 1:
        return Contiguity(Contiguous.FULLY, 0, run)
    enough = first < rank and is_nonnegative(run * element_bytes - transfer_bytes)
    return Contiguity(Contiguous.PARTIALLY if enough else Contiguous.NOT, first, run)


def _first_contiguous(mapping: Mapping, piece: Piece) -> int:
    """The least dimension from which on a piece is contiguous."""
    rank = len(mapping.shape)
    if piece.fill is not None:
        return _first_free(piece.condition.free_symbols, rank)
    symbols = index_symbols(rank)
    terms = linear_terms(piece.offset)
    strides = [terms.pop(symbol, sympy.S.Zero) for symbol in symbols]
    dense = contiguous_strides(mapping.shape)
    bias: set[sympy.Symbol] = set(piece.condition.free_symbols)
    for term in terms:
        bias |= term.free_symbols
    first = _first_free(bias, rank)
    for d in reversed(range(rank)):
        same = sympy.expand(strides[d] - dense[d]) == 0 or mapping.shape[d] == 1
        if not same:
            return max(first, d + 1)
    return first


def _first_free(symbols: set[sympy.Symbol], rank: int) -> int:
    """The dimension after the last one that a condition or bias depends on."""
    used = [k for k, symbol in enumerate(index_symbols(rank)) if symbol in symbols]
    return max(used) + 1 if used else 0
