"""Inputs that the program changes, written where they are (VTC §4.4, ScatterND).

    Update ::= node, root, value, Movement      root[movement(index)] = value[index]

A functional graph makes a changed copy of an input, goes on with that, and copies it back at the
end.  Where nothing reads the old values any more, the changed copy *is* the input: its kernel
stores the new values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from magjit.plugin.virtual_tensors.calls import operand_nodes
from magjit.plugin.virtual_tensors.indexing import At, Wrapped, index_symbols
from magjit.plugin.virtual_tensors.mapping import Movement
from magjit.plugin.virtual_tensors.rules import directions_of
from magjit_triton.codegen.domain import same
from magjit_triton.codegen.layout import sizes_of

__all__ = ["Update", "take_updates"]

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class Update:
    """New values of a part of a tensor.

    Attributes:
        root: the input that holds the tensor.
        value: the new values.
        movement: from an index of ``value`` to its place in the root.
        operands: what ``At`` in the movement refers to.
    """

    root: Node
    value: Node
    movement: Movement
    operands: tuple[Node, ...]


def take_updates(gm: GraphModule, devices: Sequence[str]) -> dict[Node, Update]:
    """The nodes that become stores into an input; erases the copies that they make needless.

    Args:
        devices: types of devices whose tensors kernels may change.
    """
    found: dict[Node, Update] = {}
    for copy in list(gm.graph.nodes):
        if copy.op != "call_function" or copy.target is not aten.copy_.default or copy.users:
            continue
        root, last = copy.args[:2]
        if root.meta["val"].device.type not in devices or root.meta["val"].dtype not in DTYPES:
            continue
        chain = _chain(root, last, copy)
        if chain is None:
            continue
        parts = [_part(node) for node in chain]
        if any(part is None for part in parts):
            continue
        for node, part in zip(chain, parts, strict=True):
            assert part is not None
            value, movement, operands = part
            found[node] = Update(root, value, movement, operands)
            node.meta["magjit_movement"] = None
        gm.graph.erase_node(copy)
    return found


def _chain(root: Any, last: Any, copy: Node) -> list[Node] | None:
    """The updates from an input to its last value, first one first."""
    if not (isinstance(root, Node) and isinstance(last, Node) and root.op == "placeholder"):
        return None
    chain: list[Node] = []
    node, after = last, copy
    while node is not root:
        if node.op != "call_function" or node.target not in _UPDATES:
            return None
        if any(user.op == "output" for user in node.users):
            return None
        # Values between two updates live in no memory of their own.
        if node is not last and set(node.users) != {after}:
            return None
        chain.append(node)
        base = node.args[0]
        if not isinstance(base, Node) or base.meta["val"].dtype != root.meta["val"].dtype:
            return None
        node, after = base, node
    if not chain or set(root.users) != {chain[-1], copy}:
        return None
    return chain[::-1]


_UPDATES = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.index_put.default,
    aten.index_copy.default,
)

Part = tuple[Node, Movement, tuple[Node, ...]]


def _part(node: Node) -> Part | None:
    if node.target in (aten.slice_scatter.default, aten.select_scatter.default):
        directions = directions_of(node)
        if directions is None or 1 not in directions.operands:
            return None
        operands = operand_nodes(node)
        return _checked(node, operands[1], directions.operands[1], ())
    if node.target is aten.index_put.default:
        return _index_put(node)
    dim, index, value = node.args[1:4]
    return None if not isinstance(dim, int) else _along(node, dim, index, value, wrapped=False)


def _index_put(node: Node) -> Part | None:
    indices: Sequence[Any] = node.args[1]  # type: ignore[assignment]
    accumulates = node.args[3] if len(node.args) > 3 else node.kwargs.get("accumulate", False)
    given = [(k, one) for k, one in enumerate(indices) if one is not None]
    if accumulates or len(given) != 1:
        return None
    dim, index = given[0]
    return _along(node, dim, index, node.args[2], wrapped=True)


def _along(node: Node, dim: int, index: Any, value: Any, *, wrapped: bool) -> Part | None:
    """``root[:, …, index, …] = value`` with one list of indices."""
    if not (isinstance(index, Node) and isinstance(value, Node)):
        return None
    places = index.meta["val"]
    if places.dim() != 1 or places.dtype not in (torch.int64, torch.int32):
        return None
    sizes = list(sizes_of(node.meta["val"]))
    dim %= len(sizes)
    size, sizes[dim] = sizes[dim], sizes_of(places)[0]
    symbols = index_symbols(len(sizes))
    place: sympy.Expr = At(0, symbols[dim])
    if wrapped:
        place = Wrapped(place, size)
    taken = (*symbols[:dim], place, *symbols[dim + 1 :])
    return _checked(node, value, Movement.of(sizes, taken), (index,))


def _checked(
    node: Node, value: Node, movement: Movement, operands: tuple[Node, ...]
) -> Part | None:
    given = value.meta["val"]
    if given.dtype != node.meta["val"].dtype or not same(sizes_of(given), movement.shape):
        return None
    if len(movement.parts) != 1 or movement.parts[0].condition != sympy.true:
        return None
    return value, movement, operands
