"""What runs in which order: the result of fusion.

Plan  ::= Unit*                       in an order in which they can run
Unit  ::= Group | Node                a fused kernel, or a call of a library operator
Group ::= Domain, Node*               nodes whose elements are computed in one loop nest
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from magjit_triton.codegen.domain import Domain
from magjit_triton.codegen.layout import Layout
from magjit_triton.codegen.lowering import operator_name

__all__ = ["Group", "Plan"]


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
    """

    units: list[Group | Node]
    layouts: dict[Node, Layout]
    stored: set[Node]

    def __str__(self) -> str:
        lines = []
        for unit in self.units:
            if isinstance(unit, Group):
                kept = [node.name for node in unit.nodes if node in self.stored]
                lines.append(f"kernel {unit.domain} -> {', '.join(kept)}")
            else:
                lines.append(f"{operator_name(unit) or unit.name.partition('_')[0]} -> {unit.name}")
        return "\n".join(lines)
