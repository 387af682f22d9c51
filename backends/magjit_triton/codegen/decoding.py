"""Attention of few query rows over long keys and values: flash-decoding, on virtual operands.

    Decoding ::= scale, splits          of an ``attend`` node: query, keys, values, mask or None

A program takes one head of keys and values, all query rows that share it (grouped queries), and one
of ``splits`` parts of the positions; with several parts a second kernel puts them together in their
order.  Every tile is loaded through its movements, or computed as it is read (VTC §4.1): keys that
are the parts of a ``cat``, lie in a cache in another order, or are cast, are never made.  Each
element of keys and values is read by one program only, so that computing it there is never more
work.  Rows in which nothing is left by the mask are zeros, as torch's are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod, simplify
from magjit_triton.codegen.attention import attend
from magjit_triton.codegen.domain import Domain, same
from magjit_triton.codegen.graphs import movement_of
from magjit_triton.codegen.ir import Builder, Dim
from magjit_triton.codegen.layout import Layout, sizes_of
from magjit_triton.codegen.lowering import Lowering
from magjit_triton.codegen.matmul.family import Operand
from magjit_triton.codegen.operators import constant
from magjit_triton.codegen.passes import ATTENTION, first_result

__all__ = [
    "SHORTEST",
    "Decoding",
    "Heads",
    "check_equal",
    "dims_of_tiles",
    "find_decoding",
    "quotient",
    "rest_of",
    "symbols_of_tiles",
    "to_be_equal",
]

aten = torch.ops.aten
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_ROWS = 64
_WIDEST = 256
SHORTEST = 256


@dataclass(frozen=True)
class Decoding:
    """What an ``attend`` node of few rows computes.

    Attributes:
        scale: of the scores.
        masked: whether the node has a mask.
    """

    scale: float
    masked: bool

    def parts(self, node: Node, memory: Mapping[Node, Layout]) -> dict[str, Operand]:
        """The tiles that it reads, over the axes g (batch and head of keys), p and r."""
        query, keys, values = node.args[:3]
        heads = Heads.of(node)
        g, p, r = symbols_of_tiles()
        batch, head = quotient(g, heads.heads), rest_of(g, heads.heads)
        row_head, row = head * heads.times + quotient(p, heads.rows), rest_of(p, heads.rows)
        found = {
            "query": _operand(
                query, (heads.count, heads.lines, heads.depth), (batch, row_head, row, r), memory
            ),
            "keys": _operand(
                keys, (heads.count, heads.depth, heads.length), (batch, head, r, p), memory
            ),
            "values": _operand(
                values, (heads.count, heads.length, heads.width), (batch, head, p, r), memory
            ),
        }
        builder = Builder(dims_of_tiles(heads.count, heads.lines, heads.length))
        given = builder.emit("given", (), "scores", torch.float32)
        scale = constant(builder, self.scale, torch.float32)
        value = builder.emit("mul", (given, scale))
        if self.masked:
            value = _with_mask(builder, node, value, (batch, row_head, row, r), memory)
        builder.kept.append(value)
        found["scores"] = Operand(builder, value)
        return found


@dataclass(frozen=True)
class Heads:
    """Sizes: ``times`` heads of ``rows`` queries share one of ``heads`` heads of keys."""

    batch: sympy.Expr
    heads: sympy.Expr
    times: int
    rows: int
    length: sympy.Expr
    depth: sympy.Expr
    width: sympy.Expr

    @classmethod
    def of(cls, node: Node) -> Heads:
        query, keys, values = (sizes_of(one.meta["val"]) for one in node.args[:3])  # type: ignore[union-attr]
        times = int(sympy.cancel(query[1] / keys[1]))
        return cls(keys[0], keys[1], times, int(query[2]), keys[2], query[3], values[3])

    @property
    def count(self) -> sympy.Expr:
        """Matrices of keys."""
        return sympy.expand(self.batch * self.heads)

    @property
    def lines(self) -> sympy.Expr:
        """Queries of one matrix of keys."""
        return sympy.Integer(self.times * self.rows)


# Finding it.


def find_decoding(
    gm: GraphModule, devices: Sequence[str], wanted: Callable[[Node, Sequence[Node]], bool]
) -> None:
    """Put ``attend`` in the place of attention of few rows.

    Args:
        devices: types of devices whose tensors kernels may read.
        wanted: whether ours should compute an attention of these operands.
    """
    for node in list(gm.graph.nodes):
        found = _matched(node)
        if found is None:
            continue
        result, operands, mask, scale = found
        if not _is_possible(operands, mask, devices) or not wanted(node, operands):
            continue
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(attend, (*operands, mask))
        depth = int(operands[0].meta["val"].shape[3])
        factor = 1 / math.sqrt(depth) if scale is None else float(scale)
        made.meta = {key: value for key, value in result.meta.items() if key != "magjit_movement"}
        made.meta["magjit_attention"] = Decoding(factor, mask is not None)
        result.replace_all_uses_with(made)
        # Operators of attention count as random: nothing else would remove them.
        for user in list(node.users):
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


Found = tuple[Node, tuple[Node, Node, Node], Node | None, float | None]


def _matched(node: Node) -> Found | None:
    """The result, operands, mask and scale of an attention without dropout and causality."""
    if node.op != "call_function":
        return None
    result: Node | None = node
    if node.target is aten.scaled_dot_product_attention.default:
        positions: tuple[int | None, ...] = (3, 4, 5)
    elif node.target in ATTENTION:
        positions, result = ATTENTION[node.target], first_result(node)
    else:
        return None
    given = [node.args[at] if at is not None and len(node.args) > at else None for at in positions]
    mask = given[0] if given[0] is not None else node.kwargs.get("attn_mask")
    rest = (*given[1:], node.kwargs.get("dropout_p"), node.kwargs.get("is_causal"))
    scale = node.kwargs.get("scale")
    if result is None or any(one not in (None, False, 0.0) for one in rest):
        return None
    if not (scale is None or isinstance(scale, int | float)):
        return None
    query, keys, values = node.args[:3]
    operands = (query, keys, values)
    if not all(isinstance(one, Node) for one in operands):
        return None
    if mask is not None and not isinstance(mask, Node):
        return None
    return result, operands, mask, scale  # type: ignore[return-value]


def _is_possible(operands: Sequence[Node], mask: Node | None, devices: Sequence[str]) -> bool:
    values = [one.meta["val"] for one in operands]
    tensors = [*values, *([] if mask is None else [mask.meta["val"]])]
    if any(one.device.type not in devices or one.layout != torch.strided for one in tensors):
        return False
    if values[0].dtype not in _DTYPES or len({one.dtype for one in values}) > 1:
        return False
    if any(one.dim() != 4 for one in values) or (mask is not None and mask.meta["val"].dim() > 4):
        return False
    query, keys, others = map(sizes_of, values)
    times = sympy.cancel(query[1] / keys[1]) if keys[1] != 0 else sympy.S.Zero
    fixed = (times, query[2], query[3], others[3])
    if not all(one.is_Integer and one > 0 for one in fixed):
        return False
    if mask is not None and not (
        mask.meta["val"].dtype == torch.bool or mask.meta["val"].dtype.is_floating_point
    ):
        return False
    return bool(
        times * query[2] <= _MOST_ROWS
        and max(query[3], others[3]) <= _WIDEST
        and same(query[3:], keys[3:])
        and not any(sympy.expand(a - b).is_number for a, b in _unproved(query, keys, others))
    )


def _unproved(*shapes: Sequence[sympy.Expr]) -> list[tuple[sympy.Expr, sympy.Expr]]:
    query, keys, values = shapes
    pairs = [(query[0], keys[0]), *zip(keys[:3], values[:3], strict=True)]
    return [(one, other) for one, other in pairs if sympy.expand(one - other) != 0]


def to_be_equal(node: Node) -> list[tuple[sympy.Expr, sympy.Expr]]:
    """The sizes of an ``attend`` node's operands that must be equal and are not proved to be."""
    return _unproved(*(sizes_of(one.meta["val"]) for one in node.args[:3]))  # type: ignore[union-attr]


