"""The row of the guard table: one kind of outside state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..twin import Scene, Table

RECAPTURED, HIT, RIGHT = "recaptured", "hit", "right"


@dataclass(frozen=True)
class Row:
    """One kind of outside state.

    Attributes:
        name: readable test id.
        make: a fresh scene with the change that matters and one that must not.
        after: what the change leads to. RECAPTURED: a new capture. HIT: values only, the record
            still holds. RIGHT: the program may split or pass through, results alone are checked.
        silent: the change alters how operators run, not what this program returns.
    """

    name: str
    make: Callable[[], Scene]
    after: str = RECAPTURED
    silent: bool = False


def new_table() -> Table:
    return Table(Row)
