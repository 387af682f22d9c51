"""Finds attention that a program writes out, ``softmax(q @ k.T) @ v``, in an ATen graph.

Between the products may be a scale, as a number or a tensor of one element, and then a mask that
is added or takes the place of scores.  Heads are dimensions of their own or merged with the batch,
as lowering ``matmul`` merges them.  Scores and probabilities that anything else reads are not
attention: they must be in memory anyway.

On GPUs operands have 16 bits, and softmax may be computed of and in float32.  A mask other than
zeros is none of attention there: what is masked as a whole is NaN or uniform in the written-out
form, and who knows on the GPU is not asked.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from magjit.plugin.fx_helpers import called
from magjit_dvm.attention import DTYPES, LANES, attention, gpu_takes_width
from magjit_dvm.attention_scores import (
    RESHAPES,
    Inverse,
    Scores,
    is_zero,
    probabilities_of,
    read_by,
    scores_of,
    shape_of,
    sizes_of,
)
from magjit_dvm.builder import size_key

__all__ = ["find_attention"]

aten = torch.ops.aten

_SHORTEST = 16
"""Columns that are known to be fewer are faster as two products and a fused operator."""
_SHORTEST_ALONE = 64
"""The same where there is one image, whose heads need not be copied, and no whole vectors."""


def find_attention(graph: Graph) -> None:
    """Put ``attention`` in the place of what is written out, in the dtypes of its kernels."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.bmm.default and not node._erased:
            _replace(graph, node)


def _replace(graph: Graph, product: Node) -> None:
    weights, value = product.args
    made = product.meta["val"]
    if made.dtype not in DTYPES.get(made.device.type, ()) or not isinstance(weights, Node):
        return
    columns, on_cpu = weights.meta["val"].shape[2], made.device.type == "cpu"
    if (on_cpu and _fewer(columns, _SHORTEST)) or not isinstance(value, Node):
        return
    passed: list[Node] = []
    softmax = probabilities_of(weights, product, passed)
    if softmax is None:
        return
    given, dim, _ = softmax.args
    shape = shape_of(softmax)
    if dim not in (-1, len(shape) - 1) or shape[-2:] != shape_of(weights)[1:]:
        return
    scores = scores_of(given, softmax) if isinstance(given, Node) else None
    if scores is None or not _is_attention(scores, shape, value):
        return
    dropped = []
    if scores.mask is not None and scores.fill is None and is_zero(scores.mask):
        dropped, scores.mask = [scores.mask], None
    tail = _merged_heads(product)
    sizes = sizes_of(weights)[:2] if weights.target in RESHAPES else [-1]
    with graph.inserting_before(product):
        operands = _operands(graph, scores, value, tail is not None or -1 not in sizes)
        if operands is None:
            return
        if len(shape_of(operands[0])) == 3:
            result = _attention(graph, operands, scores, product.meta)
            product.replace_all_uses_with(result)
        elif tail is not None:
            result = _attention(graph, operands, scores, tail[-1].meta)
            tail[-1].replace_all_uses_with(result)
        else:
            result = _attention(graph, operands, scores, None)
            moved = called(graph, aten.permute.default, result, [0, 2, 1, 3])
            kept = called(graph, aten.clone.default, moved, memory_format=torch.contiguous_format)
            merged = graph.call_function(aten.view.default, (kept, [*sizes, -1]))
            merged.meta = dict(product.meta)
            product.replace_all_uses_with(merged)
    unread = [product, *passed, softmax, *scores.passed, *scores.given, value, *dropped]
    _erase(graph, [*(tail or ())[::-1], *unread])


def _is_attention(scores: Scores, shape: Sequence[Any], value: Node) -> bool:
    """Whether the operands of both products have the sizes and dtypes that the kernel takes."""
    query, key = scores.given
    computed_with = [query, key, value, *(factor for _, factor in scores.factors)]
    if scores.mask is not None and scores.fill is not None:
        computed_with.append(scores.mask)
    # Inputs that torch.compile gives as they are do not say which of their sizes are symbols.
    if not all(isinstance(one.meta["val"], FakeTensor) for one in computed_with):
        return False
    dtype, device = value.meta["val"].dtype, value.meta["val"].device
    if query.meta["val"].dtype != dtype or (scores.factors and dtype != torch.float32):
        return False
    width = shape_of(value)[2]
    if device.type == "cuda" and isinstance(width, int) and not gpu_takes_width(width):
        return False
    if (shape_of(query)[1], shape_of(key)[2]) != tuple(shape[-2:]):
        return False
    parted = _parted(query)
    alone = device.type == "cpu" and parted is not None and shape_of(parted)[0] == 1
    if alone and _fewer(shape[-1], _SHORTEST_ALONE) and shape[-1] % LANES:
        return False
    if scores.mask is not None and scores.shape[-2:] != tuple(shape[-2:]):
        return False
    return not _differ(shape_of(query)[2], shape_of(value)[2])


# -- what takes its place --


