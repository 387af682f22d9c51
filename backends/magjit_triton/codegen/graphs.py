"""What the code generator asks of a node of an ATen graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.fx import Node

from magjit.plugin.virtual_tensors.calls import operand_nodes
from magjit.plugin.virtual_tensors.mapping import Movement
from magjit.plugin.virtual_tensors.rules import directions_of
from magjit_triton.codegen.lowering import HANDLERS, operator_name

ABSORBED = "magjit_absorbed"
"""In a node's ``meta`` where it is computed inside of an attention kernel only."""

Unit = TypeVar("Unit")

__all__ = [
    "ABSORBED",
    "in_order",
    "is_moments",
    "is_opened",
    "is_tensor",
    "movement_of",
    "mutates",
    "tensors_read",
]


def is_tensor(node: Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def movement_of(node: Node) -> tuple[Movement, Sequence[Node]] | None:
    """What a data-movement node does, and its operands; None for other operators."""
    known = node.meta.get("magjit_movement", False)
    if known is not False:
        return known  # type: ignore[no-any-return]
    found = _movement(node)
    node.meta["magjit_movement"] = found
    return found


def _movement(node: Node) -> tuple[Movement, Sequence[Node]] | None:
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source, which = node.args
        if not isinstance(source, Node) or isinstance(source.meta.get("val"), torch.Tensor):
            return None
        directions = directions_of(source)
        if directions is None or not directions.results:
            return None
        return directions.results[int(which)], operand_nodes(source)  # type: ignore[arg-type]
    if operator_name(node) in HANDLERS:
        return None
    directions = directions_of(node)
    if directions is None or len(directions.results) != 1:
        return None
    return directions.results[0], operand_nodes(node)


def mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def is_moments(node: Any) -> bool:
    return isinstance(node, Node) and operator_name(node) == "var_mean"


def is_opened(node: Node, fusible: Callable[[Node], bool] = lambda result: True) -> bool:
    """Whether an operator of several results is lowered where its results are used."""
    if ABSORBED in node.meta:
        return True
    if not all(fusible(user) for user in node.users if user.target is operator.getitem):
        return False
    if is_moments(node):
        return True
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) or not isinstance(value, list | tuple):
        return False
    directions = directions_of(node)
    return directions is not None and bool(directions.results)


def tensors_read(node: Node) -> list[Node]:
    """The tensors that computing a node reads, through operators of several results."""
    found: dict[Node, None] = {}
    for one in node.all_input_nodes:
        if is_tensor(one):
            found[one] = None
        elif node.target is operator.getitem:
            found.update(dict.fromkeys(tensors_read(one)))
    return list(found)


def in_order(units: Sequence[Unit], before: Mapping[int, set[int]]) -> list[Unit]:
    """Units in an order in which each stands after those that ``before`` names by their ids."""
    result: list[Unit] = []
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
