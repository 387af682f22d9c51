"""The row of the effect table: one kind of output or side effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..twin import Scene, Table


@dataclass(frozen=True)
class Row:
    """One kind of output or side effect.

    Attributes:
        name: readable test id.
        make: a fresh scene; its `state` returns whatever outlives the call.
        split: the program may split or run eagerly; then results alone are checked.
        replays: at least one of the calls must be a replay (False: the program reads a value that
            it changes itself, so each call may be captured anew).
        backward: gradients of the outputs are taken after each call and compared, too.
    """

    name: str
    make: Callable[[], Scene]
    split: bool = False
    replays: bool = True
    backward: bool = False


def new_table() -> Table:
    return Table(Row)
