"""Groups the operators of a graph into fused operators (DVM, §5).

Pattern fusion of vector operators: in the graph's order, each operator joins the group of
an operand if it fits into that group's loops (``builder``) and if nothing outside of the
group lies between them.  The decision rests on symbolic sizes, so that it holds for all.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

from magjit.plugin.sizes import elements_of
from magjit_dvm.across import may_go_across
from magjit_dvm.alone import gains_alone
from magjit_dvm.builder import Builder, NotFusable, Value
from magjit_dvm.groups import APART, OF_READERS, VIEWS, FusedGroup, Fusion
from magjit_dvm.in_place import store_in_place
from magjit_dvm.joining import Joiner, join_parts
from magjit_dvm.look_ups import only_looks_up, repeated
from magjit_dvm.paths import Paths
from magjit_dvm.program import ACROSS, MAPS, NodeKind, varying
from magjit_dvm.size_classes import SizeClasses
from magjit_dvm.translate import handles, translate

__all__ = ["fuse"]

_MOST = 48
_LIGHT = 3
"""Computations of an operator that memory decides about."""
_LARGE, _FEW_INPUTS = 8 << 20, 6
"""Bytes of what is made, from which on it pays to read an operand once; and of so many."""


def fuse(graph: Graph, fixed: bool = True) -> Fusion:
    """Group the nodes of a functional ATen graph whose nodes carry ``meta["val"]``.

    Args:
        graph: is not changed.
        fixed: sizes that are ints are the same in all calls, not just equal where they are.
    """
    fusion = _Fuser(graph).run()
    joiner = Joiner(fusion, fixed)
    join_parts(joiner)
    store_in_place(joiner)
    return fusion


class _Fuser:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.group_of: dict[FxNode, FusedGroup] = {}
        self.paths = Paths(graph, self.group_of)
        self.builders: dict[int, Builder] = {}
        self.reasons: dict[FxNode, str] = {}
        self.alone: dict[FxNode, FusedGroup] = {}
        self.class_of = SizeClasses(graph).of

    def run(self) -> Fusion:
        for node in self.graph.nodes:
            if handles(node):
                self.place(node)
        for node in self.graph.nodes:
            if node in self.group_of and may_go_across(node):
                self.merge_others(self.group_of[node], self.beside(self.group_of[node]))
        for group in {id(group): group for group in self.group_of.values()}.values():
            if self.is_large_map(group):
                beside = [one for one in self.beside(group) if self.is_large_map(one)]
                self.merge_others(group, beside, alike=True)
        for group in {id(group): group for group in self.group_of.values()}.values():
            self.complete(group)
        return Fusion(self.schedule(), self.reasons, self.alone)

    # -- joining --

    def place(self, node: FxNode, among: dict[int, FusedGroup] | None = None) -> None:
        """Put ``node`` into the group of an operand, one of ``among``, or into one of its own."""
        operands = [
            one for one in node.all_input_nodes if one in self.group_of and _may_meet(one, node)
        ]
        candidates = {id(self.group_of[one]): self.group_of[one] for one in reversed(operands)}
        if among is not None:
            candidates = {key: group for key, group in candidates.items() if key in among}
        for group in candidates.values():
            if len(group.nodes) < _MOST and self.may_join(node, group):
                if self.joined(group, node):
                    self.merge_others(group, candidates.values())
                    return
        if node.target is operator.getitem or node.target in VIEWS:
            return
        builder = Builder(self.class_of)
        try:
            translate(builder, node)
        except NotFusable as reason:
            self.reasons[node] = str(reason)
            return
        group = FusedGroup([node])
        self.group_of[node] = group
        self.builders[id(group)] = builder
        if among is not None:
            among[id(group)] = group

    def joined(self, group: FusedGroup, node: FxNode) -> bool:
        """Add ``node`` to the group's program, which stays as it was if that fails."""
        builder = self.builders[id(group)]
        loops = len(builder.loops)
        try:
            translate(builder, node)
            if len(builder.loops) > loops:
                _check_loops(group.nodes, builder)
        except NotFusable:
            self.builders[id(group)] = self.built(group.nodes)
            return False
        self.paths.spread((group.nodes[-1], node))
        group.nodes.append(node)
        self.group_of[node] = group
        return True

    def built(self, nodes: Sequence[FxNode]) -> Builder:
        """A program of these nodes, in order.

        Raises:
            NotFusable: they do not fit into one.
        """
        builder = Builder(self.class_of)
        for node in nodes:
            translate(builder, node)
        return builder

    def merge_others(
        self, group: FusedGroup, others: Iterable[FusedGroup], alike: bool = False
    ) -> None:
        """Join the groups of the other operands, where everything fits into one.

        Args:
            group, others: of which those that are joined are none any more.
            alike: all of them run along the same loops.
        """
        for other in list(others):
            if other is group or len(other.nodes) + len(group.nodes) > _MOST:
                continue
            if any(APART in one.meta for one in (*group.nodes, *other.nodes)):
                continue
            nodes = sorted({*group.nodes, *other.nodes}, key=self.paths.position.__getitem__)
            if not self.independent_outside(group, other):
                continue
            try:
                builder = self.built(nodes)
                _check_loops(nodes, builder)
            except NotFusable:
                continue
            if alike and len(builder.loops) > len(self.builders[id(group)].loops):
                continue
            self.paths.spread(nodes)
            group.nodes = nodes
            self.builders[id(group)] = builder
            self.builders.pop(id(other))
            for one in other.nodes:
                self.group_of[one] = group

    def beside(self, group: FusedGroup) -> list[FusedGroup]:
        """Other groups that read a tensor which this one reads, of as many elements as any."""
        inside = set(group.nodes)
        read = {one for node in group.nodes for one in node.all_input_nodes} - inside
        count = max(elements_of(node) for node in (*group.nodes, *read))
        whole = [one for one in read if elements_of(one) == count]
        users = [user for one in whole for user in one.users if user in self.group_of]
        found = {id(self.group_of[user]): self.group_of[user] for user in users}
        return [one for one in found.values() if one is not group]

    def is_large_map(self, group: FusedGroup) -> bool:
        """Whether memory decides about a group that computes each element by itself.

        Two of these that read the same are one, so that it is read once.
        """
        builder = self.builders.get(id(group))
        if builder is None or len(builder.inputs) > _FEW_INPUTS:
            return False
        whole = range(len(builder.loops))
        made = [builder.values.get(node) for node in group.nodes]
        maps = all(one.kind in MAPS for one in builder.nodes)
        full = all(isinstance(one, Value) and {*whole} <= {*one.dims} for one in made)
        return maps and full and max(map(_bytes_of, group.nodes)) >= _LARGE

    def may_join(self, node: FxNode, group: FusedGroup) -> bool:
        """Whether no operand outside of the group depends on it."""
        outside = [one for one in node.all_input_nodes if self.group_of.get(one) is not group]
        return not self.paths.depend(outside, (group,))

    def independent_outside(self, first: FusedGroup, second: FusedGroup) -> bool:
        """Whether no path leaves the two groups and comes back."""
        both = {id(first), id(second)}
        outside = [
            one
            for node in (*first.nodes, *second.nodes)
            for one in node.all_input_nodes
            if id(self.group_of.get(one)) not in both
        ]
        return not self.paths.depend(outside, (first, second))

    # -- completing --

    def complete(self, group: FusedGroup) -> None:
        """Make the group's program; what keeps it from being made becomes a group before it."""
        builder = self.builders.pop(id(group))
        try:
            group.outputs = self.outputs(group)
            group.program, arguments = builder.finish(group.outputs, self.outside(group))
            group.arguments = list(arguments)
            again = repeated(group) if group.on_gpu else None
            if again is not None:
                raise NotFusable("a look-up for each element, repeated", again)
            if _is_one_kernel(group):
                (node,) = group.nodes
                self.reasons[node] = "alone: ATen has a kernel for it"
                self.group_of.pop(node)
                if _may_go_with_others(group):
                    self.alone[node] = group
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

    def outside(self, group: FusedGroup) -> set[FxNode]:
        """What the group reads of others, for its outputs."""
        inside = set(group.nodes)
        needed = set[FxNode]().union(*(self.needed_by(one, group) for one in group.outputs))
        return {one for node in needed for one in node.all_input_nodes} - inside

    def divided(self, nodes: list[FxNode]) -> None:
        """Make a group of a part of one, and its program."""
        if all(node.target in VIEWS or node.target is operator.getitem for node in nodes):
            for node in nodes:
                self.group_of.pop(node, None)
            return
        group = FusedGroup(nodes)
        try:
            self.builders[id(group)] = self.built(nodes)
        except NotFusable:
            self.regrouped(nodes)
            return
        for node in nodes:
            self.group_of[node] = group
        self.complete(group)

    def regrouped(self, nodes: list[FxNode]) -> None:
        """Group what is left of a group anew: views in it may be views of what is outside now."""
        made: dict[int, FusedGroup] = {}
        for node in nodes:
            self.group_of.pop(node, None)
        for node in nodes:
            self.place(node, made)
        for key, group in made.items():
            if key in self.builders:  # not merged with another
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
                if not isinstance(one.meta["val"], torch.Tensor):
                    waiting.extend(one.users)  # its items: they go where it goes
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
            key: {unit_of[one] for one in self.needs(unit)} - {key} for key, unit in units.items()
        }
        return _sorted(units, needs, self.paths.position)

    def needs(self, unit: FusedGroup | FxNode) -> list[FxNode]:
        """What has to run before a step."""
        if isinstance(unit, FusedGroup):
            before = [one for node in unit.nodes for one in self.paths.before.get(node, ())]
            return [*unit.operands, *before]
        return [*unit.all_input_nodes, *self.paths.before.get(unit, ())]

    def made_outside(self, node: FxNode, outputs: set[FxNode]) -> bool:
        """Whether a node of a group is a view that ATen makes, since it is needed outside of it."""
        if node.target not in VIEWS or node in outputs:
            return False
        group = self.group_of[node]
        return any(
            self.group_of.get(user) is not group or self.made_outside(user, outputs)
            for user in node.users
        )


