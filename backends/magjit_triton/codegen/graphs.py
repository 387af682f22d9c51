"""What the code generator asks of a node of an ATen graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from magjit.plugin.fx_nodes import has_effects
from magjit.plugin.virtual_tensors.calls import operand_nodes
from magjit.plugin.virtual_tensors.mapping import Movement
from magjit.plugin.virtual_tensors.rules import directions_of
from magjit_triton.codegen.lowering import HANDLERS, operator_name

ABSORBED = "magjit_absorbed"
"""In a node's ``meta`` where it is computed inside of an attention kernel only."""

__all__ = [
    "ABSORBED",
    "has_all_symbols",
    "is_empty",
    "is_moments",
    "is_opened",
    "is_tensor",
    "keeps_order",
    "movement_of",
    "mutates",
    "tensors_read",
]


def is_tensor(node: Node) -> bool:
    """Whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_empty(value: object) -> bool:
    """Whether a tensor is known to have no elements: there is nothing to compute or to move."""
    return isinstance(value, torch.Tensor) and any(
        isinstance(size, int) and size == 0 for size in value.shape
    )


def movement_of(node: Node) -> tuple[Movement, Sequence[Node]] | None:
    """What a data-movement node does, and its operands; None for other operators."""
    known = node.meta.get("magjit_movement", False)
    if known is not False:
        return known  # type: ignore[no-any-return]
    found = _movement(node)
    node.meta["magjit_movement"] = found
    return found


def _movement(node: Node) -> tuple[Movement, Sequence[Node]] | None:
    if node.op != "call_function" or is_empty(node.meta.get("val")):
        return None
    if any(is_empty(one.meta.get("val")) for one in node.all_input_nodes):
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


def keeps_order(node: Node) -> bool:
    """Whether an operator runs in the program's order: it draws, may raise or talk to somebody."""
    known = getattr(node.target, "namespace", "aten") in ("aten", "prims")
    return has_effects(node) or not known


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


def has_all_symbols(gm: GraphModule) -> bool:
    """Whether each symbol in a size is an input, or a size or a stride of one."""
    known: set[Any] = set()
    used: set[Any] = set()
    for node in gm.graph.nodes:
        numbers = _numbers(node.meta.get("val"))
        used.update(symbol for number in numbers for symbol in number.free_symbols)
        if node.op == "placeholder":
            known.update(number for number in numbers if number.is_Symbol)
    return used <= known


def _numbers(value: Any) -> list[Any]:
    """The expressions in a value."""
    if isinstance(value, torch.SymInt):
        return [value.node.expr]
    if isinstance(value, torch.Tensor):
        places = [*value.shape, *value.stride()]
        return [one.node.expr for one in places if isinstance(one, torch.SymInt)]
    if isinstance(value, (list, tuple)):
        return [number for one in value for number in _numbers(one)]
    return []
