"""Leaves of autograd that a program makes: ``requires_grad_()``, ``nn.Parameter(…)``, factories.

Neither AOTAutograd nor a trace without gradients knows of tensors that begin to need gradients
within a graph: results would come without ``requires_grad``, and what is computed of a leaf without
a backward.  A leaf that the graph only returns is made from the compiled graph's result instead;
a graph that computes with one runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.fx_helpers import results_of
from magjit.plugin.fx_nodes import called_at, called_name, graphs_of, new_call
from magjit.plugin.protocol import CompiledGraph

__all__ = ["Leaves", "UsedLeaf", "set_aside"]

Finish = Callable[[torch.Tensor], torch.Tensor]


class UsedLeaf(Exception):
    """A leaf that a graph makes and that cannot be made later; the text says which and where."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves that are to be made of a compiled graph's results.

    Attributes:
        made: for each, its positions among the results and what makes it of the result there.
    """

    made: tuple[tuple[tuple[int, ...], Finish], ...]

    def wrap(self, compiled: CompiledGraph) -> CompiledGraph:
        """A callable with the results of the original graph; ``compiled`` where it has no leaf."""
        if not self.made:
            return compiled
        made = self.made

        def call(*inputs: Any) -> Sequence[Any]:
            results = list(compiled(*inputs))
            for positions, finish in made:
                leaf = finish(results[positions[0]])
                for position in positions:
                    results[position] = leaf
            return tuple(results)

        return call


def set_aside(gm: GraphModule) -> Leaves:
    """Take out of a graph what makes its results leaves; changes ``gm``.

    Args:
        gm: torch-level, ending in a tuple of nodes.

    Raises:
        UsedLeaf: the graph uses a leaf that it makes, or changes an input's ``requires_grad``; then
            ``gm`` is as it was.
    """
    _, *inner = graphs_of(gm)
    for node in filter(_makes_leaf, (one for graph in inner for one in graph.nodes)):
        raise UsedLeaf(_text("a part of the program that stays one call makes", node))
    makers = list(filter(_makes_leaf, gm.graph.nodes))
    if not makers:
        return Leaves(())
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    wanted = dict.fromkeys(map(_tensor, makers))
    groups = [[node for node in order if _tensor(node) == one] for one in wanted]
    for same in groups:
        _check(same, order)
    results = results_of(gm.graph)
    made = []
    for same in groups:
        finish = _finish(same)
        positions = tuple(k for k, node in enumerate(results) if node in same)
        _take_out(gm.graph, same)
        if positions:
            made.append((positions, finish))
    gm.recompile()
    return Leaves(tuple(made))


def _makes_leaf(node: Node) -> bool:
    if _is_request(node):
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    return bool(node.kwargs.get("requires_grad")) or _is_parameter(node)


def _is_request(node: Node) -> bool:
    return called_name(node) == "requires_grad_"


def _is_parameter(node: Node) -> bool:
    return called_name(node) == "make_parameter"


def _wanted(maker: Node) -> bool:
    """Whether gradients are asked for, by a request or by what makes the tensor."""
    asked = maker.kwargs.get("requires_grad", _is_request(maker))
    if _is_request(maker) or _is_parameter(maker):
        (asked,) = maker.args[1:] or [asked]
    return bool(asked)


def _tensor(node: Node) -> Any:
    """Equal for nodes that stand for one tensor: its number, or the node that makes it."""
    number = node.meta.get("value_id")
    if number is None and _is_request(node):
        return _tensor(node.args[0])  # type: ignore[arg-type]
    return node if number is None else number


def _check(same: list[Node], order: dict[Node, int]) -> None:
    """Raise where somebody may see that a tensor becomes a leaf only after the graph."""
    makers = [node for node in same if _makes_leaf(node)]
    if same[0].op in ("placeholder", "get_attr"):
        raise UsedLeaf(_text("the program changes requires_grad of an outside tensor:", makers[0]))
    maker = next(filter(_wanted, makers), None)
    if maker is None:
        return
    for user in (user for node in same for user in node.users):
        later = order[user] > order[maker] and user.op != "output"
        if later and not _is_request(user) and not _detaches(user):
            raise UsedLeaf(_text("the program computes with a leaf that it makes:", maker))


def _detaches(node: Node) -> bool:
    return called_name(node) == "detach"


def _text(what: str, maker: Node) -> str:
    where = called_at(maker)
    return f"{what} {called_name(maker)}" + ("" if where is None else f" at {where}")


def _finish(same: list[Node]) -> Finish:
    """What makes the leaf of the graph's result."""
    first = same[0]
    wanted = _wanted([node for node in same if _makes_leaf(node)][-1])
    if _is_parameter(first):
        assert callable(first.target)
        return partial(_parameter, first.target, wanted)
    return partial(_requested, wanted)


def _parameter(make: Callable[..., Any], wanted: bool, data: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = make(data, wanted)
    return made


def _requested(wanted: bool, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(wanted)


def _take_out(graph: Graph, same: list[Node]) -> None:
    first = same[0]
    if _is_parameter(first):  # it shares its data's memory
        with graph.inserting_before(first):
            data = new_call(graph, "detach", first.args[:1])
        data.meta.update(first.meta)
        first.replace_all_uses_with(data)
        graph.erase_node(first)
    elif first.kwargs.get("requires_grad") is not None and not _is_request(first):
        first.kwargs = {k: v for k, v in first.kwargs.items() if k != "requires_grad"}
    for node in same[1:]:
        if _is_request(node):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
