"""Calls of every data-movement operator that has a rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

aten = torch.ops.aten


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements all differ."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(1, count + 1, dtype=dtype).reshape(shape)


def indices(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def samples() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Operator and arguments."""
    a, b, c = numbered(2, 3, 4), numbered(6, 4), numbered(2, 8, 4, 6)
    one, none = numbered(1, 3, 1), numbered(0, 3)
    scalar = torch.tensor(7.0)
    for operator in (
        aten.view,
        aten._unsafe_view,
        aten.reshape,
        aten._reshape_copy,
        aten.view_copy,
    ):
        yield operator.default, (a, [6, 4])
        yield operator.default, (a, [2, 12])
        yield operator.default, (a, [3, 8])
        yield operator.default, (a, [4, 3, 2])
        yield operator.default, (a, [1, 24, 1])
        yield operator.default, (a, [-1])
        yield operator.default, (none, [3, 0])
        yield operator.default, (scalar, [1, 1])
    yield aten.reshape.default, (a.transpose(0, 1), [6, 4])
    yield aten._reshape_alias.default, (a, [6, 4], [4, 1])
    yield aten._reshape_alias_copy.default, (a, [6, 4], [4, 1])
    for operator in (aten.unsqueeze, aten.unsqueeze_copy):
        yield operator.default, (a, 0)
        yield operator.default, (a, -1)
        yield operator.default, (a, 2)
    for operator in (aten.squeeze, aten.squeeze_copy):
        yield operator.default, (one,)
        yield operator.dim, (one, 0)
        yield operator.dim, (one, 1)
        yield operator.dims, (one, [0, 2])
    yield aten.ravel.default, (a,)
    yield aten.reshape_as.default, (a, b)
    yield aten.view_as.default, (a, b)
    yield aten.flatten.using_ints, (a, 1, 2)
    yield aten.unflatten.int, (a, 2, [2, 2])
    for operator in (
        aten.alias,
        aten.alias_copy,
        aten.clone,
        aten.contiguous,
        aten.detach,
        aten.detach_copy,
        aten.lift,
        aten.lift_fresh,
        aten.lift_fresh_copy,
    ):
        yield operator.default, (a,)
    for operator in (aten.permute, aten.permute_copy):
        yield operator.default, (a, [2, 0, 1])
        yield operator.default, (a, [-1, -3, -2])
    for operator in (aten.transpose.int, aten.transpose_copy.int, aten.swapaxes.default):
        yield operator, (a, 0, 2)
        yield operator, (a, -1, -2)
    yield aten.swapdims.default, (a, 0, 1)
    for operator in (aten.t, aten.t_copy, aten.numpy_T, aten.mT):
        yield operator.default, (b,)
    yield aten.t.default, (numbered(3),)
    yield aten.mT.default, (a,)
    yield aten.flip.default, (a, [0, 2])
    yield aten.flip.default, (a, [-2])
    yield aten.roll.default, (a, [1], [1])
    yield aten.roll.default, (a, [-1, 5], [0, 2])
    yield aten.roll.default, (a, [7])
    for k in range(-1, 5):
        yield aten.rot90.default, (a, k, [0, 1])
        yield aten.rot90.default, (a, k, [2, 0])
    for operator in (aten.slice.Tensor, aten.slice_copy.Tensor):
        yield operator, (a, 1, 1, 3)
        yield operator, (a, 2, 0, 9223372036854775807)
        yield operator, (a, 2, 1, 4, 2)
        yield operator, (a, -1, -3, -1)
        yield operator, (a, 1, 2, 1)
        yield operator, (a, 1, -9, 9)
    yield aten.narrow.default, (a, 2, 1, 2)
    yield aten.narrow_copy.default, (a, 2, -2, 1)
    for operator in (aten.select.int, aten.select_copy.int):
        yield operator, (a, 1, 2)
        yield operator, (a, -1, -1)
    for operator in (aten.diagonal.default, aten.diagonal_copy.default):
        yield operator, (b,)
        yield operator, (a, 1, 0, 2)
        yield operator, (a, -1, 1, 2)
    for operator in (aten.as_strided.default, aten.as_strided_copy.default):
        yield operator, (a, [3, 2], [1, 5], 2)
        yield operator, (b, [2, 2, 2], [3, 3, 1])
    for operator in (aten.unfold.default, aten.unfold_copy.default):
        yield operator, (b, 0, 3, 2)
        yield operator, (a, -1, 2, 1)
    for operator in (aten.split.Tensor, aten.split_copy.Tensor, aten.unsafe_split.Tensor):
        yield operator, (c, 3, 1)
    for operator in (
        aten.split_with_sizes.default,
        aten.split_with_sizes_copy.default,
        aten.unsafe_split_with_sizes.default,
    ):
        yield operator, (c, [1, 0, 7], 1)
    yield aten.chunk.default, (c, 3, -1)
    yield aten.unsafe_chunk.default, (c, 3, -1)
    yield aten.tensor_split.sections, (c, 3, 1)
    yield aten.tensor_split.indices, (c, [2, 5], 1)
    for operator in (aten.unbind.int, aten.unbind_copy.int):
        yield operator, (a, 1)
        yield operator, (one, 0)
    for operator in (aten.expand, aten.expand_copy, aten.broadcast_to):
        yield operator.default, (one, [5, 3, 4])
        yield operator.default, (one, [2, 2, 3, 1])
    yield aten.expand.default, (a, [-1, 3, -1])
    yield aten.expand_as.default, (one, numbered(5, 3, 2))
    for operator in (aten.repeat, aten.tile):
        yield operator.default, (a, [2, 1, 3])
        yield operator.default, (b, [2, 1, 3])
        yield operator.default, (b, [1, 1])
    yield aten.repeat_interleave.self_int, (a, 3, 1)
    yield aten.repeat_interleave.self_int, (a, 2)
    yield aten.pixel_shuffle.default, (c, 2)
    yield aten.pixel_unshuffle.default, (c, 2)
    yield aten.channel_shuffle.default, (c, 4)
    yield aten.native_channel_shuffle.default, (c, 2)
    yield from pieces(a, b, one)
    yield from indexed(a, b)


