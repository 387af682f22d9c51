"""Updates of inputs done in place: what functionalisation took apart becomes a write again.

    x' = slice_scatter(x, copy(slice(x), v)); …; copy_(x, x')   →   copy_(slice(x), v)
    x' = index_copy(x, 0, i, v);              …; copy_(x, x')   →   index_copy_(x, 0, i, v)

A write moves from the end of the graph to where the new value was made. That is legal where nobody
reads the old value later, nobody keeps the new one apart from the input, and what is written is
not itself a view of the memory that is written.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.aliases import is_alias
from magjit.plugin.fx_helpers import called
from magjit.plugin.fx_nodes import remove_unused
from magjit.plugin.virtual_tensors.calls import operand_nodes

__all__ = ["update_in_place", "updated"]

aten = torch.ops.aten
_SELECTIONS: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
_UPDATES: dict[Any, Any] = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_put.default: aten.index_put_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
}


def updated(memory: torch.Tensor, *written: torch.Tensor) -> torch.Tensor:
    """A tensor after a write to it: the same memory, another value."""
    return memory


def update_in_place(gm: GraphModule) -> dict[Node, Node]:
    """Rewrite a graph in place.

    Returns:
        Each value of an updated memory, with the operator that overwrites it.
    """
    writes: dict[Node, Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            writes |= _updated(gm.graph, node)
    if writes:
        remove_unused(gm.graph)
    return writes


def _updated(graph: Graph, last: Node) -> dict[Node, Node]:
    memory, value = last.args[:2]
    assert isinstance(memory, Node)
    if not isinstance(value, Node) or value.meta["val"].dtype != memory.meta["val"].dtype:
        return {}
    versions = _versions(memory, value)
    if len(versions) < 2 or not _legal(graph, versions, last):
        return {}
    writes: dict[Node, Node] = {}
    here = memory
    for version in versions[1:]:
        writer = _Writer(graph, version)
        old = here
        writer.write(here, version, _is(version.args[0]))
        with graph.inserting_before(version):
            here = graph.call_function(updated, (memory, *writer.written))
        here.meta = dict(memory.meta)
        version.replace_all_uses_with(here, delete_user_cb=_is_not(here))
        writes[old] = writer.written[0]
    graph.erase_node(last)
    return writes


def _versions(memory: Node, value: Node) -> list[Node]:
    """The values that a memory has one after the other, the input first; [] if it is not one."""
    found = [value]
    while found[-1] is not memory:
        node = found[-1]
        if node.target not in _SELECTIONS and node.target not in _UPDATES:
            if node.target is not aten.copy.default:
                return []
        base = node.args[0]
        if not isinstance(base, Node):
            return []
        found.append(base)
    return found[::-1]


def _legal(graph: Graph, versions: list[Node], last: Node) -> bool:
    order = {node: number for number, node in enumerate(graph.nodes)}
    for version, after in zip(versions, [*versions[1:], None], strict=True):
        limit = len(order) if after is None else order[after]
        for reader in _readers(version):
            if reader.op == "output":
                return False
            if reader not in (last, after) and order[reader] > limit:
                return False
    memory = _shared(versions)
    for version in versions[1:]:
        for value in _given(version, _is(version.args[0])):
            if value in memory:
                return False
    return True


def _readers(tensor: Node) -> Iterator[Node]:
    """Who reads a tensor's memory, through views too; ``copy`` reads no value of its base."""
    for user in tensor.users:
        if user.target is aten.copy.default and user.args[1] is not tensor:
            continue
        yield user
        if is_alias(user) or user.target is operator.getitem:
            yield from _readers(user)


def _shared(versions: list[Node]) -> set[Node]:
    """The versions and everything that is a view of one."""
    found: set[Node] = set(versions)
    waiting = list(versions)
    while waiting:
        for user in waiting.pop().users:
            if user not in found and (is_alias(user) or user.target is operator.getitem):
                found.add(user)
                waiting.append(user)
    return found


Current = Callable[[Any], bool]
"""Whether a tensor is what the memory that is to be written holds."""


def _is(tensor: Any) -> Current:
    return lambda one: one is tensor


def _is_not(node: Node) -> Callable[[Node], bool]:
    return lambda one: one is not node


def _part_of(node: Node, current: Current) -> Current:
    """The same for the part of the memory that a scatter replaces."""
    selection = _SELECTIONS[node.target]
    arguments = _arguments(node)[2:]

    def is_part(one: Any) -> bool:
        return (
            isinstance(one, Node)
            and one.target is selection
            and current(one.args[0])
            and _arguments(one)[1:] == arguments
        )

    return is_part


def _arguments(node: Node) -> list[Any]:
    schema = node.target._schema  # type: ignore[union-attr]
    values = []
    for position, argument in enumerate(schema.arguments):
        given = node.kwargs.get(argument.name, argument.default_value)
        value = node.args[position] if position < len(node.args) else given
        if argument.name == "end" and value is None:
            value = 2**63 - 1
        if argument.name == "start" and value is None:
            value = 0
        values.append(value)
    return values


def _given(value: Node, current: Current) -> Iterator[Node]:
    """The tensors whose values are written."""
    if value.target in _SELECTIONS and current(value.args[0]):
        source = value.args[1]
        assert isinstance(source, Node)
        yield from _given(source, _part_of(value, current))
    elif value.target in _UPDATES and current(value.args[0]):
        yield from operand_nodes(value)[1:]
    elif value.target is aten.copy.default and isinstance(value.args[1], Node):
        yield value.args[1]
    else:
        yield value


@dataclass
class _Writer:
    """Emits the writes that make a memory hold a new value."""

    graph: Graph
    before: Node

    def __post_init__(self) -> None:
        self.written: list[Node] = []

    def write(self, place: Node, value: Node, current: Current) -> None:
        if value.target in _SELECTIONS and current(value.args[0]):
            source = value.args[1]
            assert isinstance(source, Node)
            part = self._call(_SELECTIONS[value.target], place, *_arguments(value)[2:])
            self.write(part, source, _part_of(value, current))
        elif value.target in _UPDATES and current(value.args[0]):
            written = self._call(_UPDATES[value.target], place, *_arguments(value)[1:])
            self.written.append(written)
        elif value.target is aten.copy.default:
            self.written.append(self._call(aten.copy_.default, place, value.args[1]))
        else:
            self.written.append(self._call(aten.copy_.default, place, value))

    def _call(self, target: Any, *args: Any) -> Node:
        with self.graph.inserting_before(self.before):
            return called(self.graph, target, *args)
