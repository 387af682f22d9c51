"""Activation checkpointing: the operators of a checkpointed function are a region of their own.

The program's call of ``torch.utils.checkpoint.checkpoint`` runs for real. Its own machinery (hooks,
random number state, recomputation) is left alone; only the function that it is given is followed,
through a wrapper that takes the function's place on the value stack. The backend gets the region as
a graph module under a checkpoint of its own, so it recomputes as the program would.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from magjit import _C
from magjit.monitor.operator_graph import Operator
from magjit.monitor.regions import Region
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.stack import observed_frame

_OPTIONS = frozenset({"use_reentrant", "preserve_rng_state", "determinism_check", "early_stop"})


class CheckpointedCall:
    """Stands in for a checkpointed function; recomputations find it closed and just call on."""

    def __init__(self, rec: StateRecorder, function: Any, options: dict[str, Any]) -> None:
        self.function = function
        self.options = options
        self.inside = False
        self._rec: StateRecorder | None = rec
        self._outer: list[Operator] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._rec is None or self.inside:
            return self.function(*args, **kwargs)
        self._begin(self._rec)
        try:
            return self.function(*args, **kwargs)
        finally:
            self._end()

    def _begin(self, rec: StateRecorder) -> None:
        rec.pause()
        self._outer = rec.operators.graph.operators
        rec.operators.graph.operators = []
        rec.operators.active = rec.broken is None
        self.inside = True
        rec.resume()

    def _end(self) -> None:
        rec = self._rec
        assert rec is not None
        rec.pause()
        graph = rec.operators.graph
        inner, graph.operators = graph.operators, self._outer
        self.inside = False
        self._rec = None
        rec.operators.active = False
        if inner:
            code, offset = rec.instruction()
            graph.operators.append(Region.of(inner, options=self.options).operator(code, offset))
        rec.resume()


def checkpoint_call(rec: StateRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of ``torch.utils.checkpoint.checkpoint``."""
    if rec.checkpoint is not None:
        if rec.checkpoint.inside:
            rec.split("checkpoints a part of a checkpointed function")
        return False  # its own frame, and what it calls, until the wrapper is reached
    options = {name: value for name, value in kwargs.items() if name in _OPTIONS}
    if "context_fn" in kwargs or kwargs.get("debug"):
        rec.split("checkpoints with a context function of its own")
        return None
    call = CheckpointedCall(rec, args[0] if args else None, options)
    if not args or not _replace_function(rec, call, args, kwargs):
        rec.split("calls torch.utils.checkpoint by a way that was not observed")
        return None
    rec.checkpoint = call
    rec.operators.active = False
    rec.suspended = True

    def finish(top: tuple[Any, ...]) -> None:
        rec.checkpoint = None
        rec.suspended = False
        rec.operators.active = rec.broken is None

    return finish


def _replace_function(rec: StateRecorder, call: Any, args: Any, kwargs: Any) -> bool:
    """Put the wrapper where the interpreter will find the function."""
    frame = observed_frame(rec)
    if frame is None or rec.state is None:
        return False
    if rec.state.info.instrs[rec.offset].opname == "CALL_FUNCTION_EX":
        given = _C.stack(frame)
        position = 1 if isinstance(given[-1], dict) else 0
        if type(given[-1 - position]) is not tuple:
            return False
        _C.replace_stack(frame, position, (call, *args[1:]))
        return True
    _C.replace_stack(frame, len(args) + len(kwargs) - 1, call)
    return True


CHECKPOINTS: dict[Any, Callable[..., Any]] = {torch_checkpoint.checkpoint: checkpoint_call}
"""By function, not by code: torch wraps it in a function whose code it shares with others."""


def checkpoint_special(func: types.FunctionType) -> Callable[..., Any] | None:
    """The handler of a call that checkpoints, or None."""
    return CHECKPOINTS.get(func)
