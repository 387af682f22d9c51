"""Repeated operands of attention and products, read once a group instead of copied for each member.

``repeat_kv`` writes every head of keys and values as often as there are queries in its group. Its
mapping says so: the head is ``i1 // times``. Attention kernels that know groups get the heads
themselves; a batched product gets the rows of a whole group at once.

    attention(q, K', V')  where K'[b, h] = K[b, h // times]     →  attention(q, K, V)
    bmm(a, b')            where b'[n] = b[n // times]           →  bmm(a as rows of groups, b)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import sympy
import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.fx_nodes import remove_unused
from magjit.plugin.virtual_tensors.calls import operand_nodes, result_nodes
from magjit.plugin.virtual_tensors.indexing import (
    FloorDiv,
    Mod,
    index_symbols,
    simplify,
    size_expr,
    substitute,
)
from magjit.plugin.virtual_tensors.mapping import Movement
from magjit.plugin.virtual_tensors.rules import directions_of
from magjit.plugin.virtual_tensors.rules_views import reshaped

__all__ = ["group_repeated", "source_of"]

aten = torch.ops.aten

_KNOW_GROUPS = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)
_DISPATCHED = aten._scaled_dot_product_cudnn_attention.default


def group_repeated(
    gm: GraphModule, is_kernel: Callable[[Node], bool] = lambda product: True
) -> int:
    """Rewrite a functional ATen graph in place.

    Args:
        gm: each node with ``meta["val"]``.
        is_kernel: whether a batched product will be one, reading its operands from memory.

    Returns:
        How many operators read their operands once a group now.
    """
    changed = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _KNOW_GROUPS or node.target is _DISPATCHED:
            changed += _group_attention(gm.graph, node)
        elif node.target is aten.bmm.default and is_kernel(node):
            changed += _group_product(gm.graph, node)
    if changed:
        remove_unused(gm.graph)
    return changed


def source_of(tensor: Node) -> list[tuple[Node, Movement]]:
    """The tensors that a tensor is a rearrangement of, the nearest first, and how."""
    found: list[tuple[Node, Movement]] = []
    value = tensor.meta["val"]
    shape = tuple(map(size_expr, value.shape))
    movement = Movement.of(shape, index_symbols(len(shape)))
    here = tensor
    while True:
        maker = here.args[0] if here.target is operator.getitem else here
        directions = directions_of(maker) if isinstance(maker, Node) else None
        if directions is None or not directions.results or not isinstance(maker, Node):
            return found
        operands = operand_nodes(maker)
        results = result_nodes(maker)
        if len(operands) != 1 or here not in results:
            return found
        step = directions.results[results.index(here)]
        if len(step.parts) != 1 or step.parts[0].fill is not None:
            return found
        movement = _after(movement, step)
        here = operands[0]
        found.append((here, movement))


def _after(outer: Movement, inner: Movement) -> Movement:
    """``outer`` of a tensor that ``inner`` made, as one movement of one part."""
    ranges = dict(zip(index_symbols(len(outer.shape)), outer.shape, strict=True))
    symbols = index_symbols(len(inner.shape))
    taken = outer.parts[0].index
    index = [simplify(substitute(one, symbols, taken), ranges) for one in inner.parts[0].index]
    return Movement.of(outer.shape, index)


# -- attention --


def _group_attention(graph: Graph, node: Node) -> int:
    query, key, value = node.args[:3]
    assert isinstance(query, Node) and isinstance(key, Node) and isinstance(value, Node)
    heads = [_heads(one) for one in (key, value)]
    if heads[0] is None or heads[1] is None or heads[0][1] != heads[1][1]:
        return 0
    keys, values = heads[0][0], heads[1][0]
    if node.target is _DISPATCHED:
        return _dispatched(graph, node, query, keys, values)
    node.args = (query, keys, values, *node.args[3:])
    return 1


def _heads(tensor: Node) -> tuple[Node, int] | None:
    """The heads that ``tensor`` repeats, and how often."""
    batch, head, row, column = index_symbols(4)
    if tensor.meta["val"].dim() != 4:
        return None
    for source, movement in source_of(tensor):
        shape = source.meta["val"].shape
        if len(shape) != 4 or source.meta["val"].stride(-1) != 1:
            continue
        have, made = size_expr(shape[1]), size_expr(tensor.meta["val"].shape[1])
        if not (have.is_Integer and made.is_Integer and have != 0 and made % have == 0):
            continue
        times = int(made // have)
        place = sympy.S.Zero if have == 1 else FloorDiv(head, times)
        index = movement.parts[0].index
        same = (batch, place, row, column)
        sizes = [size_expr(size) for size in shape]
        if times > 1 and all(
            one == other or (size == 1 and one == 0)
            for one, other, size in zip(index, same, sizes, strict=True)
        ):
            return source, times
    return None


def _dispatched(graph: Graph, node: Node, query: Node, keys: Node, values: Node) -> int:
    """Through the public operator, which chooses a kernel that knows groups."""
    results = result_nodes(node)
    output = results[0]
    if output is None or any(one is not None for one in results[1:]):
        return 0
    schema = node.target._schema  # type: ignore[union-attr]
    given = {
        one.name: node.args[k]
        if k < len(node.args)
        else node.kwargs.get(one.name, one.default_value)
        for k, one in enumerate(schema.arguments)
    }
    with graph.inserting_before(output):
        made = graph.call_function(
            F.scaled_dot_product_attention,
            (query, keys, values, given["attn_bias"], given["dropout_p"], given["is_causal"]),
            {"scale": given.get("scale"), "enable_gqa": True},
        )
    made.meta = dict(output.meta)
    output.replace_all_uses_with(made)
    return 1


# -- products --


def _group_product(graph: Graph, node: Node) -> int:
    rows, repeated = node.args
    assert isinstance(rows, Node) and isinstance(repeated, Node)
    found = _repeated_batches(repeated)
    if found is None or node.meta["val"].dtype != rows.meta["val"].dtype:
        return 0
    source, times, index = found
    left, right = rows.meta["val"], repeated.meta["val"]
    batches, count, width = left.shape
    if not all(isinstance(one, int) for one in (*left.shape, *right.shape)):
        return 0
    groups = batches // times
    made = _viewed(graph, node, source, (groups, width, right.shape[2]), index)
    if made is None:
        return 0
    with graph.inserting_before(node), left.fake_mode:
        try:
            grouped = left.view(groups, times * count, width)
        except (RuntimeError, ValueError):
            return 0
        wide = graph.call_function(aten.view.default, (rows, [groups, times * count, width]))
        wide.meta = {"val": grouped}
        product = graph.call_function(aten.bmm.default, (wide, made))
        product.meta = {"val": aten.bmm.default(grouped, made.meta["val"])}
        result = graph.call_function(aten.view.default, (product, list(node.meta["val"].shape)))
        result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return 1


def _repeated_batches(tensor: Node) -> tuple[Node, int, Sequence[sympy.Expr]] | None:
    """The source whose batches ``tensor`` repeats, how often, and the index of a group's."""
    if tensor.meta["val"].dim() != 3:
        return None
    batch = index_symbols(3)[0]
    batches = size_expr(tensor.meta["val"].shape[0])
    if not batches.is_Integer:
        return None
    best = None
    for source, movement in source_of(tensor):
        index = movement.parts[0].index
        times = _times(index, batch, int(batches))
        if times > 1:
            groups = dict(zip(index_symbols(3), movement.shape, strict=True))
            groups[batch] = batches // times
            first = [substitute(one, (batch,), (batch * times,)) for one in index]
            best = source, times, [simplify(one, groups) for one in first]
    return best


