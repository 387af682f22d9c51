"""What the GPU's words cannot do, known before any shape is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magjit_dvm.cuda.functions import FLOATS, INTS
from magjit_dvm.cuda.long_ranges import NOT_HELD, LongRanges, NotHeld
from magjit_dvm.cuda.words import RUNNING
from magjit_dvm.instructions import DType
from magjit_dvm.program import ROUNDED, Node, NodeKind, Program

__all__ = [
    "FLOATING",
    "NOT_HELD",
    "SMALL",
    "may_be_short",
    "may_be_stored",
    "missing_words",
    "reduction_name",
]

SMALL = 1 << 17
"""Elements that reductions along columns may have; ATen reads more of them better."""
FLOATING = frozenset({DType.F32, DType.F16, DType.BF16})
"""Dtypes that are computed in float registers."""
_MOVES = ("copy", "select")


def missing_words(nodes: Sequence[Node], number: int) -> str:
    """Why the GPU has no words for a node; empty where it may have.

    The encoder has the last word: sizes, for one, decide whether 32 bits hold an int64.
    """
    node = nodes[number]
    if node.dtype is DType.F64:
        return f"no words for {node.kind.name.lower()} of {node.dtype.text}"
    if not _may_be_held(nodes, number):
        return NOT_HELD
    if node.kind not in (NodeKind.COMPUTE, NodeKind.REDUCE, NodeKind.SCAN):
        return ""
    dtype = nodes[node.args[0]].dtype
    if node.kind is NodeKind.SCAN:
        name = f"{'f' if dtype in FLOATING else 'i'}.{node.op}"
        return "" if name in RUNNING else f"no words for {node.op} of {dtype.text}"
    if node.kind is NodeKind.REDUCE:
        return "" if reduction_name(node.op, dtype) else f"no words for {node.op} of {dtype.text}"
    known = FLOATS if dtype in FLOATING else INTS
    return (
        "" if node.op in known or node.op in _MOVES else f"no words for {node.op} of {dtype.text}"
    )


def _may_be_held(nodes: Sequence[Node], number: int) -> bool:
    """Whether 32 bits hold an int64 that words compute with, if all sizes are small.

    The largest of some has to be held exactly: mostly it is a result, and with it a whole group
    would be left to ATen.
    """
    node = nodes[number]
    if DType.I64 not in (node.dtype, *(nodes[arg].dtype for arg in node.args)):
        return True
    try:
        ranges = _of_small_sizes(nodes)
        ranges.check(number)
        return node.kind is not NodeKind.REDUCE or ranges.of(number).exact
    except NotHeld:
        return False


def may_be_stored(nodes: Sequence[Node], number: int, device: torch.device) -> bool:
    """Whether a result may be held exactly where it is computed: a GPU has 32 bits of an int64."""
    if device.type != "cuda" or nodes[number].dtype is not DType.I64:
        return True
    try:
        return _of_small_sizes(nodes).of(number).exact
    except NotHeld:
        return True  # of a float: it is stored as it is computed


def _of_small_sizes(nodes: Sequence[Node]) -> LongRanges:
    def value(n: int) -> int:
        node = nodes[n]
        if node.kind is NodeKind.CAST:
            return value(node.args[0])
        return int(node.number) if node.kind is NodeKind.CONSTANT else 1

    return LongRanges(nodes, value, lambda _: 1)


def reduction_name(op: str, dtype: DType) -> str:
    """The word's name of a reduction of ``dtype``; empty where there is none."""
    if dtype in FLOATING:
        return f"f.{op}" if op in ("sum", "prod", "max", "min") else ""
    return f"i.{op}" if op in ("max", "min", "sum") else ""


_HALVES = (DType.F16, DType.BF16)
_KEEPS_RELATIVE = frozenset(
    (
        "mul",
        "div",
        "neg",
        "abs",
        "relu",
        "maximum",
        "minimum",
        "reciprocal",
        "sqrt",
        "rsqrt",
        "copy",
    )
)
"""What a relative error of an operand is not much more of in the result."""
_LONGEST = 3


def may_be_short(program: Program, n: int) -> bool:
    """Whether 2^-17 of a float32 more or less is nothing: it is rounded to 16 bits, or meant to be.

    Where the program rounds it, eager mode is off by 2^-12 or 2^-9 at the same place.
    """
    return program.nodes[n].aux == ROUNDED or _in_halves(program, n)


def _in_halves(program: Program, n: int, longest: int = _LONGEST) -> bool:
    """Whether all that becomes of a float32 is rounded to 16 bits before any sum or comparison.

    Then 2^-17 of it more or less is nothing beside that rounding.  There are at most ``longest``
    operators between, since each may double an error.
    """
    if any(one.node == n for one in program.outputs):
        return False
    users = [k for k, node in enumerate(program.nodes) if n in node.args]
    return bool(users) and all(_rounded(program, k, longest) for k in users)


def _rounded(program: Program, user: int, longest: int) -> bool:
    node = program.nodes[user]
    if node.kind is NodeKind.CAST:
        return node.dtype in _HALVES
    keeps = node.kind is NodeKind.BROADCAST or node.op in _KEEPS_RELATIVE
    return (
        keeps and node.dtype is DType.F32 and longest > 0 and _in_halves(program, user, longest - 1)
    )
