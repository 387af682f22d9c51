"""Backwards of norms for GPUs: the input's gradient in few words, those of weights by ATen.

With g the gradient that comes, times the weight, N elements a row, and sums over rows::

    layer norm   dx = ((x - mean) * -b + g - sum(g) / N) * rstd
                 b = sum(g * (x - mean)) * rstd^2 / N
    RMS norm     dx = (x * -b + g) * rstd
                 b = sum(g * x) * rstd^2 / N

No tile has to wait for another, which scratch memory would be for: ``x - mean`` is computed twice,
the second time as a sum, so that it is another value.  Gradients of weights are sums across rows,
for which the VM on GPUs has no words: ATen's kernel reads its operands once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["layer_norm_backward", "rms_norm_backward"]

aten = torch.ops.aten

Gradients = tuple[torch.Tensor | None, ...]


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
    """``aten.native_layer_norm_backward`` of tensors on a GPU."""
    if not mask[0] or mean.dim() != x.dim() or _may_be_empty(x):
        return NotImplemented
    rest: Gradients = (None, None)
    if mask[1] or mask[2]:
        given = (dy, x, shape, mean, rstd, weight, bias, [False, mask[1], mask[2]])
        rest = aten.native_layer_norm_backward.default(*given)[1:]
    g, wide, over = _wide(dy, x, shape, weight)
    total = g.sum(over, keepdim=True)
    product = (g * (wide - mean)).sum(over, keepdim=True)
    count = math.prod(shape)
    scaled = -(product * (rstd * rstd / count))
    inner = (wide + -mean) * scaled - total / count
    return ((inner + g) * rstd).to(x.dtype), *rest


def rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    mask: Sequence[bool],
) -> Any:
    """``aten._fused_rms_norm_backward`` of tensors on a GPU."""
    if not mask[0] or rstd.dim() != x.dim() or _may_be_empty(x):
        return NotImplemented
    of_weight = None
    if mask[1]:
        given = (dy, x, shape, rstd, weight, [False, True])
        of_weight = aten._fused_rms_norm_backward.default(*given)[1]
    g, wide, over = _wide(dy, x, shape, weight)
    product = (g * wide).sum(over, keepdim=True)
    scaled = -(product * (rstd * rstd / math.prod(shape)))
    return ((wide * scaled + g) * rstd).to(x.dtype), of_weight


def _may_be_empty(x: torch.Tensor) -> bool:
    """Whether there is nothing to reduce, as far as is known."""
    return any(isinstance(size, int) and size == 0 for size in x.shape)


def _wide(
    dy: torch.Tensor, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The gradient times the weight, and x, as they are computed with; the dimensions of a row."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    dtype = torch.float32 if half else x.dtype
    g = dy.to(dtype)
    if weight is not None:
        g = g * weight.to(dtype)
    return g, x.to(dtype), list(range(x.dim() - len(shape), x.dim()))
