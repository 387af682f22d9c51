"""Which nodes are computed together, and which have memory (VTC §5.1: fusion comes first).

A node has memory where something outside of its kernel reads it; all others are computed where
they are needed.  Two groups become one where the one reads the other's elements at the very point
at which they are computed, or where both read the same memory in equal nests, and where no path
through a third unit leads from one to the other.  Large results that share no element stay apart:
together they would have to be in memory at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import GraphModule, Node

from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.codegen.attention import attend, attention_parts, find_attention
from magjit_triton.codegen.domain import Domain, total
from magjit_triton.codegen.graphs import (
    ABSORBED,
    is_empty,
    is_moments,
    is_opened,
    is_tensor,
    keeps_order,
    movement_of,
    mutates,
    tensors_read,
)
from magjit_triton.codegen.handlers import REDUCTIONS, is_expensive, reduced_dims
from magjit_triton.codegen.ir import Builder
from magjit_triton.codegen.layout import Layout, has_gaps, sizes_of
from magjit_triton.codegen.lowering import HANDLERS, Lowering, Unfusible, operator_name
from magjit_triton.codegen.operators import POINTWISE
from magjit_triton.codegen.ordering import bytes_of, lowering_peak, uses
from magjit_triton.codegen.placement import Choices, find_choices, placement, searched
from magjit_triton.codegen.plan import Group, Plan, in_order
from magjit_triton.codegen.runtime import POINTERS
from magjit_triton.codegen.shown import may_show, owner_of, shown_in
from magjit_triton.codegen.strided import strided_in
from magjit_triton.codegen.updates import Update, take_updates
from magjit_triton.kernels import never_raises

__all__ = ["Fusion", "Group", "Plan"]

_NO_DTYPES = (torch.complex64, torch.complex128, torch.complex32)
_MOST_LOADS = 24
_LOOK_BACK = 48
_LARGE = 8 << 20
"""Bytes of results beside which a launch costs nothing."""


@dataclass
class Fusion:
    """Makes the plan of a graph.

    Attributes:
        gm: an ATen graph with fake values in ``meta["val"]``.
        fusible_devices: types of devices whose tensors kernels may compute.
        objective: ``"latency"`` or ``"memory"``.
        decide: what is computed in another's memory, of what may be.
        strategy: what it has decided.
        filled: memory that is computed part by part → the tensors that are its parts.
    """

    gm: GraphModule
    fusible_devices: tuple[str, ...] = ("cuda",)
    objective: str = "latency"
    decide: Callable[[Choices], Strategy] = searched
    realized: dict[Node, Layout] = field(default_factory=dict)
    units: list[Group | Node] = field(default_factory=list)
    updates: dict[Node, Update] = field(default_factory=dict)
    views: dict[Node, tuple[Node, Layout] | None] = field(default_factory=dict)
    strategy: Strategy = field(default_factory=Strategy)
    filled: dict[Node, list[Node]] = field(default_factory=dict)
    placed: dict[Node, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._fusible: dict[Node, bool] = {}
        self._lowers: dict[Node, bool] = {}  # which no plan changes
        self._unit_of: dict[Node, Group | Node] = {}
        self._before: dict[int, set[int]] = {}
        self._reads: dict[Node, frozenset[Node]] = {}
        self._barrier: set[int] = set()
        self._last: Node | None = None  # of those that keep their order

    # What can be fused.

    def fusible(self, node: Node) -> bool:
        """Whether kernels can compute a node."""
        if node not in self._fusible:
            self._fusible[node] = self._is_fusible(node)
        return self._fusible[node]

    def _is_fusible(self, node: Node) -> bool:
        if not is_tensor(node) or node.op != "call_function":
            return False
        if node in self.updates:
            return True
        values = [node.meta["val"]]
        values += [one.meta["val"] for one in node.all_input_nodes if is_tensor(one)]
        for value in values:
            if value.dtype not in POINTERS or value.layout != torch.strided:
                return False
            if value.device.type not in self.fusible_devices or is_empty(value):
                return False
        is_part = node.target is operator.getitem and is_moments(node.args[0])
        if is_part or movement_of(node) is not None:
            return self._can_lower(node)
        name = operator_name(node)
        if "out" in node.kwargs or node.kwargs.get("dtype") in _NO_DTYPES:
            return False
        return (name in HANDLERS or name in POINTWISE) and self._can_lower(node)

    def _can_lower(self, node: Node) -> bool:
        """Try: one kernel that reads all inputs of the node from memory."""
        if node in self.updates or node in self.placed:
            return self._lowers_alone(node)
        if node not in self._lowers:
            self._lowers[node] = self._lowers_alone(node)
        return self._lowers[node]

    def _lowers_alone(self, node: Node) -> bool:
        memory = {one: Layout.of(one.name, one.meta["val"]) for one in tensors_read(node)}
        domain = self.domain_of(node)
        with suppress(Unfusible, NotImplementedError):
            return domain is not None and bool(self.lowered(domain, [node], memory).stores)
        return False

    def domain_of(self, node: Node) -> Domain | None:
        """The nest in which a node alone would be computed."""
        if node in self.updates:
            return Domain(self.updates[node].movement.shape)
        source = node.args[0] if node.target is operator.getitem and node.args else node
        if isinstance(source, Node) and operator_name(source) in REDUCTIONS:
            try:
                base, dims = reduced_dims(source)
            except Unfusible:
                return None
            sizes = sizes_of(base.meta["val"])
            if not dims or any(sizes[k] == 0 for k in dims):
                return None
            return Domain(sizes, frozenset(dims))
        return Domain(sizes_of(node.meta["val"]))

    def lowered(
        self, domain: Domain, nodes: Iterable[Node], memory: Mapping[Node, Layout]
    ) -> Builder:
        """The instructions that compute nodes in a nest, with a store for each.

        Raises:
            Unfusible: the nest cannot compute one of them.
        """
        nodes = list(nodes)
        builder = Builder(domain.dims())
        own = set(nodes)
        outside = {node: layout for node, layout in memory.items() if node not in own}
        lowering = Lowering(builder, domain, outside, movement_of)
        places = {}
        for node in nodes:
            sizes = sizes_of(node.meta["val"])
            if node in self.updates:
                sizes = self.updates[node].movement.shape
            index = domain.index_of(sizes, builder.ranges)
            if index is None:
                raise Unfusible(f"{node} has another number of elements than {domain}")
            places[node] = index
        lowering.computed = places
        for node in nodes:
            if node in self.updates:
                lowering.update(self.updates[node], places[node], self.realized[node])
            else:
                layout = memory.get(node) or Layout.dense(node.name, node.meta["val"])
                place = self.realized[node] if node in self.placed else layout
                lowering.store(node, places[node], place)
        if builder.stores_once_what_varies():
            raise Unfusible("a value that varies within its row")
        return builder

    # What has memory.

    def view_of(self, node: Node) -> tuple[Node, Layout] | None:
        """A node as strides into the memory of another one that has, or can have, memory.

        Views of what is computed need no memory of their own where the whole chain of movements
        is one stride per dimension.
        """
        if node not in self.views:
            self.views[node] = strided_in(node, self.layout_of, self._has_or_gets_memory)
        return self.views[node]

    def _has_or_gets_memory(self, node: Node) -> bool:
        return node in self.realized or not self.fusible(node)

    def layout_of(self, node: Node) -> Layout:
        """How a node lies, or would lie, in memory of its own."""
        if node in self.realized:
            return self.realized[node]
        if self.fusible(node):
            return Layout.dense(node.name, node.meta["val"])
        return Layout.of(node.name, node.meta["val"])

    def realize(self, node: Node) -> None:
        """Give a node memory."""
        if node not in self.realized:
            self.realized[node] = self.layout_of(node)

    def _realize_for(self, node: Node, changed: Set[Node]) -> None:
        """Give a library operator its operand: as a view, unless of what is changed by then."""
        found = self.view_of(node)
        found = found if found is None or found[0] is node or found[0] not in changed else None
        self.realize(node if found is None else found[0])
        if found is None:
            self.views.pop(node, None)

    def reads_of(self, node: Node) -> frozenset[Node]:
        """The nodes with memory that computing a node reads."""
        if node in self.realized or not self.fusible(node):
            return frozenset([node])
        if node not in self._reads:
            reads = (self.reads_of(one) for one in tensors_read(node))
            self._reads[node] = frozenset().union(*reads)
        return self._reads[node]

    def _decide_memory(self) -> None:
        nodes = list(self.gm.graph.nodes)
        for node, update in list(self.updates.items()):
            self.realized[node] = Layout.of(update.root.name, update.root.meta["val"])
            if not self._can_lower(node):
                raise AssertionError(f"{node} cannot be stored into {update.root}")
        for node in nodes:
            if node.op in ("placeholder", "get_attr") or (
                node.op == "call_function" and not self.fusible(node)
            ):
                if is_tensor(node):
                    self.realize(node)
        changed = {one for node in nodes if mutates(node) for one in node.all_input_nodes}
        changed |= {update.root for update in self.updates.values()}
        for node in nodes:
            if node.op == "call_function" and not self.fusible(node):
                if is_opened(node, self.fusible) or node.target is attend:
                    continue
                for one in node.all_input_nodes:
                    if is_tensor(one):
                        self._realize_for(one, changed if mutates(node) else set())
            elif node.op == "output":
                self._realize_outputs(node)
        for node in nodes:
            if node.op == "call_function" and self.fusible(node) and self._deserves_memory(node):
                self.realize(node)

    def _realize_outputs(self, node: Node) -> None:
        results = [one for one in node.all_input_nodes if is_tensor(one)]
        shown: set[Node] = set(results)
        places: dict[Node, tuple[Node, Layout]] = {}
        for one in results:
            owner = owner_of(one)
            if owner not in places:
                places[owner] = self._shown(owner, shown)
            base, layout = places[owner]
            place = layout if one is owner else shown_in(one, owner, layout)
            if place is not None:
                self.views[one] = base, place
            else:
                self.views.pop(one, None)
                self.realize(one)

    def _shown(self, owner: Node, shown: set[Node]) -> tuple[Node, Layout]:
        """Memory for a tensor that results are views of: its own, or all of a hidden one's."""
        if owner not in self.realized:
            found = self.view_of(owner)
            if found is not None and found[0] is not owner:
                if found[0] not in shown | self.updates.keys() and may_show(owner, *found):
                    shown.add(found[0])
                    self.realize(found[0])
                    return found
        shown.add(owner)
        self.realized.setdefault(owner, self._owned(owner))
        return owner, self.realized[owner]

    def _owned(self, node: Node) -> Layout:
        """How a tensor lies that is shown: with gaps, if it has some in eager mode."""
        value = node.meta["val"]
        if node in self.realized or not self.fusible(node) or not has_gaps(value):
            return self.layout_of(node)
        return Layout.of(node.name, value)

    def _take_places(self) -> None:
        """Give what the search wants in another tensor's memory its place there."""
        choices = find_choices(self.gm.graph, self, self.objective)
        if choices is None:
            return
        self.strategy = self.decide(choices)
        self._reads.clear()
        self.views.clear()
        found = placement(choices, self.strategy, self)
        for node in found.kept:
            self.realize(node)
        for node, (owner, layout) in found.with_copies(self.gm.graph).items():
            self.realize(owner)
            self.realized[node] = layout
            self.placed[node] = owner
            self.filled.setdefault(owner, []).append(node)
        for node, (owner, layout) in found.joined.items():
            self.realized[node] = layout
            self.filled[node] = self.filled[owner]

    def _deserves_memory(self, node: Node) -> bool:
        if node in self.realized or ABSORBED in node.meta:
            return node in self.realized
        reads = self.reads_of(node)
        if len(reads) > _MOST_LOADS:
            return True
        if movement_of(node) is not None:
            return False
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, Node) and operator_name(source) in REDUCTIONS:
            return True
        users = [user for user in node.users if not is_opened(user, self.fusible)]
        if len(users) < 2 or not (is_expensive(node) or len(reads) > 1):
            return False
        if self.objective == "memory":
            # Without memory of its own it keeps alive what it is computed from.
            kept = sum(bytes_of(one) for one in reads if one.op == "call_function")
            return kept > bytes_of(node)
        return True

    # Units.

    def plan(self) -> Plan:
        """Fuse."""
        self.updates = take_updates(self.gm, self.fusible_devices)
        find_attention(self.gm, self.fusible_devices, self.fusible)
        return self.planned()

    def planned(self) -> Plan:
        """The plan of a graph that is prepared."""
        self._decide_memory()
        self._take_places()
        for node in self.gm.graph.nodes:
            if node.op != "call_function" or node in self.filled:
                continue
            if self.fusible(node):
                if node in self.realized:
                    self._place(node)
            elif not is_opened(node, self.fusible):
                self._add(node, [node])
        stored = self._stored()
        for unit in self.units:
            if isinstance(unit, Group):
                unit.nodes.sort(key=lambda one: one in stored, reverse=True)
        units = in_order(self.units, self._before)
        units = [u for u in units if isinstance(u, Node) or set(u.nodes) & stored]
        results = next(node for node in self.gm.graph.nodes if node.op == "output")
        kept = frozenset(self._direct_reads(results))
        use_of = uses(stored, self.placed, self.updates, self.fusible, self._direct_reads)
        units = lowering_peak(units, use_of, self._before, kept)
        layouts = {
            node: layout
            for node, layout in self.realized.items()
            if node in stored or not self.fusible(node)
        }
        return Plan(units, layouts, stored, self.placed)

    def _add(self, unit: Group | Node, nodes: Sequence[Node]) -> None:
        before: set[int] = set(self._barrier)
        if isinstance(unit, Node) and mutates(unit):
            # What was written before and is read after keeps its place.
            before |= {id(one) for one in self.units}
            self._barrier = before | {id(unit)}
        for source in self._sources(unit, nodes):
            before |= {id(source)} | self._before[id(source)]
        if isinstance(unit, Node) and keeps_order(unit):
            if self._last is not None:
                before |= {id(self._last)} | self._before[id(self._last)]
            self._last = unit
        self.units.append(unit)
        self._before[id(unit)] = before
        for node in nodes:
            self._unit_of[node] = unit

    def _sources(self, unit: Group | Node, nodes: Sequence[Node]) -> set[Group | Node]:
        found: set[Group | Node] = set()
        for node in nodes:
            for one in self._direct_reads(node):
                source = self._unit_of.get(one)
                if source is not None and source is not unit:
                    found.add(source)
        return found

    def _direct_reads(self, node: Node) -> Iterator[Node]:
        """What a node reads: memory, also of operators that are no tensors."""
        stack = list(node.all_input_nodes)
        seen = set()
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            if one in self.realized or (one.op == "call_function" and one in self._unit_of):
                yield one
                yield from self.filled.get(one, ())
            else:
                stack.extend(one.all_input_nodes)

    def _place(self, node: Node) -> None:
        domain = self.domain_of(node)
        assert domain is not None
        reads = set(self._direct_reads(node))
        needed = {id(s) for one in reads if (s := self._unit_of.get(one)) is not None}
        if node in self.updates:  # After what may raise, as in eager mode.
            needed |= {id(u) for u in self.units if isinstance(u, Node) and not never_raises(u)}
        behind = set().union(*(self._before[one] for one in needed)) | needed
        # A kernel does not read memory of which it writes a part.
        parts = [part for one in reads for part in self.filled.get(one, ())]
        writers = {id(self._unit_of[part]) for part in parts}
        for group in reversed([u for u in self.units[-_LOOK_BACK:] if isinstance(u, Group)]):
            if id(group) in self._barrier:
                break
            if id(group) in writers:
                continue
            if any(id(group) in self._before[one] for one in needed if one != id(group)):
                continue
            if self._related(group, node, reads) and self._join(group, node, domain, behind):
                return
        self._add(Group(domain, [node]), [node])

    def _related(self, group: Group, node: Node, reads: set[Node]) -> bool:
        if any(one in reads for one in group.nodes):
            return True
        return any(reads & set(self._direct_reads(one)) for one in group.nodes)

    def _join(self, group: Group, node: Node, domain: Domain, behind: set[int]) -> bool:
        roots = [self.updates[one].root for one in group.nodes if one in self.updates]
        if node in self.updates and self.updates[node].root in roots:
            return False
        joint = domain if domain.reduced and not group.domain.reduced else group.domain
        if domain.reduced and group.domain.reduced:
            if sympy.expand(total(domain.shape) - total(group.domain.shape)) != 0:
                return False
        try:
            builder = self.lowered(joint, [*group.nodes, node], self.realized)
        except (Unfusible, NotImplementedError):
            return False
        if len(set(builder.loads())) > _MOST_LOADS + 8 or self._are_apart(group, node, joint):
            return False
        group.domain = joint
        group.nodes.append(node)
        self._unit_of[node] = group
        added = behind - {id(group)}
        self._before[id(group)] |= added
        for before in self._before.values():
            if id(group) in before:
                before |= added
        return True

    def _are_apart(self, group: Group, node: Node, joint: Domain) -> bool:
        """Whether large results, each with memory of its own, share no element that is read."""
        nodes = [*group.nodes, node]
        if any(bytes_of(n) < _LARGE or n in self.updates or n in self.placed for n in nodes):
            return False
        if not set(group.nodes).isdisjoint(self._direct_reads(node)):
            return False
        own = self.lowered(joint, [node], self.realized).loads()
        return set(own).isdisjoint(self.lowered(joint, group.nodes, self.realized).loads())

    def _stored(self) -> set[Node]:
        """The fused nodes that something outside of their kernel reads."""
        stored: set[Node] = set(self.updates)
        for node in self.gm.graph.nodes:
            if node.op == "output" or (
                node.op == "call_function"
                and not self.fusible(node)
                and not is_opened(node, self.fusible)
            ):
                if node.target is attend:
                    parts = attention_parts(node, self.realized).values()
                    names = {load.buffer for part in parts for load in part.builder.loads()}
                    stored |= {n for n, at in self.realized.items() if at.buffer in names}
                    continue
                for one in node.all_input_nodes:
                    if is_tensor(one):
                        found = self.view_of(one)
                        stored.add(one if found is None else found[0])
        for unit in self.units:
            if isinstance(unit, Group):
                builder = self.lowered(unit.domain, unit.nodes, self.realized)
                names = {load.buffer for load in builder.loads()}
                stored |= {n for n, layout in self.realized.items() if layout.buffer in names}
        for owner, filling in self.filled.items():
            stored |= {owner, *filling}
        return {node for node in stored if self.fusible(node)}
