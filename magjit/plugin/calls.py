"""Which call of a compiled program is under way.

A program that is cut runs several graphs in one call. A backend whose results live only until the
next call has to know whether it is the next one.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["current_call", "follow"]


class _Source:
    number: Callable[[], int] | None = None


def follow(number: Callable[[], int]) -> None:
    """From now on this function numbers the calls; the front end has it."""
    _Source.number = staticmethod(number)


def current_call() -> int:
    """The number of this thread's call, those not counted that a compiled program makes.

    Returns:
        0 where no compiled program is under way.
    """
    return 0 if _Source.number is None else _Source.number()
