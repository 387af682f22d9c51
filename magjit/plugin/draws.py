"""Operators that draw random numbers as eager mode draws them, for graphs that are recorded.

PyTorch's decompositions need no numbers of eager mode's: ``bernoulli`` of probabilities compares
``rand`` with them, which on GPUs are other numbers, and wherever a program is recorded ``dropout``
is the operator that CUDA has, which on CPUs draws numbers for p = 1, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["all_dropped", "as_eager_draws", "without_draws"]

aten = torch.ops.aten


def as_eager_draws(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Decompositions, and those that a recorded graph needs for eager mode's random numbers."""
    return {aten.native_dropout.default: _dropout, **table}


def without_draws(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Those decompositions of PyTorch's that are not of an operator that draws."""
    seeded = torch.Tag.nondeterministic_seeded
    return {one: made for one, made in table.items() if seeded not in getattr(one, "tags", ())}


def _dropout(
    given: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p != 1 or not given.dtype.is_floating_point:
        return NotImplemented  # type: ignore[no-any-return]
    return all_dropped(given)


def all_dropped(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and mask of dropout with p = 1, for which eager mode draws nothing."""
    return given * 0, torch.zeros_like(given, dtype=torch.bool)
