"""Functions for what torch does without one, so that a graph can name it."""

from __future__ import annotations

from typing import Any

import torch


def make_parameter(data: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
    """What ``nn.Parameter(data)`` calls, under a name that generated code can use."""
    made: torch.Tensor = torch.Tensor._make_subclass(torch.nn.Parameter, data, requires_grad)
    return made


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """``tensor.data = data``."""
    tensor.data = data


def has_tensor(out: Any) -> bool:
    """Whether the result of an operator is a tensor, or may hold one."""
    if isinstance(out, torch.Tensor):
        return True
    return isinstance(out, (tuple, list)) and (not out or any(has_tensor(item) for item in out))
