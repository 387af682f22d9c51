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
    "differ",
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
    "sizes",
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
            if getattr(kind, "__module__", "") == writes.__name__
            and isinstance(kind, type)
            and kind is not writes.ContainerState
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


def without_global(patch: pytest.MonkeyPatch, field: str) -> None:
    """Guards that compare torch's global state but for one field."""

    def change(operation: str, *operands: Any) -> tuple[Any, ...]:
        if operation != "global_state":
            return operands
        (state,) = operands
        return ({name: value for name, value in state.items() if name != field},)

    _with_operands(patch, change)


# Index in the metadata of a tensor → what accepts everything.
ANYTHING: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "sizes": (4, lambda sizes: (None,) * len(sizes)),
    "strides": (5, lambda strides: None),
    "requires_grad": (6, lambda flag: None),
}


def without_metadata(patch: pytest.MonkeyPatch, field: str) -> None:
    """Guards that compare a tensor's metadata but for one field."""
    index, anything = ANYTHING[field]

    def change(operation: str, *operands: Any) -> tuple[Any, ...]:
        if operation != "tensor":
            return operands
        slot, meta = operands
        return slot, (*meta[:index], anything(meta[index]), *meta[index + 1 :])

    _with_operands(patch, change)


def _with_operands(patch: pytest.MonkeyPatch, change: Callable[..., tuple[Any, ...]]) -> None:
    emit = GuardCode.emit
    patch.setattr(
        GuardCode,
        "emit",
        lambda self, operation, *operands: emit(self, operation, *change(operation, *operands)),
    )
