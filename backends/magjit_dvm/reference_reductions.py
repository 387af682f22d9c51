"""What reductions begin with and how their parts become one, over tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magjit_dvm.instructions import DType

__all__ = ["identity", "joined_moments"]


def joined_moments(before: Sequence[Tensor], block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared deviations, sums and counts of rows (each of shape (rows,)) with more elements.

    Args:
        before: squared deviations from the mean, sums and counts of what was there, float64.
        block: further elements of each row, (rows, columns), float64.
    """
    squares, sums, counts = before
    n = block.shape[1]
    mean = block.mean(1)
    away = torch.where(counts > 0, mean - sums / counts, 0)
    more = (block - mean[:, None]).square().sum(1) + away.square() * counts * n / (counts + n)
    return squares + more, sums + block.sum(1), counts + n


def identity(op: str, dtype: DType) -> Tensor:
    """What an accumulator of a reduction begins with."""
    if op not in ("max", "min"):
        return torch.tensor(1 if op == "prod" else 0, dtype=dtype.torch)
    if dtype.torch.is_floating_point:
        return torch.tensor(float("-inf") if op == "max" else float("inf"), dtype=dtype.torch)
    if dtype is DType.BOOL:
        return torch.tensor(op == "min")
    limits = torch.iinfo(dtype.torch)
    return torch.tensor(limits.min if op == "max" else limits.max, dtype=dtype.torch)
