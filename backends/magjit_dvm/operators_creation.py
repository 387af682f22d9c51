"""Handlers of operators that make tensors: of numbers, of positions, and of equal parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit_dvm.builder import Builder, Joined, NotFusable, Value, computed_in, size_key
from magjit_dvm.instructions import DType
from magjit_dvm.operators import argument, meta, one_result, register
from magjit_dvm.program import MAX_OUTPUTS, ONE, Node, NodeKind

aten = torch.ops.aten

_LARGEST = {DType.I64: 2**63 - 1, DType.I32: 2**31 - 1, DType.U8: 255, DType.BOOL: 1}

# -- of numbers --


@register(aten.zeros.default, aten.ones.default, aten.full.default)
def _filled(builder: Builder, node: Any) -> Value:
    dims = _sized(builder, one_result(node), node.args[0])
    return _of_number(builder, node, dims, _number(node, 1))


@register(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default)
def _new_filled(builder: Builder, node: Any) -> Value:
    if node.args[0] in builder.values:
        raise NotFusable("nothing is computed from the operand")
    dims = _sized(builder, one_result(node), node.args[1])
    return _of_number(builder, node, dims, _number(node, 2))


@register(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
@register(aten.fill.Scalar)
def _filled_like(builder: Builder, node: Any) -> Value:
    return _of_number(builder, node, _dims_like(builder, node), _number(node, 1))


@register(aten.fill.Tensor)
def _filled_with(builder: Builder, node: Any) -> Value:
    """With the element of a tensor that has no dimensions."""
    tensor, given = one_result(node), node.args[1]
    if meta(given).device != tensor.device:
        raise NotFusable("a number on another device")
    dims, dtype = _dims_like(builder, node), computed_in(tensor.dtype)
    made = builder.operand(given, tuple(tensor.shape), dims, dtype)
    over = frozenset(dims) - {ONE}
    made = builder.add(Node(NodeKind.BROADCAST, dtype, (made,), dims=over))
    return Value(made, dtype, dims, tuple(tensor.shape), tensor.dtype)


def _dims_like(builder: Builder, node: Any) -> tuple[int, ...]:
    """The loops of a result that has the shape of the first operand."""
    given, tensor = node.args[0], one_result(node)
    if given in builder.values:
        value = builder.tensor(given)
        if any(d == ONE and size_key(n) != 1 for d, n in zip(value.dims, value.shape, strict=True)):
            raise NotFusable("the shape of an expanded tensor")
        dims = value.dims
    else:
        dims = builder.loops_of(tensor.shape)
        builder.sized_as(given, dims)
    return dims


def _number(node: Any, position: int) -> Any:
    name = str(node.target).split(".")[1]
    if "full" not in name and name != "fill":
        return int("ones" in name)
    return node.args[position]


def _of_number(builder: Builder, node: Any, dims: tuple[int, ...], number: Any) -> Value:
    tensor = one_result(node)
    dtype = computed_in(tensor.dtype)
    if isinstance(number, FxNode):
        made = builder.scalar(number, dtype)
    elif dtype in _LARGEST and (not isinstance(number, int) or not 0 <= number <= _LARGEST[dtype]):
        raise NotFusable("a number that the dtype does not hold")
    else:
        made = builder.constant(number, dtype)
    over = frozenset(dims) - {ONE}
    made = builder.add(Node(NodeKind.BROADCAST, dtype, (made,), dims=over))
    return Value(made, dtype, dims, tuple(tensor.shape), tensor.dtype)


def _sized(builder: Builder, tensor: torch.Tensor, sizes: Sequence[Any]) -> tuple[int, ...]:
    """The loops of a tensor of these sizes, each told to the program."""
    dims = builder.loops_of(tensor.shape)
    for dim, size in zip(dims, sizes, strict=True):
        if dim != ONE:
            builder.sized(dim, size)
    return dims


# -- of positions --


@register(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _arange(builder: Builder, node: Any) -> Value:
    tensor = one_result(node)
    bounds = list(node.args)
    start = bounds.pop(0) if len(bounds) > 1 else 0
    end, step = bounds[0], argument(node, 2, "step", 1)
    dtype = computed_in(tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16) or dtype in (DType.U8, DType.BOOL):
        raise NotFusable(f"positions as {tensor.dtype}")
    if type(start) is not int or type(step) is not int:
        raise NotFusable("positions that begin anywhere, or fractions")
    size: Any = tensor.shape[0]
    if not isinstance(size, int):
        if not isinstance(end, FxNode) or (start, step) != (0, 1):
            raise NotFusable("a number of positions that is computed")
        if size_key(meta(end)) != size_key(size):
            raise NotFusable("a number of positions that is computed")
        size = end
    dims = _sized(builder, tensor, [size])
    if dims[0] == ONE:
        made = builder.constant(0, DType.I64)
        made = builder.add(Node(NodeKind.BROADCAST, DType.I64, (made,)))
    else:
        made = builder.add(Node(NodeKind.IOTA, DType.I64, aux=dims[0]))
    if step != 1:
        made = builder.compute("mul", DType.I64, made, builder.constant(step, DType.I64))
    if start != 0:
        made = builder.compute("add", DType.I64, made, builder.constant(start, DType.I64))
    made = builder.cast(made, DType.I64, dtype)
    return Value(made, dtype, dims, tuple(tensor.shape), tensor.dtype)


# -- of parts --


@register(aten.cat.default, aten.stack.default)
def _joined(builder: Builder, node: Any) -> Joined:
    """Equal parts side by side: each is written to its place, by whatever computes it."""
    tensor, given = one_result(node), list(node.args[0])
    stacked = node.target is aten.stack.default
    axis = argument(node, 1, "dim", 0) % max(tensor.dim(), 1)
    shape = _shape_of_parts([meta(one) for one in given], tensor, axis, stacked)

    def shaped(value: Value) -> Value:
        dims = (*value.dims[:axis], ONE, *value.dims[axis:]) if stacked else value.dims
        return replace(value, dims=dims, shape=shape)

    known = [builder.known(one) for one in given]
    if all(value is None for value in known):
        raise NotFusable("parts that the group does not compute")
    dims = builder.loops_of(shape, [None if one is None else shaped(one) for one in known])
    own = tuple(d for k, d in enumerate(dims) if not stacked or k != axis)
    parts = []
    for one, value in zip(given, known, strict=True):
        if value is None:
            if one in builder.values:
                raise NotFusable("an operator whose result is not one value")
            value = builder.load(one, own)
        parts.append(shaped(value))
    return Joined(tuple(parts), axis)


def _shape_of_parts(
    given: Sequence[torch.Tensor], tensor: torch.Tensor, axis: int, stacked: bool
) -> tuple[Any, ...]:
    """The shape of each part within the whole."""
    if not 2 <= len(given) <= MAX_OUTPUTS:
        raise NotFusable("one part, or too many")
    rank = tensor.dim() - stacked
    if any(one.dtype != tensor.dtype or one.dim() != rank for one in given):
        raise NotFusable("parts of different dtypes or ranks")
    size = 1 if stacked else given[0].shape[axis]
    if not stacked and any(size_key(one.shape[axis]) != size_key(size) for one in given):
        raise NotFusable("parts of different sizes")
    return (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
