"""Losses as eager mode's kernels add them up, for decompositions of backends."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._prims_common import get_computation_dtype

__all__ = ["nll_loss"]

MEAN = 1


def nll_loss(
    each: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    given: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignored: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean or the sum of each target's loss, and the sum of weights: ``nll_loss_forward``.

    Kernels of eager mode add up and divide in float32 where losses are in half precision.  The
    decomposition that PyTorch has counts targets in the dtype of losses: of more than 65,504 of
    them a mean in float16 would be 0.

    Args:
        each: ``nll_loss_forward`` or ``nll_loss2d_forward``, or what stands for it, which is asked
            for losses without reduction.
        given: logarithms of probabilities, of shape (N, C) or (N, C, d1, …).
        target: classes, int64, of shape (N) or (N, d1, …).
        weight: of each class, of shape (C), or None.
        reduction: 1 for a mean, 2 for a sum.
        ignored: the class whose targets do not count.

    Returns: two numbers of the dtype of ``given``.
    """
    dtype, wide = given.dtype, get_computation_dtype(given.dtype)
    loss = _sum(each(given, target, weight, 0, ignored)[0], wide)
    if weight is None:
        total = (target != ignored).sum().to(wide)
    else:
        shape = (1, -1, *([1] * (given.dim() - 2)))
        weights = weight.view(shape).expand(given.shape)
        total = -_sum(each(weights, target, None, 0, ignored)[0], wide)
    loss = loss / total if reduction == MEAN else loss
    return loss.to(dtype), total.to(dtype)


def _sum(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return given.sum() if given.dtype == dtype else given.sum(dtype=dtype)
