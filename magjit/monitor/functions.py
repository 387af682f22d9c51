"""Functions for what torch does without one, so that a graph can name it."""

from __future__ import annotations

import torch


def make_parameter(data: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
    """What ``nn.Parameter(data)`` calls, under a name that generated code can use."""
    made: torch.Tensor = torch.Tensor._make_subclass(torch.nn.Parameter, data, requires_grad)
    return made


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``."""
    tensor.data = data
