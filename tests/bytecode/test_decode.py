"""The decoder agrees with dis, and forgets code objects that died."""

from __future__ import annotations

import dis
import gc
import importlib
import sys
from types import CodeType
from typing import Any

import pytest

from magjit.bytecode import decode, fast_local_names, stored_attributes
from magjit.bytecode.optable import EventKind
from tests.bytecode.functions import MODULES, module_codes

HIDDEN = ("EXTENDED_ARG", "CACHE")


def reference(code: CodeType) -> list[dis.Instruction]:
    return [instr for instr in dis.get_instructions(code) if instr.opname not in HIDDEN]


@pytest.mark.parametrize("name", MODULES)
def test_agrees_with_dis(name: str) -> None:
    for code in module_codes(name):
        info = decode(code)
        expected = reference(code)
        assert [instr.offset for instr in expected] == list(info.instrs)
        lines = {start: line for start, _, line in code.co_lines()}
        assert lines
        for theirs in expected:
            ours = info.instrs[theirs.offset]
            assert ours.opname == theirs.opname
            assert ours.arg == (theirs.arg or 0)
            if ours.opname == "COMPARE_OP":
                assert ours.argval in theirs.argrepr
            elif ours.opname == "BINARY_OP":
                assert ours.argval == theirs.argrepr
            elif ours.opname in ("KW_NAMES", "IS_OP", "CONTAINS_OP", "FORMAT_VALUE"):
                pass  # dis gives no value, or one for people
            elif theirs.opcode in dis.hasjrel or theirs.opcode in dis.hasjabs:
                assert ours.argval == theirs.argval
            elif theirs.opcode in (*dis.hasname, *dis.hasconst, *dis.haslocal, *dis.hasfree):
                assert ours.argval == theirs.argval


def test_lines() -> None:
    def body(a: int) -> int:
        b = a + 1
        return (
            b
            *
            a
        )  # fmt: skip

    first = body.__code__.co_firstlineno
    lines = {instr.opname: instr.line for instr in decode(body.__code__).instrs.values()}
    assert lines["STORE_FAST"] == first + 1
    assert lines["RETURN_VALUE"] == first + 2


def test_keyword_names() -> None:
    def body(f: object) -> None:
        f(1, a=2, b=3)  # type: ignore[operator]
        f(1)  # type: ignore[operator]

    calls = [i for i in decode(body.__code__).instrs.values() if i.opname in ("CALL", "CALL_KW")]
    assert [call.kwnames for call in calls] == [("a", "b"), ()]


def test_loads_and_stores() -> None:
    free = 1

    def body(argument: int, unused: int) -> object:
        nonlocal free
        stored = argument
        cell = 2
        free = 3
        del stored
        return lambda: cell + free

    info = decode(body.__code__)
    assert "argument" in info.loads and "unused" not in info.loads
    assert {"stored", "cell", "free"} <= info.stores
    assert "stored" not in info.loads
    names = fast_local_names(body.__code__)
    assert names == ("argument", "unused", "stored", "cell", "free")


def test_plan_has_a_record_for_every_instruction() -> None:
    info = decode(reference.__code__)
    for raw in info.raw:
        unit = info.plan.unit(raw.unit)
        assert unit.depth == info.depths.before[raw.unit]
        if unit.kind:
            assert unit.home == raw.unit
            assert EventKind(unit.kind & 0x7F)
            assert unit.next == raw.end or info.raw[-1] is raw or "RESUME" in str(info)


def test_cached_by_identity() -> None:
    source = "def f():\n    return 1"
    codes = [compile(source, "f", "exec") for _ in range(2)]
    assert codes[0] == codes[1]
    assert decode(codes[0]) is decode(codes[0])
    assert decode(codes[0]) is not decode(codes[1])


def test_forgets_dead_code() -> None:
    cache = importlib.import_module("magjit.bytecode.decode")._cache
    code = compile("a = 1", "gone", "exec")
    decode(code)
    key = id(code)
    assert key in cache
    del code
    gc.collect()
    assert key not in cache


def test_decoding_adds_no_reference_to_code() -> None:
    code = compile("a = 1", "counted", "exec")
    before = sys.getrefcount(code)
    decode(code)
    assert sys.getrefcount(code) == before


def test_stored_attributes() -> None:
    """The same as the decoder finds, also behind prefixes."""
    source = "def f(x):\n" + "".join(f"    x.a{i}\n" for i in range(300))
    source += "    x.late = 1\n    x.other.late_too += 1\n    del x.gone\n    x.a1 = x.a2\n"
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    code = namespace["f"].__code__
    found = {i.argval for i in decode(code).instrs.values() if i.opname == "STORE_ATTR"}
    assert stored_attributes(code) == found == {"late", "late_too", "a1"}