def pieces(a: torch.Tensor, b: torch.Tensor, one: torch.Tensor) -> Iterator[tuple[Any, tuple]]:
    other = a + 100
    for operator in (aten.cat, aten.concat, aten.concatenate):
        yield operator.default, ([a, other], 1)
        yield operator.default, ([a, other[:, :, :1], a], -1)
    yield aten.cat.default, ([a, torch.empty(0), other],)
    yield aten.cat.default, ([a, other.to(torch.float64)],)
    yield aten.stack.default, ([a, other], 0)
    yield aten.stack.default, ([a, other, a], -1)
    yield aten.stack.default, ([a], 1)
    yield aten.slice_scatter.default, (a, other[:, 1:3], 1, 1, 3)
    yield aten.slice_scatter.default, (a, other[:, :, ::2], 2, 0, 4, 2)
    yield aten.slice_scatter.default, (a, other[:, :, 1:4:2], 2, 1, 4, 2)
    yield aten.slice_scatter.default, (a, other, 0)
    yield aten.select_scatter.default, (a, other[:, 1], 1, 1)
    yield aten.select_scatter.default, (a, other[..., -1], -1, -1)
    yield aten.diagonal_scatter.default, (b, numbered(4) + 100)
    yield aten.diagonal_scatter.default, (b, numbered(3) + 100, 1)
    yield aten.diagonal_scatter.default, (b, numbered(4) + 100, -1)
    yield aten.copy.default, (a, other)
    yield aten.copy.default, (a, one)
    yield aten.copy.default, (a, other.to(torch.float64))
    yield aten.constant_pad_nd.default, (a, [1, 2])
    yield aten.constant_pad_nd.default, (a, [0, 1, 2, 0], 0.5)
    yield aten.constant_pad_nd.default, (a, [-1, 2, 0, -1], 0.5)
    yield aten.reflection_pad1d.default, (a, [2, 1])
    yield aten.reflection_pad2d.default, (a, [2, 1, 0, 2])
    yield aten.reflection_pad3d.default, (numbered(1, 2, 3, 2), [1, 0, 1, 2, 1, 1])
    yield aten.replication_pad1d.default, (a, [2, 1])
    yield aten.replication_pad2d.default, (a, [2, 0, 0, 2])
    yield aten.replication_pad3d.default, (numbered(1, 2, 3, 2), [1, 0, 1, 2, 1, 1])
    yield aten.tril.default, (a,)
    yield aten.triu.default, (b, -2)
    yield aten.diag_embed.default, (b,)
    yield aten.diag_embed.default, (b, 1, 0, 2)
    yield aten.diag_embed.default, (b, -2)


def indexed(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[Any, tuple]]:
    yield aten.embedding.default, (b, indices([0, 5, 3], [2, 2, 1]))
    yield aten.index_select.default, (a, 1, indices(2, 0, 2, 1))
    yield aten.index_select.default, (a, -1, torch.tensor(2))
    yield aten.gather.default, (b, 0, indices([0, 5, 3], [2, 2, 1]))
    yield aten.gather.default, (b, 1, indices([0, 3], [2, 1]))
    yield aten.take.default, (b, indices([0, -1], [13, -24]))
    for operator in (aten.index.Tensor, aten._unsafe_index.Tensor):
        yield operator, (a, [indices(1, 0, -1)])
        yield operator, (a, [None, indices(1, -1), indices([0], [-4])])
        yield operator, (a, [indices(1, -1), None, indices([0], [-4])])
        yield operator, (a, [None, indices([2, 0], [1, 1])])
    yield aten.index.Tensor, (b, [indices(1, 0, 1, 1, 0, 0).bool()])
    yield aten.masked_fill.Scalar, (a, a > 6, -1)
    yield aten.masked_fill.Scalar, (a, numbered(3, 1) > 2, 0.5)
    yield aten.masked_fill.Scalar, (one_row(), numbered(3, 3) > 2, 0.5)
    yield aten.index_fill.int_Scalar, (a, 1, indices(0, 2), 0.5)


def one_row() -> torch.Tensor:
    return numbered(1, 3)
