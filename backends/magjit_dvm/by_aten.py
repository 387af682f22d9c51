"""A fused operator as ATen runs it, for arguments that have no bytecode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule
from torch.fx import Node as FxNode

from magjit.plugin import BackendError
from magjit.plugin.fx_nodes import is_symbol
from magjit_dvm.builder import size_key
from magjit_dvm.groups import FusedGroup
from magjit_dvm.joining import joined_by_aten

__all__ = ["by_aten"]

aten = torch.ops.aten
_TYPED_AS = (aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
"""They ask their first operand for its dtype and device, at most."""


def by_aten(gm: GraphModule, group: FusedGroup) -> Callable[..., Any]:
    """The group operator by operator, made when it is first called.

    Raises:
        BackendError: it takes numbers that neither its arguments nor their sizes say; of numbers
            that its program does not take, when it is called.
    """
    made: list[Callable[..., Any]] = []
    known = {*group.nodes, *(one for one in group.arguments if isinstance(one, FxNode))}
    read = (one for node in group.nodes for one in node.all_input_nodes)
    if any(is_symbol(one) and one not in known for one in read):
        made.append(_graph_of(gm, group))  # now, since it may be refused

    def run(*arguments: Any) -> Any:
        if not made:
            made.append(_graph_of(gm, group))
        results = made[0](*arguments)
        return results[0] if len(results) == 1 else results

    return run


def _graph_of(gm: GraphModule, group: FusedGroup) -> Callable[..., Any]:
    graph = Graph()
    copied: dict[FxNode, FxNode] = {}
    arguments: list[FxNode] = []
    for position, node in enumerate(group.arguments):
        arguments.append(graph.placeholder(f"argument_{position}"))
        if isinstance(node, FxNode):
            copied.setdefault(node, arguments[-1])
    wanted = group.values or group.outputs
    needed, waiting = set[FxNode](), list(wanted)
    own = set(group.nodes)
    while waiting:
        node = waiting.pop()
        if node in copied or node in needed:
            continue
        if node in own:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
        elif is_symbol(node):
            copied[node] = _number(graph, node.meta["val"], copied)
        else:
            typed = all(one.target in _TYPED_AS for one in node.users if one in own)
            copied[node] = _stand_in(graph, node, copied, typed)
    for node in group.nodes:
        if node in needed:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[node] for node in wanted))
    run: Callable[..., Any] = GraphModule(gm, graph).forward
    return joined_by_aten(group, run) if group.values else run


def _stand_in(graph: Graph, node: FxNode, copied: dict[FxNode, FxNode], typed: bool) -> FxNode:
    """Zeros for a tensor whose elements the program does not take, since nothing depends on them.

    Args:
        graph, copied: what is made, and of what so far.
        node: the tensor, outside of the group.
        typed: whether its sizes are not asked for, either.
    """
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise BackendError(f"{node} is nothing that its fused operator takes")
    shape: tuple[Any, ...] = (0,) if typed else tuple(value.shape)
    sizes = [one if isinstance(one, int) else _number(graph, one, copied) for one in shape]
    kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
    return graph.call_function(aten.zeros.default, (sizes,), kind)


def _number(graph: Graph, value: Any, copied: dict[FxNode, FxNode]) -> FxNode:
    """A size from outside of the group, found among those of its arguments, or made of them."""
    sizes = dict(_sizes(copied))
    key = size_key(value) if isinstance(value, torch.SymInt) else None
    if key in sizes:
        return graph.call_function(aten.sym_size.int, sizes[key])
    symbols = sorted(getattr(key, "free_symbols", ()), key=str)
    if not symbols or not all(one in sizes for one in symbols):
        raise BackendError(f"{value} is no size of what its fused operator takes")
    given = [graph.call_function(aten.sym_size.int, sizes[one]) for one in symbols]
    return graph.call_function(_evaluating(key, symbols), tuple(given))


def _sizes(copied: dict[FxNode, FxNode]) -> Iterator[tuple[Any, tuple[FxNode, int]]]:
    """Sizes of arguments, and where they are."""
    for node, argument in copied.items():
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            yield size_key(size), (argument, dim)


def _evaluating(expression: Any, symbols: list[Any]) -> Callable[..., int]:
    """What computes an expression of sizes."""

    def evaluated(*sizes: int) -> int:
        numbers = {one: sympy.Integer(size) for one, size in zip(symbols, sizes, strict=True)}
        return int(expression.xreplace(numbers))

    return evaluated