def _times(index: Sequence[sympy.Expr], batch: sympy.Symbol, batches: int) -> int:
    """The greatest number of neighbouring batches that are the same."""
    divisors = {
        int(one.args[1]) for part in index for one in part.atoms(FloorDiv) if one.args[1].is_Integer
    }
    if not any(part.has(batch) for part in index):
        divisors.add(batches)
    member = index_symbols(4)[3]
    for times in sorted(divisors, reverse=True):
        if times < 2 or batches % times:
            continue
        ranges = {
            **dict.fromkeys(index_symbols(3)[1:], sympy.Integer(2**31)),
            batch: sympy.Integer(batches // times),
            member: sympy.Integer(times),
        }
        parts = [simplify(one.xreplace({batch: batch * times + member}), ranges) for one in index]
        if not any(part.has(member) for part in parts):
            return times
    return 1


def _viewed(
    graph: Graph, before: Node, source: Node, shape: Sequence[int], index: Sequence[sympy.Expr]
) -> Node | None:
    """The tensor ``index`` of a source as a permutation and a view; None where these cannot."""
    value = source.meta["val"]
    places = [_digit(one, len(shape)) for one in index]
    if any(place is None for place in places):
        return None
    order = sorted(range(len(index)), key=lambda k: places[k])  # type: ignore[arg-type,return-value]
    permuted = [size_expr(value.shape[k]) for k in order]
    taken = reshaped(permuted, [size_expr(size) for size in shape]).parts[0].index
    if any(sympy.expand(one - index[k]) != 0 for one, k in zip(taken, order, strict=True)):
        return None
    with graph.inserting_before(before), value.fake_mode:
        try:
            turned = value.permute(order)
            seen = turned.view(shape)
        except (RuntimeError, ValueError):
            return None
        first = graph.call_function(aten.permute.default, (source, order))
        first.meta = {"val": turned}
        second = graph.call_function(aten.view.default, (first, list(shape)))
        second.meta = {"val": seen}
    return second


def _digit(expr: sympy.Expr, rank: int) -> tuple[int, int] | None:
    """Which dimension an index is a digit of, and its place: the greatest first."""
    symbols = index_symbols(rank)
    if expr == 0:
        return 0, -(2**62)
    inner = expr.args[0] if isinstance(expr, Mod) else expr
    weight = 1
    if isinstance(inner, FloorDiv) and inner.args[1].is_Integer:
        inner, weight = inner.args[0], int(inner.args[1])
    return (symbols.index(inner), -weight) if inner in symbols else None
