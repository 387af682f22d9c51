"""The guard plan: what must hold for a record to be right, as data (MagPy §4.2, Figure 11).

    GuardPlan ::= Check* distinct* differing* overlap?
    Check     ::= node relation target          the edge still leads to the target

The order is that of the nodes' discovery, so an object is fetched before anything of it is read.
"""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from magjit.refgraph import relations as r
from magjit.refgraph.addresses import BY_ADDRESS
from magjit.refgraph.kinds import class_lookup
from magjit.refgraph.nodes import ABSENT, Edge, Lifted, RefGraph, ShadowNode, Target
from magjit.refgraph.search import reachable


@dataclass(frozen=True, slots=True)
class Check:
    """One edge of version 0: where it starts, and what it must lead to."""

    node_id: int
    relation: r.Relation
    target: Target


@dataclass(frozen=True, slots=True)
class GuardPlan:
    """Everything that a record's guard checks.

    Attributes:
        checks: by node, in order of discovery.
        nodes: the nodes that need their type checked, in order.
        distinct: groups of nodes whose first must be another object than the others.
        differing: groups of nodes of which no two may be one object.
        mutates: whether the graph changes an input in place, so storage overlap matters.
        tensors: nodes of the graph's inputs, in order.
        argument_count, keywords: the call's shape.
        keyword_order: the program sees in which order the keywords came.
        metas: tensor metadata by node, from before the run.
        overlaps: pairs of inputs that shared memory, with their distance in bytes.
    """

    graph: RefGraph
    checks: tuple[Check, ...]
    nodes: tuple[ShadowNode, ...]
    distinct: tuple[tuple[int, ...], ...]
    differing: tuple[tuple[int, ...], ...]
    mutates: bool
    tensors: tuple[int, ...]
    argument_count: int
    keywords: tuple[str, ...]
    keyword_order: bool
    metas: dict[int, Any]
    overlaps: tuple[tuple[int, int, int | None], ...]

    def kinds(self) -> Counter[str]:
        """How many checks there are of each kind."""
        found = Counter(type(check.relation).__name__ for check in self.checks)
        found["Type"] = len(self.nodes)
        found["Tensor"] = len(self.tensors)
        found["Distinct"] = len(self.distinct) + len(self.differing)
        return +found

    def verify(self) -> None:
        """Raise AssertionError when a check starts at a node that nothing leads to before it."""
        self.graph.verify()
        known = {0}
        for check in self.checks:
            assert check.node_id in known, f"#{check.node_id} is used before it is fetched"
            if isinstance(check.target, Edge):
                known.add(check.target.node_id)

    def __str__(self) -> str:
        lines = [f"call with {self.argument_count} arguments, keywords {list(self.keywords)}"]
        for check in self.checks:
            owner = self.graph.path(self.graph.nodes[check.node_id])
            lines.append(f"{owner} {_show(check.relation)} {self._target(check.target)}")
        groups = (*self.distinct, *self.differing)
        lines += [f"different objects: {list(group)}" for group in groups]
        return "\n".join(lines)

    def _target(self, target: Target) -> str:
        if isinstance(target, Edge):
            node = self.graph.nodes[target.node_id]
            return f"is {self.graph.path(node)}: {type(node.obj).__name__}"
        if target.value is ABSENT:
            return "is absent"
        if isinstance(target, Lifted):
            return f"is any {type(target.value).__name__}"
        text = repr(target.value)
        return f"== {text if len(text) < 60 else text[:57] + '...'}"


def _show(relation: r.Relation) -> str:
    match relation:
        case r.Item(key=key) | r.Has(key=key):
            return f"[{key!r}]"
        case r.ClassAttr(name=name):
            return f".{name}"
        case _:
            return str(relation)


_UNTYPED = (type, types.ModuleType, types.FunctionType, types.CellType, types.BuiltinFunctionType)


def build_plan(
    graph: RefGraph,
    tensors: tuple[int, ...],
    *,
    mutates: bool,
    one_for_two: bool,
    argument_count: int,
    keywords: tuple[str, ...],
    keyword_order: bool,
    metas: dict[int, Any],
) -> GuardPlan:
    """Collect the checks of all nodes that the outside reached before the run (Algorithm 1).

    With ``one_for_two``, tensors need not be different ones.
    """
    nodes = reachable(graph)
    checks = [
        Check(node.node_id, relation, target)
        for node in [graph.outside, *nodes]
        for relation, target in node.first.refs.items()
    ]
    typed = tuple(node for node in nodes if _needs_type(node))
    return GuardPlan(
        graph,
        tuple(checks),
        typed,
        _distinct_groups(graph, nodes, () if one_for_two else tensors),
        _differing_groups(nodes),
        mutates,
        tensors,
        argument_count,
        keywords,
        keyword_order,
        metas,
        _overlaps(graph, tensors) if mutates else (),
    )


def _overlaps(graph: RefGraph, tensors: tuple[int, ...]) -> tuple[tuple[int, int, int | None], ...]:
    """Pairs of strided inputs whose memory overlaps, and how far apart they start."""
    ranges = sorted(
        (start, end, node_id)
        for node_id in tensors
        for start, end in [_memory(graph.nodes[node_id].obj)]
        if end > start
    )
    found: list[tuple[int, int, int | None]] = []
    for position, (start, end, node_id) in enumerate(ranges):
        for other_start, _, other in ranges[position + 1 :]:
            if other_start >= end:
                break
            found.append((node_id, other, other_start - start))
    return tuple(found)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor's data, and the one behind its last."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.numel() == 0:
        return (0, 0)
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (reach + 1) * tensor.element_size()


def _needs_type(node: ShadowNode) -> bool:
    """Fixed classes, modules and functions cannot change their type; instances can."""
    if isinstance(node.relation, (r.InstanceDict, r.ModuleDict)):
        return False
    if node.fixed:
        return type(node.obj).__flags__ & (1 << 9) != 0 and not isinstance(node.obj, _UNTYPED)
    return True


def _differing_groups(nodes: list[ShadowNode]) -> tuple[tuple[int, ...], ...]:
    """Objects that have to be as many: compared ones, and those that are equal if they are one.

    The latter C code tells apart in many ways: in keys of dicts, in sets, inside other containers.
    """
    compared = tuple([node.node_id for node in nodes if node.identity_used and not node.fixed])
    alike: dict[type, list[int]] = {}
    for node in nodes:
        cls = type(node.obj)
        if not node.fixed and not issubclass(cls, torch.Tensor):
            alike.setdefault(cls, []).append(node.node_id)
    groups = [
        tuple(group)
        for cls, group in alike.items()
        if len(group) > 1 and class_lookup(cls, "__hash__") in BY_ADDRESS
    ]
    return (*([compared] if len(compared) > 1 else []), *groups)


def _distinct_groups(
    graph: RefGraph, nodes: list[ShadowNode], tensors: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Objects that a later call might pass as one: tensors and changed objects."""
    groups: list[tuple[int, ...]] = []
    if any(graph.nodes[node_id].structural for node_id in tensors) and len(tensors) > 1:
        groups.append(tensors)
    watched = [node for node in nodes if node.changed and not node.fixed]
    for node in watched:
        same = [
            other.node_id
            for other in nodes
            if other is not node
            and type(other.obj) is type(node.obj)
            and (other.structural or node.structural)
        ]
        if same and not isinstance(node.obj, torch.Tensor):
            groups.append((node.node_id, *same))
    return tuple(groups)
