"""Memory of a graph that runs: results that take over an operand's, or go where they belong.

    copy_(place, f(a, b))    →   f(a, b, out=place)       if nothing else sees the result
    f(a, b)                  →   f(a, b, out=a)           if f is pointwise and a is needed no more

Only memory that the graph itself has allocated is taken over, and only as a whole.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.aliases import is_alias, may_alias
from magjit.plugin.writes import updated
from magjit_triton.emit import as_strided, expect_strides
from magjit_triton.kernels import never_raises, out_variant, relu_out, same_layout
from magjit_triton.strides import UNSURE

__all__ = ["Memory", "reuse_memory", "write_directly"]

aten = torch.ops.aten


@dataclass
class Memory:
    """Whose memory each tensor of a graph has, and until when it is needed."""

    graph: Graph
    root: dict[Node, Node] = field(default_factory=dict)
    last: dict[Node, int] = field(default_factory=dict)
    order: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.order = {node: number for number, node in enumerate(self.graph.nodes)}
        items: dict[tuple[Any, ...], Node] = {}
        for node in self.graph.nodes:
            if node.target is operator.getitem and not is_alias(node.args[0]):
                # One result under two names.
                first = items.setdefault(node.args, node)
                if first is not node and first in self.root:
                    self.root[node] = self.root[first]
                    continue
            if not isinstance(node.meta.get("val"), torch.Tensor):
                # A list of views: their owner is that of what they are views of.
                if is_alias(node):
                    self.root[node] = self.root[node.args[0]]
                continue
            below = _shares_with(node)
            self.root[node] = node if below is None else self.root.get(below, below)
        for node, root in self.root.items():
            ends = [self._end(user) for user in node.users]
            self.last[root] = max([self.last.get(root, self.order[root]), *ends])
        for node in self.graph.nodes:
            if node.op == "call_function" and _hides_memory(node):
                for one in (node, *node.users, *node.all_input_nodes):
                    if one in self.root:
                        self.last[self.root[one]] = len(self.order)

    def _end(self, user: Node) -> int:
        return len(self.order) if user.op == "output" else self.order[user]

    def is_owned(self, root: Node) -> bool:
        """Whether the graph has allocated a memory itself."""
        return root.op == "call_function"

    def dies_at(self, root: Node, node: Node) -> bool:
        """Whether nothing after an operator needs a memory."""
        return self.last[root] <= self.order[node]


def _hides_memory(node: Node) -> bool:
    """Whether nobody says where an operator's results lie: they and its operands stay."""
    if node.target in (as_strided, expect_strides, updated, relu_out, operator.getitem):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and any(one.alias_info is not None for one in schema.returns):
        return False
    values = node.meta.get("val")
    made = values if isinstance(values, list | tuple) else [values]
    if not any(isinstance(one, torch.Tensor) for one in made):
        return False
    return not is_alias(node) and may_alias(node)


def _shares_with(node: Node) -> Node | None:
    """The tensor whose memory a node's result is in; None for memory of its own."""
    if node.op != "call_function":
        return None
    out = node.kwargs.get("out")
    if isinstance(out, Node):
        return out
    first = node.args[0] if node.args else None
    if not isinstance(first, Node):
        return None
    if node.target in (as_strided, expect_strides, updated):
        return first
    if node.target is operator.getitem:
        return first if is_alias(first) else None
    schema = getattr(node.target, "_schema", None)
    if is_alias(node) or (
        schema is not None and any(one.alias_info is not None for one in schema.returns)
    ):
        return first
    return None


