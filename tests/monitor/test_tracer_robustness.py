"""The tracer leaves the program as it would be without it, whatever program or handlers do."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

from magjit import _C
from magjit.bytecode import EventKind, decode, plan_for

LEGACY = sys.version_info < (3, 12)
monitoring: Any = sys.__dict__.get("monitoring")


class Observer:
    """Observes the code of this file and counts what it is told."""

    def __init__(self, handle: Callable[..., Any] | None = None, **others: Any) -> None:
        self.frames: list[str] = []
        self.exits: list[tuple[str, Any]] = []
        self.instructions: list[tuple[str, str]] = []
        self.handle = handle
        handlers: list[Any] = [None, *(self.handler for _ in EventKind)]
        arguments: dict[str, Any] = {
            "handlers": handlers,
            "on_frame": self.on_frame,
            "on_exit": self.on_exit,
            "trivial": frozenset(),
            "plan_for": plan_for,
        }
        self.tracer = _C.Tracer(**(arguments | others))

    def on_frame(self, function: Any, code: CodeType, *rest: Any) -> Any:
        if code.co_filename != __file__:
            return None
        self.frames.append(code.co_name)
        return code

    def on_exit(self, state: CodeType, value: Any) -> None:
        self.exits.append((state.co_name, value))

    def handler(self, state: CodeType, offset: int, inputs: tuple[Any, ...]) -> Any:
        self.instructions.append((state.co_name, decode(state).instrs[offset].opname))
        return self.handle(state, offset, inputs) if self.handle is not None else None

    def run(self, body: Callable[[], Any]) -> Any:
        self.tracer.start()
        try:
            return body()
        finally:
            self.tracer.stop()


def double(n: int) -> int:
    return n + n


def work() -> int:
    total = 0
    for n in range(3):
        total += double(n)
    return total


# ---- start and stop ----


def test_start_twice_raises() -> None:
    observer, other = Observer(), Observer()
    observer.tracer.start()
    try:
        with pytest.raises(RuntimeError, match="already running"):
            observer.tracer.start()
        with pytest.raises(RuntimeError, match="another tracer"):
            other.tracer.start()
    finally:
        observer.tracer.stop()
    assert not observer.tracer.running
    observer.tracer.stop()
    assert other.run(work) == 6


def test_restart_begins_anew() -> None:
    observer = Observer()
    assert observer.run(work) == observer.run(work) == 6
    assert observer.frames == ["work", "double", "double", "double"] * 2
    assert observer.exits[:2] == [("double", 0), ("double", 2)]


def test_stop_in_another_thread_raises() -> None:
    observer = Observer()
    caught: list[BaseException] = []

    def stop() -> None:
        try:
            observer.tracer.stop()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=stop)
    observer.tracer.start()
    thread.start()
    thread.join()
    observer.tracer.stop()
    assert len(caught) == 1


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError):
        _C.Tracer([], None, None, [int], plan_for)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a type"):
        _C.Tracer([], None, None, frozenset({1}), plan_for)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at most"):
        _C.Tracer([None] * 200, None, None, frozenset(), plan_for)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="without pause"):
        observer = Observer()
        observer.run(observer.tracer.resume)


def test_stop_by_a_handler() -> None:
    def stop(state: CodeType, offset: int, inputs: Any) -> Any:
        observer.tracer.stop()
        return lambda values: pytest.fail("a handler was called after stop()")

    observer = Observer(stop)
    assert observer.run(work) == 6
    assert len(observer.instructions) == 1 and observer.tracer.error is None


# ---- failing handlers ----


class Boom(Exception):
    pass


def boom(*args: Any) -> Any:
    raise Boom


def boom_in_post(*args: Any) -> Any:
    return boom


@pytest.mark.parametrize(
    "observer",
    [
        lambda: Observer(boom),
        lambda: Observer(boom_in_post),
        lambda: Observer(on_frame=boom),
        lambda: Observer(on_exit=boom),
        lambda: Observer(plan_for=boom),
    ],
    ids=["handler", "post", "on_frame", "on_exit", "plan_for"],
)
def test_error_of_a_handler_is_kept(observer: Callable[[], Observer]) -> None:
    subject = observer()
    assert subject.run(work) == 6
    assert isinstance(subject.tracer.error, Boom)
    assert subject.tracer.error.__traceback__ is not None
    assert len(subject.frames) <= 2 and len(subject.instructions) < 8
    if LEGACY:
        assert sys.gettrace() is None


def test_events_end_at_the_error_not_at_stop() -> None:
    observer = Observer(boom)
    observer.tracer.start()
    assert work() == 6
    assert observer.tracer.running and not observer.tracer.attached
    assert isinstance(observer.tracer.error, Boom)
    observer.tracer.stop()


def test_wrong_plan_is_an_error() -> None:
    class Plan:
        units = b"short"

    observer = Observer(plan_for=lambda code: Plan())
    assert observer.run(work) == 6
    assert isinstance(observer.tracer.error, TypeError)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["handler", "on_frame", "on_exit"])
def test_interrupt_reaches_the_program(kind: type[BaseException], where: str) -> None:
    def interrupt(*args: Any) -> Any:
        raise kind

    observer = Observer(interrupt) if where == "handler" else Observer(**{where: interrupt})
    before = sys.gettrace()
    with pytest.raises(kind):
        observer.run(work)
    assert sys.gettrace() is before
    assert isinstance(observer.tracer.error, kind)


@pytest.mark.parametrize("confines", [False, True])
def test_a_confining_tracer_stops_the_program_s_own_handlers(confines: bool) -> None:
    seen: list[int] = []
    done: list[str] = []

    def stop(state: Any, offset: int, inputs: Any) -> Any:
        seen.append(offset)
        raise KeyboardInterrupt

    def body() -> None:
        try:
            double(1)
        except BaseException:
            double(2)
            done.append("handled")
            raise

    observer = Observer(stop)
    observer.tracer.confines = confines
    before = sys.gettrace()
    with pytest.raises(KeyboardInterrupt):
        observer.run(body)
    assert sys.gettrace() is before
    assert len(set(seen)) == 1 + confines
    assert done == ([] if confines else ["handled"])


def test_error_while_an_exception_unwinds() -> None:
    def fails() -> None:
        raise KeyError("the program's own")

    def body() -> str:
        try:
            fails()
        except KeyError as error:
            return repr(error)
        return "no exception"

    observer = Observer(on_exit=boom)
    assert observer.run(body) == 'KeyError("the program\'s own")'
    assert isinstance(observer.tracer.error, Boom)


def test_handlers_do_not_disturb_the_current_exception() -> None:
    def noisy(state: CodeType, offset: int, inputs: Any) -> Any:
        try:
            raise Boom
        except Boom:
            return lambda values: None

    def body() -> Any:
        try:
            try:
                double(None)  # type: ignore[arg-type]
            except TypeError:
                work()
                raise
        except TypeError as error:
            return sys.exc_info()[1] is error, error.__context__

    observer = Observer(noisy)
    assert observer.run(body) == (True, None)
    assert observer.tracer.error is None
    assert ("double", _C.NULL) in observer.exits


# ---- others who trace ----


def line_tracer(lines: list[str]) -> Callable[..., Any]:
    def trace(frame: Any, what: str, value: Any) -> Any:
        if frame.f_code.co_filename == __file__:
            lines.append(f"{what} {frame.f_code.co_name}")
        return trace

    return trace


@pytest.fixture
def keep_trace() -> Iterator[None]:
    before = sys.gettrace()
    yield
    sys.settrace(before)


@pytest.mark.usefixtures("keep_trace")
@pytest.mark.parametrize("handle", [None, boom], ids=["plain", "error"])
def test_earlier_trace_function_is_put_back(handle: Any) -> None:
    lines: list[str] = []
    trace = line_tracer(lines)

    def body() -> Any:
        inside = sys.gettrace()
        return work(), inside

    def outer() -> Any:
        result = observer.run(body)
        lines.append("after")
        return result

    observer = Observer(handle)
    sys.settrace(trace)
    result, inside = outer()
    assert sys.gettrace() is trace
    sys.settrace(None)
    assert result == 6 and inside is trace
    after = lines[lines.index("after") :]
    assert "line outer" in after and "return outer" in after


@pytest.mark.usefixtures("keep_trace")
def test_program_that_sets_a_trace_function() -> None:
    lines: list[str] = []
    trace = line_tracer(lines)

    def body() -> int:
        sys.settrace(trace)
        return work()

    observer = Observer()
    assert observer.run(body) == 6
    assert sys.gettrace() is trace
    sys.settrace(None)
    assert lines.count("call double") == 3
    if LEGACY:
        # what the program did since was not seen: the recorder must know
        assert isinstance(observer.tracer.error, RuntimeError)
    else:
        assert observer.tracer.error is None
        assert observer.frames.count("double") == 3


@pytest.mark.usefixtures("keep_trace")
def test_program_that_removes_and_restores_its_trace_function() -> None:
    def body() -> int:
        before = sys.gettrace()
        sys.settrace(None)
        sys.settrace(before)
        return work()

    observer = Observer()
    assert observer.run(body) == 6
    assert sys.gettrace() is None
    assert (observer.tracer.error is not None) == LEGACY


def test_profile_function_stays() -> None:
    calls: list[str] = []

    def profile(frame: Any, what: str, value: Any) -> None:
        if what == "call" and frame.f_code.co_filename == __file__:
            calls.append(frame.f_code.co_name)

    observer = Observer()
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        observer.run(work)
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert calls.count("double") == 3
    assert observer.frames == ["work", "double", "double", "double"]


def test_only_the_starting_thread_is_observed() -> None:
    def body() -> list[int]:
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [*results, work()]

    observer = Observer()
    assert observer.run(body) == [6] * 4
    assert observer.frames.count("work") == 1
    assert observer.frames.count("double") == 3


@pytest.mark.skipif(LEGACY, reason="sys.monitoring is of 3.12")
def test_other_monitoring_tools_keep_working() -> None:
    seen: list[str] = []
    tool, events = 3, monitoring.events
    monitoring.use_tool_id(tool, "other")
    try:
        monitoring.register_callback(
            tool, events.LINE, lambda code, line: seen.append(code.co_name)
        )
        monitoring.set_local_events(tool, double.__code__, events.LINE)
        observer = Observer()
        observer.run(work)
        assert seen.count("double") == 3
        double(1)
        assert seen.count("double") == 4
        assert monitoring.get_tool(tool) == "other"
        monitoring.set_local_events(tool, double.__code__, 0)
    finally:
        monitoring.free_tool_id(tool)
    assert observer.frames.count("double") == 3
    assert ("double", "BINARY_OP") in observer.instructions


@pytest.mark.skipif(LEGACY, reason="sys.monitoring is of 3.12")
def test_a_tool_that_wants_no_more_lines_hides_no_instruction() -> None:
    """CPython makes no INSTRUCTION event where a callback for the line returns DISABLE."""

    def fresh() -> Any:
        code = many_lines.__code__.replace(co_firstlineno=many_lines.__code__.co_firstlineno)
        return FunctionType(code, many_lines.__globals__)

    alone, beside = Observer(), Observer()
    assert alone.run(fresh()) == 9
    tool, events = 3, monitoring.events
    monitoring.use_tool_id(tool, "coverage")
    lines: list[int] = []
    try:
        monitoring.register_callback(
            tool, events.LINE, lambda code, line: lines.append(line) or monitoring.DISABLE
        )
        monitoring.set_events(tool, events.LINE)
        assert beside.run(fresh()) == 9
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, events.LINE, None)
        monitoring.free_tool_id(tool)
    assert set(lines) >= {many_lines.__code__.co_firstlineno + line for line in range(1, 5)}
    assert beside.instructions == alone.instructions


@pytest.mark.skipif(LEGACY, reason="sys.monitoring is of 3.12")
def test_tool_id_is_free_and_clean_afterwards() -> None:
    Observer().run(work)
    Observer(boom).run(work)
    assert all(monitoring.get_tool(tool) is None for tool in range(6))
    for tool in range(6):
        monitoring.use_tool_id(tool, "probe")
        seen: list[Any] = []
        monitoring.register_callback(
            tool, monitoring.events.INSTRUCTION, lambda *event: seen.append(event)
        )
        work()
        assert seen == [] and monitoring.get_events(tool) == 0
        assert monitoring.get_local_events(tool, work.__code__) == 0
        monitoring.register_callback(tool, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(tool)


@pytest.mark.skipif(LEGACY, reason="sys.monitoring is of 3.12")
def test_no_free_tool_id() -> None:
    taken = [tool for tool in range(6) if monitoring.get_tool(tool) is None]
    for tool in taken:
        monitoring.use_tool_id(tool, "taken")
    try:
        with pytest.raises(RuntimeError, match="in use"):
            Observer().tracer.start()
    finally:
        for tool in taken:
            monitoring.free_tool_id(tool)
    assert Observer().run(work) == 6


def many_lines() -> int:
    total = 0
    for item in (1, 2, 3):
        more = item + 1
        total = total + more
    return total


# ---- frames ----


def test_frames_that_run_at_start_are_not_observed() -> None:
    observer = Observer()
    observer.tracer.start()
    total = double(4)
    observer.tracer.stop()
    assert total == 8 and observer.frames == ["double"]


def test_recursion_error_of_the_program() -> None:
    def deep(n: int) -> int:
        return deep(n + 1) + 1

    def body() -> str:
        try:
            deep(0)
        except RecursionError:
            return "caught"
        return "no"

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        observer = Observer()
        assert observer.run(body) == "caught"
    finally:
        sys.setrecursionlimit(limit)


def test_program_uses_up_the_c_stack() -> None:
    class Endless:
        def __repr__(self) -> str:
            return repr([self])

    def body() -> str:
        try:
            repr(Endless())
        except RecursionError:
            return "caught"
        return "no"

    for _ in range(2):
        assert Observer().run(body) == "caught"
    # the first error is raised in a handler: observation must end in full there
    observer = Observer()
    assert observer.run(work) == 6
    assert observer.frames == ["work", "double", "double", "double"]
    if not LEGACY:
        assert all(monitoring.get_tool(tool) is None for tool in range(6))


def test_deep_recursion() -> None:
    def deep(n: int) -> int:
        return 0 if n == 0 else 1 + deep(n - 1)

    observer = Observer()
    assert observer.run(lambda: deep(600)) == 600
    assert observer.tracer.error is None
    assert [value for name, value in observer.exits if name == "deep"] == list(range(601))


def count_to(n: int) -> Iterator[int]:
    for i in range(n):
        yield double(i)


def test_generator_outlives_the_observation() -> None:
    kept = []

    def body() -> int:
        kept.append(count_to(3))
        return next(kept[0])

    observer = Observer()
    assert observer.run(body) == 0
    assert list(kept[0]) == [2, 4]
    assert observer.frames == ["body", "count_to", "double"]
    frame = count_to(1).gi_frame  # type: ignore[attr-defined]
    assert frame.f_trace_lines and not frame.f_trace_opcodes


def test_generator_flags_are_restored_while_suspended() -> None:
    flags = []

    def body() -> list[int]:
        generator = count_to(2)
        next(generator)
        frame = generator.gi_frame  # type: ignore[attr-defined]
        flags.append((frame.f_trace_lines, frame.f_trace_opcodes))
        return list(generator)

    assert Observer().run(body) == [2]
    assert flags == [(True, False)]


def test_generator_from_before_is_asked_about_when_resumed() -> None:
    resuming: list[tuple[str, bool]] = []

    def on_frame(function: Any, code: CodeType, *rest: Any) -> Any:
        resuming.append((code.co_name, observer.tracer.resuming))
        return code

    generator = count_to(3)
    next(generator)
    observer = Observer(on_frame=on_frame)
    assert observer.run(lambda: [*generator]) == [2, 4]
    assert resuming.count(("count_to", True)) == 1
    assert ("double", False) in resuming


def test_many_abandoned_generators() -> None:
    def body() -> int:
        return sum(any(double(i) for i in range(1, 9)) for _ in range(2000))

    observer = Observer()
    assert observer.run(body) == 2000
    assert observer.frames.count("double") == 2000


def test_handler_replaces_a_value_on_the_stack() -> None:
    def replace(state: CodeType, offset: int, inputs: Any) -> Any:
        instr = decode(state).instrs[offset]
        if instr.opname == "BINARY_OP" and state.co_name == "double":
            frame = sys._getframe(2)
            assert frame.f_code is state
            depth = decode(state).depths.before[offset // 2]
            assert _C.stack(frame, depth) == _C.stack(frame) == list(inputs)
            assert _C.localsplus(frame) == [inputs[0]]
            assert _C.function(frame) is double
            _C.replace_stack(frame, 0, 100)
            _C.replace_stack(frame, 1, fresh, depth)

    fresh = int("1000")
    observer = Observer(replace)
    before = sys.getrefcount(fresh)
    assert observer.run(lambda: double(7)) == 1100
    assert sys.getrefcount(fresh) == before


def test_program_stops_the_tracer_in_its_middle() -> None:
    def inner() -> int:
        observer.tracer.stop()
        return double(3)

    def body() -> int:
        total = double(1) + inner()
        for n in range(3):
            total += double(n)
        return total

    observer = Observer()
    observer.tracer.start()
    assert body() == 14
    assert not observer.tracer.running and observer.tracer.error is None
    assert observer.frames == ["body", "double", "inner"]
    assert body() == 14


def test_signal_handlers_and_finalizers() -> None:
    class Dying:
        def __del__(self) -> None:
            seen.append(double(1))

    def on_signal(number: int, frame: Any) -> None:
        seen.append(double(2))

    def body() -> int:
        made = Dying()
        del made
        signal.raise_signal(signal.SIGUSR1)
        return double(3)

    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, on_signal)
    try:
        observer = Observer()
        assert observer.run(body) == 6
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [2, 4]
    assert observer.frames.count("double") == 3 and observer.tracer.error is None


def test_interrupt_of_the_program() -> None:
    def body() -> int:
        signal.raise_signal(signal.SIGINT)
        return work()

    observer = Observer()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            observer.run(body)
    finally:
        signal.signal(signal.SIGINT, before)
    assert observer.tracer.error is None
    assert ("body", _C.NULL) in observer.exits


def test_stack_readers_check_their_arguments() -> None:
    with pytest.raises(TypeError):
        _C.stack(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _C.localsplus(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        _C.stack(sys._getframe(), 10_000)
    with pytest.raises(ValueError, match="give it"):
        _C.stack(sys._getframe())
    generator = count_to(3)
    next(generator)
    frame = generator.gi_frame  # type: ignore[attr-defined]
    assert [type(value).__name__ for value in _C.stack(frame)][:1] == ["range_iterator"]
    with pytest.raises(IndexError):
        _C.replace_stack(frame, 50, None)


# ---- pause ----


def test_pause_hides_what_happens() -> None:
    def body() -> int:
        first = double(1)
        observer.tracer.pause()
        observer.tracer.pause()
        assert observer.tracer.paused == 2
        hidden = work()
        observer.tracer.resume()
        hidden += double(1)
        observer.tracer.resume()
        return first + hidden + double(2)

    observer = Observer()
    assert observer.run(body) == 14
    assert observer.tracer.error is None
    assert observer.frames == ["body", "double", "double"]
    assert [name for name, _ in observer.exits] == ["double", "double", "body"]


class Unobserved:
    """Its methods leave while observation is paused: their exits are never reported."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer

    def __enter__(self) -> None:
        self.tracer.pause()

    def __exit__(self, *args: Any) -> None:
        self.tracer.resume()


