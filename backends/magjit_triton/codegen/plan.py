"""What runs: kernels and library calls in order, and what lies where.

    Plan  ::= Unit*                       in an order in which they can run
    Unit  ::= Group | Node                a fused kernel, or a call of a library operator
    Group ::= Domain, Node*               nodes whose elements are computed in one loop nest

A unit stands after all those that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from magjit_triton.codegen.domain import Domain
from magjit_triton.codegen.layout import Layout
from magjit_triton.codegen.lowering import operator_name

__all__ = ["Group", "Plan", "in_order"]


@dataclass(eq=False)
class Group:
    """Nodes of one kernel.

    Attributes:
        domain: the loop nest.
        nodes: what it stores, unless nothing outside reads it.
    """

    domain: Domain
    nodes: list[Node]

    def __str__(self) -> str:
        return f"{self.domain} {', '.join(node.name for node in self.nodes)}"


@dataclass
class Plan:
    """Units in order, and what lies where.

    Attributes:
        units: kernels and library calls.
        layouts: every node with memory, and how it lies there.
        stored: nodes that a kernel stores.
        placed: nodes that are computed in another's memory → whose.
    """

    units: list[Group | Node]
    layouts: dict[Node, Layout]
    stored: set[Node]
    placed: dict[Node, Node] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for unit in self.units:
            if isinstance(unit, Group):
                kept = [self._shown(node) for node in unit.nodes if node in self.stored]
                lines.append(f"kernel {unit.domain} -> {', '.join(kept)}")
            else:
                called = operator_name(unit) or unit.name.partition("_")[0]
                lines.append(f"{called} -> {self._shown(unit)}")
        return "\n".join(lines)

    def _shown(self, node: Node) -> str:
        owner = self.placed.get(node)
        return node.name if owner is None else f"{node.name} in {owner.name}"


def in_order(units: Sequence[Group | Node], before: Mapping[int, set[int]]) -> list[Group | Node]:
    """The units in an order in which each stands after those it reads.

    Args:
        units: in any order.
        before: id of a unit → ids of the units that run before it.
    """
    result: list[Group | Node] = []
    placed: set[int] = set()
    waiting = list(units)
    while waiting:
        rest = []
        for unit in waiting:
            if before[id(unit)] <= placed:
                placed.add(id(unit))
                result.append(unit)
            else:
                rest.append(unit)
        assert len(rest) < len(waiting), "units wait for each other"
        waiting = rest
    return result
