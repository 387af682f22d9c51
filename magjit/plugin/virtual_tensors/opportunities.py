"""The virtual tensor opportunity graph and its conflict sets (VTC §5.1, Algorithm 1).

    Opportunity ::= tensor → targets       the tensor may be a virtual tensor of these
    VTOG        ::= tensors, edges of all opportunities (a networkx multigraph)
    conflicts   ::= pairs of edges of one tensor that belong to different opportunities

Tensors are FX nodes of a functional ATen graph. Edges of one opportunity go together: what a tensor
becomes through one operator may be spread over several others (a split's operand). Those of two
opportunities exclude each other, for they would give an element two places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, Node

from magjit.plugin.virtual_tensors.calls import operand_nodes, result_nodes
from magjit.plugin.virtual_tensors.mapping import Movement
from magjit.plugin.virtual_tensors.rules import Directions, directions_of

if TYPE_CHECKING:  # A compilation whose decisions are known loads it not.
    import networkx

__all__ = ["Movements", "Opportunities", "Opportunity", "find_opportunities"]


@dataclass(frozen=True, slots=True, eq=False)
class Opportunity:
    """One way to make a tensor virtual.

    Attributes:
        tensor: what becomes virtual.
        targets: what it points to, by the movement's operand numbers; None where nothing has a
            use for that result.
        movement: the tensor as a rearrangement of the targets.
        operator: the data-movement operator that this (or its part in this) makes needless.
        backward: whether an operand becomes virtual of the operator's results.
    """

    tensor: Node
    targets: tuple[Node | None, ...]
    movement: Movement
    operator: Node
    backward: bool

    def __str__(self) -> str:
        targets = ", ".join(str(target) for target in dict.fromkeys(self.targets))
        return f"{self.tensor} → {targets} ({self.operator})"


@dataclass(slots=True)
class Movements:
    """The data-movement operators of a graph with their rules' answers.

    Attributes:
        directions: of each such operator.
    """

    directions: dict[Node, Directions] = field(default_factory=dict)
    _operands: dict[Node, list[Node]] = field(default_factory=dict)
    _results: dict[Node, list[Node | None]] = field(default_factory=dict)

    def operands(self, node: Node) -> list[Node]:
        """``operand_nodes``, remembered: the graph must not change."""
        if node not in self._operands:
            self._operands[node] = operand_nodes(node)
        return self._operands[node]

    def results(self, node: Node) -> list[Node | None]:
        """``result_nodes``, remembered."""
        if node not in self._results:
            self._results[node] = result_nodes(node)
        return self._results[node]

    @classmethod
    def of(cls, graph: Graph) -> Movements:
        found: dict[Node, Directions] = {}
        for node in graph.nodes:
            directions = directions_of(node)
            if directions is not None:
                found[node] = directions
        return cls(found)


@dataclass(slots=True)
class Opportunities:
    """The VTOG with what its edges mean.

    Attributes:
        tensors: of the graph that was looked at.
        choices: tensor → its opportunities; a strategy takes at most one of each.
        fixed: tensors that stay physical → why.
        beside: tensor → the tensors that one kernel reads or writes together with it.
    """

    tensors: list[Node]
    choices: dict[Node, list[Opportunity]]
    fixed: dict[Node, str]
    beside: dict[Node, set[Node]]

    @property
    def graph(self) -> networkx.MultiDiGraph:
        """Nodes are tensors; an edge ``u → v`` has the key and attribute ``opportunity``."""
        import networkx

        made = networkx.MultiDiGraph()
        made.add_nodes_from(self.tensors)
        for tensor in self.choices:
            for end, key, opportunity in self._edges(tensor):
                made.add_edge(tensor, end, key=key, opportunity=opportunity)
        return made

    def _edges(self, tensor: Node) -> Iterator[tuple[Node, int, Opportunity]]:
        for key, opportunity in enumerate(self.choices.get(tensor, ())):
            for end in dict.fromkeys(opportunity.targets):
                if end is not None:
                    yield end, key, opportunity

    def conflicts(self, tensor: Node) -> set[frozenset[tuple[Node, Node, int]]]:
        """The conflict set: pairs of the tensor's outgoing edges that exclude each other."""
        edges = [((tensor, end, key), key) for end, key, _ in self._edges(tensor)]
        return {
            frozenset((one, other))
            for (one, number), (other, second) in combinations(edges, 2)
            if number != second
        }

    def is_points_to_graph(self, chosen: dict[Node, Opportunity]) -> bool:
        """Whether a strategy gives every element one place: no conflicts, no cycles."""
        edges = {
            tensor: [end for end in one.targets if end is not None]
            for tensor, one in chosen.items()
        }
        try:
            TopologicalSorter(edges).prepare()
        except CycleError:
            return False
        return True


