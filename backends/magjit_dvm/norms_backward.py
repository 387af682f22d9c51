"""Backwards of norms for GPUs: all gradients in one group of few words.

With dy the gradient that comes, g the same times the weight, N elements a row, and sums of a row::

    layer norm   X = (x - mean) * rstd
                 dx = (g - sum(g) / N - X * (sum(g * X) / N)) * rstd
    RMS norm     X = x * rstd
                 dx = (g - X * (sum(g * X) / N)) * rstd

    gradients    of the weight, dy * X, and of the bias, dy, summed across rows

One word makes dx of g and x, and one the sum of dy * X (``cuda/backwards.py``).

Where a block has no room for sums across rows (``across.py``), the operator stays whole if it has
words by itself (``wide_norms.py``).  If not, a kernel of ATen's computes those sums, which reads x
and dy once more; ATen's for dx would do so, too.  Where columns do not come by four, all is ATen's,
whose kernels take less time then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import get_computation_dtype

from magjit_dvm.across import come_by_four, has_room
from magjit_dvm.wide_norms import is_wide

__all__ = ["layer_norm_backward", "rms_norm_backward"]

_of_layer_norm = torch.ops.aten.native_layer_norm_backward.default
_of_rms_norm = torch.ops.aten._fused_rms_norm_backward.default


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
    across = of_weight or of_bias
    if not mask[0] or mean.dim() != x.dim() or not _may_be_ours(x, shape, across):
        return NotImplemented
    if mask[1] and is_wide(dy, x, shape, [weight, bias if of_bias else None]):
        return NotImplemented
    if across and not has_room(shape):
        own = layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, [True, False, False])
        others = [False, of_weight, of_bias]
        return own[0], *_of_layer_norm(dy, x, shape, mean, rstd, weight, bias, others)[1:]
    plain, wide, g, over = _wide(dy, x, shape, weight)
    norm = (wide - mean) * rstd
    total = _averaged(g.sum(over, keepdim=True), shape)
    inner = g - total - norm * _averaged((g * norm).sum(over, keepdim=True), shape)
    like = x if weight is None else weight
    d_weight = _across(norm * plain, shape, like) if of_weight else None
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
    if not mask[0] or rstd.dim() != x.dim() or not _may_be_ours(x, shape, mask[1]):
        return NotImplemented
    if mask[1] and is_wide(dy, x, shape, [weight]):
        return NotImplemented
    if mask[1] and not has_room(shape):
        own = rms_norm_backward(dy, x, shape, rstd, weight, [True, False])
        return own[0], _of_rms_norm(dy, x, shape, rstd, weight, [False, True])[1]
    plain, wide, g, over = _wide(dy, x, shape, weight)
    norm = wide * rstd
    inner = g - norm * _averaged((g * norm).sum(over, keepdim=True), shape)
    dx = (inner * rstd).to(x.dtype)
    return dx, _across(norm * plain, shape, x if weight is None else weight) if mask[1] else None


def _averaged(row: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Divided by the number of a row's elements; by its inverse where that is known."""
    count = math.prod(shape)
    return row * (1.0 / count) if isinstance(count, int) else row / count


def _across(terms: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Their sum across rows, of the dtype of ``like``."""
    return terms.sum(list(range(terms.dim() - len(shape)))).to(like.dtype)


def _may_be_ours(x: torch.Tensor, shape: Sequence[int], across: bool) -> bool:
    """Whether there is something to reduce, and if it is across rows, rows, whose columns come by
    four as far as is known.
    """
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return False
    return not across or (0 < len(shape) < x.dim() and come_by_four(shape))


def _wide(
    dy: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """The gradient and x as they are computed with, the gradient times the weight, and a row's
    dimensions.
    """
    dtype = get_computation_dtype(x.dtype)
    plain = dy.to(dtype)
    g = plain if weight is None else plain * weight.to(dtype)
    over = list(range(x.dim() - len(shape), x.dim()))
    return plain, x.to(dtype), g, over
