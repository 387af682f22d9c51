"""Long reductions of few rows in two phases: many programs reduce parts, few reduce those."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from magjit.plugin.fx_helpers import called
from magjit_triton.codegen.handlers import reduced_dims
from magjit_triton.codegen.lowering import Unfusible, operator_name

__all__ = ["split_reductions"]

aten = torch.ops.aten

_PROGRAMS = 528
_LANES = 64  # neighbouring columns that one program reduces together
_FEWEST_COLUMNS = 16
_FEWEST_LONG = 65536
_FEWEST_LONG_COLUMN = 1024
_SHORTEST_PART = 1024
_SHORTEST_COLUMN = 32

_SPLIT = {
    "sum": aten.sum.dim_IntList,
    "mean": aten.sum.dim_IntList,
    "amax": aten.amax.default,
    "amin": aten.amin.default,
    "any": aten.any.dims,
    "all": aten.all.dims,
}


_MOMENTS = ("var", "var_mean")


def split_reductions(gm: GraphModule) -> None:
    """Split where a reduction would leave most of a GPU idle."""
    for node in list(gm.graph.nodes):
        if operator_name(node) not in (*_SPLIT, *_MOMENTS):
            continue
        try:
            source, dims = reduced_dims(node)
        except Unfusible:
            continue
        value = source.meta["val"]
        if not dims or not all(isinstance(size, int) for size in value.shape):
            continue
        sizes, joined = _joined(list(value.shape), dims)
        found = _parts(sizes, joined, columns=_is_of_columns(value, dims))
        if found is None:
            continue
        cut = _Cut(sizes, joined, *found)
        if operator_name(node) in _SPLIT:
            _rewrite(gm, node, source, cut)
        elif value.dtype in (torch.float32, torch.float64):
            _rewrite_moments(gm, node, source, cut)


def _joined(sizes: list[int], dims: tuple[int, ...]) -> tuple[list[int], tuple[int, ...]]:
    """Neighbouring reduced dimensions as one."""
    result: list[int] = []
    reduced: list[int] = []
    for k, size in enumerate(sizes):
        if k in dims and k - 1 in dims:
            result[-1] *= size
            continue
        if k in dims:
            reduced.append(len(result))
        result.append(size)
    return result, tuple(reduced)


def _is_of_columns(value: torch.Tensor, dims: tuple[int, ...]) -> bool:
    """Whether neighbours in memory are in different rows of a reduction."""
    steps = [(step, -k) for k, step in enumerate(value.stride()) if value.shape[k] > 1]
    if not steps:
        return False
    nearest = -min(steps)[1]
    return nearest not in dims and value.shape[nearest] >= _FEWEST_COLUMNS


def _parts(sizes: list[int], dims: tuple[int, ...], *, columns: bool) -> tuple[int, int] | None:
    """The dimension to split, and into how many parts."""
    rows = math.prod(size for k, size in enumerate(sizes) if k not in dims)
    length = math.prod(sizes[k] for k in dims)
    programs = max(1, rows // _LANES) if columns else rows
    if length < (_FEWEST_LONG_COLUMN if columns else _FEWEST_LONG) or programs * 2 > _PROGRAMS:
        return None
    shortest = _SHORTEST_COLUMN if columns else _SHORTEST_PART
    most = min(2 * _PROGRAMS // programs, length // shortest)
    best = None
    for k in dims:
        inner = math.prod(sizes[j] for j in dims if j > k)
        for parts in range(min(most, sizes[k]), 1, -1):
            if sizes[k] % parts == 0 and (columns or sizes[k] // parts * inner >= 64):
                if best is None or parts > best[1]:
                    best = (k, parts)
                break
    return best if best is not None and best[1] >= 4 else None


class _Cut(NamedTuple):
    """What is reduced in parts.

    Attributes:
        sizes: of the operand, neighbouring reduced dimensions as one.
        dims: those that are reduced.
        k: the one that is cut.
        parts: into so many.
    """

    sizes: list[int]
    dims: tuple[int, ...]
    k: int
    parts: int

    @property
    def shape(self) -> list[int]:
        """The parts as a dimension of their own."""
        k, sizes = self.k, self.sizes
        return [*sizes[:k], self.parts, sizes[k] // self.parts, *sizes[k + 1 :]]

    @property
    def inner(self) -> list[int]:
        """The dimensions of the shape that each part reduces."""
        return [dim if dim < self.k else dim + 1 for dim in self.dims]

    @property
    def outer(self) -> list[int]:
        """Where the parts are then."""
        return [self.k - sum(1 for dim in self.dims if dim < self.k)]

    @property
    def length(self) -> int:
        """How many numbers a row has."""
        return math.prod(self.sizes[dim] for dim in self.dims)


def _rewrite(gm: GraphModule, node: Node, source: Node, cut: _Cut) -> None:
    name = operator_name(node)
    target = _SPLIT[name]
    result = node.meta["val"]
    sums = name in ("sum", "mean")
    wide = {}
    if sums:
        halves = (torch.float16, torch.bfloat16)
        wide = {"dtype": torch.float32 if result.dtype in halves else result.dtype}
    graph = gm.graph
    with graph.inserting_before(node):
        made = called(graph, aten.reshape.default, source, cut.shape)
        made = called(graph, target, made, cut.inner, **wide)
        made = called(graph, target, made, cut.outer, **wide)
        if name == "mean":
            made = called(graph, aten.div.Tensor, made, cut.length)
        if made.meta["val"].dtype != result.dtype:
            made = called(graph, torch.ops.prims.convert_element_type.default, made, result.dtype)
        if tuple(made.meta["val"].shape) != tuple(result.shape):
            made = called(graph, aten.reshape.default, made, list(result.shape))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _rewrite_moments(gm: GraphModule, node: Node, source: Node, cut: _Cut) -> None:
    """The variance of equal parts: the mean of theirs and of what their means are away, squared."""
    correction: Any = node.kwargs.get("correction", 1)
    free = cut.length - (1 if correction is None else correction)
    if free <= 0:
        return
    graph = gm.graph
    results = node.meta["val"]
    wanted = list(results[0].shape if isinstance(results, tuple) else results.shape)
    with graph.inserting_before(node):
        parts = called(graph, aten.reshape.default, source, cut.shape)
        within = called(graph, aten.var_mean.correction, parts, cut.inner, correction=0)
        spread, middle = (called(graph, operator.getitem, within, which) for which in (0, 1))
        # In this form one kernel does all of it.
        mean = called(graph, aten.mean.dim, middle, cut.outer, True)
        away = called(graph, aten.sub.Tensor, middle, mean)
        away = called(graph, aten.mul.Tensor, away, away)
        variance = called(graph, aten.add.Tensor, spread, away)
        variance = called(graph, aten.mean.dim, variance, cut.outer)
        variance = called(graph, aten.mul.Tensor, variance, cut.length / free)
        made = [called(graph, aten.reshape.default, one, wanted) for one in (variance, mean)]
    if not isinstance(results, tuple):
        node.replace_all_uses_with(made[0])
    for user in list(node.users):
        user.replace_all_uses_with(made[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
