"""The row of the feature table: one feature of Python or torch in one small program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..twin import Call, Scene, Table, one_tensor


@dataclass(frozen=True)
class Row:
    """One feature.

    Attributes:
        name: readable test id.
        make: a fresh scene.
        split: the feature has a handler of its own or a reported split; otherwise it is one graph.
        backward: gradients are compared, too.
    """

    name: str
    make: Callable[[], Scene]
    split: bool = False
    backward: bool = False


class FeatureTable(Table):
    """Most rows are a program alone: `program` registers it under its own name."""

    def __init__(self) -> None:
        super().__init__(Row)

    def program(
        self, args: Callable[[], Call] = one_tensor, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(fn: Callable[..., Any]) -> Callable[..., Any]:
            name = fn.__name__.replace("_", " ").strip()
            self.add(name, functools.partial(Scene, fn, args=args), **options)
            return fn

        return register