def _operands(graph: Graph, scores: Scores, value: Node, may_part: bool) -> list[Any] | None:
    """Query, key, value: with heads where the mask needs them or all have them.

    Args:
        graph, scores, value: what is replaced, with its insertion point.
        may_part: whether a result with heads can take its place.

    Returns:
        None where the mask has heads that the operands do not have.
    """
    given = (*scores.given, value)
    parted = [_parted(one) for one in given]
    heads: Any = scores.shape[:2] if len(scores.shape) == 4 else None
    if scores.mask is None:
        common = {None if one is None else shape_of(one)[:2] for one in parted}
        heads = common.pop() if len(common) == 1 else None
    sizes = [*scores.leading, -1]
    can_view = len(sizes) == 3 and sizes.count(-1) == 1
    operands: list[Any] = []
    for one, whole in zip(parted, given, strict=True):
        width = shape_of(whole)[2]
        if heads is None or not may_part:
            break
        if one is not None and shape_of(one)[:2] == heads:
            operands.append((one, None))
        elif can_view and isinstance(width, int):
            operands.append((whole, [*sizes, width]))
        elif can_view and whole is scores.given[1] and isinstance(shape_of(whole)[1], int):
            operands.append((whole, [*scores.leading, shape_of(whole)[1], -1]))
    if len(operands) == 3:
        operands = [
            one if view is None else called(graph, aten.view.default, one, view)
            for one, view in operands
        ]
    elif len(scores.shape) == 4 and scores.mask is not None and len(shape_of(scores.mask)) > 2:
        return None
    else:
        operands = list(given)
    operands[1] = _turned(graph, operands[1])
    for target, factor in scores.factors:
        operands[0] = called(graph, target, operands[0], factor)
    return operands


def _parted(node: Node) -> Node | None:
    """The operand of a product before heads were merged with the batch, and copied for that."""
    if node.target not in RESHAPES or not isinstance(node.args[0], Node):
        return None
    source = node.args[0]
    if source.target is aten.clone.default and isinstance(source.args[0], Node):
        source = source.args[0]
    if not isinstance(source.meta["val"], FakeTensor):
        return None
    if len(shape_of(source)) != 4 or shape_of(source)[2:] != shape_of(node)[1:]:
        return None
    return source


def _turned(graph: Graph, key: Node) -> Node:
    """(…, columns, width) of (…, width, columns)."""
    dims = len(shape_of(key))
    if key.target is aten.transpose.int:
        if sorted(dim % dims for dim in key.args[1:3]) == [dims - 2, dims - 1]:  # type: ignore[operator]
            return key.args[0]  # type: ignore[return-value]
    return called(graph, aten.transpose.int, key, dims - 2, dims - 1)


def _attention(
    graph: Graph, operands: list[Any], scores: Scores, meta: dict[str, Any] | None
) -> Node:
    query, _, value = (one.meta["val"] for one in operands)
    mask = scores.mask
    if mask is not None and scores.fill is not None:
        mask = _as_added(graph, mask, scores.inside)
    scale = scores.scale
    if isinstance(scale, Inverse):
        made = graph.call_function(operator.truediv, (1.0, scale.of))
        made.meta = {"val": 1.0 / scale.of.meta["val"]}
        scale = made
    arguments = (*operands, mask, scale, scores.fill)
    node = graph.call_function(attention, arguments)
    if not meta:
        batch, heads, rows, _ = query.shape
        with query.fake_mode:
            meta = {"val": query.new_empty((batch, rows, heads, value.shape[3]))}
    node.meta = dict(meta)
    return node


def _as_added(graph: Graph, condition: Node, inside: bool) -> Node:
    """0, and -inf where a condition holds (``inside``), or where it does not."""
    value = condition.meta["val"]
    numbers = []
    for number in (0.0, -math.inf):
        node = graph.call_function(
            aten.full.default, ([], number), {"dtype": torch.float32, "device": value.device}
        )
        with value.fake_mode:
            node.meta = {"val": value.new_full([], number, dtype=torch.float32)}
        numbers.append(node)
    if inside:
        numbers.reverse()
    return called(graph, aten.where.self, condition, *numbers)


def _merged_heads(product: Node) -> list[Node] | None:
    """What parts the heads of a product and moves and copies them beside their widths."""
    chain: list[Node] = []
    node = product
    for fits in (_parts_heads, _moves_heads, _copies):
        if len(node.users) != 1:
            return None
        (node,) = node.users
        if not fits(node):
            return None
        chain.append(node)
    return chain


def _parts_heads(node: Node) -> bool:
    whole = node.args[0]
    return (
        node.target in RESHAPES
        and len(shape_of(node)) == 4
        and isinstance(whole, Node)
        and shape_of(node)[2:] == shape_of(whole)[1:]
    )


def _moves_heads(node: Node) -> bool:
    if node.target is aten.transpose.int:
        return sorted(dim % 4 for dim in node.args[1:3]) == [1, 2]  # type: ignore[operator]
    return node.target is aten.permute.default and [
        dim % 4  # type: ignore[operator]
        for dim in node.args[1]  # type: ignore[union-attr]
    ] == [0, 2, 1, 3]


def _copies(node: Node) -> bool:
    contiguous = node.kwargs.get("memory_format") is torch.contiguous_format
    return node.target is aten.clone.default and contiguous


def _erase(graph: Graph, nodes: Sequence[Node]) -> None:
    """Remove what nobody reads any more, from the last to the first."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop(0)
        if node._erased or node.users or node.op != "call_function":
            continue
        waiting += read_by(node)
        graph.erase_node(node)


def _fewer(size: Any, least: int) -> bool:
    """Whether a size is known to be less."""
    key = size if isinstance(size, sympy.Basic) else size_key(size)
    return isinstance(key, int) and key < least


def _differ(a: Any, b: Any) -> bool:
    """Of two symbols, each call finds out."""
    return a != b and (isinstance(a, int) or isinstance(b, int))
