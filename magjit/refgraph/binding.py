"""Handlers as the tracer calls them: bound to a recorder, their own torch calls unrecorded."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from magjit import _C
from magjit.bytecode import EventKind
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
    operators = recorder.operators

    def handle(state: FrameState, offset: int, inputs: tuple[Any, ...]) -> Any:
        if recorder.between:  # the instruction of a cut has ended by an exception
            recorder.operation_raises()
            return None
        numbers = recorder.numbers
        recorder.state = state
        recorder.offset = state.offset = offset
        state.calling = None
        recorder.marker = (len(operators.graph.operators), len(recorder.effects), recorder.changes)
        if recorder.places and cut_at_known_place(recorder, state, offset):
            return _C.OPAQUE
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
        if recorder.waits():
            return _C.OPAQUE
        if recorder.notes_results and kind in (EventKind.CALL, EventKind.CALL_EX):
            verdict = _noting(recorder, state, offset, verdict)
        if verdict is None or verdict is _C.OPAQUE:
            return verdict
        if isinstance(verdict, tuple):
            return (verdict[0], _handling(recorder, verdict[1]))
        return _handling(recorder, verdict)

    return handle


def _noting(recorder: StateRecorder, state: FrameState, offset: int, verdict: Any) -> Any:
    """The verdict of a call, and a note of what the call makes."""
    opaque = verdict is _C.OPAQUE or isinstance(verdict, tuple)
    post = verdict[1] if isinstance(verdict, tuple) else None if opaque else verdict

    def note(top: tuple[Any, ...]) -> None:
        recorder.made.setdefault(id(top[-1]), (top[-1], *recorder.place(state, offset)))
        if post is not None:
            post(top)

    return (_C.OPAQUE, note) if opaque else note


def cut_at_known_place(recorder: StateRecorder, state: FrameState, offset: int) -> bool:
    """Whether an instruction is known to be one to cut at, and the run was cut there."""
    reason = known_place(recorder, state, offset)
    if reason is None:
        return False
    recorder.operators.handling = True
    try:
        return recorder.try_cut(reason, learn=True)
    finally:
        recorder.operators.handling = False


def known_place(recorder: StateRecorder, state: FrameState, offset: int) -> str | None:
    """Why an instruction is known to be one to cut at, if it is."""
    point = recorder.resumed.get(id(state.code))
    code, offset = recorder.place(state, offset)
    if point is not None and point.call is not None and offset == point.offset:
        return None  # the call that the frame was handed: it goes on with the next frame
    return recorder.places.get((id(code), offset))


def _handling(recorder: StateRecorder, post: Callable[[Any], None]) -> Callable[[Any], None]:
    """What a handler does after its instruction is the recorder's own work as well."""
    operators, region = recorder.operators, recorder.regions

    def run(top: tuple[Any, ...]) -> None:
        if recorder.regions != region:
            return  # the run was cut inside the call: that region has its record
        operators.handling = recorder.after_event = True
        try:
            post(top)
        finally:
            operators.handling = recorder.after_event = False

    return run
