"""Static depths agree with themselves on real code, and on 3.11 with the interpreter's own."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from magjit import _C
from magjit.bytecode import decode
from magjit.bytecode.depths import UNREACHABLE, DepthError, depths, exception_table
from tests.bytecode.functions import MODULES, module_codes
from tests.monitor.programs import PROGRAMS


@pytest.mark.parametrize("name", MODULES)
def test_depths_of_real_code(name: str) -> None:
    for code in module_codes(name):
        info = decode(code)
        before = info.depths.before
        reached = [depth for depth in before if depth != UNREACHABLE]
        assert max(reached) <= code.co_stacksize
        assert min(reached) >= 0
        for row in exception_table(code):
            assert row.depth + row.lasti + 1 <= code.co_stacksize
            for unit in range(row.start, row.end):
                if before[unit] != UNREACHABLE:
                    assert before[unit] >= row.depth
        for raw in info.raw:
            instr = info.instrs[2 * raw.unit]
            if instr.opname in ("RETURN_VALUE", "RERAISE") and before[raw.unit] != UNREACHABLE:
                assert before[raw.unit] >= 1


def test_handlers_are_known() -> None:
    def body(a: int) -> int:
        try:
            a = 1 // a
        except ZeroDivisionError:
            a = 2
        return a

    info = decode(body.__code__)
    handling = {info.instrs[2 * unit].opname for unit in info.depths.handling}
    assert {"PUSH_EXC_INFO", "CHECK_EXC_MATCH", "POP_EXCEPT"} <= handling
    last_return = max(raw.unit for raw in info.raw if raw.opname.startswith("RETURN"))
    first = info.raw[0].unit
    assert first not in info.depths.handling
    assert last_return not in info.depths.handling or sys.version_info >= (3, 12)


def test_disagreement_raises() -> None:
    def body(a: int) -> int:
        return a if a else 1

    info = decode(body.__code__)
    returns = next(raw for raw in info.raw if raw.opname == "RETURN_VALUE")
    raws = [
        raw._replace(target=returns.unit) if "IF_FALSE" in raw.opname else raw for raw in info.raw
    ]
    with pytest.raises(DepthError, match="body"):
        depths(body.__code__, raws)


class Checker:
    """A trace function that compares the static depth with the interpreter's at every opcode."""

    def __init__(self) -> None:
        self.checked = 0
        self.wrong: list[str] = []

    def __call__(self, frame: types.FrameType, what: str, value: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if what == "opcode":
            unit = frame.f_lasti // 2
            static = decode(frame.f_code).depths.before[unit]
            real = len(_C.stack(frame))
            self.checked += 1
            if static != real:
                self.wrong.append(f"{frame.f_code.co_qualname} {2 * unit}: {static}, not {real}")
        return self


def library_work() -> Any:
    import argparse
    import collections
    import dataclasses
    import enum
    import inspect
    import json
    import re
    import statistics
    import string
    import textwrap
    from urllib import parse

    parser = argparse.ArgumentParser()
    parser.add_argument("--flag", type=int, default=3)
    made = dataclasses.make_dataclass("Made", ["x", ("y", int, 5)])
    return (
        parser.parse_args(["--flag", "4"]),
        json.dumps(json.loads('{"a": [1, 2.5, null]}'), indent=1),
        re.compile(r"(a|b)+?[c-f]\d{2,3}(?P<n>x)").pattern,
        statistics.stdev([1, 2, 3.5]),
        string.Template("$a b").substitute(a=1),
        textwrap.fill("some words to wrap " * 4, 30),
        collections.namedtuple("N", "a b")(1, 2),
        made(1) == made(1),
        enum.Enum("E", "one two").two,
        inspect.signature(library_work),
        parse.urlparse("http://a.b/c?d=e#f"),
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="3.12 does not show the stack pointer")
@pytest.mark.parametrize(
    "body", [*PROGRAMS.values(), library_work], ids=[*PROGRAMS, "library_work"]
)
def test_depths_at_run_time(body: Callable[[], Any]) -> None:
    checker = Checker()
    before = sys.gettrace()
    sys.settrace(checker)
    try:
        body()
    finally:
        sys.settrace(before)
    assert checker.checked > 5
    assert checker.wrong == []
