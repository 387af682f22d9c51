"""What a strategy costs in bytes: the model of quick mode, where nothing is measured.

    cost ::= bytes moved by operators that are left, and copies that kernels make inside
           | bytes allocated                                   (the objective "memory")

What kernels can do is theirs to say: a ``Kernels`` answers for one operator what it costs that an
operand or result is where a strategy puts it, or that it cannot be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from magjit.plugin.virtual_tensors.opportunities import Movements, Opportunity
from magjit.plugin.virtual_tensors.search import Strategy

__all__ = ["CostModel", "Kernels", "left_to_fill", "left_to_move", "tensor_bytes"]


PLACING = 64.0
"""Bytes that a result in another's memory must save to be worth the trouble."""


class Kernels(Protocol):
    """What the kernels of a backend can read and write."""

    def run(self, node: Node, strategy: Strategy) -> float | None:
        """Bytes that computing ``node`` moves beyond its plain operands and results.

        None where no kernel takes operands and results at these places.
        """
        ...

    def move(self, node: Node, strategy: Strategy, whole: bool) -> float | None:
        """The same for a data-movement operator that is left; ``whole``: no part is needless."""
        ...


def tensor_bytes(value: object) -> float:
    """Bytes of a tensor's elements; of symbolic sizes, for those of the example."""
    if not isinstance(value, torch.Tensor):
        return 0.0
    count: Any = value.numel()
    if isinstance(count, torch.SymInt):
        hint = count.node.hint
        count = 2**16 if hint is None else hint
    return float(count * value.element_size())


