"""A function resumed at any instruction gives what the function gives that runs through."""

from __future__ import annotations

import dis
import gc
import re
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import pytest

from magjit import _C
from magjit.bytecode import decode
from magjit.bytecode.splice import (
    ResumePoint,
    SpliceError,
    obstacle,
    resume_arguments,
    resume_code,
    resume_function,
)
from tests.monitor import programs
from tests.monitor.programs import PROGRAMS

LEGACY = sys.version_info < (3, 12)


class Stop(BaseException):
    """Ends a run after its rest was tried."""


def each_instruction(body: Callable[[], Any], visit: Callable[[types.FrameType, int], None]) -> Any:
    """Runs body and visits every instruction of the frames whose code is of the programs' file."""
    files = (programs.__file__, "<string>", __file__)

    def trace(frame: types.FrameType, what: str, value: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if what == "opcode":
            visit(frame, after_prefixes(frame.f_code, frame.f_lasti))
        return trace

    def on_start(code: types.CodeType, offset: int) -> None:
        if code.co_filename in files and code not in watched:
            watched.append(code)
            monitoring.set_local_events(tool, code, events.INSTRUCTION)

    def on_instruction(code: types.CodeType, offset: int) -> None:
        if after_prefixes(code, offset) == offset:
            visit(sys._getframe(1), offset)

    if LEGACY:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return body()
        finally:
            sys.settrace(before)
    monitoring: Any = sys.__dict__["monitoring"]
    events, tool = monitoring.events, 3
    watched: list[types.CodeType] = []
    monitoring.use_tool_id(tool, "splice")
    monitoring.register_callback(tool, events.PY_START, on_start)
    monitoring.register_callback(tool, events.INSTRUCTION, on_instruction)
    monitoring.set_events(tool, events.PY_START)
    try:
        return body()
    finally:
        for code in watched:
            monitoring.set_local_events(tool, code, 0)
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, events.PY_START, None)
        monitoring.register_callback(tool, events.INSTRUCTION, None)
        monitoring.free_tool_id(tool)


def after_prefixes(code: types.CodeType, offset: int) -> int:
    """The offset of the instruction that begins, with its prefixes, at an offset."""
    while dis.opname[code.co_code[offset]] == "EXTENDED_ARG":
        offset += 2
    return offset


def outcome(function: Callable[..., Any], *args: Any) -> str:
    """What a call gives, as a text without addresses."""
    try:
        text = repr(function(*args))
    except Exception as error:
        text = f"raises {error!r}"
    return re.sub("0x[0-9a-f]+", "0x", text)


def rest_of(frame: types.FrameType, offset: int) -> str:
    """What the rest of the frame gives, executed by a resume function."""
    code = frame.f_code
    fast_locals = _C.localsplus(frame)
    stack = _C.stack(frame, decode(code).depths.before[offset // 2])
    resumed = resume_code(code, ResumePoint.of(offset, fast_locals, stack))
    function = resume_function(_C.function(frame), resumed, fast_locals)
    return outcome(function, *resume_arguments(code, fast_locals, stack))


def reached(body: Callable[[], Any]) -> tuple[list[tuple[types.CodeType, int]], dict[Any, str]]:
    """Every (code, offset) that body reaches, and what the first frame of each code gives."""
    places: dict[tuple[types.CodeType, int], None] = {}
    first: dict[types.CodeType, types.FrameType] = {}
    results: dict[types.CodeType, str] = {}

    def visit(frame: types.FrameType, offset: int) -> None:
        code = frame.f_code
        if first.setdefault(code, frame) is frame and obstacle(code, offset) is None:
            if code not in results:
                results[code] = rest_of(frame, offset)
                raise Stop
            places[code, offset] = None

    known = -1
    while known < len(results):
        known = len(results)
        first.clear()
        places.clear()
        programs.counter = 5
        try:
            each_instruction(body, visit)
        except (Stop, Exception):  # what a program makes of Stop is its own affair
            pass
    return list(places), results


# an event loop that is given up in its middle leaves its files open
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "event_loop"])
def test_resume_anywhere(name: str) -> None:
    body = PROGRAMS[name]
    programs.counter = 5
    expected = repr(body())
    places, results = reached(body)
    if body.__code__ in results:
        assert results[body.__code__] == expected
    for place in places if len(places) < 1000 else places[::97]:
        answers: list[str] = []
        first: list[types.FrameType] = []

        def visit(
            frame: types.FrameType,
            offset: int,
            place: Any = place,
            first: Any = first,
            answers: Any = answers,
        ) -> None:
            if frame.f_code == place[0] and not first:
                first.append(frame)
            if (frame.f_code, offset) == place and first[0] is frame and not answers:
                answers.append(rest_of(frame, offset))
                raise Stop

        programs.counter = 5
        try:
            each_instruction(body, visit)
        except (Stop, Exception):  # what a program makes of Stop is its own affair
            pass
        assert answers[:1] == [results[place[0]]], decode(place[0]).instrs[place[1]]
    programs.counter = 5
    assert repr(body()) == expected


def place_of(code: types.CodeType, opname: str, number: int = 0) -> int:
    found = [instr.offset for instr in decode(code).instrs.values() if instr.opname == opname]
    return found[number]


def resume(function: Any, offset: int, fast_locals: list[Any], stack: list[Any]) -> Any:
    code = resume_code(function.__code__, ResumePoint.of(offset, fast_locals, stack))
    resumed = resume_function(function, code, fast_locals)
    return resumed, resumed(*resume_arguments(function.__code__, fast_locals, stack))


