"""Whose memory the results of an ATen graph lie in, as far as can be known from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node

__all__ = [
    "VIEWS_OF_INPUTS",
    "is_alias",
    "is_strided",
    "may_alias",
    "memory_of",
    "readers",
    "results_are_their_own",
    "storage_of",
    "trust",
    "written_by",
]

aten = torch.ops.aten

VIEWS_OF_INPUTS = "magjit: views of inputs"
"""In an output node's ``meta``: positions of results of which the caller gets views of inputs, made
anew; of the graph's result only sizes, strides and offset are asked."""
_UNSAFE_VIEWS = (
    aten._unsafe_view.default,
    aten.unsafe_chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
"""Operators that give views though their schemas say that they do not."""
_trusted: set[object] = set()


def trust(target: Callable[..., Any]) -> None:
    """Have an operator of a backend's count as ATen's: its results lie where its schema says.

    Those of one that has no schema are memory of their own.
    """
    _trusted.add(target)


def is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that says where in a storage its elements are."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, while one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def is_alias(node: Node) -> bool:
    """Whether the operator gives views of its operand."""
    if node.target in _UNSAFE_VIEWS:
        return True
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(one.alias_info is not None for one in schema.returns)


def may_alias(node: Node) -> bool:
    """Whether an operator's results may lie in its operands' memory, as far as can be known.

    Only ATen's own kernels, and those of `trust`, are trusted where a schema promises memory of the
    results' own.
    """
    if is_alias(node):
        return True
    target = node.target
    if target in (aten.linear.default, aten.scaled_dot_product_attention.default):
        return False
    if target in _trusted:
        return False
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return True
    # What is made of other operators is as they are, which its schema need not say.
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), key))


def results_are_their_own(gm: GraphModule) -> bool:
    """Whether all results are tensors, and none shares memory with an input or another result."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    seen: set[Node] = set()
    for result in output.args[0]:
        if not isinstance(result, Node) or not isinstance(result.meta.get("val"), torch.Tensor):
            return False
        made_by = memory_of([result])
        if made_by & seen or any(node.op != "call_function" for node in made_by):
            return False
        seen |= made_by
    return True


def memory_of(nodes: Iterable[Node]) -> set[Node]:
    """Whose memory tensors may lie in, in a graph with operators in place, too.

    Of an operator with several results, any of them.
    """
    found: set[Node] = set()
    seen: set[Node] = set()
    ways = list(nodes)
    while ways:
        one = ways.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "call_function" and (_gives_operand(one) or may_alias(one)):
            ways += one.all_input_nodes
        else:
            found.add(one)
    return found


def readers(node: Node) -> Iterator[Node]:
    """Who reads a tensor, or what may lie in its memory."""
    seen = {node}
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user in seen:
                continue
            seen.add(user)
            yield user
            if user.op == "call_function" and (_gives_operand(user) or may_alias(user)):
                waiting.append(user)


def _gives_operand(node: Node) -> bool:
    """Whether a result is an operand's, or the operand."""
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or (schema is not None and bool(schema.is_mutable))


def written_by(node: Node) -> Iterator[Node]:
    """The operands that an operator changes."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.kwargs.get(argument.name)
        if position < len(node.args):
            given = node.args[position]
        for one in given if isinstance(given, list | tuple) else (given,):
            if isinstance(one, Node):
                yield one
