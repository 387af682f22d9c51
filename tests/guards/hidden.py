"""Rows of programs that read state by unusual ways; a split is right, a stale value is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..twin import Scene, Table
from .table import RIGHT


def add_hidden(
    rows: Table,
    name: str,
    make: Callable[[], Any],
    change: Callable[[Any], Any],
    read: Callable[[Any], Any],
) -> None:
    """A program that reads an outside object which changes between two calls."""

    def recipe() -> Scene:
        state = make()
        keep = [state]

        def program(x: torch.Tensor) -> Any:
            return x * read(keep[0])

        return Scene(program, change=lambda scene: change(state))

    rows.add(f"hidden {name}", recipe, after=RIGHT)


class Box:
    """An object to put things into."""


def box(**fields: Any) -> Any:
    made = Box()
    made.__dict__.update(fields)
    return made


class Equal:
    def __init__(self, v: Any) -> None:
        self.v = v

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.v == other.v

    def __hash__(self) -> int:
        return 1

    def __lt__(self, other: Any) -> bool:
        return bool(self.v < other.v)


def set_of(owner: str, name: str, value: Any) -> Callable[[Any], Any]:
    """Sets an attribute of the state, or of one of its parts."""

    def change(state: Any) -> None:
        setattr(getattr(state, owner) if owner else state, name, value)

    return change
