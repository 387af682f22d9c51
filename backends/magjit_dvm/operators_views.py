"""Handlers of copies, casts, views inside a group, and look-ups by position."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit_dvm.builder import Builder, NotFusable, Value, computed_in, size_key, stored_as
from magjit_dvm.instructions import DType
from magjit_dvm.operators import (
    Block,
    elementwise,
    meta,
    one_result,
    register,
)
from magjit_dvm.program import INDEXED, ONE
from magjit_dvm.tables import Promotion

aten = torch.ops.aten

# -- copies, casts and views --


@register(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _clone(builder: Builder, node: Any) -> Value:
    block, result = elementwise(builder, node, node.args[:1], Promotion.DEFAULT)
    return block.value(block.made[0], result)


@register(aten._to_copy.default, torch.ops.prims.convert_element_type.default)
def _to_copy(builder: Builder, node: Any) -> Value:
    return _converted(builder, node, node.args[0])


def _converted(builder: Builder, node: Any, given: Any) -> Value:
    tensor = one_result(node)
    if meta(given).device != tensor.device:
        raise NotFusable("a copy between devices")
    stored, source = stored_as(tensor.dtype), computed_in(meta(given).dtype)
    block = Block(builder, (given,), tensor.shape, source)
    made = builder.cast(block.made[0], source, stored)
    # Half precision is rounded here, as the program says, and computed with in single.
    made, dtype = builder.widened(made, stored)
    return block.value(made, tensor.dtype, dtype)


@register(aten.copy.default)
def _copied_into(builder: Builder, node: Any) -> Value:
    """What ``copy_`` leaves in its first operand."""
    tensor, given = one_result(node), node.args[1]
    if [size_key(n) for n in meta(given).shape] != [size_key(n) for n in tensor.shape]:
        raise NotFusable("a copy that repeats its operand")
    return _converted(builder, node, given)


def _inside(builder: Builder, node: Any) -> Value:
    """The operand of a view: views of tensors from outside stay with ATen."""
    value = builder.values.get(node.args[0])
    if not isinstance(value, Value):
        raise NotFusable("a view of a tensor from outside")
    return value


@register(aten.unsqueeze.default)
def _unsqueeze(builder: Builder, node: Any) -> Value:
    value = _inside(builder, node)
    at = node.args[1] % (len(value.dims) + 1)
    dims = (*value.dims[:at], ONE, *value.dims[at:])
    return replace(value, dims=dims, shape=tuple(meta(node).shape))


@register(aten.permute.default)
def _permute(builder: Builder, node: Any) -> Value:
    value = _inside(builder, node)
    order = [axis % len(value.dims) for axis in node.args[1]]
    dims = tuple(value.dims[axis] for axis in order)
    return replace(value, dims=dims, shape=tuple(meta(node).shape))


@register(aten.transpose.int, aten.t.default)
def _transpose(builder: Builder, node: Any) -> Value:
    value = _inside(builder, node)
    rank = len(value.dims)
    dims = list(value.dims)
    if node.target is aten.t.default:
        dims.reverse()
    elif rank:
        first, second = node.args[1] % rank, node.args[2] % rank
        dims[first], dims[second] = dims[second], dims[first]
    return replace(value, dims=tuple(dims), shape=tuple(meta(node).shape))


@register(aten.expand.default)
def _expand(builder: Builder, node: Any) -> Value:
    value = _inside(builder, node)
    shape = tuple(meta(node).shape)
    offset = len(shape) - len(value.dims)
    dims = tuple(ONE if k < offset else value.dims[k - offset] for k in range(len(shape)))
    # An expanded dimension has no loop yet: whatever it is combined with gives it one.
    return replace(value, dims=dims, shape=shape)


@register(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
)
def _view(builder: Builder, node: Any) -> Value:
    """Views that only add or drop dimensions of size 1."""
    value = _inside(builder, node)
    shape = tuple(meta(node).shape)
    old = [(dim, size_key(size)) for dim, size in zip(value.dims, value.shape, strict=True)]
    old = [one for one in old if one[1] != 1]
    dims = []
    for size in shape:
        if size_key(size) == 1:
            dims.append(ONE)
        elif old and old[0][1] == size_key(size):
            dims.append(old.pop(0)[0])
        else:
            raise NotFusable("a view that merges or splits dimensions")
    if old:
        raise NotFusable("a view that merges or splits dimensions")
    return replace(value, dims=tuple(dims), shape=shape)


# -- positions --


@register(aten.embedding.default)
def _embedding(builder: Builder, node: Any) -> Value:
    table, positions = node.args[:2]
    tensor = one_result(node)
    if not isinstance(table, FxNode) or builder.values.get(table) is not None:
        raise NotFusable("a table that the group computes")
    shape = tuple(tensor.shape)
    known = builder.known(positions)
    placed = None
    if known is not None:
        placed = replace(known, dims=(*known.dims, ONE), shape=(*known.shape, 1))
    dims = builder.loops_of(shape, (placed,))
    at = builder.load(positions, dims[:-1]) if known is None else known
    if at.dtype not in (DType.I64, DType.I32):
        raise NotFusable("positions that are not ints")
    made = builder.looked_up(table, (INDEXED, dims[-1]), at.node)
    made, dtype = builder.widened(made, builder.nodes[made].dtype)
    return Value(made, dtype, dims, shape, tensor.dtype)
