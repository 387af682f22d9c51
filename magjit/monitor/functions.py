"""Functions for what torch does without one, so that a graph can name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TENSOR_TYPE: Any = type(torch.FloatTensor)


class NotRecordable(Exception):
    """An argument or result that cannot be part of a graph."""


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


def spelled_out(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Legacy constructors take a torch.Size for a size, and a tuple for data: sizes as numbers."""
    legacy = func is torch.Tensor or type(func) is TENSOR_TYPE
    if not legacy and getattr(func, "__name__", "") != "new":
        return args
    if args and type(args[-1]) is torch.Size:
        if not args[-1]:
            raise NotRecordable("makes a tensor of an empty torch.Size")
        return (*args[:-1], *args[-1])
    return args
