"""Marks that a program carries for the recorder: where not to capture, and what to take as it is.

They are functions that a monitor run meets like any others; the recorder knows them by their code
(`Mark`). Outside a capture each does what it says in plain Python, or nothing.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

import torch

from magjit.errors import ArgumentError

__all__ = ["allow_in_graph", "disable", "graph_break", "is_compiling"]

F = TypeVar("F", bound=Callable[..., Any])


class Mark(enum.Enum):
    """What a marked function means to a monitor run."""

    BREAK = enum.auto()  # the graph ends here
    DISABLED = enum.auto()  # neither this function nor what it calls is captured
    OPERATOR = enum.auto()  # one node of the graph, not followed
    CONSTANT = enum.auto()  # gives the same in a capture as in a replay
    TRANSPARENT = enum.auto()  # MagJIT's own, between the program and what it calls


_marked_code: dict[int, tuple[types.CodeType, Mark]] = {}
_in_graph: weakref.WeakSet[types.FunctionType] = weakref.WeakSet()


def mark_of(func: types.FunctionType) -> Mark | None:
    """The mark of a Python function."""
    found = _marked_code.get(id(func.__code__))
    if found is not None:
        return found[1]
    return Mark.OPERATOR if _in_graph and func in _in_graph else None


def mark(function: F, meaning: Mark) -> F:
    """Mark all functions that share this one's code; for MagJIT's own functions."""
    code: types.CodeType = getattr(function, "__code__")  # noqa: B009 - F is any callable
    _marked_code[id(code)] = (code, meaning)
    return function


def graph_break(reason: str = "") -> None:
    """End the graph here: what follows belongs to another region.

    Outside a capture it does nothing. With ``fullgraph=True`` the call raises `GraphBreakError`.

    Args:
        reason: shown in reports.
    """


def is_compiling() -> bool:
    """False: a capture is the program's own run, so no code needs to tell the two apart."""
    return False


class Exclusion:
    """What `disable` gives without a function: a decorator, and a context manager."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __call__(self, function: F) -> F:
        if not callable(function):
            raise ArgumentError(f"magjit.disable takes a callable, not {_kind(function)}")
        made: Any = function
        if isinstance(function, torch.nn.Module):
            made.forward = _excluded(function.forward, self.reason)
            return function
        made = _excluded(function, self.reason)
        return cast(F, made)

    def __enter__(self) -> Exclusion:
        return self

    def __exit__(self, *error: object) -> None:
        return None


@overload
def disable(function: F, *, reason: str = "") -> F: ...


@overload
def disable(function: None = None, *, reason: str = "") -> Exclusion: ...


def disable(function: Any = None, *, reason: str = "") -> Any:
    """Keep a function, or a block of code, out of graphs.

    ::

        @magjit.disable
        def log(loss): ...

        with magjit.disable(reason="talks to a server"):
            ...

    A capture that meets it is split there. Outside captures it changes nothing; objects that were
    compiled themselves and are called inside still use their records.

    Args:
        function: any callable; without it, the result is a decorator and a context manager.
        reason: shown in reports.

    Raises:
        ArgumentError: ``function`` is not callable.
    """
    exclusion = Exclusion(reason)
    return exclusion if function is None else exclusion(function)


def _excluded(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def disabled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    disabled._magjit_reason = reason  # type: ignore[attr-defined]
    return mark(disabled, Mark.DISABLED)


@overload
def allow_in_graph(function: F) -> F: ...


@overload
def allow_in_graph(function: list[F] | tuple[F, ...]) -> list[F]: ...


def allow_in_graph(function: Any) -> Any:
    """Take calls of a Python function as one operator each, without following them.

    It must be a function of its arguments alone: what else it reads is not guarded, what else it
    changes is not done again. Backends see it as it is.

    Args:
        function: a Python function that takes and returns tensors; or a list or tuple of such.

    Returns:
        The function itself; a list of them for a list or tuple.

    Raises:
        ArgumentError: it is not a Python function.
    """
    if isinstance(function, list | tuple):
        return [allow_in_graph(one) for one in function]
    if not isinstance(function, types.FunctionType):
        raise ArgumentError(
            f"magjit.allow_in_graph takes a Python function, not {_kind(function)}",
            remedy="functions written in C are described by annotations: magjit.annotations.load",
        )
    _in_graph.add(function)
    return function


def mark_dynamic(
    tensor: torch.Tensor, dim: int, min: int | None = None, max: int | None = None
) -> None:
    """Say that a size of an argument changes: a symbol from the first capture on.

    The mark is that of ``torch._dynamo.mark_dynamic``, so that it holds for ``torch.compile``, too;
    it belongs to this tensor object. Where the program needs the very size (it loops over it), each
    size is captured all the same.

    Args:
        tensor: an argument of later calls.
        dim: which size; negative ones count from the end.
        min, max: bounds of the sizes that one graph has to serve, both included.

    Raises:
        ArgumentError: there is no such dimension, or its size is not between the bounds.
    """
    dim = _dimension(tensor, dim)
    size = tensor.size(dim)
    if (min is not None and size < min) or (max is not None and size > max):
        raise ArgumentError(f"size {dim} is {size}, which is not between {min} and {max}")
    torch._dynamo.mark_dynamic(tensor, dim, min=min, max=max)


def mark_static(tensor: torch.Tensor, dim: int | None = None) -> None:
    """Say that a size of an argument is to be compared exactly, whatever changes.

    The mark is that of ``torch._dynamo.mark_static``.

    Args:
        tensor: an argument of later calls.
        dim: which size; all of them by default.

    Raises:
        ArgumentError: there is no such dimension.
    """
    torch._dynamo.mark_static(tensor, None if dim is None else _dimension(tensor, dim))


def _dimension(tensor: Any, dim: Any) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"a mark is for a tensor, not for {_kind(tensor)}")
    if type(dim) is not int or not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(f"a tensor of {tensor.dim()} dimensions has no dimension {dim!r}")
    return dim % tensor.dim()


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__qualname__


for _function, _meaning in (
    (graph_break, Mark.BREAK),
    (Exclusion.__enter__, Mark.DISABLED),
    (is_compiling, Mark.CONSTANT),
    (Exclusion.__exit__, Mark.CONSTANT),
):
    mark(_function, _meaning)
