"""Turning off one kind of guard or of side effect: what the tables must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from magjit import pipeline
from magjit.guards.emit import _EMITTERS, GuardCode
from magjit.mocks import changes, writes
from magjit.refgraph import relations

# Instructions that compare; all others fetch, and what is fetched others may need.
CHECKS = (
    "absent",
    "argc",
    "cell_empty",
    "context_unset",
    "distinct",
    "eq",
    "func_code",
    "global_state",
    "is",
    "keys",
    "kwarg_order",
    "len",
    "no_overlap",
    "overlap",
    "pyeq",
    "same",
    "set_eq",
    "slot_empty",
    "tensor",
    "tp_names",
    "type_is",
)
RELATIONS = tuple(sorted(_EMITTERS, key=lambda relation: relation.__name__))
# What these check is that the fetch succeeds.
FETCHED_ONLY = (relations.Has, relations.NonEmpty)
# What a run's changes become; the base class of the container states is none itself.
WRITES = tuple(
    sorted(
        (
            kind
            for kind in vars(changes).values()
            if getattr(kind, "__module__", "") == writes.__name__ and isinstance(kind, type)
        ),
        key=lambda kind: kind.__name__,
    )
)

Selects = Callable[[str, Any], bool]


def without_instructions(patch: pytest.MonkeyPatch, selects: Selects) -> None:
    """Guard programs without the instructions that ``selects(operation, origin)`` names."""

    def wrapped(method: Callable[..., None]) -> Callable[..., None]:
        def emit(self: GuardCode, *instruction: Any) -> None:
            if not selects(instruction[0], self._origin[1]):
                method(self, *instruction)

        return emit

    for name in ("emit", "later"):
        patch.setattr(GuardCode, name, wrapped(getattr(GuardCode, name)))


def without_check(patch: pytest.MonkeyPatch, operation: str) -> None:
    without_instructions(patch, lambda op, origin: op == operation)


def without_relation(patch: pytest.MonkeyPatch, relation: type) -> None:
    """Guards that do not compare what a kind of edge leads to."""
    operations = (*CHECKS, "getitem", "index") if relation in FETCHED_ONLY else CHECKS
    without_instructions(patch, lambda op, origin: type(origin) is relation and op in operations)


def without_write(patch: pytest.MonkeyPatch, kind: type) -> None:
    """Replays that do not redo one kind of side effect."""
    writes_of = pipeline.writes_of
    patch.setattr(
        pipeline,
        "writes_of",
        lambda *args: [write for write in writes_of(*args) if type(write) is not kind],
    )