@pytest.mark.parametrize("verdict", ["opaque", "observed"])
def test_pause_by_a_context_manager(verdict: str) -> None:
    def on_frame(function: Any, code: CodeType, *rest: Any) -> Any:
        frames.append(code.co_name)
        return code if verdict == "observed" or code.co_name != "__enter__" else _C.SKIP_ALWAYS

    def body() -> int:
        for _ in range(3):
            with Unobserved(observer.tracer):
                work()
        return double(1)

    frames: list[str] = []
    observer = Observer(on_frame=on_frame)
    assert observer.run(body) == 2
    assert observer.tracer.error is None
    assert "double" in frames and "work" not in frames


def test_stop_while_paused() -> None:
    observer = Observer()
    observer.tracer.start()
    observer.tracer.pause()
    observer.tracer.stop()
    assert observer.tracer.paused == 0
    observer.tracer.resume()
    assert observer.run(work) == 6
    assert "double" in observer.frames


def test_pause_survives_an_exception() -> None:
    def body() -> int:
        try:
            with Unobserved(observer.tracer):
                double(None)  # type: ignore[arg-type]
        except TypeError:
            return double(5)
        return 0

    observer = Observer()
    assert observer.run(body) == 10
    assert observer.frames == ["body", "__init__", "__enter__", "double"]