class CostModel:
    """Costs of strategies for one graph, with the legality that does not depend on kernels.

    Args:
        graph: functional but for the updates that ``writes`` names.
        movements: its data-movement operators.
        kernels: of the backend.
        writes: tensor → the operator that overwrites its memory later in the graph.
        objective: ``"latency"`` or ``"memory"``.
        is_view: whether the results of an operator that is left lie in its operands' memory.
    """

    def __init__(
        self,
        graph: Graph,
        movements: Movements,
        kernels: Kernels,
        writes: Mapping[Node, Node] | None = None,
        objective: str = "latency",
        is_view: Callable[[Node], bool] = lambda operator: False,
    ) -> None:
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.movements = movements
        self.kernels = kernels
        self.writes = {node: self.order[writer] for node, writer in (writes or {}).items()}
        self.writers = set((writes or {}).values())
        self.objective = objective
        self.is_view = is_view
        self._sizes: dict[Node, float] = {}

    def gain(self, old: Strategy, new: Strategy, opportunity: Opportunity) -> float | None:
        """Equation 4: bytes that taking an opportunity saves; None where it is not legal."""
        tensors = new.pointing_to(opportunity.tensor) | {opportunity.tensor}
        tensors |= self._views_of(tensors, new)
        operators = {opportunity.operator}
        for tensor in tensors:
            operators |= {_maker(tensor)} | set(tensor.users)
        after = self._of(operators, new)
        if after is None:
            return None
        before = self._of(operators, old)
        return None if before is None else before - after

    def total(self, strategy: Strategy) -> float:
        """Bytes of the whole graph."""
        found = self._of(set(self.order), strategy)
        return float("inf") if found is None else found

    def _of(self, operators: set[Node], strategy: Strategy) -> float | None:
        total = 0.0
        for operator in operators:
            cost = self._operator(operator, strategy)
            if cost is None:
                return None
            total += cost
        return total

    def _operator(self, node: Node, strategy: Strategy) -> float | None:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return 0.0
        if node not in self.movements.directions:
            if not self._current(node, self.movements.operands(node), strategy):
                return None
            inside = self.kernels.run(node, strategy)
            if inside is None:
                return None
            placed = any(one in strategy.chosen for one in self.movements.results(node))
            return inside + self._allocated(node, strategy) + (PLACING if placed else 0.0)
        left = left_to_move(node, self.movements, strategy)
        if not left and not left_to_fill(node, self.movements, strategy):
            return 0.0
        if not self._current(node, left, strategy):
            return None
        operands = self.movements.operands(node)
        inside = self.kernels.move(node, strategy, whole=len(left) == len(operands))
        if inside is None:
            return None
        if self.objective == "memory":
            return inside + self._allocated(node, strategy)
        return inside + self._moved(node, left)

    def _moved(self, node: Node, left: Sequence[Node]) -> float:
        """What is read and written for operands, each at most its own and the results' bytes."""
        made = sum(self._bytes(one) for one in self.movements.results(node) if one is not None)
        if len(self.movements.operands(node)) == 1:
            return self._bytes(left[0]) + made if left else 0.0
        return sum(self._bytes(one) + min(self._bytes(one), made) for one in left)

    def _bytes(self, tensor: Node) -> float:
        if tensor not in self._sizes:
            self._sizes[tensor] = tensor_bytes(tensor.meta["val"])
        return self._sizes[tensor]

    def _allocated(self, node: Node, strategy: Strategy) -> float:
        if self.objective != "memory":
            return 0.0
        results = [one for one in self.movements.results(node) if one is not None]
        return sum(tensor_bytes(one.meta["val"]) for one in results if one not in strategy.chosen)

    def _current(self, node: Node, operands: list[Node], strategy: Strategy) -> bool:
        """Whether no operand's memory has been overwritten by the time it is read.

        An operator that writes a memory reads of it only what it is given to write to, its first
        operand: others must not lie in it.
        """
        here = self.order[node]
        place = self.movements.operands(node)[:1] if node in self.writers else []
        for operand in operands:
            for source in self._memory(operand, strategy):
                written = self.writes.get(source)
                if written is None or written > here:
                    continue
                if written < here or operand not in place:
                    return False
        return True

    def _memory(self, tensor: Node, strategy: Strategy) -> set[Node]:
        """The physical tensors that a tensor points to, and what they are views of."""
        found: set[Node] = set()
        waiting: list[Any] = [tensor]
        while waiting:
            for source in strategy.points_to(waiting.pop()) - found:
                assert isinstance(source, Node)
                found.add(source)
                maker = _maker(source)
                if source.op == "call_function" and self.is_view(maker):
                    waiting += self.movements.operands(maker)
        return found

    def _views_of(self, tensors: set[Node], strategy: Strategy) -> set[Node]:
        """Physical tensors in the memory of some others, and those that point to them."""
        if not self.writers:
            return set()
        found: set[Node] = set()
        waiting = list(tensors)
        while waiting:
            for user in waiting.pop().users:
                if user.op != "call_function" or not self.is_view(user):
                    continue
                for result in self.movements.results(user):
                    if result is not None and result not in found:
                        near = {result} | strategy.pointing_to(result)
                        waiting += near - found
                        found |= near
        return found


def left_to_move(node: Node, movements: Movements, strategy: Strategy) -> list[Node]:
    """The operands that a data-movement operator still has to read under a strategy."""
    results = [one for one in movements.results(node) if one is not None]
    if all(_by(strategy, result, node) for result in results):
        return []
    return [one for one in movements.operands(node) if not _by(strategy, one, node)]


def left_to_fill(node: Node, movements: Movements, strategy: Strategy) -> bool:
    """Whether an operator has values of its own to write, those of a padding."""
    results = [one for one in movements.results(node) if one is not None]
    if all(_by(strategy, result, node) for result in results):
        return False
    return any(
        part.fill is not None
        for movement in movements.directions[node].results
        for part in movement.parts
    )


def _by(strategy: Strategy, tensor: Node, operator: Node) -> bool:
    opportunity = strategy.chosen.get(tensor)
    return opportunity is not None and opportunity.operator is operator


def _maker(tensor: Node) -> Node:
    """The operator that computes a tensor."""
    first = tensor.args[0] if tensor.args else None
    is_item = getattr(tensor.target, "__name__", "") == "getitem"
    return first if is_item and isinstance(first, Node) else tensor
