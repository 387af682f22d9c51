"""Gradients beside those of float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["require_as_near"]


def require_as_near(
    ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]
) -> None:
    """None of ours is twice as far from the exact one as eager mode's is."""
    for one, other, wanted in zip(ours, eager, exact, strict=True):
        error, others = ((found.double() - wanted).norm() for found in (one, other))
        assert error <= 2 * others + 1e-6 * wanted.norm()
