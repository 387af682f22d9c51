"""What the dispatcher tries for a call, made of a guard, a compiled graph and a mock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from magjit import _C

__all__ = ["handle_of"]


def handle_of(
    program: _C.GuardProgram,
    compiled: Callable[..., Any],
    input_slots: Sequence[int],
    finish: Any,
    finish_slots: tuple[int, ...],
) -> _C.Record:
    """The C object of a record.

    Where a call returns the graph's one output, and what has compiled the graph has a way to give
    it as it is (`magjit.plugin.CompiledGraph`), that way is called.

    Args:
        program: the guard.
        compiled: the graph.
        input_slots: where the guard leaves the graph's inputs.
        finish: the mock, or the index of the output that it would return.
        finish_slots: what else the mock takes.
    """
    only = getattr(compiled, "only", None)
    if only is not None and type(finish) is int:
        function, positions = only
        taken = tuple(input_slots[position] for position in positions)
        return _C.Record(program, function, taken)
    return _C.Record(program, compiled, tuple(input_slots), finish, finish_slots)