def _may_meet(operand: FxNode, node: FxNode) -> bool:
    """Whether nothing that is known of them keeps two nodes from one group."""
    if APART in operand.meta or APART in node.meta:
        return False
    return OF_READERS not in node.meta or OF_READERS in operand.meta


def _check_loops(nodes: Iterable[FxNode], builder: Builder) -> None:
    """Raise where what has been reduced lacks a loop of a group that is not reduced.

    As a result it has no place in the group, which would be divided when it is complete, wherever
    it was begun; else it would be computed anew for each turn of that loop.
    """
    reduced = {d for one in builder.nodes if one.kind is NodeKind.REDUCE for d in one.dims}
    if not reduced:
        return
    needed = set(range(len(builder.loops))) - reduced
    varies: list[frozenset[int]] = []
    for one in builder.nodes:
        varies.append(varying(one, varies, builder.inputs))
        if one.kind is NodeKind.REDUCE and one.aux != ACROSS and not needed <= varies[-1]:
            raise NotFusable("a reduction for each turn of another loop")
    for node in nodes:
        value = builder.values.get(node)
        if not isinstance(value, Value) or needed.issubset(value.dims):
            continue
        if not all(map(handles, node.users)):
            raise NotFusable("a result lacks a loop of the group", node)


def _is_one_kernel(group: FusedGroup) -> bool:
    """Whether ATen does a group on a GPU as fast: nothing is fused, so no traffic is saved."""
    node, *others = group.nodes
    if others or not group.on_gpu:
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    alone = pointwise and not gains_alone(node)
    return may_go_across(node) or alone or only_looks_up(group)


def _bytes_of(node: FxNode) -> int:
    value = node.meta.get("val")
    return elements_of(node) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _may_go_with_others(group: FusedGroup) -> bool:
    """Whether an operator that ATen runs as fast loses nothing in a launch with others.

    What computes much for what it moves is slower by words.
    """
    (node,) = group.nodes
    if may_go_across(node) or only_looks_up(group) or group.program is None:
        return False
    computed = sum(one.kind is NodeKind.COMPUTE for one in group.program.nodes)
    return computed <= _LIGHT and set(group.operands) <= set(node.all_input_nodes)


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
