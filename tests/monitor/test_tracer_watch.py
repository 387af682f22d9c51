"""Watched objects: every instruction that uses one is reported, and nothing else is added."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from magjit import _C
from magjit.bytecode import EventKind, decode, plan_for
from magjit.monitor.reference import ReferenceTracer

TRIVIAL = frozenset({int, float, bool, str, type(None), tuple})


def observed(make: Any, body: Callable[[Any], Any], watched: Any, argument: Any) -> list[str]:
    """Names of the instructions of ``body`` that made an event of a filtered kind."""
    found: list[str] = []

    def handle(code: CodeType, offset: int, inputs: tuple[Any, ...]) -> None:
        found.append(decode(code).instrs[offset].opname)

    kinds = {EventKind.READ, EventKind.BINARY_OP, EventKind.INPLACE, EventKind.HOLD}
    tracer = make(
        [None, *(handle if kind in kinds else None for kind in EventKind)],
        lambda function, code, *rest: code if code is body.__code__ else False,
        lambda state, value: None,
        TRIVIAL,
        plan_for,
    )
    tracer.start()
    try:
        tracer.watch(watched)
        body(argument)
    finally:
        tracer.stop()
    assert tracer.error is None
    return found


def program(n: Any) -> Any:
    other = 1000 + len("ab")
    total = n + other
    other += 1
    pair = (n, other)
    strangers = [other, other]
    if n > 3:
        strangers = {"key": n}
    return [m for m in (1, n)], pair, strangers, total, -other


@pytest.mark.parametrize("make", [_C.Tracer, ReferenceTracer])
def test_what_uses_it_is_reported(make: Any) -> None:
    n = 12345
    found = observed(make, program, n, n)
    assert [name for name in found if name.startswith(("BINARY", "COMPARE"))] == [
        "BINARY_OP",
        "COMPARE_OP",
    ]
    assert found.count("BUILD_TUPLE") >= 1 and "BUILD_LIST" not in found[: found.index("BUILD_MAP")]


@pytest.mark.parametrize("make", [_C.Tracer, ReferenceTracer])
def test_others_are_not(make: Any) -> None:
    others = [object() for _ in range(5)]  # one may have the hash of an object of the program
    assert [] in [observed(make, program, other, 12345) for other in others]


def test_a_second_run_watches_nothing() -> None:
    """A tracer that is started again has forgotten what it watched."""
    n, seen = 54321, []
    tracer = _C.Tracer(
        [None, *(lambda *event: seen.append(event) for _ in EventKind)],
        lambda function, code, *rest: code if code is program.__code__ else False,
        lambda state, value: None,
        TRIVIAL | {list, dict, type(len), type(iter(())), range},
        plan_for,
    )
    counts = []
    for watch in (True, False):
        seen.clear()
        tracer.start()
        if watch:
            tracer.watch(n)
        program(n)
        tracer.stop()
        counts.append(len(seen))
    assert counts[1] < counts[0]


@pytest.mark.parametrize(
    "value", [0, 1, -1, 7, 256, 257, -(2**31), 2**62, -(2**90), 0.0, -0.0, 1.5]
)
def test_fresh_number(value: Any) -> None:
    fresh = _C.fresh_number(value)
    assert fresh is not value and fresh is not _C.fresh_number(value)
    assert type(fresh) is type(value) and repr(fresh) == repr(value) and hash(fresh) == hash(value)
    assert fresh == value and fresh + 1 == value + 1 and {value: "found"}[fresh] == "found"
    assert [10, 20][_C.fresh_number(1)] == 20 and list(range(_C.fresh_number(2))) == [0, 1]


@pytest.mark.parametrize("value", ["0", "a", "é", "no", "αβ", "\U0001f600", "x" * 1000])
def test_fresh_text(value: str) -> None:
    fresh = _C.fresh_number(value)
    assert fresh == value and fresh is not value and hash(fresh) == hash(value)
    assert {value: 1}[fresh] == 1 and fresh.encode() == value.encode()
    assert fresh.isascii() == value.isascii() and fresh + "!" == value + "!"


@pytest.mark.parametrize("value", [True, "", b"1", None, 1j])
def test_fresh_number_of_another_type(value: Any) -> None:
    with pytest.raises(TypeError, match="expected an int, a float or a text"):
        _C.fresh_number(value)
