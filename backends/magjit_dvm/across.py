"""Sums across rows: on a GPU, gradients of weights join the group that has what they are sums of.

A program reduces along its columns, row by row.  A sum across all rows is another kind of result:
each block of threads adds up what it comes by, and a second kernel adds up the blocks' parts
(``cuda/sums.py``).  Nothing computes with it in its group, since it is not there before the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit_dvm.builder import Builder, NotFusable, Value, size_key
from magjit_dvm.groups import CASTS, VIEWS
from magjit_dvm.instructions import DType
from magjit_dvm.program import ACROSS, ONE, Node, NodeKind, across

__all__ = [
    "check_unused",
    "come_by_four",
    "has_room",
    "has_room_alone",
    "may_go_across",
    "sum_across",
]

aten = torch.ops.aten

_FEWEST = 256
"""Columns; of fewer, most lanes would have nothing to do.  They come by four."""
_COLUMN = 28
"""Bytes of shared memory that a column may take: two float32 of two stages, three of sums."""
_ALONE = 14
"""The same of sums in registers: two of 16 bits of two stages, a weight, and 2 of all else."""
_SHARED = 232448
"""Bytes that a block may have on sm_90, for which programs are made where there is no GPU."""
_SUMMED = (torch.float32, torch.float16, torch.bfloat16)


def may_go_across(node: FxNode) -> bool:
    """Whether an operator is a sum across rows.

    It goes over the first dimensions, in float32, on a GPU, and what becomes of it is no larger.
    """
    if node.target is not aten.sum.dim_IntList:
        return False
    given, made = node.args[0], node.meta["val"]
    if made.device.type != "cuda" or made.dtype not in _SUMMED or not isinstance(given, FxNode):
        return False
    sizes = [size_key(size) for size in given.meta["val"].shape]
    axes: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if not isinstance(axes, (list, tuple)) or not sizes:
        return False
    over = sorted(axis % len(sizes) for axis in axes)
    if over != list(range(len(over))) or not 0 < len(over) < len(sizes):
        return False
    rows, columns = sizes[: len(over)], sizes[len(over) :]
    if all(size == 1 for size in rows) or columns[-1] == 1:
        return False
    return has_room(columns) and _stays_small(node)


def has_room(columns: Sequence[Any]) -> bool:
    """Whether a block keeps sums of rows of these sizes, as far as they are known."""
    count = _count(columns)
    return count is None or (_FEWEST <= count <= _most() and come_by_four(columns))


def has_room_alone(columns: Sequence[Any]) -> bool:
    """The same of rows of 16 bits whose sums are in registers, beside nothing else; all known."""
    count = _count(columns)
    return count is not None and _FEWEST <= count <= _most(_ALONE) and come_by_four(columns)


def come_by_four(columns: Sequence[Any]) -> bool:
    """Whether columns of these sizes do, as far as they are known."""
    count = _count(columns)
    return count is None or count % 4 == 0


def _count(columns: Sequence[Any]) -> int | None:
    known = [size for size in columns if isinstance(size, int)]
    return math.prod(known) if len(known) == len(columns) else None


@cache
def _most(of_column: int = _COLUMN) -> int:
    if not torch.cuda.is_available():
        return _SHARED // of_column
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "shared_memory_per_block_optin", _SHARED)) // of_column


def _stays_small(node: FxNode) -> bool:
    """Whether operators that take a result make others of the same number of elements."""
    count = _elements(node)
    for user in node.users:
        if user.op == "output":
            continue
        if _elements(user) != count:
            return False
        if (user.target in VIEWS or user.target in CASTS) and not _stays_small(user):
            return False
    return True


def _elements(node: FxNode) -> Any:
    made = node.meta.get("val")
    return size_key(made.numel()) if isinstance(made, torch.Tensor) else None


def sum_across(builder: Builder, value: Value, axes: Iterable[int], keepdim: bool) -> Value:
    """The sum of ``value`` over all rows, in float32; ``axes`` are its first dimensions.

    Raises:
        NotFusable: the group's rows are others.
    """
    over, rank = sorted(axes), len(value.dims)
    rows = frozenset(value.dims[a] for a in over if value.dims[a] != ONE)
    columns = frozenset(value.dims) - {ONE} - rows
    if not rows | columns <= builder.varies[value.node]:
        raise NotFusable("a sum across rows that are expanded")
    if builder.reduced not in (None, columns):
        raise NotFusable("the group reduces other dimensions")
    builder.reduced = columns
    node = builder.cast(value.node, value.dtype, DType.F32)
    made = builder.add(Node(NodeKind.REDUCE, DType.F32, (node,), "sum", aux=ACROSS, dims=rows))
    kept = range(rank) if keepdim else range(len(over), rank)
    dims = tuple(ONE if a in over else value.dims[a] for a in kept)
    shape = tuple(1 if a in over else value.shape[a] for a in kept)
    return Value(made, DType.F32, dims, shape, value.logical)


def check_unused(nodes: Sequence[Node], before: int) -> None:
    """Raise NotFusable if nodes from ``before`` on compute with a sum across rows."""
    for node in nodes[before:]:
        if node.kind is not NodeKind.CAST and any(across(nodes, arg) >= 0 for arg in node.args):
            raise NotFusable("a sum across rows is not there before the end")
