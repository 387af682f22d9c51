"""Backwards of norms for GPUs: the input's gradient in few words, those of weights by ATen.

With g the gradient that comes, times the weight, N elements a row, and sums over rows::

    layer norm   dx = ((mean - x) * b - sum(g) / N + g) * rstd
                 b = sum(g * (x - mean)) * rstd^2 / N
    RMS norm     dx = (g - x * b) * rstd
                 b = sum(g * x) * rstd^2 / N

No tile has to wait for another, which scratch memory would be for: ``mean - x`` is another value
than ``x - mean``, computed anew.  What is one number for a row is computed in few steps, each of
which has to wait for the one before.

Gradients of weights are sums across rows, for which the VM on GPUs has no words: ATen's kernel
reads its operands once for all of them.  Beside it, the input's gradient of a layer norm is
quicker by ATen, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import get_computation_dtype

__all__ = ["layer_norm_backward", "rms_norm_backward"]

aten = torch.ops.aten


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
    """``aten.native_layer_norm_backward`` on a GPU; where weights have gradients, ATen's."""
    if list(mask) != [True, False, False] or mean.dim() != x.dim() or _is_empty(x):
        return NotImplemented
    g, wide, over = _wide(dy, x, shape, weight)
    total = g.sum(over, keepdim=True)
    product = (g * (wide - mean)).sum(over, keepdim=True)
    inner = (mean - wide) * (_averaged(rstd * rstd, shape) * product) - _averaged(total, shape)
    return ((inner + g) * rstd).to(x.dtype), None, None


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mask: Sequence[bool],
) -> Any:
    """``aten._fused_rms_norm_backward`` of tensors on a GPU."""
    if not mask[0] or rstd.dim() != x.dim() or _is_empty(x):
        return NotImplemented
    of_weight = None
    if mask[1]:
        given = (dy, x, shape, rstd, weight, [False, True])
        of_weight = aten._fused_rms_norm_backward.default(*given)[1]
    g, wide, over = _wide(dy, x, shape, weight)
    product = (g * wide).sum(over, keepdim=True)
    scaled = _averaged(rstd * rstd, shape) * product
    return ((g - wide * scaled) * rstd).to(x.dtype), of_weight


def _averaged(row: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Divided by the number of a row's elements; by its inverse where that is known."""
    count = math.prod(shape)
    return row * (1.0 / count) if isinstance(count, int) else row / count


def _is_empty(x: torch.Tensor) -> bool:
    """Whether there is nothing to reduce, as far as is known."""
    return any(isinstance(size, int) and size == 0 for size in x.shape)


def _wide(
    dy: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The gradient times the weight, and x, as they are computed with; the dimensions of a row."""
    dtype = get_computation_dtype(x.dtype)
    g = dy.to(dtype)
    if weight is not None:
        g = g * weight.to(dtype)
    return g, x.to(dtype), list(range(x.dim() - len(shape), x.dim()))
