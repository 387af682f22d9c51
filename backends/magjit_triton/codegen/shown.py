"""What a graph returns lies in memory as in eager mode: views stay views of what they are views of.

    Shown ::= owner, sizes, strides, offset      a result in the memory of the tensor ``owner``

Strides and offset are those of the fake values, which eager mode's own operators gave.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import sympy
import torch
from torch.fx import Node

from magjit.plugin.aliases import is_alias
from magjit.plugin.virtual_tensors.indexing import size_expr
from magjit_triton.codegen.domain import total
from magjit_triton.codegen.layout import Layout, sizes_of, strides_for

__all__ = ["may_show", "owner_of", "shown_in", "views_of"]

aten = torch.ops.aten
_MAY_COPY = (aten.reshape.default, aten.contiguous.default)
"""Operators of which nobody says whether they give a view; only rewrites make them."""


def owner_of(node: Node) -> Node:
    """The tensor in whose memory, and in whose dtype, a result is; often the result itself."""
    while True:
        below = _viewed(node)
        if below is None:
            return node
        value = below.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return node
        if value.dtype != node.meta["val"].dtype:
            return node
        node = below


def _viewed(node: Node) -> Node | None:
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker, Node) or maker.op != "call_function":
        return None
    if maker.target in _MAY_COPY or not is_alias(maker):
        return None
    below = maker.args[0] if maker.args else None
    return below if isinstance(below, Node) else None


def views_of(node: Node) -> Iterator[Node]:
    """A tensor and everything in its memory."""
    yield node
    for user in node.users:
        if user.target is operator.getitem or (user.op == "call_function" and is_alias(user)):
            yield from views_of(user)


def shown_in(node: Node, owner: Node, layout: Layout) -> Layout | None:
    """A result as strides into the memory of its owner, if that lies there as in eager mode."""
    value, whole = node.meta["val"], owner.meta["val"]
    given = zip(layout.sizes, layout.strides, whole.stride(), strict=True)
    if any(size != 1 and sympy.expand(mine - size_expr(own)) != 0 for size, mine, own in given):
        return None
    strides = tuple(size_expr(stride) for stride in value.stride())
    start = size_expr(value.storage_offset()) - size_expr(whole.storage_offset())
    offset = sympy.expand(layout.offset + start)
    return Layout(layout.buffer, layout.dtype, sizes_of(value), strides, offset)


def may_show(node: Node, base: Node, layout: Layout) -> bool:
    """Whether a result may be all of a computed tensor's memory, if nobody else sees that."""
    value = node.meta["val"]
    return (
        base.op == "call_function"
        and layout.offset == 0
        and layout.strides == strides_for(value)
        and sympy.expand(total(sizes_of(value)) - total(sizes_of(base.meta["val"]))) == 0
    )
