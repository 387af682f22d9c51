"""Elementwise operators computed once more, where their result would be written to be read again.

What a norm's statistics are found of is read again by the norm itself, which another launch
computes: where two reductions follow one another, no block has all that the second one asks for.
Fusion by operands has one group write such a tensor for the other.  If what it is made of is no
more to read, it is made in both: a copy of half the width, say, or the gradient of a SiLU, whose
operands the second group reads anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from magjit.plugin.aliases import is_alias, memory_of, written_by
from magjit.plugin.fx_nodes import draws_random
from magjit.plugin.sizes import elements_of
from magjit_dvm.groups import CASTS, OF_READERS
from magjit_dvm.translate import handles

__all__ = ["repeat_between_reductions"]

_LARGE = 1 << 20
"""Elements from which on a tensor is worth it."""
_MOST_MADE, _MOST_SEEN = 12, 96
"""Operators that are repeated for one tensor; and that are looked at on the way to its readers."""
_READ_AGAIN = 1.5
"""Bytes that may be read more for each of the tensor's, which would be written and read."""


def repeat_between_reductions(graph: Graph) -> None:
    """Have the readers behind two reductions of a tensor make it themselves, if that is less."""
    written = _written(graph)
    for node in list(graph.nodes):
        if len(node.users) < 2 or not _is_elementwise(node) or not all(map(_is_fused, node.users)):
            continue
        later = _readers_behind(node)
        if not later or len(later) == len(node.users):
            continue
        made = _made_of(node)
        if made is None or not _pays(node, made, later[0]):
            continue
        if memory_of(_read_by(made)).isdisjoint(written):  # what is read later is what it was
            _repeat(graph, node, made, later)


def _written(graph: Graph) -> set[Node]:
    """Whose memory operators write."""
    return memory_of(one for node in graph.nodes for one in written_by(node))


def _is_elementwise(node: Node) -> bool:
    """Whether an operator makes a large tensor, on a GPU, element by element."""
    if node.op != "call_function" or not handles(node):
        return False
    if draws_random(node):
        return False
    tags = getattr(node.target, "tags", ())
    return (torch.Tag.pointwise in tags or node.target in CASTS) and _is_large(node)


def _is_large(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_cuda and elements_of(node) >= _LARGE


def _is_fused(node: Node) -> bool:
    """Whether it does not need its operands in memory, nor those that read it as a view."""
    if node.op != "call_function":
        return False
    return all(map(_is_fused, node.users)) if is_alias(node) else handles(node)


def _reduces(node: Node) -> bool:
    """Whether it makes fewer elements than it is given."""
    return (
        0
        < 2 * elements_of(node)
        <= max((elements_of(one) for one in node.all_input_nodes), default=0)
    )


def _readers_behind(node: Node) -> list[Node]:
    """Users of what it makes that a reduction of a reduction of it has to be there for."""
    passed: dict[Node, int] = {node: 0}
    waiting = [node]
    while waiting and len(passed) <= _MOST_SEEN:
        one = waiting.pop(0)
        for user in one.users:
            if not _is_fused(user) and not isinstance(one.meta.get("val"), (tuple, list)):
                continue
            count = min(passed[one] + _reduces(user), 2)
            if count > passed.get(user, -1):
                passed[user] = count
                if not (count == 2 and _is_large(user)):  # which is what is looked for
                    waiting.append(user)
    return [user for user in node.users if _is_behind(user, passed, _MOST_MADE)]


def _is_behind(node: Node, passed: dict[Node, int], steps: int) -> bool:
    """Whether all that an elementwise operator is made for has passed both reductions."""
    if not _is_elementwise(node) or steps == 0:
        return False
    if passed.get(node, 0) == 2:
        return True
    return bool(node.users) and all(_is_behind(one, passed, steps - 1) for one in node.users)


def _made_of(node: Node) -> list[Node] | None:
    """The operators to repeat, in order; None if these are too many."""
    found, waiting = {node}, [node]
    while waiting:
        for one in waiting.pop().all_input_nodes:
            if one not in found and _is_elementwise(one) and all(map(_is_fused, one.users)):
                found.add(one)
                waiting.append(one)
        if len(found) > _MOST_MADE:
            return None
    return [one for one in node.graph.nodes if one in found]


def _read_by(nodes: list[Node]) -> set[Node]:
    return {one for node in nodes for one in node.all_input_nodes} - set(nodes)


def _pays(node: Node, made: list[Node], reader: Node) -> bool:
    read = {one for one in _read_by(made) if _is_large(one)}
    beside = set(_read_beside(reader, node))
    more = sum(map(_bytes, read - beside))
    return bool(read) and more <= _READ_AGAIN * _bytes(node)


def _read_beside(reader: Node, node: Node) -> Iterator[Node]:
    """Large tensors that the group of a reader reads as well."""
    group, waiting = {reader}, [reader]
    while waiting and len(group) <= _MOST_MADE:
        one = waiting.pop()
        for other in (*one.users, *one.all_input_nodes):
            if other not in group and other is not node and _is_elementwise(other):
                group.add(other)
                waiting.append(other)
    for one in group:
        yield from (other for other in one.all_input_nodes if _is_large(other))


def _bytes(node: Node) -> int:
    return elements_of(node) * int(node.meta["val"].itemsize)


def _repeat(graph: Graph, node: Node, made: list[Node], later: list[Node]) -> None:
    order = {one: k for k, one in enumerate(graph.nodes)}
    copies: dict[Node, Any] = {}
    with graph.inserting_before(min(later, key=order.__getitem__)):
        for one in made:
            copies[one] = graph.node_copy(one, lambda given: copies.get(given, given))
            copies[one].meta[OF_READERS] = True
    for reader in later:
        reader.replace_input_with(node, copies[node])
