"""The tracer's protocol in plain Python: it defines what ``_C.Tracer`` does (MagPy, section 5.1).

    observation ::= start frame* stop
    frame       ::= on_frame(function, code, globals, builtins, fast locals) -> verdict
                    (post(values) | handler(state, offset, inputs) -> result | frame)*
                    on_exit(state, value)
    verdict     ::= state        observe the frame; any object but the following
                  | False        not this frame, but ask again about the frames that it calls
                  | None         neither this frame nor, until it exits, anything that it calls
                  | SKIP_ALWAYS  as None, for every frame of this code object, without asking again
    result      ::= None | OPAQUE | post | (OPAQUE, post)
                    OPAQUE: frames entered before this frame's next instruction are not reported
                    post: called at this frame's next instruction with the results of this one,
                    if this one falls through to it

Generators: on_frame at the first entry, on_exit when the generator ends; a resumed generator
keeps its state.  If a handler raises, ``error`` keeps the exception, observation ends and the
program goes on; what is no ``Exception``, such as KeyboardInterrupt, is raised in the program, too.

This file is slow and only for tests: the tracer in C must give the same events on every version.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType, MethodType
from typing import Any

from magjit import _C
from magjit.bytecode.decode import FILTER_BIT, Plan, Unit
from magjit.bytecode.optable import OPCODE, VERSION, EventKind, Give, Read

Handler = Callable[[Any, int, tuple[Any, ...]], Any]


@dataclass(slots=True)
class _Entry:
    """A frame on the stack of observed (state) and opaque (no state) frames."""

    frame: FrameType
    observed: bool
    state: Any
    opaque: bool
    plan: Plan | None
    pending: Callable[[tuple[Any, ...]], object] | None = None
    pending_unit: Unit | None = None
    raising: bool = False


def _call(callable_: Any, self_: Any, args: list[Any]) -> tuple[Any, ...]:
    if type(callable_) is MethodType:
        first = [] if self_ is _C.NULL else [self_]
        return (callable_.__func__, callable_.__self__, *first, *args)
    return (callable_, self_, *args)


def _inputs(frame: FrameType, unit: Unit, values: list[Any]) -> tuple[Any, ...]:
    """The inputs of an event, laid out as the table's Read modes say."""
    read = Read(unit.mode & 0x0F)
    if read is Read.CELL:
        return (*values, _C.localsplus(frame)[unit.operand])
    if read is Read.CALL:
        first, second, *args = values
        return _call(second, _C.NULL, args) if first is _C.NULL else _call(first, second, args)
    if read is Read.CALL13:
        return _call(values[0], values[1], values[2:])
    if read is Read.CALL_KW13:
        return _call(values[0], values[1], values[2:-1])
    if read in (Read.CALL_EX, Read.CALL_EX13):
        keywords = values[3] if len(values) > 3 else _C.NULL
        return (values[1 if read is Read.CALL_EX else 0], values[2], keywords)
    if read is Read.WITH_EXIT:
        exception = values[-1]
        return _call(values[0], _C.NULL, [type(exception), exception, exception.__traceback__])
    if read is Read.NAMESPACE:
        return (*values, frame.f_locals)
    if read is Read.NONE_TEST:
        return (*values, None)
    if read is Read.SLICE:
        return (*values[:-2], slice(values[-2], values[-1]))
    if read is Read.BELOW_TOP:
        return tuple(values[:-1])
    if read is Read.FILL:
        return (values[0], *values[len(values) - unit.operand :])
    return tuple(values)


def _posts(unit: Unit, here: int, stack: list[Any]) -> tuple[Any, ...]:
    """The results of an instruction, seen from the next one, laid out as the Give modes say."""
    give = Give(unit.mode & 0xF0)
    if give is Give.METHOD13:
        method, self_ = stack[-2:]
        return (_C.NULL, method) if self_ is _C.NULL else (method, self_)
    if give is Give.ITERATION and here != unit.next:
        return (_C.NULL,)
    end = len(stack) - (give is Give.DROP_NULL)
    return tuple(stack[end - unit.nposts : end])


