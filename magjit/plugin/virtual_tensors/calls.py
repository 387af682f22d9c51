"""A data-movement operator as its rule sees it: arguments by name, tensors as operands.

    Call    ::= operator, name → (Operand | [Operand, …] | value), results
    Operand ::= position, shape, dtype

Operands are numbered in the order in which they are written, so that one tensor given twice counts
twice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from magjit.plugin.virtual_tensors.indexing import size_expr

__all__ = ["Call", "Operand", "call_of", "operand_nodes", "result_nodes"]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument or a tensor result."""

    position: int
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    dense: bool
    """Whether the elements follow one another in row-major order from the storage's first."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an ATen operator."""

    target: Any
    arguments: dict[str, Any]
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def size(self, name: str) -> sympy.Expr | None:
        """An argument that is a size, an int or a SymInt, as an expression."""
        value = self.arguments[name]
        return None if value is None else size_expr(value)

    @property
    def shape(self) -> tuple[sympy.Expr, ...]:
        """The shape of the first result."""
        return self.results[0].shape


def operand_nodes(node: Node) -> list[Node]:
    """The tensor arguments of a node in the order of ``Call.operands``."""
    found: list[Node] = []
    for value in _by_name(node).values():
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, Node) and isinstance(one.meta.get("val"), torch.Tensor):
                found.append(one)
    return found


def result_nodes(node: Node) -> list[Node | None]:
    """The node of each tensor result: itself, or its ``getitem``; None where none is used."""
    value = node.meta.get("val")
    if not isinstance(value, list | tuple):
        return [node]
    items: dict[int, Node] = {}
    for user in node.users:
        if user.target is operator.getitem and isinstance(user.args[1], int):
            items.setdefault(user.args[1], user)
    return [items.get(k) for k in range(len(value))]


def call_of(node: Node) -> Call:
    """The call that an FX node with ``meta["val"]`` makes."""
    operands: list[Operand] = []

    def seen(value: Any) -> Any:
        if isinstance(value, Node):
            given = value.meta.get("val")
            if isinstance(given, torch.Tensor):
                operands.append(_operand(len(operands), given))
                return operands[-1]
            return given
        if isinstance(value, list | tuple):
            return [seen(one) for one in value]
        return value

    arguments = {name: seen(value) for name, value in _by_name(node).items()}
    value = node.meta["val"]
    results = value if isinstance(value, list | tuple) else [value]
    tensors = [one for one in results if isinstance(one, torch.Tensor)]
    return Call(
        node.target,
        arguments,
        tuple(operands),
        tuple(_operand(k, one) for k, one in enumerate(tensors)),
    )


def _by_name(node: Node) -> dict[str, Any]:
    """All arguments of the schema with their values or defaults, in its order."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {str(k): value for k, value in enumerate(node.args)}
    values: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            values[argument.name] = node.args[position]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values


def _operand(position: int, value: torch.Tensor) -> Operand:
    shape = tuple(map(size_expr, value.shape))
    return Operand(position, shape, value.dtype, _is_dense(value))


def _is_dense(value: torch.Tensor) -> bool:
    if value.layout != torch.strided:
        return False
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if size_expr(stride) != size_expr(expected):
            return False
        expected = expected * size
    return bool(size_expr(value.storage_offset()) == 0)


Sizes = Sequence[sympy.Expr]
