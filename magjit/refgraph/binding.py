"""Handlers as the tracer calls them: bound to a recorder, their own torch calls unrecorded."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from magjit import _C
from magjit.bytecode import EventKind
from magjit.monitor.operators import OperatorRecorder
from magjit.refgraph.frames import FrameState
from magjit.refgraph.holder_events import pin_late
from magjit.refgraph.number_events import use_numbers
from magjit.refgraph.recorder import Handler, StateRecorder


def bind_handlers(recorder: StateRecorder, table: dict[EventKind, Handler]) -> list[Any]:
    """The handler list that the tracer calls, indexed by event kind."""
    handlers: list[Any] = [None] * (max(EventKind) + 1)
    for kind, function in table.items():
        handlers[kind] = _bound(recorder, kind, function)
    return handlers


def _bound(recorder: StateRecorder, kind: EventKind, function: Handler) -> Any:
    operators, numbers = recorder.operators, recorder.numbers

    def handle(state: FrameState, offset: int, inputs: tuple[Any, ...]) -> Any:
        recorder.state = state
        recorder.offset = offset
        state.calling = None
        if recorder.suspended:  # the call that suspended recording has ended, by an exception
            recorder.suspended = False
            operators.active = recorder.broken is None
        operators.handling = True
        started = perf_counter()
        try:
            numbers.offered = None
            if numbers.late:
                pin_late(recorder, kind, state, offset, inputs)
            if numbers and numbers.among(inputs):
                verdict = use_numbers(recorder, kind, function, state, offset, inputs)
            else:
                verdict = function(recorder, state, offset, inputs)
        finally:
            operators.handling = False
            recorder.seconds += perf_counter() - started
        if verdict is None or verdict is _C.OPAQUE:
            return verdict
        if isinstance(verdict, tuple):
            return (verdict[0], _handling(operators, verdict[1]))
        return _handling(operators, verdict)

    return handle


def _handling(operators: OperatorRecorder, post: Callable[[Any], None]) -> Callable[[Any], None]:
    """What a handler does after its instruction is the recorder's own work as well."""

    def run(top: tuple[Any, ...]) -> None:
        operators.handling = True
        try:
            post(top)
        finally:
            operators.handling = False

    return run
