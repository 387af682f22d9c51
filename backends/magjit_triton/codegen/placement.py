"""Where generated kernels put what they compute: the points-to search over what fusion leaves open.

    Placement ::= placed, kept
    placed    ::= tensor → Layout       computed inside the memory of another one
    kept      ::= rearrangements made once, though kernels could read through them

Kernels read through every movement, so most rearrangements need no decision.  Two do: what lies in
a ``cat`` or ``stack`` can be computed there (VTC §4.1, output virtual tensors) or read from where
it is, and elements that are looked up one by one can be looked up once or by each reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.fx import Graph, Node

from magjit.plugin.virtual_tensors.contiguity import TRANSFER_BYTES, Contiguous, contiguity
from magjit.plugin.virtual_tensors.costs import CostModel, left_to_move, tensor_bytes
from magjit.plugin.virtual_tensors.indexing import At, size_expr
from magjit.plugin.virtual_tensors.mapping import Affine, NotComposable, VirtualTensor
from magjit.plugin.virtual_tensors.mapping import Mapping as Places
from magjit.plugin.virtual_tensors.opportunities import (
    Movements,
    Opportunities,
    Opportunity,
    find_opportunities,
)
from magjit.plugin.virtual_tensors.rules import Directions, directions_of
from magjit.plugin.virtual_tensors.search import Strategy, search
from magjit_triton.codegen.graphs import (
    ABSORBED,
    is_tensor,
    movement_of,
    mutates,
    tensors_read,
)
from magjit_triton.codegen.layout import Layout, sizes_of, strides_for
from magjit_triton.kernels import AtenKernels, out_variant, strided

__all__ = ["Choices", "Placement", "find_choices", "placement", "searched"]

LAUNCH = 4e6
"""Bytes that a GPU moves in the time in which a kernel is launched."""
_HINT = 1e-6
"""What costs no memory is still better with less to do."""


class Fused(Protocol):
    """What is asked of the fusion."""

    realized: dict[Node, Layout]

    @property
    def updates(self) -> Mapping[Node, object]:
        """The nodes that are stored into inputs."""
        ...

    def fusible(self, node: Node) -> bool:
        """Whether kernels can compute a node."""
        ...


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
        if moved is None or not fused.fusible(node) or _maker(node) is not node:
            continue
        if len(node.users) > 1 and _is_look_up(node):
            found[node] = directions_of(node) or Directions()
        elif (len(moved[1]) > 1 or node in fused.realized) and _is_dense(node):
            chains = [_chain(one, fused) for one in moved[1]]
            directions = _writable(node)
            if directions is None or not any(_is_made(chain[-1], fused) for chain in chains):
                continue
            found[node] = directions
            for maker in (_maker(one) for chain in chains for one in chain[:-1]):
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


def _chain(tensor: Node, fused: Fused) -> list[Node]:
    """A tensor and what it is a rearrangement of, through operators of one operand."""
    chain = [tensor]
    while True:
        moved = movement_of(chain[-1])
        if moved is None or len(moved[1]) != 1 or chain[-1] in fused.updates:
            return chain
        chain.append(moved[1][0])


def _maker(tensor: Node) -> Node:
    first = tensor.args[0] if tensor.args else None
    is_item = getattr(tensor.target, "__name__", "") == "getitem"
    return first if is_item and isinstance(first, Node) else tensor


def _is_made(node: Node, fused: Fused) -> bool:
    """Whether a kernel, or a library that takes ``out=``, computes a tensor."""
    if node.op != "call_function" or not is_tensor(node) or ABSORBED in node.meta:
        return False
    if fused.fusible(node):
        return movement_of(node) is None
    return out_variant(node) is not None


def _is_look_up(node: Node) -> bool:
    """Whether each element comes from a place of its own that is read from memory."""
    moved = movement_of(node)
    if moved is None or not any(one.has(At) for part in moved[0].parts for one in part.index):
        return False
    shapes = [one.meta["val"].shape for one in moved[1]]
    operands = [Places.physical(shape, source=k) for k, shape in enumerate(shapes)]
    try:
        places = moved[0].over(operands)
    except NotComposable:
        return False
    return contiguity(places, node.meta["val"].element_size()).kind is Contiguous.NOT


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


class GeneratedKernels:
    """``Kernels`` of generated code: what its kernels and the library's calls read and write.

    A kernel is charged for the memory that it reads through movements and through what it computes
    on the way, for what it writes, and for its launch unless it can be part of another one.

    Args:
        fused: the fusion; its ``realized`` has what needs memory in any case.
        movements: the operators about which something is decided.
        objective: ``"memory"`` charges what is allocated.
    """

    def __init__(self, fused: Fused, movements: Movements, objective: str = "latency") -> None:
        self.fused = fused
        self.movements = movements
        self.objective = objective
        self.aten = AtenKernels(movements)
        self.needed = frozenset(fused.realized)
        self._followed: dict[Node, bool] = {}

    def can_write(self, tensor: Node) -> bool:
        """Whether a tensor can be computed into given memory."""
        return _is_made(tensor, self.fused) and tensor not in self.fused.updates

    def has_memory(self, tensor: Node, strategy: Strategy) -> bool:
        """Whether a tensor lies in memory: its own, or a part of another's."""
        opportunity = strategy.chosen.get(tensor)
        if opportunity is not None:
            return opportunity.backward
        if tensor in self.needed or not self.fused.fusible(tensor):
            return True
        return _maker(tensor) in self.movements.directions

    def leaves(self, tensor: Node, strategy: Strategy) -> dict[Node, float]:
        """The tensors in memory that computing one reads, and bytes of each."""
        found: dict[Node, float] = {}
        own = _count(tensor) if movement_of(tensor) is not None else math.inf
        stack = [(one, own, 1.0) for one in tensors_read(tensor)]
        seen: set[Node] = set()
        while stack:
            node, most, factor = stack.pop()
            if self.has_memory(node, strategy):
                given = min(most, _count(node)) * node.meta["val"].element_size() * factor
                found[node] = max(found.get(node, 0.0), given)
                continue
            if node in seen:
                continue
            seen.add(node)
            moved = movement_of(node)
            if moved is None:
                stack += [(one, math.inf, factor) for one in tensors_read(node)]
                continue
            movement, operands = moved
            sector = TRANSFER_BYTES / node.meta["val"].element_size() / 2
            data = {part.operand for part in movement.parts} if self.looks_up(node) else set()
            for number, one in enumerate(operands):
                times = max(factor, sector) if number in data else factor
                stack.append((one, min(most, _count(node)), times))
        return found

    def looks_up(self, node: Node) -> bool:
        """Whether reading through a movement means to look up single elements."""
        if node not in self._followed:
            self._followed[node] = node in self.movements.directions and _is_look_up(node)
        return self._followed[node]

    def run(self, node: Node, strategy: Strategy) -> float | None:
        """Bytes that computing a node moves, or allocates; None where it cannot be so."""
        if ABSORBED in node.meta or not is_tensor(node):
            return 0.0
        if not self.fused.fusible(node):
            return self._library(node, strategy)
        if not self.has_memory(node, strategy):
            return 0.0
        if node in strategy.chosen and self.aten.affine(node, strategy) is None:
            return None
        return self._stored(node, self.leaves(node, strategy), strategy)

    def _library(self, node: Node, strategy: Strategy) -> float | None:
        copies: float | None = 0.0
        if isinstance(node.target, torch._ops.OpOverload):
            concerned = {node, *self.movements.operands(node)}
            if not concerned.isdisjoint(strategy.chosen):
                copies = self.aten.run(node, strategy)
        if copies is None or self.objective != "memory":
            return copies
        return copies + (0.0 if node in strategy.chosen else tensor_bytes(node.meta["val"]))

    def _stored(
        self, node: Node, leaves: Mapping[Node, float], strategy: Strategy, own: bool = True
    ) -> float:
        """A tensor that a kernel stores."""
        written = tensor_bytes(node.meta["val"])
        traffic = written + sum(self._read(node, one, leaves) for one in leaves)
        launch = 0.0 if self._joins(node, leaves) else LAUNCH
        if self.objective != "memory":
            return traffic + launch
        return (0.0 if node in strategy.chosen or not own else written) + (traffic + launch) * _HINT

    def _read(self, node: Node, leaf: Node, leaves: Mapping[Node, float]) -> float:
        """Nothing where the kernel that computes a tensor reduces the same rows anyway."""
        shared = _count(leaf) == _count(node) and any(
            self._is_reduction(other) and leaf in tensors_read(other)
            for other in leaves
            if other is not leaf
        )
        return 0.0 if shared else leaves[leaf]

    def _is_reduction(self, node: Node) -> bool:
        if not self.fused.fusible(node) or movement_of(node) is not None:
            return False
        return any(_count(one) > _count(node) for one in tensors_read(node))

    def _joins(self, node: Node, leaves: Mapping[Node, float]) -> bool:
        """Whether a tensor is computed point by point beside what it reads, or its reductions."""
        for leaf in leaves:
            if not self.fused.fusible(leaf):
                continue
            if _count(leaf) == _count(node):
                return True
            if self._is_reduction(leaf) and any(
                _count(one) == _count(node) for one in tensors_read(leaf)
            ):
                return True
        return False

    def move(self, node: Node, strategy: Strategy, whole: bool) -> float | None:
        """The same for a rearrangement that gets memory."""
        left = left_to_move(node, self.movements, strategy)
        results = [one for one in self.movements.results(node) if one is not None]
        if len(results) != 1:
            return 0.0 if whole else None  # Parts of what is cut are read where they lie.
        (result,) = results
        if whole:
            if result in strategy.chosen:
                return None  # Nothing of it is computed there.
            return self._stored(result, self.leaves(result, strategy), strategy)
        place = strategy.place(result)
        total = self.filled(node, strategy)
        for operand in left:
            if _part(node, operand, self.movements, place) is None:
                return None
            leaves = {operand: tensor_bytes(operand.meta["val"])}
            if not self.has_memory(operand, strategy):
                leaves = self.leaves(operand, strategy)
            total += self._stored(operand, leaves, strategy, own=False)
        return total

    def filled(self, node: Node, strategy: Strategy) -> float:
        """Memory that others fill part by part."""
        if self.objective != "memory":
            return 0.0
        results = [one for one in self.movements.results(node) if one is not None]
        return sum(tensor_bytes(one.meta["val"]) for one in results if one not in strategy.chosen)


