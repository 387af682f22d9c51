"""Backwards of norms for GPUs: all gradients in one group of few words.

With dy the gradient that comes, g the same times the weight, N elements a row, and sums of a row::

    layer norm   dx = (g - sum(g) / N - (x - mean) * b) * rstd
                 b = sum(g * (x - mean)) * rstd^2 / N
    RMS norm     dx = (g - x * b) * rstd
                 b = sum(g * x) * rstd^2 / N

    gradients    of the weight, dy * (x - mean) * rstd, and of the bias, dy, summed across rows

They are written so that as few tiles as possible wait for another, which is what scratch memory is
for: ``mean - x`` is another value than ``x - mean``, computed anew, and where the weight has a
gradient, the products that are summed across rows are those that are summed in a row.  In 16 bits,
x * b and mean * b are subtracted one after the other: of an x with 11 bits, what that is off by is
less than what x is.  What is one number for a row is computed in few steps, each of which has to
wait for the one before.

Where a block has no room for sums across rows (``across.py``), ATen's kernels compute all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import get_computation_dtype

from magjit_dvm.across import has_room

__all__ = ["layer_norm_backward", "rms_norm_backward"]


def layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> Any:
    """``aten.native_layer_norm_backward`` on a GPU."""
    of_weight, of_bias = mask[1], mask[2]
    if not mask[0] or mean.dim() != x.dim() or not _fits(x, shape, of_weight or of_bias):
        return NotImplemented
    plain, wide, scale, over = _wide(dy, x, shape, weight)
    away, factor = wide - mean, rstd
    if of_weight:
        away = away * rstd
    else:
        factor = rstd * rstd
    moved = away * plain
    product = _times(moved, scale).sum(over, keepdim=True)
    g = _times(plain, scale)
    total = _averaged(g.sum(over, keepdim=True), shape)
    if x.dtype in (torch.float16, torch.bfloat16):
        slope = _averaged(factor, shape) * product
        inner = g - (total - mean * slope) - wide * slope
    elif of_weight:
        inner = g - total - away * _averaged(product, shape)
    else:
        inner = (mean - wide) * (_averaged(factor, shape) * product) - total + g
    d_weight = _across(moved, shape, x if weight is None else weight) if of_weight else None
    d_bias = _across(plain, shape, x if bias is None else bias) if of_bias else None
    return (inner * rstd).to(x.dtype), d_weight, d_bias


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mask: Sequence[bool],
) -> Any:
    """``aten._fused_rms_norm_backward`` of tensors on a GPU."""
    if not mask[0] or rstd.dim() != x.dim() or not _fits(x, shape, mask[1]):
        return NotImplemented
    plain, wide, scale, over = _wide(dy, x, shape, weight)
    moved = wide * rstd * plain if mask[1] else wide * plain
    product = _times(moved, scale).sum(over, keepdim=True)
    scaled = _averaged(rstd if mask[1] else rstd * rstd, shape) * product
    dx = ((_times(plain, scale) - wide * scaled) * rstd).to(x.dtype)
    return dx, _across(moved, shape, x if weight is None else weight) if mask[1] else None


def _times(tile: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return tile if scale is None else tile * scale


def _averaged(row: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Divided by the number of a row's elements; by its inverse where that is known."""
    count = math.prod(shape)
    return row * (1.0 / count) if isinstance(count, int) else row / count


def _across(terms: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Their sum across rows, of the dtype of ``like``."""
    return terms.sum(list(range(terms.dim() - len(shape)))).to(like.dtype)


def _fits(x: torch.Tensor, shape: Sequence[int], across: bool) -> bool:
    """Whether there is something to reduce, and room for sums across rows, as far as is known."""
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return False
    return not across or (0 < len(shape) < x.dim() and has_room(shape))


def _wide(
    dy: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[int]]:
    """The gradient, x and the weight as they are computed with; the dimensions of a row."""
    dtype = get_computation_dtype(x.dtype)
    scale = None if weight is None else weight.to(dtype)
    over = list(range(x.dim() - len(shape), x.dim()))
    return dy.to(dtype), x.to(dtype), scale, over