def write_directly(gm: GraphModule) -> None:
    """Let kernels write what was to be copied, if nothing reads or writes the place meanwhile."""
    memory = Memory(gm.graph)
    for node in list(gm.graph.nodes):
        if node.target is not aten.copy_.default or not isinstance(node.args[1], Node):
            continue
        place, value = node.args[:2]
        out = out_variant(value)
        if out is None or list(value.users) != [node]:
            continue
        if not _same_kind(place.meta["val"], value.meta["val"]):
            continue
        root = memory.root[place]
        if root.op != "call_function" and _may_raise(memory, value, node):
            continue
        if _is_touched(memory, root, value, node) or not _can_precede(memory, place, value):
            continue
        _move_before(place, value, memory)
        value.target = out
        value.kwargs = {**value.kwargs, "out": place}
        value.meta = {"val": place.meta["val"]}
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
        memory = Memory(gm.graph)


def _same_kind(place: torch.Tensor, value: torch.Tensor) -> bool:
    return (
        place.dtype == value.dtype and place.device == value.device and place.shape == value.shape
    )


def _is_touched(memory: Memory, root: Node, start: Node, end: Node) -> bool:
    """Whether an operator from ``start`` to before ``end`` reads or writes a memory."""
    for node, owner in memory.root.items():
        if owner is not root:
            continue
        for user in (node, *node.users):
            within = memory.order[start] <= memory.order[user] < memory.order[end]
            if within and not _only_views(user, root):
                return True
    return False


def _may_raise(memory: Memory, start: Node, end: Node) -> bool:
    """Whether an operator after ``start`` and before ``end`` may raise for what its operands hold.

    The caller would see what was written to its tensors before.
    """
    return any(
        node.op == "call_function"
        and memory.order[start] < memory.order[node] < memory.order[end]
        and node.target not in (as_strided, expect_strides, updated)
        and not never_raises(node)
        for node in memory.order
    )


def _only_views(node: Node, root: Node) -> bool:
    """Whether a node computes nothing: it allocates, or gives a view."""
    if node is root or node.target in (as_strided, expect_strides):
        return True
    return is_alias(node)


def _can_precede(memory: Memory, place: Node, value: Node) -> bool:
    """Whether a place and what it is a view of can be made before a tensor is computed."""
    here = place
    while memory.order[here] > memory.order[value]:
        given = [one for one in here.all_input_nodes if memory.order[one] > memory.order[value]]
        if not given:
            return _only_views(here, memory.root[place]) or here.target is updated
        if len(given) > 1 or not _only_views(here, memory.root[place]):
            return False
        here = given[0]
    return True


def _move_before(place: Node, value: Node, memory: Memory) -> None:
    chain = []
    here = place
    while memory.order[here] > memory.order[value]:
        chain.append(here)
        given = [one for one in here.all_input_nodes if memory.order[one] > memory.order[value]]
        if not given:
            break
        here = given[0]
    for one in reversed(chain):
        value.prepend(one)


def reuse_memory(gm: GraphModule) -> None:
    """Let pointwise operators write over an operand that nothing needs any more."""
    memory = Memory(gm.graph)
    for node in gm.graph.nodes:
        out = out_variant(node)
        if out is None or torch.Tag.pointwise not in node.target.tags:
            continue
        value: Any = node.meta.get("val")
        for operand in node.all_input_nodes:
            given = operand.meta.get("val")
            root = memory.root.get(operand)
            if root is None or not isinstance(given, torch.Tensor):
                continue
            if not _can_take_over(memory, node, operand, root):
                continue
            if UNSURE in operand.meta or UNSURE in node.meta:
                continue
            if given.dtype == value.dtype and same_layout(given, value):
                node.target = out
                node.kwargs = {**node.kwargs, "out": operand}
                memory.root[node] = root
                memory.last[root] = memory.last.pop(node)
                for other, owner in memory.root.items():
                    if owner is node:
                        memory.root[other] = root
                break


def _can_take_over(memory: Memory, node: Node, operand: Node, root: Node) -> bool:
    if not memory.is_owned(root) or not memory.dies_at(root, node):
        return False
    whole = root.meta.get("val")
    given = operand.meta["val"]
    if not isinstance(whole, torch.Tensor) or not same_layout(whole, given):
        return False
    return not any(
        other is not operand and memory.root.get(other) is root for other in node.all_input_nodes
    )
