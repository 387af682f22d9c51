"""Where the largest or smallest element is: the extreme first, then the first place that has it.

Both are reductions of the same loops, one phase after the other, so that ``max`` along a
dimension gives values and positions in one group. Of equal elements the first one counts, and
NaN is beyond all numbers, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from magjit_dvm.builder import Builder, NotFusable, Value, size_key, stored_as
from magjit_dvm.instructions import DType
from magjit_dvm.operators import argument, register
from magjit_dvm.program import ONE, Node, NodeKind

__all__: list[str] = []

aten = torch.ops.aten

_FLOATS = (DType.F32, DType.F64)


def _rounded(builder: Builder, value: Value) -> Value:
    """Half precision as it would be in memory: rounding makes elements equal."""
    stored = stored_as(value.logical)
    made, _ = builder.widened(builder.cast(value.node, value.dtype, stored), stored)
    return replace(value, node=made)


def _extreme(
    builder: Builder, value: Value, axes: Sequence[int], keepdim: bool, op: str
) -> tuple[Value, Value]:
    """The extreme element along ``axes``, and its position among them in row-major order."""
    loops = [value.dims[axis] for axis in axes if value.dims[axis] != ONE]
    if not loops:
        raise NotFusable("a place along a dimension of size 1")
    value = _rounded(builder, value)
    found = builder.reduce(op, value, axes, keepdim)
    here = builder.compute("eq", value.dtype, value.node, found.node, to_bool=True)
    if value.dtype in _FLOATS:
        nan = builder.compute("is_nan", value.dtype, value.node, to_bool=True)
        here = builder.compute("bitwise_or", DType.BOOL, here, nan)
    dtype = _positions_in([value.shape[axis] for axis in axes])
    last = torch.iinfo(dtype.torch).max
    places = _places(builder, loops, dtype)
    at = builder.compute("select", dtype, here, places, builder.constant(last, dtype))
    first = builder.reduce("min", replace(value, node=at, dtype=dtype), axes, keepdim)
    made = builder.cast(first.node, dtype, DType.I64)
    return found, replace(first, node=made, dtype=DType.I64, logical=torch.int64)


def _positions_in(sizes: Sequence[Any]) -> DType:
    """What positions are counted in: the shorter ints are faster, if they are known to suffice."""
    keys = [size_key(size) for size in sizes]
    if not all(isinstance(key, int) for key in keys):
        return DType.I64
    return DType.I32 if torch.Size(keys).numel() < 2**31 else DType.I64


def _places(builder: Builder, loops: Sequence[int], dtype: DType) -> int:
    """The row-major position among ``loops``."""
    made = -1
    for number, loop in enumerate(loops):
        place = builder.add(Node(NodeKind.IOTA, DType.I64, aux=loop))
        place = builder.cast(place, DType.I64, dtype)
        inner = frozenset(loops[number + 1 :])
        if inner:
            length = builder.add(Node(NodeKind.NUMEL, dtype, dims=inner))
            place = builder.compute("mul", dtype, place, length)
        made = place if made < 0 else builder.compute("add", dtype, made, place)
    return made


def _axes(value: Value, dim: int | None) -> list[int]:
    rank = len(value.dims)
    if not rank:
        raise NotFusable("the place of a number")
    return list(range(rank)) if dim is None else [dim % rank]


@register(aten.argmax.default, aten.argmin.default)
def _place(builder: Builder, node: Any) -> Value:
    value = builder.tensor(node.args[0])
    axes = _axes(value, argument(node, 1, "dim"))
    op = "max" if node.target is aten.argmax.default else "min"
    return _extreme(builder, value, axes, bool(argument(node, 2, "keepdim", False)), op)[1]


@register(aten.max.dim, aten.min.dim)
def _element_and_place(builder: Builder, node: Any) -> tuple[Value, Value]:
    value = builder.tensor(node.args[0])
    axes = _axes(value, node.args[1])
    op = "max" if node.target is aten.max.dim else "min"
    return _extreme(builder, value, axes, bool(argument(node, 2, "keepdim", False)), op)
