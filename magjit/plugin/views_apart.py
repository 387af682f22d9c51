"""Views before and after what a graph computes.

A CUDA graph has fixed sizes, and results that are nobody else's memory:

inputs → views of them → what is computed, without symbols → views of what it returns → results
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from magjit.plugin.aliases import is_alias, results_are_their_own
from magjit.plugin.fx_helpers import make_graph_module
from magjit.plugin.fx_nodes import is_symbol
from magjit.plugin.sizes import elements_of

__all__ = ["is_symbolic", "tensors_of", "without_symbols", "without_views"]

_BY_PLACE = torch.ops.aten.as_strided.default  # Another tensor's memory is other places.

_MOST_COPIED = 2
"""Elements that are copied out for one that is returned."""


def tensors_of(node: Node) -> list[torch.Tensor]:
    """The fake tensors that a node stands for."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return [one for one in values if isinstance(one, torch.Tensor)]


def is_symbolic(node: Node) -> bool:
    """Whether a node stands for a symbol, or for tensors with symbols among their sizes."""
    sizes = (size for one in tensors_of(node) for size in one.shape)
    return is_symbol(node) or any(isinstance(size, torch.SymInt) for size in sizes)


def without_symbols(gm: GraphModule) -> tuple[GraphModule, GraphModule] | None:
    """A graph as views of its inputs, and what is computed of them, in which no size is a symbol.

    A program that takes step after step of a sequence, ``x[t]``, is of this kind.

    Returns:
        The first takes the inputs and gives a tuple of those of the second, which gives the
        results; None where sizes that are symbols are computed with.
    """
    views: list[Node] = []
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "output"):
            continue
        if any(map(is_symbolic, node.all_input_nodes)):
            if node.op == "output" or not (is_alias(node) or not tensors_of(node)):
                return None
            if not all(one.op == "placeholder" or one in views for one in node.all_input_nodes):
                return None
            views.append(node)
    outside = dict.fromkeys(
        [*(node for node in gm.graph.nodes if node.op == "placeholder"), *views]
    )
    read = [node for node in outside if not set(node.users) <= set(views)]
    if any(map(is_symbolic, read)):
        return None
    first, copies = Graph(), dict[Node, Node]()
    for node in outside:
        copies[node] = first.node_copy(node, copies.__getitem__)
    first.output(tuple(copies[node] for node in read))
    second, copies = Graph(), {}
    for node in read:
        copies[node] = second.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node not in outside:
            copies[node] = second.node_copy(node, copies.__getitem__)
    return make_graph_module(gm, first), make_graph_module(gm, second)


def without_views(gm: GraphModule) -> tuple[GraphModule, GraphModule] | None:
    """A graph as what it computes, and the results that are views of it or of inputs.

    Returns:
        The first returns tensors of which none shares memory with another or with an input; the
        second takes these and then all inputs, and gives the results.  None where that cannot be
        told, or where a result is a small part of what would have to be kept.
    """
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    results = list(output.args[0])
    if not all(isinstance(one, Node) and len(tensors_of(one)) == 1 for one in results):
        return None
    views: dict[Node, None] = {}
    bases: dict[Node, int] = {}
    for result in results:
        base = _base(result, views)
        bases[base] = bases.get(base, 0) + elements_of(result)
    computed = [node for node in bases if node.op != "placeholder"]
    if any(
        not _is_laid_out_alike(torch.empty_like(node.meta["val"]), node.meta["val"])
        or elements_of(node) > _MOST_COPIED * bases[node]
        for node in computed
    ):
        return None
    sizes = _sizes_of(views)
    if sizes is None:
        return None
    first, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node.op != "output":
            copies[node] = first.node_copy(node, copies.__getitem__)
    first.output(tuple(copies[node] for node in computed))
    for node in reversed(views):
        if not copies[node].users:
            first.erase_node(copies[node])
    second, copies = Graph(), {}
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in (*computed, *given):
        copies[node] = second.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in views or node in sizes:
            copies[node] = second.node_copy(node, copies.__getitem__)
    second.output(tuple(copies[node] for node in results))
    made = make_graph_module(gm, first)
    return (made, make_graph_module(gm, second)) if results_are_their_own(made) else None


def _is_laid_out_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether strides are equal, of symbols whatever they stand for."""
    pairs = zip(tensor.stride(), other.stride(), strict=True)
    return all(statically_known_true(one == another) for one, another in pairs)


def _is_symbol_or_integer(node: Node) -> bool:
    return is_symbol(node) or isinstance(node.meta.get("val"), int)


def _sizes_of(views: Iterable[Node]) -> set[Node] | None:
    """What computes the numbers that views take; None where that takes more than inputs."""
    found: set[Node] = set()
    waiting = [one for node in views for one in node.all_input_nodes if _is_symbol_or_integer(one)]
    while waiting:
        node = waiting.pop()
        if node.op == "placeholder" or node in found:
            continue
        if not _is_symbol_or_integer(node):
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return found


def _base(result: Node, views: dict[Node, None]) -> Node:
    """What a result is a view of; ``views`` gets the operators between, of one tensor each."""
    base = result
    while base.op == "call_function":
        operands = [one for one in base.all_input_nodes if not _is_symbol_or_integer(one)]
        if len(operands) != 1:
            break
        (operand,) = operands
        is_item = base.target is operator.getitem and is_alias(operand)
        if base.target is _BY_PLACE or not (is_alias(base) or is_item):
            break
        views[base] = None
        base = operand
    return base
