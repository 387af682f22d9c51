"""Operators that make a tensor of a NumPy array, which is a constant of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True, eq=False)
class ArrayOperator:
    """A torch function of an array, which is its first argument.

    Attributes:
        func: the function.
        array: nobody else's; each call gets a copy, which its tensor may share.
    """

    func: Callable[..., torch.Tensor]
    array: np.ndarray[Any, Any]

    @property
    def __name__(self) -> str:
        return f"{getattr(self.func, '__name__', 'tensor')}_of_array"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.func(self.array.copy(), *args, **kwargs)


def copies_array(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call makes a tensor of the contents of an array."""
    plain = bool(args) and type(args[0]) is np.ndarray and not args[0].dtype.hasobject
    return plain and func is torch.tensor


def listed(index: Any) -> Any:
    """An index with its NumPy arrays as lists, where these index alike."""
    if isinstance(index, tuple):
        return tuple(listed(item) for item in index)
    if type(index) is np.ndarray and index.dtype.kind in "ib" and index.ndim == 1:
        return index.tolist()
    return index