def test_example() -> None:
    def body(a: int, b: int) -> int:
        return a * 10 + b

    offset = place_of(body.__code__, "BINARY_OP", 1)
    resumed, result = resume(body, offset, [_C.NULL, 3], [50, 7])
    assert result == 57
    code = resumed.__code__
    assert code.co_varnames == ("a", "b", ".stack0", ".stack1")
    assert code.co_argcount == 4 and code.co_name == "body"
    assert code.co_filename == body.__code__.co_filename


def test_unbound_local_stays_unbound() -> None:
    def body(flag: bool) -> Any:
        if flag:
            value = 1
        return value

    offset = decode(body.__code__).raw[1].unit * 2
    point = ResumePoint.of(offset, [False, _C.NULL], [])
    code = resume_code(body.__code__, point)
    function = resume_function(body, code, [False, _C.NULL])
    with pytest.raises(UnboundLocalError):
        function(*resume_arguments(body.__code__, [False, _C.NULL], []))
    assert function(True, None) == 1


def test_cells_are_shared() -> None:
    def body(argument: int) -> Any:
        local = 1

        def increase() -> int:
            nonlocal argument, local
            argument += 1
            local += 1
            return argument * 100 + local

        increase()
        return increase, argument, local

    argument, local = types.CellType(5), types.CellType(7)
    closure = body(1)[0]
    made = types.FunctionType(closure.__code__, globals(), "increase", None, (argument, local))
    code = body.__code__
    after = decode(code).raw
    pop = next(i for i, raw in enumerate(after) if raw.opname == "POP_TOP")
    offset = 2 * after[pop + 1].unit
    names = list(code.co_varnames)
    fast_locals = [argument if name == "argument" else made for name in names] + [local]
    _, result = resume(body, offset, fast_locals, [])
    assert result == (made, 5, 7)
    assert made() == 608 and argument.cell_contents == 6


def test_lines_in_tracebacks() -> None:
    def body(a: int) -> float:
        b = a - 1
        c = 1 / b
        return c

    offset = place_of(body.__code__, "BINARY_OP", 1)
    point = ResumePoint.of(offset, [1, 0, _C.NULL], [1, 0])
    code = resume_code(body.__code__, point)
    function = resume_function(body, code, [1, 0, _C.NULL])
    with pytest.raises(ZeroDivisionError) as caught:
        function(*resume_arguments(body.__code__, [1, 0, _C.NULL], [1, 0]))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.name, last.lineno) == ("body", body.__code__.co_firstlineno + 2)


def test_exceptions_are_caught_after_resuming() -> None:
    def body(a: Any) -> Any:
        try:
            with programs.Manager(True) as log:
                a.append(1 // 0)
        except ZeroDivisionError:
            return "not swallowed"
        finally:
            a.append("finally")
        return log

    items: list[Any] = []
    places, results = reached(lambda: body(items))
    assert results[body.__code__] == "['enter', 'ZeroDivisionError']"
    assert len(places) > 10


def test_many_stack_values_and_locals() -> None:
    names = ", ".join(f"a{i}" for i in range(260))
    source = f"def body({names}):\n    return [{names}, len(a0), a259]"
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    body = namespace["body"]
    values: list[Any] = [*range(260)]
    values[0] = "abc"
    offset = place_of(body.__code__, "CALL")
    call = [len, _C.NULL] if sys.version_info >= (3, 13) else [_C.NULL, len]
    stack = [list(values), *call, "abc"]
    _, result = resume(body, offset, values, stack)
    assert result == [*values, 3, 259]


def refusals() -> list[tuple[Any, int, str]]:
    def generator() -> Any:
        yield 1

    async def coroutine() -> None:
        pass

    def handler() -> int:
        try:
            return int("1")
        except ValueError:
            return 2

    def keywords() -> None:
        handler(a=1)  # type: ignore[call-arg]

    def simple() -> int:
        return 1

    in_handler = place_of(handler.__code__, "CHECK_EXC_MATCH")
    found = [
        (generator.__code__, place_of(generator.__code__, "YIELD_VALUE"), "generator"),
        (coroutine.__code__, 4, "coroutine"),
        (handler.__code__, in_handler, "being handled"),
        (simple.__code__, 0, "not started"),
        (simple.__code__, 1, "no instruction"),
        (simple.__code__, 3000, "no instruction"),
        (compile("a = 1", "module", "exec"), 2, "not the code of a function"),
    ]
    if sys.version_info < (3, 13):
        found.append((keywords.__code__, place_of(keywords.__code__, "CALL"), "keyword names"))
    return found


@pytest.mark.parametrize(("code", "offset", "reason"), refusals())
def test_refusals(code: types.CodeType, offset: int, reason: str) -> None:
    assert reason in (obstacle(code, offset) or "")
    with pytest.raises(SpliceError, match=reason):
        resume_code(code, ResumePoint(offset, frozenset(), frozenset(), 0))


def test_wrong_depth_is_refused() -> None:
    code = place_of.__code__
    offset = place_of(code, "STORE_FAST")
    with pytest.raises(SpliceError, match="values"):
        resume_code(code, ResumePoint(offset, frozenset(), frozenset(), 40))


def test_nothing_is_kept() -> None:
    def body(a: Any) -> Any:
        return [a, a]

    token = object()
    before = sys.getrefcount(token)
    offset = place_of(body.__code__, "BUILD_LIST")
    for _ in range(20):
        _, result = resume(body, offset, [token], [token, token])
        assert result == [token, token]
    del result
    gc.collect()
    assert sys.getrefcount(token) == before