def find_opportunities(
    graph: Graph,
    fixed: dict[Node, str],
    can_write: Callable[[Node], bool] = lambda tensor: True,
    movements: Movements | None = None,
    further: Sequence[Opportunity] = (),
) -> Opportunities:
    """Algorithm 1.

    An operand that no kernel can write into another tensor's memory is not offered a place in a
    result, nor is what is only a view of it: nothing could be gained.

    Args:
        graph: functional ATen, each node with ``meta["val"]``.
        fixed: tensors that must be physical, with a reason; inputs and outputs of the graph are
            among them whether named or not.
        can_write: whether the kernel that computes a tensor may write into given memory.
        movements: the rules' answers, where they are already known.
        further: opportunities that no rule gives, such as memory that the graph updates.
    """
    reasons = dict(fixed)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            reasons.setdefault(node, "an input of the graph")
        elif node.op == "output":
            for one in node.all_input_nodes:
                reasons.setdefault(one, "an output of the graph")
    choices: dict[Node, list[Opportunity]] = {}
    known = Movements.of(graph) if movements is None else movements
    given = [
        one
        for operator, directions in known.directions.items()
        for one in _of(operator, directions)
    ]
    given += further
    writable = _writable(given, set(reasons), can_write)
    for opportunity in given:
        tensor = opportunity.tensor
        if tensor in reasons or tensor in opportunity.targets:
            continue
        if opportunity.backward and tensor not in writable:
            continue
        choices.setdefault(tensor, []).append(opportunity)
    in_order = {node: choices[node] for node in graph.nodes if node in choices}
    beside = {node: _beside(node, known) for node in in_order}
    tensors = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    return Opportunities(tensors, in_order, reasons, beside)


def _beside(tensor: Node, movements: Movements) -> set[Node]:
    found: set[Node] = set()
    for operator in (tensor, *tensor.users):
        if operator not in movements.directions:
            found |= {operator, *operator.all_input_nodes}
    return found


def _writable(
    given: Sequence[Opportunity], fixed: set[Node], can_write: Callable[[Node], bool]
) -> set[Node]:
    """Tensors that a kernel can compute in place, and those which such a one may point to."""
    moved = {one.tensor for one in given if not one.backward}
    tensors = {one.tensor for one in given if one.backward} - fixed
    found = {one for one in tensors if one not in moved and can_write(one)}
    grown = True
    while grown:
        grown = False
        for one in given:
            if one.backward and one.tensor in found:
                new = {target for target in one.targets if target in tensors} - found
                found |= new
                grown = grown or bool(new)
    return found


def _of(operator: Node, directions: Directions) -> Iterator[Opportunity]:
    operands, results = operand_nodes(operator), result_nodes(operator)
    for result, movement in zip(results, directions.results, strict=False):
        if result is not None:
            yield Opportunity(result, tuple(operands), movement, operator, backward=False)
    for position, movement in directions.operands.items():
        # An operand that is given twice cannot be in two places.
        if operands.count(operands[position]) == 1 and all(one is not None for one in results):
            yield Opportunity(operands[position], tuple(results), movement, operator, backward=True)
