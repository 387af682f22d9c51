"""The tracer in C and the reference in Python report the same events for the same program."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from magjit import _C
from magjit.bytecode import EventKind, decode, plan_for
from magjit.monitor.reference import ReferenceTracer
from tests.monitor import programs
from tests.monitor.programs import PROGRAMS

NO_TYPES: frozenset[type] = frozenset()
SIMPLE_TYPES = frozenset({int, float, str, bool, type(None), bytes})


def summary(value: Any) -> str:
    if value is _C.NULL:
        return "NULL"
    if type(value) in SIMPLE_TYPES:
        return repr(value)
    if type(value).__name__ in ("function", "builtin_function_or_method", "type"):
        return str(value.__name__)
    return type(value).__name__


class Log:
    """Handlers that write down all they are told; verdict and result say what they answer."""

    def __init__(
        self,
        verdict: Callable[[CodeType], Any],
        result: Callable[[EventKind, tuple[Any, ...], Any], Any],
    ) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.verdict = verdict
        self.result = result

    def on_frame(self, function: Any, code: CodeType, *rest: Any) -> Any:
        assert function.__code__ is code
        global_names, _, fast_locals = rest
        assert function.__globals__ is global_names
        answer = self.verdict(code)
        if answer is True:
            answer = code
        if own(code):
            self.events.append(("frame", code.co_name, [summary(value) for value in fast_locals]))
        return answer

    def on_exit(self, state: CodeType, value: Any) -> None:
        self.events.append(("exit", state.co_name, summary(value)))

    def handler(self, kind: EventKind) -> Callable[[CodeType, int, tuple[Any, ...]], Any]:
        def handle(state: CodeType, offset: int, inputs: tuple[Any, ...]) -> Any:
            instr = decode(state).instrs[offset]
            seen = [summary(value) for value in inputs]
            self.events.append((kind.name, state.co_name, offset, instr.opname, seen))

            def post(values: tuple[Any, ...]) -> None:
                self.events.append(("post", offset, [summary(value) for value in values]))

            return self.result(kind, inputs, post)

        return handle

    def tracer(self, cls: Any, trivial: frozenset[type]) -> Any:
        handlers = [None, *(self.handler(kind) for kind in EventKind)]
        return cls(handlers, self.on_frame, self.on_exit, trivial, plan_for)


def own(code: CodeType) -> bool:
    """Code of the programs; what the library runs depends on addresses."""
    return code.co_filename in (programs.__file__, "<string>")


VERDICTS: dict[str, Callable[[CodeType], Any]] = {
    "everything": lambda code: own(code) or None,
    "opaque": lambda code: None if code.co_name in ("shifted", "numbers", "add") else own(code),
    "callees": lambda code: own(code) and code.co_name not in ("shifted", "numbers", "failing"),
    "always": lambda code: _C.SKIP_ALWAYS if code.co_name in ("fib", "__init__") else own(code),
}

RESULTS: dict[str, Callable[[EventKind, tuple[Any, ...], Any], Any]] = {
    "posts": lambda kind, inputs, post: post,
    "nothing": lambda kind, inputs, post: None,
    "opaque calls": lambda kind, inputs, post: (
        (_C.OPAQUE, post)
        if kind in (EventKind.CALL, EventKind.FOR_ITER) and "e" in summary(inputs[0])
        else None
    ),
    "opaque": lambda kind, inputs, post: _C.OPAQUE if kind != EventKind.CALL else None,
}


def observe(cls: Any, log: Log, trivial: frozenset[type], body: Callable[[], Any]) -> Any:
    tracer = log.tracer(cls, trivial)
    tracer.start()
    try:
        result = body()
    finally:
        tracer.stop()
    if tracer.error is not None:
        raise tracer.error
    return result


@pytest.mark.parametrize(
    ("verdict", "result", "trivial"),
    [
        ("everything", "posts", NO_TYPES),
        ("everything", "nothing", SIMPLE_TYPES),
        ("opaque", "posts", SIMPLE_TYPES),
        ("callees", "posts", SIMPLE_TYPES),
        ("always", "posts", SIMPLE_TYPES),
        ("everything", "opaque calls", SIMPLE_TYPES),
        ("everything", "opaque", NO_TYPES),
    ],
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_same_events(name: str, verdict: str, result: str, trivial: frozenset[type]) -> None:
    body = PROGRAMS[name]
    expected = repr(body())
    logs = []
    for cls in (ReferenceTracer, _C.Tracer):
        log = Log(VERDICTS[verdict], RESULTS[result])
        assert repr(observe(cls, log, trivial, body)) == expected
        logs.append(log.events)
    assert len(logs[0]) > 0
    for reference, actual in zip(*logs):
        assert actual == reference
    assert len(logs[0]) == len(logs[1])
    assert repr(body()) == expected
