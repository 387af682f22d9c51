"""Calls of functions with ``functools.lru_cache``, as a guard makes them again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_thread = threading.local()


@contextmanager
def not_asked() -> Iterator[None]:
    """A guard is only looked at: caches count no calls, and are said to be as they were last."""
    before = getattr(_thread, "looks", False)
    _thread.looks = True
    try:
        yield
    finally:
        _thread.looks = before


class CachedCall:
    """One call, which looks its arguments up in the cache.

    Args:
        func: keeps the cache.
        args, kwargs: of the capture.
        nodes: of what a later call takes from the outside, by position: of ``func``, which is 0,
            and the arguments behind it.
    """

    __slots__ = ("_func", "_lost", "_names", "_places", "_result", "_values", "nodes")

    def __init__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], nodes: dict[int, int]
    ) -> None:
        self._func, self._names = func, tuple(kwargs)
        self._places, self.nodes = tuple(nodes), tuple(nodes.values())
        values = enumerate((func, *args, *kwargs.values()))
        self._values = [None if at in nodes else value for at, value in values]
        self._result: Any = None
        self._lost = False

    def returned(self, result: Any) -> None:
        """What the call of the capture gave."""
        self._result = result

    def __call__(self, *objects: Any) -> bool:
        """Whether the cache has that result still; counts as the program's own call.

        Args:
            objects: as ``nodes``, those of now.
        """
        if getattr(_thread, "looks", False):
            return not self._lost
        values = self._values
        if objects:
            values = values.copy()
            for at, value in zip(self._places, objects, strict=True):
                values[at] = value
        func = values[0]
        self._lost = func is not self._func or not self._is_found(func, values)
        return not self._lost

    def _is_found(self, func: Any, values: list[Any]) -> bool:
        misses = func.cache_info().misses
        first = len(values) - len(self._names)
        named = dict(zip(self._names, values[first:], strict=True))
        found = func(*values[1:first], **named)
        return found is self._result and bool(func.cache_info().misses == misses)

    def __str__(self) -> str:
        return f"{name_of(self._func)} has its result in its lru_cache"


def name_of(func: Any) -> str:
    """Of a function with a cache."""
    return str(getattr(func, "__qualname__", repr(func)))
