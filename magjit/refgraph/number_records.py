"""What a record does with its numbers at each call: hand them to the graph, compare decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from magjit.refgraph import number_code
from magjit.refgraph.generators import repeated, same_draw
from magjit.refgraph.number_values import Drawn, Number, Reads, text_of

__all__ = ["NumberGuard", "NumberInputs"]


@dataclass(frozen=True, slots=True, eq=False)
class NumberGuard:
    """Whether the numbers of a call lead to the same decisions.

    Called with the objects of the reads. Random numbers are drawn from a copy of their
    generator.
    """

    reads: Reads
    draws: list[Drawn]
    outcomes: list[tuple[Number, bool]]
    compiled: list[Callable[..., bool]] = field(default_factory=list, repr=False)
    """Made at the first call, when it is known what is pinned."""

    def __call__(self, *holders: Any) -> bool:
        if self.compiled:
            return self.compiled[0](*holders)
        if not self.draws:
            self.compiled.append(number_code.checked(self.reads, self.outcomes))
            return self.compiled[0](*holders)
        values = self.reads.values(holders)
        copies: dict[int, Any] = {}
        try:
            for drawn in self.draws:
                value = repeated(drawn.func, drawn.args, drawn.kwargs, copies)
                if drawn.pinned and not same_draw(drawn.value, value):
                    return False
                values[id(drawn)] = value
            return all(
                bool(number.evaluate(values)) is expected for number, expected in self.outcomes
            )
        except Exception:  # what raises now did not in the run
            return False

    def __str__(self) -> str:
        fixed = [f"{text_of(drawn)} == {drawn.value!r:.40}" for drawn in self.draws if drawn.pinned]
        tests = [f"{text_of(number)} is {expected}" for number, expected in self.outcomes]
        return ", ".join(dict.fromkeys(fixed + tests))


@dataclass(frozen=True, slots=True, eq=False)
class NumberInputs:
    """Numbers for a graph; called with the objects of the reads."""

    reads: Reads
    numbers: list[Number]
    compiled: list[Callable[..., list[Any]]] = field(default_factory=list, repr=False)
    """Made at the first call, when it is known what is pinned."""

    def __call__(self, holders: tuple[Any, ...]) -> list[Any]:
        if not self.compiled:
            self.compiled.append(number_code.computed(self.reads, self.numbers))
        return self.compiled[0](*holders)