# ---- memory ----


class State:
    pass


def test_states_and_posts_die_with_the_run() -> None:
    states: list[weakref.ref[State]] = []

    def on_frame(*args: Any) -> State:
        state = State()
        states.append(weakref.ref(state))
        return state

    def handler(state: State, offset: int, inputs: Any) -> Any:
        def post(values: tuple[Any, ...]) -> None:
            pass

        states.append(weakref.ref(post))  # type: ignore[arg-type]
        return post

    def body() -> Any:
        kept.append(count_to(3))
        next(kept[0])
        try:
            double(None)  # type: ignore[arg-type]
        except TypeError:
            return work()

    kept: list[Any] = []
    handlers = [None, *(handler for _ in EventKind)]
    observer = Observer(on_frame=on_frame, on_exit=lambda *args: None, handlers=handlers)
    assert observer.run(body) == 6
    assert observer.tracer.error is None
    assert len(states) > 20 and all(state() is None for state in states)


def test_inputs_are_released() -> None:
    token = State()
    seen: list[int] = []

    def body(value: Any) -> Any:
        pair = (value, value)
        return pair[0] is value and [value, *pair] and {"a": value}["a"]

    observer = Observer(lambda *args: lambda values: None, on_exit=lambda *args: None)
    before = sys.getrefcount(token)
    for _ in range(50):
        observer.run(lambda: body(token))
        seen.append(sys.getrefcount(token))
    assert set(seen) == {before}


