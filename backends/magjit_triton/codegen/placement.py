"""Where generated kernels put what they compute: the points-to search over what fusion leaves open.

    Placement ::= placed, kept
    placed    ::= tensor → Layout       computed inside the memory of another one
    kept      ::= rearrangements made once, though kernels could read through them

Kernels read through every movement, so most rearrangements need no decision.  Two do: what lies in
a ``cat`` or ``stack`` can be computed there (VTC §4.1, output virtual tensors) or read from where
it is, and elements that are looked up one by one can be looked up once or by each reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from magjit.plugin.virtual_tensors.costs import left_to_move
from magjit.plugin.virtual_tensors.indexing import size_expr
from magjit.plugin.virtual_tensors.mapping import Affine
from magjit.plugin.virtual_tensors.opportunities import (
    Movements,
    Opportunities,
    find_opportunities,
)
from magjit.plugin.virtual_tensors.rules import Directions, directions_of
from magjit.plugin.virtual_tensors.search import Strategy, search
from magjit_triton.codegen.graphs import (
    is_tensor,
    movement_of,
    mutates,
)
from magjit_triton.codegen.layout import Layout, sizes_of, strides_for
from magjit_triton.codegen.traffic import (
    Fused,
    GeneratedKernels,
    KernelModel,
    chain_of,
    is_look_up,
    is_made,
    maker_of,
    part_of,
)

__all__ = ["Choices", "Placement", "find_choices", "placement", "searched"]


@dataclass
class Placement:
    """What the search decides.

    Attributes:
        placed: tensor → the owner of the memory that it is computed in, and where it lies there.
        joined: the same of results whose operands lie in another's memory together.
        copied: operand, operator, owner and place, where others of the operator's are placed.
        kept: rearrangements that get memory.
    """

    placed: dict[Node, tuple[Node, Layout]] = field(default_factory=dict)
    joined: dict[Node, tuple[Node, Layout]] = field(default_factory=dict)
    copied: list[tuple[Node, Node, Node, Layout]] = field(default_factory=list)
    kept: set[Node] = field(default_factory=set)

    def with_copies(self, graph: Graph) -> dict[Node, tuple[Node, Layout]]:
        """What is placed, the copies among it, which are made as nodes of the graph."""
        found = dict(self.placed)
        for operand, node, owner, layout in self.copied:
            with graph.inserting_before(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (operand,))
            copy.meta["val"] = operand.meta["val"]
            found[copy] = owner, layout
        return found


@dataclass
class Choices:
    """What is open in a graph.

    Attributes:
        movements: the data-movement operators concerned.
        opportunities: the graph of all ways to make their operands and results virtual.
        base: what fusion does without a decision: kernels read through all of them.
        model: what strategies cost.
    """

    movements: Movements
    opportunities: Opportunities
    base: Strategy
    model: KernelModel

    @property
    def order(self) -> dict[Node, int]:
        """The nodes of the graph by number."""
        return self.model.order


def find_choices(graph: Graph, fused: Fused, objective: str = "latency") -> Choices | None:
    """The opportunities of a graph whose nodes have memory as far as nothing is open; or None.

    Args:
        graph: functional ATen, each node with ``meta["val"]``.
        fused: says which nodes kernels compute; ``realized`` has those that need memory.
        objective: ``"latency"`` or ``"memory"``.
    """
    movements = _open_movements(graph, fused)
    if not movements.directions:
        return None
    kernels = GeneratedKernels(fused, movements, objective)
    opportunities = find_opportunities(graph, _fixed(graph, fused), kernels.can_write, movements)
    if not opportunities.choices:
        return None
    base = Strategy()
    for tensor, own in opportunities.choices.items():
        forward = [one for one in own if not one.backward and tensor not in fused.realized]
        if forward:
            base = base.with_(forward[0])
    model = KernelModel(graph, movements, kernels, objective)
    return Choices(movements, opportunities, base, model)


def searched(choices: Choices) -> Strategy:
    """The cheapest strategy that the greedy search finds; what fusion does unasked if none is."""
    found = search(choices.opportunities, choices.model.gain, choices.model.total)
    total = choices.model.total
    return found if total(found) < total(choices.base) else choices.base


def _open_movements(graph: Graph, fused: Fused) -> Movements:
    """Operators that put tensors together, what leads to their operands, and look-ups."""
    found: dict[Node, Directions] = {}
    for node in graph.nodes:
        moved = movement_of(node) if is_tensor(node) and node not in fused.updates else None
        if moved is None or not fused.fusible(node) or maker_of(node) is not node:
            continue
        if len(node.users) > 1 and is_look_up(node):
            found[node] = directions_of(node) or Directions()
        elif (len(moved[1]) > 1 or node in fused.realized) and _is_dense(node):
            chains = [chain_of(one, fused) for one in moved[1]]
            directions = _writable(node)
            if directions is None or not any(is_made(chain[-1], fused) for chain in chains):
                continue
            found[node] = directions
            for maker in (maker_of(one) for chain in chains for one in chain[:-1]):
                inner = _writable(maker)
                if inner is not None:
                    found[maker] = inner
    return Movements({node: found[node] for node in graph.nodes if node in found})


def _writable(node: Node) -> Directions | None:
    """What an operator does, if all of its result is its operands' and they have places in it."""
    directions = directions_of(node)
    if directions is None or not directions.operands:
        return None
    fills = any(part.fill is not None for one in directions.results for part in one.parts)
    return None if fills else directions