class ReferenceTracer:
    """``_C.Tracer`` in Python: the same arguments, methods and attributes."""

    def __init__(
        self,
        handlers: list[Handler | None],
        on_frame: Callable[[Any, CodeType, dict[str, Any], dict[str, Any], list[Any]], Any],
        on_exit: Callable[[Any, Any], object],
        trivial: frozenset[type],
        plan_for: Callable[[CodeType], Plan],
    ) -> None:
        self.handlers = handlers
        self.on_frame = on_frame
        self.on_exit = on_exit
        self.trivial = trivial
        self._watched: set[int] = set()
        self.plan_for = plan_for
        self.error: BaseException | None = None
        self.paused = 0
        self.running = False
        self.attached = False
        self.resuming = False
        self._entries: list[_Entry] = []
        self._suspended: dict[FrameType, _Entry | None] = {}
        self._skip_always: set[int] = set()
        self._source = _Settrace(self) if VERSION < (3, 12) else _Monitoring(self)

    # ---- control ----

    def start(self) -> None:
        """Begins to observe the calling thread."""
        if self.running:
            raise RuntimeError("the tracer is already running")
        self.error = None
        self.paused = 0
        self.running = self.attached = True
        self._source.attach()

    def stop(self) -> None:
        """Ends observation; does nothing when not running."""
        if not self.running:
            return
        self._detach()
        self.running = False
        self._entries.clear()
        self._suspended.clear()
        self._skip_always.clear()

    def watch(self, obj: Any) -> None:
        """Instructions that use this object make events whatever its type."""
        self._watched.add(id(obj))

    def pause(self) -> None:
        """Suspends all events."""
        self.paused += 1

    def resume(self) -> None:
        """Undoes one pause; frames that were left meanwhile are forgotten."""
        self.paused -= 1
        if not self.paused:
            running = []
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                running.append(frame)
                frame = frame.f_back
            while self._entries and self._entries[-1].frame not in running:
                self._entries.pop()

    def _detach(self) -> None:
        if self.attached:
            self.attached = False
            self._source.detach()

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a handler; if it raises, observation ends."""
        try:
            return function(*args)
        except BaseException as error:
            self.error = error
            self._detach()
            if not isinstance(error, Exception):
                raise
            return None

    # ---- protocol ----

    def entered(self, frame: FrameType, first: bool) -> None:
        """A frame starts or, if not first, a generator goes on."""
        entries = self._entries
        for index, entry in enumerate(entries):
            if entry.frame is frame:
                del entries[index:]
        if frame in self._suspended:
            suspended = self._suspended[frame]
            if suspended is not None:
                del self._suspended[frame]
                entries.append(suspended)
                self._source.observe(suspended)
            return
        code = frame.f_code
        if (entries and entries[-1].opaque) or code.co_filename == __file__:
            return
        verdict: Any = _C.SKIP_ALWAYS
        if id(code) not in self._skip_always:
            self.resuming = not first
            function, fast_locals = _C.function(frame), _C.localsplus(frame)
            verdict = self._guarded(
                self.on_frame, function, code, frame.f_globals, frame.f_builtins, fast_locals
            )
            self.resuming = False
        if not self.attached:
            return
        if verdict is False:
            if code.co_flags & (0x20 | 0x80 | 0x200):
                self._suspended[frame] = None
            return
        if verdict is _C.SKIP_ALWAYS:
            self._skip_always.add(id(code))
        observed = verdict is not None and verdict is not _C.SKIP_ALWAYS
        plan = self._guarded(self.plan_for, code) if observed else None
        if self.attached:
            entry = _Entry(frame, observed, verdict, not observed, plan)
            entries.append(entry)
            self._source.observe(entry)

    def instruction(self, frame: FrameType, here: int) -> None:
        """An instruction of some frame is about to be executed."""
        entry = self._on_top(frame)
        if entry is None or entry.plan is None:
            return
        entry.opaque = False
        entry.raising = False
        unit = entry.plan.unit(here)
        if unit.kind == 0 and entry.pending is None:
            return
        stack = _C.stack(frame, unit.depth)
        if entry.pending is not None:
            self._deliver(entry, here, stack)
        if unit.kind == 0 or not self.attached:
            return
        values = stack[len(stack) - unit.ninputs :]
        number = unit.kind & ~FILTER_BIT
        trivial = (value is _C.NULL or type(value) in self.trivial for value in values)
        filtered = unit.kind & FILTER_BIT and all(trivial)
        watched = any(id(value) in self._watched for value in values)
        if (filtered or number == EventKind.HOLD) and not watched:
            return
        handler = self._handler(number)
        if handler is None and watched:
            handler = self._handler(EventKind.HOLD)
        if handler is not None:
            inputs = _inputs(frame, unit, values)
            result = self._guarded(handler, entry.state, 2 * unit.home, inputs)
            self._take(entry, unit, result)

    def _handler(self, number: int) -> Handler | None:
        return self.handlers[number] if number < len(self.handlers) else None

    def _deliver(self, entry: _Entry, here: int, stack: list[Any]) -> None:
        post, unit = entry.pending, entry.pending_unit
        assert post is not None and unit is not None
        entry.pending = None
        completed = here == unit.next
        if unit.mode & 0xF0 == Give.ITERATION:
            completed = completed or here == unit.operand
        if completed:
            self._guarded(post, _posts(unit, here, stack))

    @staticmethod
    def _take(entry: _Entry, unit: Unit, result: Any) -> None:
        if result is _C.OPAQUE:
            result = (_C.OPAQUE, None)
        if type(result) is tuple and len(result) == 2 and result[0] is _C.OPAQUE:
            entry.opaque = True
            result = result[1]
        entry.pending, entry.pending_unit = result, unit

    def left(self, frame: FrameType, value: Any) -> None:
        """A frame exits; value is NULL where an exception unwinds it."""
        entry = self._on_top(frame)
        if entry is not None:
            self._entries.pop()
            self._source.release(entry)
            if entry.observed:
                self._guarded(self.on_exit, entry.state, value)

    def yielded(self, frame: FrameType) -> None:
        """A generator is suspended."""
        entry = self._on_top(frame)
        if entry is not None:
            self._entries.pop()
            self._source.release(entry)
            self._suspended[frame] = entry

    def raised(self, frame: FrameType) -> None:
        """An exception was raised in some frame."""
        entry = self._on_top(frame)
        if entry is not None:
            entry.raising = True

    def is_raising(self, frame: FrameType) -> bool:
        """Whether an exception was raised in the frame's current instruction."""
        entry = self._on_top(frame)
        return entry is not None and entry.raising

    def _on_top(self, frame: FrameType) -> _Entry | None:
        for index in range(len(self._entries) - 1, -1, -1):
            if self._entries[index].frame is frame:
                del self._entries[index + 1 :]
                return self._entries[index]
        return None