def test_code_objects_are_released() -> None:
    namespace: dict[str, Any] = {}
    exec(compile("def made(n):\n    return n + 1", __file__, "exec"), namespace)
    code = weakref.ref(namespace["made"].__code__)
    observer = Observer()
    assert observer.run(lambda: namespace["made"](1)) == 2
    assert "made" in observer.frames
    observer.instructions.clear()
    observer.exits.clear()
    namespace.clear()
    gc.collect()
    assert code() is None


def test_tracer_in_a_cycle_is_collected() -> None:
    observer = Observer()
    observer.run(work)
    dead = weakref.ref(observer)
    observer.handle = observer.run
    del observer
    gc.collect()
    assert dead() is None


def test_memory_does_not_grow() -> None:
    def body() -> Any:
        out = [*count_to(3), work()]
        abandoned = count_to(2)
        next(abandoned)
        try:
            double(None)  # type: ignore[arg-type]
        except TypeError as error:
            out.append(repr(error))
        return out

    def once() -> None:
        Observer(lambda *args: lambda values: None).run(body)
        Observer(boom).run(body)

    def objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    for _ in range(20):
        once()
    blocks, before = sys.getallocatedblocks(), objects()
    for _ in range(100):
        once()
    after = objects()
    assert after - before < 20
    assert sys.getallocatedblocks() - blocks < 200


def test_collection_during_observation() -> None:
    def collect(state: CodeType, offset: int, inputs: Any) -> Any:
        gc.collect(1)
        return lambda values: gc.collect(0)

    observer = Observer(collect)
    assert observer.run(lambda: [*count_to(2), work()]) == [0, 2, 6]
    assert observer.tracer.error is None
