"""Chains of movements that are strides into the memory of where they begin."""

from __future__ import annotations

from collections.abc import Callable

import sympy
from torch.fx import Node

from magjit.plugin.virtual_tensors import index_symbols
from magjit.plugin.virtual_tensors.indexing import linear_terms, simplify
from magjit_triton.codegen.graphs import is_tensor, movement_of
from magjit_triton.codegen.layout import Layout, sizes_of

__all__ = ["strided_in"]


def strided_in(
    node: Node, layout_of: Callable[[Node], Layout], ends: Callable[[Node], bool]
) -> tuple[Node, Layout] | None:
    """A node as one stride a dimension into the memory of another; None where it is no such view.

    Args:
        node: the last of a chain of movements.
        layout_of: how a tensor lies, or would lie, in memory of its own.
        ends: whether a chain goes no farther than this tensor.
    """
    sizes = sizes_of(node.meta["val"])
    symbols = index_symbols(len(sizes))
    base: Node = node
    index: tuple[sympy.Expr, ...] = tuple(symbols)
    ranges = dict(zip(symbols, sizes, strict=True))
    while not ends(base):
        moved = movement_of(base)
        if moved is None:
            break
        movement, operands = moved
        if len(movement.parts) != 1 or movement.parts[0].condition != sympy.true:
            return None
        (part,) = movement.parts
        if part.fill is not None:
            return None
        own = index_symbols(len(movement.shape))
        swaps = dict(zip(own, index, strict=True))
        index = tuple(simplify(one.xreplace(swaps), ranges) for one in part.index)
        base = operands[part.operand]
    if not is_tensor(base):
        return None
    layout = layout_of(base)
    terms = linear_terms(simplify(layout.offset_at(index), ranges))
    offset = terms.pop(sympy.S.One, sympy.S.Zero)
    strides = tuple(terms.pop(symbol, sympy.S.Zero) for symbol in symbols)
    if terms or any(stride.could_extract_minus_sign() for stride in strides):
        return None
    return base, Layout(layout.buffer, layout.dtype, sizes, strides, offset)
