"""Every opcode of the running interpreter is in the table: with an event, or without and why."""

from __future__ import annotations

import dis
import re
from pathlib import Path

import pytest

from magjit import _C
from magjit.bytecode import decode, optable
from magjit.bytecode.optable import EventKind, Give, Op, Read


@pytest.mark.parametrize("name", dis.opmap)
def test_every_opcode_is_known(name: str) -> None:
    for arg in range(30):
        op = optable.op_for(name, arg)
        assert (op.kind is None) == bool(op.reason), name
        assert optable.count(op.inputs, arg) >= 0
        assert optable.count(op.posts, arg) >= 0


def test_unknown_names_raise() -> None:
    with pytest.raises(KeyError):
        optable.op_for("NO_SUCH_OPCODE", 0)


def test_every_kind_is_used() -> None:
    """Over all versions; a kind that nothing makes would be a handler that never runs."""
    kinds = {
        op.kind
        for row in optable.TABLE.values()
        for arg in range(30)
        for op in [row if isinstance(row, Op) else row(arg)]
    }
    assert kinds - {None} == set(EventKind)


@pytest.mark.parametrize("name", sorted(set(dis.opmap) & set(optable.TABLE)))
def test_effects_agree_with_inputs_and_posts(name: str) -> None:
    """An instruction takes its inputs off the stack and leaves its posts there, or says why not."""
    keeps = {
        *("JUMP_IF_FALSE_OR_POP", "JUMP_IF_TRUE_OR_POP"),  # the value stays where it jumps
        *("GET_LEN", "MATCH_MAPPING", "MATCH_SEQUENCE", "MATCH_KEYS"),  # the subject stays
        *(
            "CHECK_EXC_MATCH",
            "IMPORT_FROM",
            "WITH_EXCEPT_START",
            "FOR_ITER",
            "SEND",
        ),  # operands stay
        *optable.FILLING,  # the container stays, and what lies above it
        *("MAKE_FUNCTION", "GET_ANEXT", "GET_AWAITABLE", "GET_AITER", "PRINT_EXPR"),
        *("BEFORE_ASYNC_WITH", "END_ASYNC_FOR", "SETUP_ANNOTATIONS", "IMPORT_STAR"),
        *("LOAD_METHOD", "YIELD_VALUE", "LOAD_FROM_DICT_OR_DEREF"),
    }
    opcode = dis.opmap[name]
    if opcode > 255 or name in keeps:
        return
    for arg in range(1, 12) if opcode >= dis.HAVE_ARGUMENT else [0]:
        op = optable.op_for(name, arg)
        if op.kind is None or op.kind is EventKind.OTHER:
            continue
        try:
            effect = optable.stack_effect(opcode, name, arg, False)
        except ValueError:  # no such argument
            continue
        posts = optable.count(op.posts, arg)
        if name == "LOAD_GLOBAL":
            posts += arg & 1  # a NULL, which is not a result
        if name == "CHECK_EG_MATCH":
            posts += 1  # the rest of the group, below the match
        assert effect == posts - optable.count(op.inputs, arg), (name, arg)


def test_numbers_agree_with_the_c_header() -> None:
    header = Path(optable.__file__).parent.parent / "csrc" / "tracer.h"
    if not header.exists():
        pytest.skip("installed without sources")
    text = header.read_text()
    for prefix, members in (("INPUT_", Read), ("POST_", Give)):
        declared = {
            name: int(value, 0) for name, value in re.findall(rf"{prefix}(\w+) = (\w+),", text)
        }
        assert declared == {member.name: member.value for member in members}
    assert f"MJ_FILTER 0x{decode_module().FILTER_BIT:X}" in text
    assert f"MJ_QUIET {decode_module().QUIET}" in text
    assert decode_module().UNIT_LAYOUT.size == _C.UNIT_SIZE


def decode_module() -> object:
    import importlib

    return importlib.import_module("magjit.bytecode.decode")


def test_table_prints_as_a_listing() -> None:
    def sample(a: list[int]) -> int:
        return a[0] + len(a)

    text = str(decode(sample.__code__))
    assert "BINARY_SUBSCR" in text and "LOAD_SUBSCR" in text and "'len'" in text
