"""What a strategy costs generated kernels: memory that they read, write and allocate, launches.

    cost ::= bytes that each kernel reads, however far back that lies, and writes, and its launch
           | bytes allocated                                   (the objective "memory")

Nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch.fx import Graph, Node

from magjit.plugin.virtual_tensors.contiguity import TRANSFER_BYTES, Contiguous, contiguity
from magjit.plugin.virtual_tensors.costs import CostModel, left_to_move, tensor_bytes
from magjit.plugin.virtual_tensors.indexing import At
from magjit.plugin.virtual_tensors.mapping import Affine, NotComposable, VirtualTensor
from magjit.plugin.virtual_tensors.mapping import Mapping as Places
from magjit.plugin.virtual_tensors.opportunities import (
    Movements,
    Opportunity,
)
from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.codegen.graphs import (
    ABSORBED,
    is_tensor,
    movement_of,
    tensors_read,
)
from magjit_triton.codegen.layout import Layout
from magjit_triton.kernels import AtenKernels, out_variant, strided

__all__ = [
    "Fused",
    "GeneratedKernels",
    "KernelModel",
    "chain_of",
    "is_look_up",
    "is_made",
    "maker_of",
    "part_of",
]

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


def chain_of(tensor: Node, fused: Fused) -> list[Node]:
    """A tensor and what it is a rearrangement of, through operators of one operand."""
    chain = [tensor]
    while True:
        moved = movement_of(chain[-1])
        if moved is None or len(moved[1]) != 1 or chain[-1] in fused.updates:
            return chain
        chain.append(moved[1][0])


def maker_of(tensor: Node) -> Node:
    first = tensor.args[0] if tensor.args else None
    is_item = getattr(tensor.target, "__name__", "") == "getitem"
    return first if is_item and isinstance(first, Node) else tensor


def is_made(node: Node, fused: Fused) -> bool:
    """Whether a kernel, or a library that takes ``out=``, computes a tensor."""
    if node.op != "call_function" or not is_tensor(node) or ABSORBED in node.meta:
        return False
    if fused.fusible(node):
        return movement_of(node) is None
    return out_variant(node) is not None


def is_look_up(node: Node) -> bool:
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


def part_of(node: Node, operand: Node, movements: Movements, place: VirtualTensor) -> Affine | None:
    """The strides that an operand has within the result of an operator."""
    operands = movements.operands(node)
    movement = movements.directions[node].operands.get(operands.index(operand))
    if movement is None or operands.count(operand) > 1:
        return None
    return strided(movement.over([place.mapping]))


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
        return is_made(tensor, self.fused) and tensor not in self.fused.updates

    def has_memory(self, tensor: Node, strategy: Strategy) -> bool:
        """Whether a tensor lies in memory: its own, or a part of another's."""
        opportunity = strategy.chosen.get(tensor)
        if opportunity is not None:
            return opportunity.backward
        if tensor in self.needed or not self.fused.fusible(tensor):
            return True
        return maker_of(tensor) in self.movements.directions

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
            self._followed[node] = node in self.movements.directions and is_look_up(node)
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
            if part_of(node, operand, self.movements, place) is None:
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
            stack = [maker_of(tensor), *tensor.users]
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
