"""Bytes that the operators of a graph move, and a points-to graph, for reports.

``bytes_by_itself`` counts an operator as if it ran alone: it reads its operands and writes its
results, views move nothing, and what is expanded is read once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

import torch
from torch.fx import Graph, Node

from magjit.plugin.data_movement import DataMovement, Edge, Moved, Place
from magjit.plugin.virtual_tensors.costs import tensor_bytes
from magjit.plugin.virtual_tensors.opportunities import Movements

__all__ = ["Account", "account", "bytes_by_itself", "touched"]

Account = Mapping[str, tuple[str, float]]
"""Name of a node → what it calls and bytes."""

_FREE = (
    *("aten::_unsafe_view", "aten::unsafe_chunk", "aten::unsafe_split"),
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"),
)


def account(
    title: str,
    before: Account,
    after: Account,
    virtual: Mapping[Node, Iterable[tuple[Node, str]]],
) -> DataMovement:
    """What a report shows of a graph.

    Args:
        title: which graph.
        before: the graph's operators, each by itself.
        after: what runs; operators that both have stand in one row.
        virtual: tensor without memory → those that it points to, and by which operator.
    """
    left = _matched(before, after)
    rows = []
    for name in dict.fromkeys([*before, *left]):
        what, size = before.get(name, ("", 0.0))
        then, rest = left.get(name, ("", 0.0))
        if size or rest:
            rows.append(Moved(name, what or then, int(size), int(rest)))
    edges = [
        Edge(tensor.name, target.name, how)
        for tensor, targets in virtual.items()
        for target, how in targets
    ]
    tensors = dict.fromkeys(virtual, True)
    for targets in virtual.values():
        for target, _ in targets:
            tensors.setdefault(target, False)
    places = [_place(tensor, is_virtual) for tensor, is_virtual in tensors.items()]
    return DataMovement(title, tuple(places), tuple(edges), tuple(rows))


def _matched(before: Account, after: Account) -> dict[str, tuple[str, float]]:
    """What runs, under the names that it had: an operator may have become one with ``out=``."""
    found = {name: one for name, one in after.items() if name in before}
    free: dict[str, list[str]] = {}
    for name, (what, _) in before.items():
        if name not in found:
            free.setdefault(_plain(what), []).append(name)
    for name, one in after.items():
        if name not in before:
            same = free.get(_plain(one[0]))
            found[same.pop(0) if same else name] = one
    return found


def _plain(what: str) -> str:
    """An operator without its overload, and whether it writes into given memory."""
    return ".".join(what.split(".")[:2]).rstrip("_")


def _place(tensor: Node, virtual: bool) -> Place:
    value = tensor.meta["val"]
    sizes = ", ".join(str(size) for size in value.shape)
    text = f"{str(value.dtype).removeprefix('torch.')} ({sizes})"
    return Place(tensor.name, text, int(tensor_bytes(value)), virtual)


def bytes_by_itself(graph: Graph) -> dict[str, tuple[str, float]]:
    """Bytes that each operator of a graph moves if every operator runs alone."""
    known = Movements.of(graph)
    found = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            found[node.name] = str(node.target), _alone(node, node in known.directions)
    return found


def _alone(node: Node, moves: bool) -> float:
    schema = getattr(node.target, "_schema", None)
    into = node.kwargs.get("out")
    if isinstance(into, Node):
        read = [one for one in node.all_input_nodes if one is not into or one in node.args]
        given = [touched(one.meta.get("val")) for one in read]
        return touched(into.meta.get("val")) + sum(given)
    values = node.meta.get("val")
    results = values if isinstance(values, list | tuple) else [values]
    if schema is None or not any(isinstance(one, torch.Tensor) for one in results):
        return 0.0
    operands = [one.meta.get("val") for one in node.all_input_nodes]
    if schema.is_mutable:
        # What is written is as much as what is read, or all of the memory.
        given = [touched(one) for one in operands[1:]]
        return 2 * sum(given) if any(given) else touched(operands[0] if operands else None)
    if any(one.alias_info is not None for one in schema.returns) or schema.name in _FREE:
        return 0.0
    made = sum(map(touched, results))
    # A rearrangement reads of its operands no more than it writes.
    return made + sum(min(touched(one), made) if moves else touched(one) for one in operands)


def touched(value: object) -> float:
    """Bytes of the elements of a tensor that are different ones in memory."""
    if not isinstance(value, torch.Tensor):
        return 0.0
    if value.layout != torch.strided:
        return tensor_bytes(value)
    once = [0 if isinstance(step, int) and step == 0 else slice(None) for step in value.stride()]
    if all(one == slice(None) for one in once):
        return tensor_bytes(value)
    return tensor_bytes(value[tuple(once)])
