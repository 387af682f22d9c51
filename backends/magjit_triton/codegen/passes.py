"""Rewrites of an ATen graph before fusion: repeated operands are not repeated.

Attention with grouped queries written as expand and reshape (VTC §3.1) becomes attention that
knows of groups; a batched product whose one operand repeats becomes one with fewer, larger
matrices.  Each rewrite is made where the composed movement is proved to be the repetition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from magjit.plugin.fx_helpers import called
from magjit.plugin.fx_nodes import remove_unused
from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod, index_symbols, simplify
from magjit_triton.codegen.channels_last import in_channels_last
from magjit_triton.codegen.convolutions import biases_apart, grouped_as_products
from magjit_triton.codegen.domain import same
from magjit_triton.codegen.graphs import movement_of
from magjit_triton.codegen.layout import sizes_of
from magjit_triton.codegen.shown import views_of
from magjit_triton.codegen.splitting import split_reductions

__all__ = [
    "ATTENTION",
    "PASSES",
    "composed",
    "first_result",
    "group_attention",
    "group_products",
]

aten = torch.ops.aten
Index = tuple[sympy.Expr, ...]


def composed(node: Node) -> list[tuple[Node, Index]]:
    """The tensors that a node is a rearrangement of: each with the index of its element there.

    The first is the node itself; every further one is what the one before was moved from.
    """
    sizes = sizes_of(node.meta["val"])
    symbols = index_symbols(len(sizes))
    ranges = dict(zip(symbols, sizes, strict=True))
    index: Index = tuple(symbols)
    chain = [(node, index)]
    while True:
        moved = movement_of(node)
        if moved is None:
            return chain
        movement, operands = moved
        if len(movement.parts) != 1 or movement.parts[0].condition != sympy.true:
            return chain
        (part,) = movement.parts
        if part.fill is not None:
            return chain
        swaps = dict(zip(index_symbols(len(movement.shape)), index, strict=True))
        index = tuple(simplify(one.xreplace(swaps), ranges) for one in part.index)
        node = operands[part.operand]
        chain.append((node, index))


def _repeated_heads(node: Node) -> tuple[Node, sympy.Expr] | None:
    """The tensor whose heads a 4-d tensor repeats one after the other, and how many times."""
    sizes = sizes_of(node.meta["val"])
    if len(sizes) != 4:
        return None
    batch, head, row, column = index_symbols(4)
    for source, index in composed(node)[1:]:
        if len(index) != 4 or not all(
            index[k] == (sympy.S.Zero if sizes[k] == 1 else symbol)
            for k, symbol in ((0, batch), (2, row), (3, column))
        ):
            continue
        heads = sizes_of(source.meta["val"])[1]
        times = sympy.cancel(sizes[1] / heads)
        if times.is_Integer and times > 1 and index[1] == FloorDiv(head, times):
            return source, times
    return None


def first_result(node: Node) -> Node | None:
    """``getitem(node, 0)`` where no other result is used."""
    users = [user for user in node.users if user.users]
    if len(users) == 1 and users[0].target is operator.getitem and users[0].args[1] == 0:
        return users[0]
    return None


# Operator → positions of (attention mask, dropout, is_causal); None where it has none.
ATTENTION: dict[Any, tuple[int | None, int | None, int | None]] = {
    aten._scaled_dot_product_flash_attention.default: (None, 3, 4),
    aten._scaled_dot_product_efficient_attention.default: (3, 5, 6),
    aten._scaled_dot_product_cudnn_attention.default: (3, 5, 6),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (None, 3, 4),
}


def group_attention(gm: GraphModule) -> None:
    """Attention over repeated keys and values reads them once."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in ATTENTION:
            continue
        result = first_result(node)
        query, key, value = node.args[:3]
        keys, values = _repeated_heads(key), _repeated_heads(value)
        if result is None or keys is None or values is None or keys[1] != values[1]:
            continue
        mask_at, dropout_at, causal_at = ATTENTION[node.target]

        def given(position: int | None, default: Any, node: Node = node) -> Any:
            if position is None or len(node.args) <= position:
                return default
            return node.args[position]

        mask = given(mask_at, None)
        if node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
            mask = node.kwargs.get("attn_mask")
        if given(dropout_at, 0.0) != 0.0 or given(7, False) is True:
            continue
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(
                aten.scaled_dot_product_attention.default,
                (query, keys[0], values[0], mask, 0.0, given(causal_at, False)),
                {"scale": node.kwargs.get("scale"), "enable_gqa": True},
            )
        if _replace(gm, result, made):
            # The operator counts as random, so that nothing else would remove it.
            for user in list(node.users):
                gm.graph.erase_node(user)
            gm.graph.erase_node(node)


def _replace(gm: GraphModule, old: Node, new: Node) -> bool:
    """``new`` in the place of ``old``, if a fake run gives it a value like the old one's."""
    values = torch.fx.map_arg((new.args, new.kwargs), lambda one: one.meta["val"])
    like = old.meta["val"]
    with like.fake_mode, torch.no_grad():
        found = new.target(*values[0], **values[1])  # type: ignore[operator]
    if not same(sizes_of(found), sizes_of(like)) or found.dtype != like.dtype:
        gm.graph.erase_node(new)
        return False
    # Who reads the old value, or is given it, expects its strides.
    new.meta = dict(old.meta)
    new.meta.pop("magjit_movement", None)
    old.replace_all_uses_with(new)
    # Users know their operands' strides no better than before, but by another node.
    for user in new.users:
        user.meta.pop("magjit_movement", None)
    gm.graph.erase_node(old)
    return True