def _count(node: Node) -> float:
    value = node.meta["val"]
    return float(tensor_bytes(value) / value.element_size())


class KernelModel(CostModel):
    """Costs in which each kernel is charged for all that it reads, however far back that lies."""

    def __init__(
        self, graph: Graph, movements: Movements, kernels: GeneratedKernels, objective: str
    ) -> None:
        super().__init__(graph, movements, kernels, None, objective)
        self._scopes: dict[Node, set[Node]] = {}
        self.generated = kernels
        self._needed = kernels.needed

    def gain(self, old: Strategy, new: Strategy, opportunity: Opportunity) -> float | None:
        """Bytes that an opportunity saves; None where the tensor has to be in memory as it is."""
        if opportunity.tensor in self._needed and not opportunity.backward:
            return None
        operators = set(self._scope(opportunity.tensor)) | self._scope(opportunity.operator)
        for tensor in new.pointing_to(opportunity.tensor):
            operators |= self._scope(tensor)
        after = self._of(operators, new)
        before = self._of(operators, old)
        if after is None:
            return None
        return float("inf") if before is None else before - after

    def _scope(self, tensor: Node) -> set[Node]:
        """A tensor's operator and all whose kernels may read it."""
        if tensor not in self._scopes:
            found: set[Node] = set()
            stack = [_maker(tensor), *tensor.users]
            while stack:
                node = stack.pop()
                if node in found:
                    continue
                found.add(node)
                if node in self._needed and node not in self.movements.directions:
                    continue
                stack.extend(node.users)
            self._scopes[tensor] = found
        return self._scopes[tensor]

    def _operator(self, node: Node, strategy: Strategy) -> float | None:
        if node.op != "call_function":
            return 0.0
        if node not in self.movements.directions:
            return self.kernels.run(node, strategy)
        left = left_to_move(node, self.movements, strategy)
        if not left:
            return self.generated.filled(node, strategy)
        whole = len(left) == len(self.movements.operands(node))
        return self.kernels.move(node, strategy, whole)


def placement(choices: Choices, strategy: Strategy, fused: Fused) -> Placement:
    """A strategy as layouts."""
    found = Placement()
    movements, kernels = choices.movements, choices.model.generated
    for tensor, opportunity in strategy.chosen.items():
        maker = _maker(tensor)
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
                affine = _part(node, operand, movements, place)
                assert affine is not None, f"{operand} has no strides in {node}"
                owner = place.sources[affine.source]
                assert isinstance(owner, Node)
                found.copied.append((operand, node, owner, _layout(operand, owner, affine)))
        elif is_tensor(node) and node not in strategy.chosen and node not in fused.realized:
            if kernels.looks_up(node):
                found.kept.add(node)
    return found


def _part(node: Node, operand: Node, movements: Movements, place: VirtualTensor) -> Affine | None:
    """The strides that an operand has within the result of an operator."""
    operands = movements.operands(node)
    movement = movements.directions[node].operands.get(operands.index(operand))
    if movement is None or operands.count(operand) > 1:
        return None
    return strided(movement.over([place.mapping]))


def _layout(tensor: Node, owner: Node, affine: Affine) -> Layout:
    value = tensor.meta["val"]
    return Layout(owner.name, value.dtype, sizes_of(value), affine.strides, affine.offset)
