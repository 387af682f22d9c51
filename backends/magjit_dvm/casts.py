"""Casts where they move least: before what moves elements around, or behind what takes a part.

Autocast has norms and activations make float32, and casts what a convolution takes.  Between them a
U-Net upsamples and concatenates, which moves twice as much in float32.  To 16 bits an element is
the same whether it is moved first or cast first, so that what is cast is what is moved: the group
that makes it stores 16 bits.  In backward a part of a gradient is taken of what has become float32;
taken first, it is cast by whoever reads it.  Rows that are summed up come ahead of those who read
them only if they follow one another without gaps, so that such a part is copied.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, Node

from magjit.plugin.aliases import is_alias
from magjit.plugin.fx_helpers import called
from magjit.plugin.fx_nodes import may_follow_strides
from magjit.plugin.sizes import elements_of, magnitude
from magjit_dvm.builder import size_key
from magjit_dvm.groups import APART, CASTS
from magjit_dvm.translate import handles

__all__ = ["cast_where_least_moves"]

aten = torch.ops.aten

_SAMPLED = frozenset(
    getattr(aten, name.format(dims)).default
    for name in ("upsample_nearest{}d", "_upsample_nearest_exact{}d")
    for dims in (1, 2, 3)
)
"""What gives elements of its first operand as they are."""
_Dtypes = tuple[torch.dtype, ...]
_SINGLE, _HALVES = (torch.float32,), (torch.float16, torch.bfloat16)
_LARGE, _MOST_SEEN = 1 << 20, 24
"""Elements of a part, from which on one without gaps is worth a launch; and operators that are
looked at."""
_MOST_PASSED = 4
"""Operators, one behind another, that a cast goes before."""


def cast_where_least_moves(graph: Graph) -> None:
    """Exchange casts on GPUs and what moves elements, where that moves less."""
    for node in list(graph.nodes):
        if _is_cast(node, _SINGLE, _HALVES):
            _cast_before(graph, node, _MOST_PASSED)
    for node in list(graph.nodes):
        if _is_cast(node, _HALVES, _SINGLE):
            _cast_behind(graph, node)


def _is_cast(node: Node, given: _Dtypes, made: _Dtypes) -> bool:
    """Whether an operator does nothing but cast, on a GPU, one of these dtypes to another."""
    if node.target not in CASTS or node.kwargs.get("memory_format") is not None:
        return False
    source: Any = node.args[0]
    before, after = source.meta["val"], node.meta["val"]
    known = before.dtype in given and after.dtype in made
    alone = after.is_cuda and before.device == after.device
    return bool(alone and known and _strides(before) == _strides(after))


def _strides(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(size_key, value.stride()))


def _cast_before(graph: Graph, cast: Node, most: int) -> None:
    """What a cast to 16 bits is of takes operands that are cast, if nobody else reads it."""
    moved = cast.args[0]
    if most == 0 or not isinstance(moved, Node) or len(moved.users) != 1:
        return
    dtype = cast.meta["val"].dtype
    target: Any = moved.target
    if target is not aten.cat.default and target not in _SAMPLED:
        return
    parts: Any = moved.args[0]
    taken: Any
    if target is aten.cat.default:
        # A number of another dtype would be rounded twice, a float16 as bfloat16 once too little.
        if any(one.meta["val"].dtype not in (torch.float32, dtype) for one in parts):
            return
        taken = [_cast_of(graph, moved, one, cast) for one in parts]
    else:
        taken = _cast_of(graph, moved, parts, cast)
    with graph.inserting_before(cast):
        made = called(graph, target, taken, *moved.args[1:], **moved.kwargs)
    given = made.all_input_nodes
    if _strides(made.meta["val"]) != _strides(cast.meta["val"]):
        graph.erase_node(made)
        for one in given:
            if not one.users and one.op == "call_function":
                graph.erase_node(one)
        return
    cast.replace_all_uses_with(made)
    graph.erase_node(cast)
    graph.erase_node(moved)
    for one in given:
        if _is_cast(one, _SINGLE, (dtype,)):
            _cast_before(graph, one, most - 1)


def _cast_of(graph: Graph, before: Node, part: Node, cast: Node) -> Node:
    if part.meta["val"].dtype is cast.meta["val"].dtype:
        return part
    target: Any = cast.target
    with graph.inserting_before(before):
        return called(graph, target, part, *cast.args[1:], **cast.kwargs)


def _cast_behind(graph: Graph, cast: Node) -> None:
    """Parts of a tensor that is cast are parts of the tensor, which are cast, if it is no more."""
    target: Any = cast.target
    source, parts = cast.args[0], list(cast.users)
    for part in parts:
        if part.target is not aten.slice.Tensor or not _may_lie_otherwise(part):
            return
    if not parts or sum(map(elements_of, parts)) > elements_of(cast):
        return
    for part in parts:
        with graph.inserting_before(cast):  # later, memory may have been written
            taken = called(graph, aten.slice.Tensor, source, *part.args[1:], **part.kwargs)
            if _is_reduced(part):
                taken = called(
                    graph, aten.clone.default, taken, memory_format=torch.contiguous_format
                )
                taken.meta[APART] = True
            made = called(graph, target, taken, *cast.args[1:], **cast.kwargs)
        part.replace_all_uses_with(made)
        graph.erase_node(part)
    graph.erase_node(cast)


def _is_reduced(part: Node) -> bool:
    """Whether a large part is read together with what is made of it for a sum, in rows."""
    if elements_of(part) < _LARGE:
        return False
    seen, waiting = {part}, [part]
    while waiting and len(seen) <= _MOST_SEEN:
        for user in waiting.pop().users:
            if user in seen or not handles(user):
                continue
            made = user.meta.get("val")
            if isinstance(made, torch.Tensor) and 2 * elements_of(user) <= elements_of(part):
                return True
            seen.add(user)
            waiting.append(user)
    return False


def _may_lie_otherwise(part: Node) -> bool:
    """Whether nobody can tell that a part of a tensor has no gaps any more."""
    strides = [magnitude(one) for one in part.meta["val"].stride()]
    ordered = all(one >= other for one, other in pairwise(strides))
    return ordered and not any(
        one.op != "call_function" or is_alias(one) or may_follow_strides(one) for one in part.users
    )