def group_products(gm: GraphModule) -> None:
    """A batched product in which matrices repeat multiplies each of them once."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is aten.bmm.default:
            left, right = node.args
            found = _repeated_matrices(right)
            shared = _shared_matrix(right)
            if found is not None:
                _group_product(gm, node, left, *found)
            elif shared is not None:
                _flat_product(gm, node, left, *shared)


def _repeated_matrices(node: Node) -> tuple[Node, sympy.Expr, bool] | None:
    """The 4-d tensor whose matrices a batch repeats, how many times, whether it is transposed."""
    sizes = sizes_of(node.meta["val"])
    batch, row, column = index_symbols(3)
    for source, index in composed(node)[1:]:
        if len(index) != 4:
            continue
        own = sizes_of(source.meta["val"])
        count = sympy.expand(own[0] * own[1])
        times = sympy.cancel(sizes[0] / count)
        if not (times.is_Integer and times > 1):
            continue
        ranges = dict(zip((batch, row, column), sizes, strict=True))
        matrix = FloorDiv(batch, times)
        expected = (
            simplify(FloorDiv(matrix, own[1]), ranges),
            simplify(Mod(matrix, own[1]), ranges),
        )
        if own[0] == 1:
            expected = (sympy.S.Zero, simplify(matrix, ranges))
        first = tuple(simplify(one, ranges) for one in index[:2])
        if first != expected and not _agree(first, expected, batch, sizes[0]):
            continue
        if index[2:] == (row, column):
            return source, times, False
        if index[2:] == (column, row):
            return source, times, True
    return None


def _shared_matrix(node: Node) -> tuple[Node, bool] | None:
    """The 2-d tensor that is every matrix of a batch, and whether it is transposed."""
    _, row, column = index_symbols(3)
    for source, index in composed(node)[1:]:
        if index == (row, column):
            return source, False
        if index == (column, row):
            return source, True
    return None


def _flat_product(gm: GraphModule, node: Node, left: Node, matrix: Node, turned: bool) -> None:
    value = left.meta["val"]
    batch, rows, inner = value.shape
    graph = gm.graph
    if any(isinstance(size, torch.SymInt) for size in (batch, rows, inner)):
        return
    if not (batch == 1 or rows == 1 or value.stride(0) == rows * value.stride(1)):
        return  # The rows of one matrix would have to be made.
    with graph.inserting_before(node):
        right = called(graph, aten.t.default, matrix) if turned else matrix
        flat = called(graph, aten.reshape.default, left, [batch * rows, inner])
        product = called(graph, aten.mm.default, flat, right)
        result = called(graph, aten.reshape.default, product, list(node.meta["val"].shape))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _agree(one: Sequence[sympy.Expr], other: Sequence[sympy.Expr], symbol: Any, size: Any) -> bool:
    """Equal for every value of the one symbol they contain."""
    if not size.is_Integer or int(size) > 4096:
        return False
    if any(expr.free_symbols - {symbol} for expr in (*one, *other)):
        return False
    return all(
        a.xreplace({symbol: sympy.Integer(k)}) == b.xreplace({symbol: sympy.Integer(k)})
        for k in range(int(size))
        for a, b in zip(one, other, strict=True)
    )


def _group_product(
    gm: GraphModule, node: Node, left: Node, source: Node, times: sympy.Expr, turned: bool
) -> None:
    rows = left.meta["val"].shape
    matrices = source.meta["val"].shape
    count = matrices[0] * matrices[1]
    group = int(times)
    if any(isinstance(size, torch.SymInt) for size in (*rows, *matrices)):
        return
    graph = gm.graph
    with graph.inserting_before(node):
        right = called(graph, aten.reshape.default, source, [count, matrices[2], matrices[3]])
        if turned:
            right = called(graph, aten.transpose.int, right, 1, 2)
        joined = called(graph, aten.reshape.default, left, [count, group * rows[1], rows[2]])
        product = called(graph, aten.bmm.default, joined, right)
        shape = list(node.meta["val"].shape)
        result = called(graph, aten.reshape.default, product, shape)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def forward_copies(gm: GraphModule) -> None:
    """``copy(old, new)`` is ``new`` where both are alike: the old values are not read.

    What the graph returns stays a tensor of its own.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target is not aten.copy.default:
            continue
        old, new = (one.meta["val"] for one in node.args[:2])
        if any(user.op == "output" for one in views_of(node) for user in one.users):
            continue
        if same(sizes_of(old), sizes_of(new)) and old.dtype == new.dtype:
            node.replace_all_uses_with(node.args[1])
            gm.graph.erase_node(node)


def _remove_unused(gm: GraphModule) -> None:
    remove_unused(gm.graph)


PASSES: list[Callable[[GraphModule], None]] = [
    forward_copies,
    group_attention,
    group_products,
    biases_apart,
    in_channels_last,
    grouped_as_products,
    split_reductions,
    _remove_unused,
]
"""In the order in which they run."""
