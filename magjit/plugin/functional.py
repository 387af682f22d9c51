"""Which graphs AOTAutograd can make functional: those whose views it makes again as they were.

It takes in-place operators apart into functional ones and makes views of what was changed again
from a list of view operators.  That list is wrong, and results are too, where operators change
sizes and strides of a tensor in place, and where ``as_strided`` looks at memory that was changed.
Recurrent layers it takes apart wrongly: see ``recurrent``.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from magjit.plugin.aliases import is_strided, storage_of
from magjit.plugin.fx_nodes import called_name
from magjit.plugin.recurrent import recurrent_as_it_is

__all__ = ["can_be_functional", "changes", "overlapping"]

_IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.imatmul, operator.itruediv),
    *(operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior),
    *(operator.ixor, operator.ilshift, operator.irshift),
)
"""What ``x += y`` and the like are in a graph of Dynamo's."""
_OTHER_SIZES = (
    "as_strided_",
    "resize_",
    "resize_as_",
    "set_",
    "squeeze_",
    "swapaxes_",
    "swapdims_",
    "t_",
    "transpose_",
    "unsqueeze_",
)
"""Methods that leave a tensor's memory and change how it is seen."""


def can_be_functional(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd gives a graph the results, aliases and effects that it has itself.

    Args:
        gm: torch-level, as ``Backend.compile`` is given it.
        example_inputs: fake tensors among them share memory as the real ones do.
    """
    if recurrent_as_it_is(gm, example_inputs):
        return False
    names = [called_name(node) for node in gm.graph.nodes]
    if any(name in _OTHER_SIZES for name in names):
        return False
    if not any(changes(node) for node in gm.graph.nodes):
        return True
    tensors = [one for one in example_inputs if type(one) is not torch.nn.Parameter]
    return "as_strided" not in names and not overlapping(tensors)


def changes(node: Node) -> bool:
    """Whether a call of a torch-level graph writes a tensor that it is given."""
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target is operator.setitem or node.target in _IN_PLACE or "out" in node.kwargs:
        return True
    name = called_name(node)
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return True
    return _is_asked_to(node) or _is_mutable(node.target)


def _is_asked_to(node: Node) -> bool:
    """Whether a function of torch's is given a true ``inplace``, by name or by position."""
    position = _place_of_inplace(node.target) if callable(node.target) else None
    given = node.args[position : position + 1] if position is not None else ()
    return bool(node.kwargs.get("inplace", any(given)))


@cache
def _place_of_inplace(function: Callable[..., Any]) -> int | None:
    if getattr(function, "__module__", "") != torch.nn.functional.__name__:
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:  # made in C++
        return None
    return names.index("inplace") if "inplace" in names else None


def _is_mutable(target: object) -> bool:
    """Of operators: whether the schema, or one of the schemas, writes an argument."""
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, one)._schema.is_mutable for one in target.overloads())
    return False


def overlapping(example_inputs: Sequence[Any]) -> set[int]:
    """Positions of inputs whose memory overlaps that of others, as far as sizes' hints tell."""
    shared: dict[int, list[int]] = {}
    for at, one in enumerate(example_inputs):
        if is_strided(one):
            shared.setdefault(storage_of(one), []).append(at)
    found: set[int] = set()
    for places in shared.values():
        ones = [example_inputs[at] for at in places]
        if len(ones) > 1:
            overlap = compute_overlapping_tensors(ones, symbolic=_is_symbolic(ones))
            found |= {places[k] for k in overlap}
    return found


def _is_symbolic(tensors: Sequence[torch.Tensor]) -> bool:
    return any(isinstance(size, torch.SymInt) for one in tensors for size in one.shape)
