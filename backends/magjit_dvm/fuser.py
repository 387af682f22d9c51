"""Groups the operators of a graph into fused operators (DVM, §5).

Pattern fusion of vector operators: in the graph's order, each operator joins the group of
an operand if it fits into that group's loops (``builder``) and if nothing outside of the
group lies between them.  The decision rests on symbolic sizes, so that it holds for all.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from magjit_dvm.builder import Builder, NotFusable
from magjit_dvm.program import Program
from magjit_dvm.translate import handles, translate

__all__ = ["FusedGroup", "Fusion", "fuse"]

aten = torch.ops.aten
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
"""These cost nothing by themselves: used outside of their group, ATen makes the view."""

_MOST = 48


@dataclass(slots=True)
class FusedGroup:
    """One fused operator.

    Attributes:
        nodes: what it computes, in the graph's order.
        outputs: those of them that are needed outside.
        program: for any sizes.
        arguments: what each call passes, in order.
        cube: which of the arguments is computed along with the group, panel by panel, or -1.
    """

    nodes: list[FxNode]
    outputs: list[FxNode] = field(default_factory=list)
    program: Program | None = None
    arguments: list[FxNode | int] = field(default_factory=list)

    cube: int = -1

    @property
    def operands(self) -> list[FxNode]:
        """What must have been computed before."""
        nodes = [one for one in self.arguments if isinstance(one, FxNode)]
        if self.cube >= 0:
            product = self.arguments[self.cube]
            assert isinstance(product, FxNode)
            nodes.remove(product)
            nodes += product.all_input_nodes
        return nodes


@dataclass(slots=True)
class Fusion:
    """A graph as a sequence of fused operators and single nodes, and why nodes stayed single."""

    steps: list[FusedGroup | FxNode]
    reasons: dict[FxNode, str]

    @property
    def groups(self) -> list[FusedGroup]:
        """The fused operators."""
        return [step for step in self.steps if isinstance(step, FusedGroup)]


def fuse(graph: Graph) -> Fusion:
    """Group the nodes of a functional ATen graph whose nodes carry ``meta["val"]``."""
    return _Fuser(graph).run()


class _Fuser:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.group_of: dict[FxNode, FusedGroup] = {}
        self.builders: dict[int, Builder] = {}
        self.reasons: dict[FxNode, str] = {}

    def run(self) -> Fusion:
        for node in self.graph.nodes:
            if handles(node):
                self.place(node)
        for group in {id(group): group for group in self.group_of.values()}.values():
            self.complete(group)
        return Fusion(self.schedule(), self.reasons)

    # -- joining --

    def place(self, node: FxNode) -> None:
        """Put ``node`` into the group of an operand, or into one of its own."""
        operands = [one for one in node.all_input_nodes if one in self.group_of]
        candidates = {id(self.group_of[one]): self.group_of[one] for one in reversed(operands)}
        for group in candidates.values():
            if len(group.nodes) < _MOST and self.may_join(node, group):
                if self.joined(group, node):
                    self.merge_others(group, candidates.values())
                    return
        if node.target is operator.getitem or node.target in VIEWS:
            return
        builder = Builder()
        try:
            translate(builder, node)
        except NotFusable as reason:
            self.reasons[node] = str(reason)
            return
        group = FusedGroup([node])
        self.group_of[node] = group
        self.builders[id(group)] = builder

    def joined(self, group: FusedGroup, node: FxNode) -> bool:
        """Add ``node`` to the group's program, which stays as it was if that fails."""
        try:
            translate(self.builders[id(group)], node)
        except NotFusable:
            self.builders[id(group)] = _built(group.nodes)
            return False
        group.nodes.append(node)
        self.group_of[node] = group
        return True

    def merge_others(self, group: FusedGroup, others: Iterable[FusedGroup]) -> None:
        """Join the groups of the other operands, where everything fits into one."""
        for other in list(others):
            if other is group or len(other.nodes) + len(group.nodes) > _MOST:
                continue
            nodes = sorted({*group.nodes, *other.nodes}, key=self.position.__getitem__)
            if not self.independent_outside(group, other):
                continue
            try:
                builder = _built(nodes)
            except NotFusable:
                continue
            group.nodes = nodes
            self.builders[id(group)] = builder
            self.builders.pop(id(other))
            for one in other.nodes:
                self.group_of[one] = group

    def may_join(self, node: FxNode, group: FusedGroup) -> bool:
        """Whether no operand outside of the group depends on it."""
        outside = [one for one in node.all_input_nodes if self.group_of.get(one) is not group]
        return not self.depends(outside, {id(group)})

    def independent_outside(self, first: FusedGroup, second: FusedGroup) -> bool:
        """Whether no path leaves the two groups and comes back."""
        both = {id(first), id(second)}
        outside = [
            one
            for node in (*first.nodes, *second.nodes)
            for one in node.all_input_nodes
            if id(self.group_of.get(one)) not in both
        ]
        return not self.depends(outside, both)

    def depends(self, nodes: Iterable[FxNode], groups: set[int]) -> bool:
        """Whether one of ``nodes`` needs a result of one of ``groups``."""
        seen: set[int] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            group = self.group_of.get(node)
            unit = id(node) if group is None else id(group)
            if unit in groups:
                return True
            if unit in seen:
                continue
            seen.add(unit)
            for member in [node] if group is None else group.nodes:
                waiting.extend(member.all_input_nodes)
        return False

    # -- completing --

    def complete(self, group: FusedGroup) -> None:
        """Make the group's program; what keeps it from being made becomes a group before it."""
        builder = self.builders.pop(id(group))
        try:
            group.outputs = self.outputs(group)
            group.program, group.arguments = builder.finish(group.outputs)
            return
        except NotFusable as reason:
            culprit = reason.node or group.nodes[-1]
            needed = self.needed_by(culprit, group)
            if len(needed) == len(group.nodes):
                needed.discard(culprit)
                self.reasons[culprit] = str(reason)
                self.group_of.pop(culprit)
                parts = [[node for node in group.nodes if node in needed]]
            else:
                parts = [
                    [node for node in group.nodes if (node in needed) is first]
                    for first in (True, False)
                ]
        for nodes in parts:
            self.divided(nodes)

    def divided(self, nodes: list[FxNode]) -> None:
        """Make a group of a part of one, and its program."""
        if all(node.target in VIEWS or node.target is operator.getitem for node in nodes):
            for node in nodes:
                self.group_of.pop(node, None)
            return
        group = FusedGroup(nodes)
        try:
            self.builders[id(group)] = _built(nodes)
        except NotFusable as reason:
            # A view of what is outside now, at the part's beginning.
            self.reasons[nodes[0]] = str(reason)
            self.group_of.pop(nodes[0], None)
            self.divided(nodes[1:])
            return
        for node in nodes:
            self.group_of[node] = group
        self.complete(group)

    def needed_by(self, node: FxNode, group: FusedGroup) -> set[FxNode]:
        """``node`` and all of the group that it is computed from."""
        inside = set(group.nodes)
        needed: set[FxNode] = set()
        waiting = [node]
        while waiting:
            one = waiting.pop()
            if one in inside and one not in needed:
                needed.add(one)
                waiting.extend(one.all_input_nodes)
        return needed

    def outputs(self, group: FusedGroup) -> list[FxNode]:
        """Values that are needed outside; of views, what they are views of."""
        inside = set(group.nodes)
        needed: set[FxNode] = set()

        def need(node: Any) -> None:
            if node.target in VIEWS and node.args[0] in inside:
                need(node.args[0])
            else:
                needed.add(node)

        for node in group.nodes:
            if any(user not in inside for user in node.users):
                if not isinstance(node.meta["val"], torch.Tensor):
                    raise NotFusable("a result of several that is not computed", node)
                need(node)
        return [node for node in group.nodes if node in needed]

    # -- order --

    def schedule(self) -> list[FusedGroup | FxNode]:
        """All steps in an order in which operands come first, near the graph's own."""
        outputs = {node for group in self.group_of.values() for node in group.outputs}
        units: dict[int, FusedGroup | FxNode] = {}
        unit_of: dict[FxNode, int] = {}
        for node in self.graph.nodes:
            group = self.group_of.get(node)
            unit = node if group is None or self.made_outside(node, outputs) else group
            units[id(unit)] = unit
            unit_of[node] = id(unit)
        needs = {
            key: {unit_of[one] for one in _operands(unit)} - {key} for key, unit in units.items()
        }
        return _sorted(units, needs, self.position)

    def made_outside(self, node: FxNode, outputs: set[FxNode]) -> bool:
        """Whether a node of a group is a view that ATen makes, since it is needed outside of it."""
        if node.target not in VIEWS or node in outputs:
            return False
        group = self.group_of[node]
        return any(
            self.group_of.get(user) is not group or self.made_outside(user, outputs)
            for user in node.users
        )


def _built(nodes: Sequence[FxNode]) -> Builder:
    builder = Builder()
    for node in nodes:
        translate(builder, node)
    return builder


def _operands(unit: FusedGroup | FxNode) -> list[FxNode]:
    if isinstance(unit, FusedGroup):
        return unit.operands
    return list(unit.all_input_nodes)


def _sorted(
    units: dict[int, FusedGroup | FxNode],
    needs: dict[int, set[int]],
    position: dict[FxNode, int],
) -> list[FusedGroup | FxNode]:
    def rank(key: int) -> int:
        unit = units[key]
        return position[unit.nodes[-1] if isinstance(unit, FusedGroup) else unit]

    users: dict[int, list[int]] = {key: [] for key in units}
    missing = {key: len(wanted) for key, wanted in needs.items()}
    for key, wanted in needs.items():
        for one in wanted:
            users[one].append(key)
    ready = [(rank(key), key) for key, count in missing.items() if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, key = heapq.heappop(ready)
        ordered.append(units[key])
        for user in users[key]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, (rank(user), user))
    assert len(ordered) == len(units), "groups wait for one another"
    return ordered
