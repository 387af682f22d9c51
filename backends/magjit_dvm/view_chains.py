"""Views of what stays inside a schedule: one call for those that follow one another.

torch takes some microseconds from Python for each view, and a transformer's layer has dozens.  The
machine computes strides itself (``csrc/views.cpp``) and makes a tensor of the same memory, which is
no view of autograd's: it has a version counter of its own, and no base.  So this is for values that
neither the caller nor an operator that writes or hands on its operands can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from magjit.plugin.aliases import is_alias, may_alias, written_by
from magjit_dvm.attention import attention
from magjit_dvm.by_aten import by_aten
from magjit_dvm.drawing import take_numbers
from magjit_dvm.groups import FusedGroup
from magjit_dvm.vm import Views

__all__ = ["ViewChain", "in_chains"]

aten = torch.ops.aten

_VIEW, _PERMUTE, _EXPAND, _UNSQUEEZE, _SQUEEZE, _SELECT, _SLICE = range(7)
_GIVEN = 1 << 61
"""As in views.cpp: from here on a number says which of a call's it is."""
_MOST_DIMS = 16

Number = int | FxNode
Operator = tuple[int, tuple[Number, ...]]


@dataclass(frozen=True, slots=True)
class ViewChain:
    """Views of which each but the last is there for the next alone.

    Attributes:
        operators: what they are made of, for the machine.
    """

    nodes: tuple[FxNode, ...]
    operators: tuple[Operator, ...]

    @property
    def outputs(self) -> list[FxNode]:
        """The last of them."""
        return [self.nodes[-1]]

    @property
    def operands(self) -> list[FxNode]:
        """The tensor, and numbers that calls give, in order."""
        given = (one for one in _all_numbers(self.operators) if isinstance(one, FxNode))
        return [self.nodes[0].all_input_nodes[0], *dict.fromkeys(given)]

    def compiled(self, gm: GraphModule) -> Callable[..., torch.Tensor]:
        """Takes the operands; ``gm`` is the nodes' module."""
        place = {node: _GIVEN + k for k, node in enumerate(self.operands[1:])}
        operators = tuple(
            (kind, tuple(one if isinstance(one, int) else place[one] for one in numbers))
            for kind, numbers in self.operators
        )
        return Views(operators, len(place), self.by_torch(gm))

    def by_torch(self, gm: GraphModule) -> Callable[..., torch.Tensor]:
        """The same view by view."""
        views = FusedGroup(list(self.nodes), self.outputs, arguments=list(self.operands))
        return by_aten(gm, views)


def in_chains(steps: Sequence[Any]) -> list[Any]:
    """The steps, with views in chains; a chain is where its last view was."""
    inside: dict[FxNode, bool] = {}
    ends: dict[FxNode, ViewChain] = {}
    parts: set[FxNode] = set()
    for node in steps:
        operators = _operators_of(node) if isinstance(node, FxNode) else None
        if operators is None or not _stays(node, inside):
            continue
        parts.add(node)
        before = node.all_input_nodes[0]
        chain = ViewChain((), ())
        if before in ends and len(before.users) == 1:
            chain = ends.pop(before)
        ends[node] = ViewChain((*chain.nodes, node), (*chain.operators, *operators))
    done: list[Any] = []
    for step in steps:
        if not isinstance(step, FxNode) or step not in parts:
            done.append(step)
        elif step in ends:
            done.append(ends[step])
    return done


def _stays(node: FxNode, known: dict[FxNode, bool]) -> bool:
    """Whether nobody else sees a value: no caller, no operator that writes or hands it on."""
    if node not in known:
        known[node] = all(_only_reads(user, node, known) for user in node.users)
    return known[node]


def _only_reads(user: FxNode, node: FxNode, known: dict[FxNode, bool]) -> bool:
    if user.op != "call_function":
        return False
    if user.target in (attention, take_numbers):
        return True
    if user.target is getitem or is_alias(user):
        return _stays(user, known)
    return not may_alias(user) and node not in written_by(user)


def _operators_of(node: FxNode) -> tuple[Operator, ...] | None:
    """What a view is made of; None for anything else."""
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    if rule is None or not node.args or not isinstance(node.args[0], FxNode):
        return None
    tensor, made = _plain(node.args[0]), _plain(node)
    if tensor is None or made is None or max(tensor.dim(), made.dim()) > _MOST_DIMS:
        return None
    operators = rule(tensor, *node.args[1:], **node.kwargs)
    if operators is None or not all(map(_is_number, _all_numbers(operators))):
        return None
    return tuple(operators)


def _plain(node: FxNode) -> torch.Tensor | None:
    """What a node gives, if it lies in memory with strides."""
    found = node.meta.get("val")
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided:
        return None
    return None if found.is_quantized else found


def _all_numbers(operators: Iterable[Operator]) -> Iterable[Any]:
    return (number for _, numbers in operators for number in numbers)


def _is_number(one: Any) -> bool:
    if isinstance(one, FxNode):
        return isinstance(one.meta.get("val"), (int, torch.SymInt))
    return type(one) is int and -_GIVEN < one < _GIVEN


def _dim(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _viewed(_: torch.Tensor, sizes: Sequence[Number]) -> list[Operator]:
    return [(_VIEW, tuple(sizes))]


def _expanded(_: torch.Tensor, sizes: Sequence[Number], implicit: bool = False) -> list[Operator]:
    return [(_EXPAND, tuple(sizes))]


def _permuted(x: torch.Tensor, dims: Sequence[int]) -> list[Operator]:
    return [(_PERMUTE, tuple(_dim(one, x.dim()) for one in dims))]


def _transposed(x: torch.Tensor, first: int = 0, second: int = 1) -> list[Operator] | None:
    if x.dim() < 2:
        return None
    dims = list(range(x.dim()))
    first, second = _dim(first, x.dim()), _dim(second, x.dim())
    dims[first], dims[second] = dims[second], dims[first]
    return [(_PERMUTE, tuple(dims))]


def _unsqueezed(x: torch.Tensor, dim: int) -> list[Operator]:
    return [(_UNSQUEEZE, (_dim(dim, x.dim() + 1),))]


def _squeezed(x: torch.Tensor, dims: int | Sequence[int]) -> list[Operator] | None:
    which = sorted({_dim(one, x.dim()) for one in ([dims] if isinstance(dims, int) else dims)})
    if not all(type(x.shape[one]) is int and x.shape[one] == 1 for one in which):
        return None  # the number of dimensions may be another one at a call
    return [(_SQUEEZE, (one,)) for one in reversed(which)]


def _selected(x: torch.Tensor, dim: int, index: Number) -> list[Operator]:
    return [(_SELECT, (_dim(dim, x.dim()), index))]


def _sliced(
    x: torch.Tensor,
    dim: int = 0,
    start: Number | None = None,
    end: Number | None = None,
    step: Number = 1,
) -> list[Operator]:
    first = 0 if start is None else start
    last = _GIVEN - 1 if end is None else end
    if isinstance(last, int):
        last = min(last, _GIVEN - 1)
    return [(_SLICE, (_dim(dim, x.dim()), first, last, step))]


def _same(_: torch.Tensor) -> list[Operator]:
    return []


_RULES: dict[Any, Callable[..., list[Operator] | None]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.expand.default: _expanded,
    aten.permute.default: _permuted,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.t.default: _transposed,
    aten.transpose.int: _transposed,
    aten.unsqueeze.default: _unsqueezed,
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
}
