"""Nodes of torch.fx graphs: new ones at half of torch's cost, unused ones, and symbols."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OperatorBase
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect

from magjit.errors import Location

__all__ = [
    "called_at",
    "called_name",
    "draws_random",
    "enables_gradients",
    "graphs_of",
    "has_effects",
    "is_symbol",
    "keep_checks",
    "may_follow_strides",
    "new_call",
    "remove_unused",
]

aten = torch.ops.aten

_USER_LINE = re.compile(r'File "(.+)", line (\d+), in (\S+)')
_FOLLOWING_STRIDES = ("as_strided", "stride", "storage_offset", "is_contiguous", "set_", "resize")
"""Parts of names of operators whose results depend on how their operands lie."""
_KNOWN = ("aten", "prims")
"""Namespaces of operators whose results depend on numbers alone, but for those."""


def new_call(
    graph: Graph,
    target: Callable[..., Any] | str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
) -> Node:
    """``graph.call_function``, or ``call_method`` of a name, where no argument is a symbol.

    torch looks through all arguments for symbols, to warn of them, which takes longer than
    everything else.
    """
    op = "call_method" if isinstance(target, str) else "call_function"
    node = graph.create_node(op, target, name=name)
    if args:
        node.args = args
    if kwargs:
        node.kwargs = kwargs
    return node


def called_name(node: Node) -> str:
    """The name of the function or method that a node calls, if it calls one."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", "")).split(".")[0]


def may_follow_strides(node: Node) -> bool:
    """Whether what an operator gives may depend on how its operands lie in memory.

    So it may be of any operator that is not ATen's.
    """
    others = getattr(node.target, "namespace", None) not in _KNOWN
    name = str(node.target)
    return (isinstance(node.target, OperatorBase) and others) or any(
        part in name for part in _FOLLOWING_STRIDES
    )


def called_at(node: Node) -> Location | None:
    """Where the user's program calls an operator, if its graph tells."""
    lines = _USER_LINE.findall(node.meta.get("stack_trace") or "")
    return Location(lines[-1][0], int(lines[-1][1]), lines[-1][2]) if lines else None


def enables_gradients(gm: Any) -> bool:
    """Whether a torch-level graph, or one of its parts, switches grad mode on."""
    return any(
        node.target is torch._C._set_grad_enabled and node.args[:1] == (True,)
        for graph in graphs_of(gm)
        for node in graph.nodes
    )


def graphs_of(gm: Any) -> list[Graph]:
    """A graph module's own graph and those of its parts; none of a function."""
    if not isinstance(gm, GraphModule):
        return []
    return [one.graph for one in gm.modules() if isinstance(one, GraphModule)]


def keep_checks() -> None:
    """Tell torch that the operator which raises for singular matrices is no dead code.

    From 2.13 on torch knows; before, what ``torch.compile`` makes of ``torch.linalg.inv``
    returns NaN where eager mode raises.
    """
    has_side_effect(aten._linalg_check_errors.default)


def remove_unused(graph: Graph) -> bool:
    """Remove what nothing uses and what has no effect; whether anything went."""
    return graph.eliminate_dead_code(lambda node: bool(node.users) or has_effects(node))


def has_effects(node: Node) -> bool:
    """Whether a node matters although nothing uses its result: it writes, draws or may raise."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.is_impure()
    if node.target is aten._assert_tensor_metadata.default:
        return False
    schema = node.target._schema
    if not schema.returns or schema.is_mutable or node.is_impure():
        return True
    return draws_random(node)


def draws_random(node: Node) -> bool:
    """Whether a node draws random numbers, whose order counts among all that do."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_symbol(node: Node) -> bool:
    """Whether a node of an ATen graph stands for a symbol, or for an expression of some."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