class _Settrace:
    """Events of CPython 3.11, from sys.settrace."""

    def __init__(self, tracer: ReferenceTracer) -> None:
        self.tracer = tracer
        self.previous: Any = None

    def attach(self) -> None:
        self.previous = sys.gettrace()
        sys.settrace(self.trace)

    def detach(self) -> None:
        sys.settrace(self.previous)

    def observe(self, entry: _Entry) -> None:
        entry.frame.f_trace_opcodes = entry.observed
        entry.frame.f_trace_lines = False

    def release(self, entry: _Entry) -> None:
        entry.frame.f_trace_opcodes = False
        entry.frame.f_trace_lines = True

    def trace(self, frame: FrameType, what: str, value: Any) -> Any:
        tracer = self.tracer
        if not tracer.attached or tracer.paused:
            return self.trace
        code = frame.f_code.co_code
        if what == "opcode":
            tracer.instruction(frame, frame.f_lasti // 2)
        elif what == "call":
            tracer.entered(frame, tuple(code[frame.f_lasti :][:2]) == (OPCODE["RESUME"], 0))
        elif what == "exception":
            tracer.raised(frame)
        elif what == "return":
            last = code[frame.f_lasti]
            completes = last in (OPCODE["RETURN_VALUE"], OPCODE["YIELD_VALUE"])
            unwound = value is None and (tracer.is_raising(frame) or not completes)
            if not unwound and last == OPCODE["YIELD_VALUE"]:
                tracer.yielded(frame)
            else:
                tracer.left(frame, _C.NULL if unwound else value)
        return self.trace


class _Monitoring:
    """Events of CPython 3.12 and later, from sys.monitoring."""

    TOOLS = (3, 4, 5, 2, 1, 0)
    EVERYWHERE = ("PY_START", "PY_RESUME", "PY_THROW", "PY_RETURN", "PY_UNWIND", "PY_YIELD")

    def __init__(self, tracer: ReferenceTracer) -> None:
        self.tracer = tracer
        self.monitoring: Any = sys.__dict__["monitoring"]
        self.thread = 0
        self.tool = -1
        self.codes: dict[int, CodeType] = {}

    def attach(self) -> None:
        monitoring, tracer = self.monitoring, self.tracer
        self.thread = threading.get_ident()
        self.tool = next(tool for tool in self.TOOLS if monitoring.get_tool(tool) is None)
        monitoring.use_tool_id(self.tool, "magjit reference")
        self.register("PY_START", lambda frame, _, __: tracer.entered(frame, True))
        self.register("PY_RESUME", lambda frame, _, __: tracer.entered(frame, False))
        self.register("PY_THROW", lambda frame, _, __: tracer.entered(frame, False))
        self.register("PY_RETURN", lambda frame, _, value: tracer.left(frame, value))
        self.register("PY_UNWIND", lambda frame, _, __: tracer.left(frame, _C.NULL))
        self.register("PY_YIELD", lambda frame, _, __: tracer.yielded(frame))
        self.register("INSTRUCTION", lambda frame, at, _: tracer.instruction(frame, at // 2))
        events = sum(getattr(monitoring.events, name) for name in self.EVERYWHERE)
        monitoring.set_events(self.tool, events)

    def register(self, name: str, function: Callable[[FrameType, int, Any], None]) -> None:
        def on_event(code: CodeType, offset: int, value: Any = None) -> None:
            tracer = self.tracer
            if tracer.attached and not tracer.paused and threading.get_ident() == self.thread:
                function(sys._getframe(1), offset, value)

        event = getattr(self.monitoring.events, name)
        self.monitoring.register_callback(self.tool, event, on_event)

    def detach(self) -> None:
        monitoring = self.monitoring
        for code in self.codes.values():
            monitoring.set_local_events(self.tool, code, 0)
        self.codes.clear()
        monitoring.set_events(self.tool, 0)
        for name in (*self.EVERYWHERE, "INSTRUCTION"):
            monitoring.register_callback(self.tool, getattr(monitoring.events, name), None)
        monitoring.free_tool_id(self.tool)

    def observe(self, entry: _Entry) -> None:
        code = entry.frame.f_code
        if entry.observed and id(code) not in self.codes:
            instruction = self.monitoring.events.INSTRUCTION
            self.monitoring.set_local_events(self.tool, code, instruction)
            self.codes[id(code)] = code

    def release(self, entry: _Entry) -> None:
        pass
