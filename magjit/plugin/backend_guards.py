"""Guards that a backend adds, as plain data; the front end makes them guards of the record.

::

    BackendGuard := ShapeGuard(expression, inputs)        specialised or related symbols
                  | SameInput(kept, dropped)              two inputs are one tensor
                  | StorageRelation(overlapping, disjoint)
                  | CustomGuard(inputs, check, reason)    what a backend adds by hand

``predicate`` defines what each means; ``at`` moves it to other positions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

__all__ = [
    "BackendGuard",
    "CustomGuard",
    "Predicate",
    "SameInput",
    "ShapeGuard",
    "StorageRelation",
]

_INPUT = re.compile(r"inputs\[(\d+)\]")
_NAMES = {**SYMPY_INTERP, "math": math, "torch": torch}
"""What the expressions of shape guards may name."""

Predicate = Callable[[Sequence[Any]], bool]


@dataclass(frozen=True, slots=True)
class ShapeGuard:
    """A condition on sizes, strides and lifted ints.

    Attributes:
        expression: Python over ``inputs``, such as ``inputs[0].size()[1] == inputs[2].size()[0]``.
        inputs: positions of the graph inputs it reads.
    """

    expression: str
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        return self.expression

    def predicate(self) -> Predicate:
        """The condition as a function of all graph inputs."""
        made: Predicate = eval(f"lambda inputs: {self.expression}", dict(_NAMES))
        return made

    def at(self, positions: Sequence[int]) -> ShapeGuard:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        expression = _INPUT.sub(lambda m: f"inputs[{positions[int(m[1])]}]", self.expression)
        return ShapeGuard(expression, tuple(positions[i] for i in self.inputs))


def joined(guards: Sequence[ShapeGuard], inputs: Sequence[int]) -> Callable[..., bool]:
    """All of some conditions, as one function of the inputs at these positions."""
    parameters = ", ".join(f"input_{i}" for i in inputs)
    named = [_INPUT.sub(r"input_\1", guard.expression) for guard in guards]
    terms = [f"({expression})" for expression in named]
    made: Callable[..., bool] = eval(f"lambda {parameters}: {' and '.join(terms)}", dict(_NAMES))
    return made


@dataclass(frozen=True, slots=True)
class SameInput:
    """The graph was specialised on two inputs being the same tensor."""

    kept: int
    dropped: int

    def __str__(self) -> str:
        return f"inputs[{self.kept}] is inputs[{self.dropped}]"

    def predicate(self) -> Predicate:
        """The condition as a function of all graph inputs."""
        kept, dropped = self.kept, self.dropped
        return lambda inputs: inputs[kept] is inputs[dropped]

    def at(self, positions: Sequence[int]) -> SameInput:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        return SameInput(positions[self.kept], positions[self.dropped])


@dataclass(frozen=True, slots=True)
class StorageRelation:
    """Which inputs share memory.

    Attributes:
        overlapping: positions of those that overlap another one.
        disjoint: positions that share their storage with others but overlap none.
    """

    overlapping: tuple[int, ...]
    disjoint: tuple[int, ...]

    def __str__(self) -> str:
        return f"overlap{list(self.overlapping)} disjoint{list(self.disjoint)}"

    def predicate(self) -> Predicate:
        """The condition as a function of all graph inputs."""
        positions = (*self.overlapping, *self.disjoint)
        wanted = set(range(len(self.overlapping)))

        def holds(inputs: Sequence[Any]) -> bool:
            tensors = [inputs[i] for i in positions]
            return compute_overlapping_tensors(tensors, symbolic=False) == wanted

        return holds

    def at(self, positions: Sequence[int]) -> StorageRelation:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        return StorageRelation(
            tuple(positions[i] for i in self.overlapping),
            tuple(positions[i] for i in self.disjoint),
        )


@dataclass(frozen=True, slots=True)
class CustomGuard:
    """A condition that a backend states by hand.

    Attributes:
        inputs: positions of the graph inputs that ``check`` takes, in that order.
        check: must not run user code, and must be cheap: it runs at every call.
        reason: shown when the guard fails.
    """

    inputs: tuple[int, ...]
    check: Callable[..., bool]
    reason: str

    def __str__(self) -> str:
        return self.reason

    def predicate(self) -> Predicate:
        """The condition as a function of all graph inputs."""
        positions, check = self.inputs, self.check
        return lambda inputs: check(*[inputs[i] for i in positions])

    def at(self, positions: Sequence[int]) -> CustomGuard:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        return CustomGuard(tuple(positions[i] for i in self.inputs), self.check, self.reason)


BackendGuard = ShapeGuard | SameInput | StorageRelation | CustomGuard