def check_equal(*pairs: tuple[int, int]) -> None:
    """What the library would find wrong too.

    Raises:
        RuntimeError: two sizes differ.
    """
    for one, other in pairs:
        if one != other:
            raise RuntimeError(
                f"Attention: queries, keys and values do not agree in a size, {one} and {other}"
            )


# Tiles.


def symbols_of_tiles() -> tuple[sympy.Symbol, sympy.Symbol, sympy.Symbol]:
    g, p, r = (sympy.Symbol(f"i{k}", integer=True, nonnegative=True) for k in range(3))
    return g, p, r


def dims_of_tiles(*sizes: Any, axes: str = "gpr") -> tuple[Dim, ...]:
    named = zip(symbols_of_tiles(), sizes, axes, strict=True)
    return tuple(Dim(symbol, sympy.sympify(size), axis) for symbol, size, axis in named)


def quotient(symbol: sympy.Expr, size: Any) -> sympy.Expr:
    return symbol if size == 1 else FloorDiv(symbol, sympy.sympify(size))


def rest_of(symbol: sympy.Expr, size: Any) -> sympy.Expr:
    return sympy.S.Zero if size == 1 else Mod(symbol, sympy.sympify(size))


def _lowering(builder: Builder, memory: Mapping[Node, Layout]) -> Lowering:
    return Lowering(builder, Domain(tuple(dim.size for dim in builder.dims)), memory, movement_of)


def _index(builder: Builder, node: Node, index: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    sizes = sizes_of(node.meta["val"])
    return tuple(
        sympy.S.Zero if size == 1 else simplify(one, builder.ranges)
        for one, size in zip(index, sizes, strict=True)
    )


def _operand(
    node: Any, sizes: Sequence[Any], index: Sequence[sympy.Expr], memory: Mapping[Node, Layout]
) -> Operand:
    builder = Builder(dims_of_tiles(*sizes))
    value = _lowering(builder, memory).value(node, _index(builder, node, index))
    builder.kept.append(value)
    return Operand(builder, value)


def _with_mask(
    builder: Builder,
    node: Node,
    value: int,
    index: Sequence[sympy.Expr],
    memory: Mapping[Node, Layout],
) -> int:
    mask = node.args[3]
    shape = (*sizes_of(node.args[0].meta["val"])[:3], sizes_of(node.args[1].meta["val"])[2])  # type: ignore[union-attr]
    found = _lowering(builder, memory).operand(mask, shape, tuple(index), None)
    if builder.instructions[found].dtype == torch.bool:
        nothing = constant(builder, float("-inf"), torch.float32)
        return builder.emit("where", (found, value, nothing))
    if builder.instructions[found].dtype != torch.float32:
        found = builder.emit("cast", (found,), torch.float32, torch.float32)
    return builder.emit("add", (value, found))
