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


def taken_for_float(value: Any) -> bool:
    """Whether torch's operators take a number of NumPy's for its real part, a float."""
    return isinstance(value, np.bool_ | np.complexfloating) and not isinstance(value, complex)


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


@dataclass(frozen=True, slots=True, eq=False)
class ArrayIndex:
    """An indexing of a tensor by NumPy arrays, which torch makes tensors of in its own way.

    Attributes:
        func: ``__getitem__`` or ``__setitem__``.
        index: nobody else's.
    """

    func: Callable[..., Any]
    index: Any

    @property
    def __name__(self) -> str:
        return f"{self.func.__name__}_by_array"

    def __call__(self, tensor: torch.Tensor, *value: Any) -> Any:
        return self.func(tensor, self.index, *value)

    def traced(self, tensor: torch.Tensor, *value: Any) -> Any:
        """The same for what traces, which takes no arrays."""
        return self.func(tensor, listed(self.index), *value)


def is_array_index(index: Any) -> bool:
    """Whether an index is made of one-dimensional arrays and constants."""
    parts = index if isinstance(index, tuple) else (index,)
    arrays = [part for part in parts if _is_list_like(part)]
    others = [part for part in parts if not _is_list_like(part)]
    return bool(arrays) and all(_is_constant(part) for part in others)


def _is_list_like(part: Any) -> bool:
    return type(part) is np.ndarray and part.dtype.kind in "ib" and part.ndim == 1


def _is_constant(part: Any) -> bool:
    return part is None or part is ... or (type(part) is slice and part == slice(None))


def copied(index: Any) -> Any:
    """An index with arrays of its own."""
    if isinstance(index, tuple):
        return tuple(copied(item) for item in index)
    return index.copy() if type(index) is np.ndarray else index