def _is_dense(node: Node) -> bool:
    """Whether memory that is made for a tensor has the strides that it has in eager mode."""
    value = node.meta["val"]
    return strides_for(value) == tuple(map(size_expr, value.stride()))


def _fixed(graph: Graph, fused: Fused) -> dict[Node, str]:
    """Tensors that stay where they are, or that somebody else may see."""
    found: dict[Node, str] = {}
    waiting: list[Node] = []
    for node in graph.nodes:
        if node.op == "output" or (node.op == "call_function" and mutates(node)):
            waiting += node.all_input_nodes
        if node in fused.updates:
            found[node] = "is stored into an input"
        if is_tensor(node) and any(size == 0 for size in sizes_of(node.meta["val"])):
            found[node] = "has no elements"
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = "shares memory with an output"
        moved = movement_of(node)
        if moved is not None and len(moved[0].parts) == 1:
            waiting += moved[1]
    return found


def placement(choices: Choices, strategy: Strategy, fused: Fused) -> Placement:
    """A strategy as layouts."""
    found = Placement()
    movements, kernels = choices.movements, choices.model.generated
    for tensor, opportunity in strategy.chosen.items():
        maker = maker_of(tensor)
        gathers = maker in movements.directions and len(movements.operands(maker)) > 1
        if opportunity.backward and (maker not in movements.directions or gathers):
            place = strategy.place(tensor)
            affine = kernels.aten.affine(tensor, strategy)
            assert affine is not None, f"{tensor} has no strides in another's memory"
            owner = place.sources[affine.source]
            assert isinstance(owner, Node)
            into = found.joined if gathers else found.placed
            into[tensor] = owner, _layout(tensor, owner, affine)
    owners = {owner for owner, _ in found.placed.values()}
    for node in movements.directions:
        if node in owners or node in found.joined:
            place = strategy.place(node)
            for operand in left_to_move(node, movements, strategy):
                affine = part_of(node, operand, movements, place)
                assert affine is not None, f"{operand} has no strides in {node}"
                owner = place.sources[affine.source]
                assert isinstance(owner, Node)
                found.copied.append((operand, node, owner, _layout(operand, owner, affine)))
        elif is_tensor(node) and node not in strategy.chosen and node not in fused.realized:
            if kernels.looks_up(node):
                found.kept.add(node)
    return found


def _layout(tensor: Node, owner: Node, affine: Affine) -> Layout:
    value = tensor.meta["val"]
    return Layout(owner.name, value.dtype, sizes_of(value), affine.strides, affine.offset)
