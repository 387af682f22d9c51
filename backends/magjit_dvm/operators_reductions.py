"""Handlers of reductions, softmax and normalisations."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit.plugin.sizes import elements
from magjit_dvm.across import may_go_across, sum_across
from magjit_dvm.builder import Builder, NotFusable, Value, computed_in, size_key, stored_as
from magjit_dvm.gathering import one_hot_sum
from magjit_dvm.instructions import DType
from magjit_dvm.operators import (
    argument,
    elementwise,
    one_result,
    register,
)
from magjit_dvm.program import ONE
from magjit_dvm.tables import Promotion

aten = torch.ops.aten

# -- reductions --


def _axes(value: Value, axes: Any) -> list[int]:
    rank = len(value.dims)
    if axes is None or (isinstance(axes, (list, tuple)) and not axes):
        return list(range(rank))
    if isinstance(axes, int):
        axes = [axes]
    return [axis % rank for axis in axes] if rank else []


@register(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
def _sum_or_mean(builder: Builder, node: Any) -> Value:
    tensor = one_result(node)
    value = builder.tensor(node.args[0])
    whole = node.target in (aten.sum.default, aten.mean.default)
    axes = _axes(value, None if whole else argument(node, 1, "dim"))
    keepdim = False if whole else bool(argument(node, 2, "keepdim", False))
    compute = computed_in(tensor.dtype)
    if may_go_across(node):
        made = sum_across(builder, value, axes, keepdim)
        return replace(made, logical=tensor.dtype)
    made = builder.reduce("sum", value, axes, keepdim, compute)
    if node.target in (aten.mean.dim, aten.mean.default):
        count = builder.numel(value, axes, compute)
        made = replace(made, node=builder.compute("div", compute, made.node, count))
    return replace(made, logical=tensor.dtype)


@register(aten.prod.dim_int, aten.prod.default)
def _prod(builder: Builder, node: Any) -> Value:
    tensor = one_result(node)
    value = builder.tensor(node.args[0])
    whole = node.target is aten.prod.default
    axes = _axes(value, None if whole else node.args[1])
    keepdim = False if whole else bool(argument(node, 2, "keepdim", False))
    made = builder.reduce("prod", value, axes, keepdim, computed_in(tensor.dtype))
    return replace(made, logical=tensor.dtype)


@register(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
def _extreme(builder: Builder, node: Any) -> Value:
    tensor = one_result(node)
    value = builder.tensor(node.args[0])
    name = str(node.target).split(".")[1].removeprefix("a")
    keepdim = bool(argument(node, 2, "keepdim", False))
    made = builder.reduce(name, value, _axes(value, argument(node, 1, "dim")), keepdim)
    return replace(made, logical=tensor.dtype)


@register(
    aten.any.default, aten.all.default, aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims
)
def _any_or_all(builder: Builder, node: Any) -> Value:
    value = builder.tensor(node.args[0])
    axes = _axes(value, argument(node, 1, "dim"))
    keepdim = bool(argument(node, 2, "keepdim", False))
    name = "max" if ".any." in str(node.target) else "min"
    made = builder.reduce(name, value, axes, keepdim, DType.BOOL)
    logical = one_result(node).dtype  # of uint8 it is uint8
    dtype = computed_in(logical)
    return replace(
        made, node=builder.cast(made.node, DType.BOOL, dtype), dtype=dtype, logical=logical
    )


@register(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def _count_nonzero(builder: Builder, node: Any) -> Value:
    value = builder.tensor(node.args[0])
    whole = builder.cast(value.node, value.dtype, DType.BOOL)
    value = replace(value, node=whole, dtype=DType.BOOL, logical=torch.int64)
    return builder.reduce("sum", value, _axes(value, argument(node, 1, "dim")), False, DType.I64)


@register(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _norm(builder: Builder, node: Any) -> Value:
    tensor = one_result(node)
    value = builder.tensor(node.args[0])
    order = argument(node, 1, "p" if "norm.Scalar" in str(node.target) else "ord", 2)
    order = 2 if order is None else order
    dtype = computed_in(tensor.dtype)
    axes = _axes(value, argument(node, 2, "dim"))
    if isinstance(order, FxNode) or dtype not in (DType.F32, DType.F64):
        raise NotFusable("a norm of a changing order, or of ints")
    if all(value.dims[axis] == ONE for axis in axes):
        raise NotFusable("the norm of a single element")  # torch's does not square it
    size = builder.cast(value.node, value.dtype, dtype)
    size = size if order == 2 else builder.compute("abs", dtype, size)
    value = replace(value, node=size, dtype=dtype, logical=tensor.dtype)
    return _norm_of(builder, value, float(order), axes, bool(argument(node, 3, "keepdim", False)))


def _norm_of(
    builder: Builder, size: Value, order: float, axes: Sequence[int], keepdim: bool
) -> Value:
    """The norm of elements whose absolute values are given; of order 2, any sign."""
    dtype = size.dtype
    if math.isinf(order):
        return builder.reduce("max" if order > 0 else "min", size, axes, keepdim)
    if order == 0:
        counts = builder.compute("ne", dtype, size.node, builder.constant(0, dtype), to_bool=True)
        return builder.reduce(
            "sum", replace(size, node=counts, dtype=DType.BOOL), axes, keepdim, dtype
        )
    powers = size.node
    if order == 2:
        powers = builder.compute("mul", dtype, powers, powers)
    elif order != 1:
        powers = builder.compute("pow", dtype, powers, builder.constant(order, dtype))
    total = builder.reduce("sum", replace(size, node=powers), axes, keepdim)
    made = total.node
    if order == 2:
        made = builder.compute("sqrt", dtype, made)
    elif order != 1:
        made = builder.compute("pow", dtype, made, builder.constant(1 / order, dtype))
    return replace(total, node=made)


def _moments(
    builder: Builder, value: Value, axes: list[int], correction: float
) -> tuple[Value, Value]:
    """Mean and variance, with the reduced dimensions kept."""
    dtype = value.dtype
    count = builder.numel(value, axes, dtype)
    total = builder.reduce("sum", value, axes, True)
    mean = builder.compute("div", dtype, total.node, count)
    away = builder.compute("sub", dtype, value.node, mean)
    square = builder.compute("mul", dtype, away, away)
    squares = builder.reduce("sum", replace(value, node=square), axes, True)
    if correction:
        less = builder.compute("sub", dtype, count, builder.constant(correction, dtype))
        count = builder.compute("maximum", dtype, less, builder.constant(0, dtype))
    variance = builder.compute("div", dtype, squares.node, count)
    return replace(total, node=mean), replace(total, node=variance)


@register(aten.var.correction, aten.var_mean.correction)
def _var(builder: Builder, node: Any) -> Any:
    value = builder.tensor(node.args[0])
    axes = _axes(value, argument(node, 1, "dim"))
    correction = node.kwargs.get("correction")
    keepdim = bool(node.kwargs.get("keepdim", False))
    mean, variance = _moments(
        builder, value, axes, 1.0 if correction is None else float(correction)
    )
    kept = [a for a in range(len(value.dims)) if keepdim or a not in axes]

    def shaped(one: Value) -> Value:
        dims, shape = (tuple(of[a] for a in kept) for of in (one.dims, one.shape))
        return replace(one, dims=dims, shape=shape)

    if node.target is aten.var.correction:
        return shaped(variance)
    return shaped(variance), shaped(mean)


def _beyond_largest(builder: Builder, value: Value, axes: Sequence[int]) -> tuple[int, int, int]:
    """The largest of elements, what each is beyond it, and the exponentials of that."""
    largest = builder.reduce("max", value, axes, True).node
    away = builder.compute("sub", value.dtype, value.node, largest)
    return largest, away, builder.compute("exp", value.dtype, away)


@register(aten._softmax.default, aten._log_softmax.default)
def _softmax(builder: Builder, node: Any) -> Value:
    given, axis, _ = node.args
    tensor = one_result(node)
    value = builder.tensor(given)
    if not value.dims:
        raise NotFusable("softmax of a number")
    dtype = value.dtype
    _, away, powers = _beyond_largest(builder, value, [axis])
    total = builder.reduce("sum", replace(value, node=powers), [axis], True)
    if node.target is aten._softmax.default:
        inverse = builder.compute("reciprocal", dtype, total.node)
        made = builder.compute("mul", dtype, powers, inverse)
    else:
        made = builder.compute("sub", dtype, away, builder.compute("log", dtype, total.node))
    return replace(value, node=made, logical=tensor.dtype)


@register(aten.logsumexp.default)
def _logsumexp(builder: Builder, node: Any) -> Value:
    """Of rows whose largest element is infinite, that."""
    tensor = one_result(node)
    value, dtype = builder.tensor(node.args[0]), computed_in(tensor.dtype)
    axes = _axes(value, argument(node, 1, "dim"))
    value = replace(value, node=builder.cast(value.node, value.dtype, dtype), dtype=dtype)
    largest, _, powers = _beyond_largest(builder, value, axes)
    keepdim = bool(argument(node, 2, "keepdim", False))
    total = builder.reduce("sum", replace(value, node=powers), axes, keepdim)
    made = builder.compute("add", dtype, builder.compute("log", dtype, total.node), largest)
    infinite = builder.compute("is_inf", dtype, largest, to_bool=True)
    made = builder.compute("select", dtype, infinite, largest, made)
    return replace(total, node=made, logical=tensor.dtype)


@register(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(builder: Builder, node: Any) -> Value:
    gradient, output, axis, _ = node.args
    tensor = one_result(node)
    block, _ = elementwise(builder, node, (gradient, output), Promotion.DEFAULT)
    g, y = block.made
    dtype = block.dtype
    if node.target is aten._softmax_backward_data.default:
        product = block.value(block("mul", g, y), tensor.dtype)
        total = builder.reduce("sum", product, [axis], True)
        made = builder.compute("mul", dtype, y, builder.compute("sub", dtype, g, total.node))
    else:
        incoming = block.value(g, tensor.dtype)
        total = one_hot_sum(builder, incoming, axis) or builder.reduce(
            "sum", incoming, [axis], True
        )
        scaled = builder.compute("mul", dtype, block("exp", y), total.node)
        made = builder.compute("sub", dtype, g, scaled)
    return block.value(made, tensor.dtype)


_LONGEST = 8192
"""Elements of a row up to which GPUs have running results: all of it has to be in one stage."""


@register(aten.cumsum.default, aten.cumprod.default)
def _running(builder: Builder, node: Any) -> Value:
    tensor = one_result(node)
    value = builder.tensor(node.args[0])
    if not value.dims:
        raise NotFusable("running results of a number")
    axis = argument(node, 1, "dim") % len(value.dims)
    if tensor.device.type == "cuda":
        in_rows = size_key(tensor.stride(axis)) == 1
        if not in_rows or elements([tensor.shape[axis]]) > _LONGEST:
            raise NotFusable("running results of columns, or of long rows, on a GPU")
    # Eager casts first, then adds up ints in 64 bits and floats in double.
    stored = stored_as(tensor.dtype)
    made, dtype = builder.widened(builder.cast(value.node, value.dtype, stored), stored)
    wide = dtype if dtype in (DType.F32, DType.F64) else DType.I64
    value = replace(value, node=builder.cast(made, dtype, wide), dtype=wide, logical=tensor.dtype)
    name = str(node.target).split(".")[1]
    result = builder.scan(name, value, axis)
    return replace(result, node=builder.cast(result.node, wide, dtype), dtype=dtype)


# -- normalisation --


def _aligned(
    builder: Builder, arg: Any, value: Value, positions: Sequence[int], dtype: DType
) -> int:
    """A weight whose dimensions are those of ``value`` at ``positions``."""
    known = builder.known(arg)
    dims = tuple(value.dims[k] for k in positions)
    if known is not None:
        if known.dims != dims:
            raise NotFusable("a weight along other loops")
        return builder.cast(known.node, known.dtype, dtype)
    loaded = builder.load(arg, dims)
    return builder.cast(loaded.node, loaded.dtype, dtype)


@register(aten.native_layer_norm.default)
def _layer_norm(builder: Builder, node: Any) -> Any:
    given, shape, weight, bias, epsilon = node.args
    value = builder.tensor(given)
    rank = len(value.dims)
    axes = list(range(rank - len(shape), rank))
    dtype = value.dtype
    mean, variance = _moments(builder, value, axes, 0)
    shifted = builder.compute("add", dtype, variance.node, builder.constant(epsilon, dtype))
    rstd = builder.compute("rsqrt", dtype, shifted)
    away = builder.compute("sub", dtype, value.node, mean.node)
    made = builder.compute("mul", dtype, away, rstd)
    if weight is not None:
        made = builder.compute("mul", dtype, made, _aligned(builder, weight, value, axes, dtype))
    if bias is not None:
        made = builder.compute("add", dtype, made, _aligned(builder, bias, value, axes, dtype))
    results = node.meta["val"]
    return (
        replace(value, node=made, logical=results[0].dtype),
        replace(mean, logical=results[1].dtype),
        replace(mean, node=rstd, logical=results[2].dtype),
    )


@register(
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
)
def _batch_norm(builder: Builder, node: Any) -> Any:
    if node.target is not aten._native_batch_norm_legit_no_training.default and node.args[5]:
        raise NotFusable("batch norm in training")
    given, weight, bias, mean, var = node.args[:5]
    epsilon = node.args[-1]
    results = node.meta["val"]
    value = builder.tensor(given)
    dtype = value.dtype
    spread = _aligned(builder, var, value, [1], dtype)
    shifted = builder.compute("add", dtype, spread, builder.constant(epsilon, dtype))
    inverse = builder.compute("rsqrt", dtype, shifted)
    scale = inverse
    if weight is not None:
        scale = builder.compute("mul", dtype, inverse, _aligned(builder, weight, value, [1], dtype))
    away = builder.compute("sub", dtype, value.node, _aligned(builder, mean, value, [1], dtype))
    made = builder.compute("mul", dtype, away, scale)
    if bias is not None:
        made = builder.compute("add", dtype, made, _aligned(builder, bias, value, [1], dtype))
    return (replace(value, node=made, logical=results[0].dtype), *[None] * (len(results) - 1))


@register(operator.getitem)
def _getitem(builder: Builder, node: Any) -> Value:
    source = builder.values.get(node.args[0])
    if not isinstance(source, tuple):
        raise NotFusable("an item of something from outside")
    value = source[node.args[1]]
    if not isinstance(value, Value):
        raise NotFusable("a result that is not computed")
    return value
