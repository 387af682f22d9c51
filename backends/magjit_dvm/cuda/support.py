"""What the GPU's words cannot do, known before any shape is."""

from __future__ import annotations

from collections.abc import Sequence

from magjit_dvm.cuda.functions import FLOATS, INTS
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind

__all__ = ["FLOATING", "missing_words", "reduction_name"]

FLOATING = frozenset({DType.F32, DType.F16, DType.BF16})
"""Dtypes that are computed in float registers."""
_NEVER = frozenset({NodeKind.IOTA, NodeKind.INDEX, NodeKind.SCAN})
_MOVES = ("copy", "select")


def missing_words(nodes: Sequence[Node], number: int) -> str:
    """Why the GPU has no words for a node; empty where it may have.

    The encoder has the last word: int64, for one, is loaded and cast, or cast to and stored.
    """
    node = nodes[number]
    if node.kind in _NEVER or node.dtype is DType.F64:
        return f"no words for {node.kind.name.lower()} of {node.dtype.text}"
    if node.kind not in (NodeKind.COMPUTE, NodeKind.REDUCE):
        return ""
    dtype = nodes[node.args[0]].dtype
    if DType.I64 in (dtype, node.dtype):
        return f"no words for {node.op} of i64"
    if node.kind is NodeKind.REDUCE:
        return "" if reduction_name(node.op, dtype) else f"no words for {node.op} of {dtype.text}"
    known = FLOATS if dtype in FLOATING else INTS
    return (
        "" if node.op in known or node.op in _MOVES else f"no words for {node.op} of {dtype.text}"
    )


def reduction_name(op: str, dtype: DType) -> str:
    """The word's name of a reduction of ``dtype``; empty where there is none."""
    if dtype in FLOATING:
        return f"f.{op}" if op in ("sum", "prod", "max", "min") else ""
    return f"i.{op}" if op in ("max", "min") else ""
