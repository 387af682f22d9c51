"""Results that a backward needs and that the program changes before it: an error, no wrong number.

Inductor keeps for its backward what a graph returns anyway.  A result that it makes as a view has a
count of changes of its own: autograd sees no change of it, and gradients of ``torch.compile`` are
those of other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from magjit.plugin import BackendError, CompiledGraph
from magjit.plugin.aliases import is_strided, storage_of
from magjit.plugin.modes import has_saved_tensor_hooks
from magjit.plugin.undefined_gradients import backward_of

__all__ = ["ChangedResultError", "noticing_changes"]


class ChangedResultError(BackendError, RuntimeError):
    """A backward needs a result as it was before the program changed it."""


def noticing_changes(compiled: CompiledGraph) -> CompiledGraph:
    """A compiled graph whose backward raises `ChangedResultError` where one that it needs was."""
    needed: _Needed | None = None

    def call(*inputs: Any) -> Sequence[Any]:
        nonlocal needed
        results: Sequence[Any] = compiled(*inputs)
        # Saved tensors that somebody packs are not unpacked to be looked at.
        if needed is None and not has_saved_tensor_hooks():
            needed = _needed(inputs, results)
        if needed is not None and needed.positions:
            found = backward_of(results[needed.differentiable])
            if found is not None:
                backward, _ = found
                backward.register_prehook(_check([results[one] for one in needed.positions]))
        return results

    return call


class _Needed(NamedTuple):
    """Of a graph's results.

    Attributes:
        differentiable: the position of one.
        positions: of those in whose memory something was kept.
    """

    differentiable: int
    positions: list[int]


def _needed(inputs: Sequence[Any], results: Sequence[Any]) -> _Needed:
    """What a backward keeps, by a first call.

    Of inputs' memory, and what lies in it, autograd knows.
    """
    given = set(map(storage_of, filter(is_strided, inputs)))
    own = {
        position: storage_of(one)
        for position, one in enumerate(results)
        if is_strided(one) and storage_of(one) not in given
    }
    made_by = {k: found for k in own if (found := backward_of(results[k])) is not None}
    if not made_by:
        return _Needed(0, [])
    first, (backward, _) = next(iter(made_by.items()))
    try:
        kept = [*backward.saved_tensors, *getattr(backward, "_tensors_no_vc_check", ())]
    except RuntimeError:  # One is changed already, which the backward will say.
        return _Needed(0, [])
    memory = set(map(storage_of, filter(is_strided, kept)))
    return _Needed(first, [k for k, one in own.items() if one in memory])


def _check(results: Sequence[torch.Tensor]) -> Callable[[Any], None]:
    # Detached, they share the count of changes, and do not hold the backward that holds them.
    known = [(one.detach(), one._version) for one in results]

    def check(gradients: Any) -> None:
        for one, version in known:
            if one._version != version:
                raise ChangedResultError(
                    f"a result of shape {list(one.shape)} was changed in place, and the backward"
                    " that Inductor has made needs it as it was",
                    remedy="change a clone of it, or use backend='dvm' or 'eager'",
                )

    return check
