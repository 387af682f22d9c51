"""Fused operators that write inputs: what a graph copies there is stored there at once.

A buffer's new value, or that of a part of it, is not made to be copied: the group that computes it
gets the input, or a view of it, as an argument that it writes, as if it were a part of a whole
(``joining.py``).  So an average that a layer keeps is read once and written once.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit.plugin.aliases import is_alias, memory_of
from magjit.plugin.fx_nodes import is_symbol
from magjit.plugin.inference import order_of
from magjit.plugin.writes import updated
from magjit_dvm.builder import NotFusable, size_key, stored_as
from magjit_dvm.groups import VIEWS, FusedGroup, operands_of
from magjit_dvm.instructions import DType
from magjit_dvm.joining import Joiner, Part, values_of, verified
from magjit_dvm.panels import CUBES
from magjit_dvm.program import (
    INDEXED,
    MAPS,
    Input,
    InputKind,
    Node,
    NodeKind,
    Output,
    Program,
    has_machine,
)

__all__ = ["store_in_place"]

aten = torch.ops.aten

_SAFE = (*VIEWS, *CUBES, getitem, updated, aten.copy_.default, aten.slice.Tensor, aten.select.int)
"""What raises for no values of its operands."""


def store_in_place(joiner: Joiner) -> None:
    """Let groups store what copies would bring to inputs, where nobody sees that it is earlier."""
    for step in list(joiner.fusion.steps):
        if not isinstance(step, FxNode) or step.target is not aten.copy_.default:
            continue
        try:
            _Store(joiner, step).run()
        except NotFusable as reason:
            joiner.fusion.reasons[step] = str(reason)


class _Store:
    """One copy: what it is of, and where it goes."""

    def __init__(self, joiner: Joiner, copy: FxNode) -> None:
        self.joiner, self.copy = joiner, copy
        self.fusion = joiner.fusion
        place, value, *_ = copy.args
        if not isinstance(place, FxNode) or not isinstance(value, FxNode):
            raise NotFusable("no tensor is copied")
        self.place, self.value = place, value
        memory = memory_of([place])
        if len(memory) != 1 or any(one.op != "placeholder" for one in memory):
            raise NotFusable("no input is written")
        self.memory = memory

    def run(self) -> None:
        """Change the group that computes the value, and the steps.

        Raises:
            NotFusable: it stays a copy; nothing has been changed.
        """
        self.check_tensors()
        alone = self.fusion.alone.get(self.value)
        steps = list(self.fusion.steps)
        if alone is not None and self.value in steps:
            self.fusion.steps[steps.index(self.value)] = alone
        try:
            self.store()
        except NotFusable:
            self.fusion.steps[:] = steps
            raise
        if alone is not None:
            self.fusion.alone.pop(self.value)
            self.fusion.reasons.pop(self.value, None)

    def check_tensors(self) -> None:
        """Whether the copy is one of a value as it is, but for its floating dtype."""
        to, value = self.place.meta["val"], self.value.meta["val"]
        if not has_machine(to.device) or to.device != value.device:
            raise NotFusable("not on one CPU or GPU")
        if list(map(size_key, to.shape)) != list(map(size_key, value.shape)) or not to.dim():
            raise NotFusable("a value that is repeated, or a number")
        same = to.dtype == value.dtype or (to.is_floating_point() and value.is_floating_point())
        if not same or (to.is_cuda and to.dtype in (torch.float64, torch.int64)):
            raise NotFusable("a value of another dtype, or of one that the machine has not")
        apart = (
            size == 1 or stride != 0 for size, stride in zip(to.shape, to.stride(), strict=True)
        )
        if not all(apart) or to.is_conj() or to.is_neg():
            raise NotFusable("an input that is expanded")

    def store(self) -> None:
        part = Part(self.value)
        self.joiner.find_group(part)
        group = part.group
        if group is None:
            raise NotFusable("nobody computes it")
        steps = self.fusion.steps
        first, last = (self.number_of(one) for one in (group, self.copy))
        views = self.views_from(first)
        between = [one for one in steps[first + 1 : last] if one not in views]
        before = self.read_before(group, between)
        for one in between[before:]:
            if not group.on_gpu and not _never_raises(one):
                raise NotFusable("what comes before it may raise")
        made = self.storing(group, part)
        # From here on there is a change.
        (self.fusion.stored if self.copy.users else self.joiner.dead).add(self.copy)
        self.joiner.leave_views(part)
        self.joiner.change(group, [part], *made)
        group.stores.append(self.copy)
        moved = [one for one in steps[first:last] if one in views]
        steps[first:last] = [*moved, *between[:before], group, *between[before:]]
        self.joiner.remove_dead()

    def read_before(self, group: FusedGroup, between: list[Any]) -> int:
        """How many of the steps behind a group have to run before it: they read what was there.

        Raises:
            NotFusable: some of them need the group.
        """
        reads = (
            number
            for number, one in enumerate(between, 1)
            if not _is_view(one) and memory_of(operands_of(one)) & self.memory
        )
        count = max(reads, default=0)
        needed = {*group.outputs}
        moves = group.program and not group.stores and not group.program.has(NodeKind.DRAW)
        if count and (not moves or any(needed & {*operands_of(one)} for one in between[:count])):
            raise NotFusable("what was there is read after that")
        return count

    def number_of(self, step: Any) -> int:
        return next(number for number, one in enumerate(self.fusion.steps) if one is step)

    def views_from(self, first: int) -> list[FxNode]:
        """Of the views that the place is of an input, those that are made after a step."""
        known = set(map(id, self.fusion.steps[:first]))
        found: list[FxNode] = []
        waiting = [self.place]
        while waiting:
            one = waiting.pop()
            if id(one) in known or one in found:
                continue
            if not is_alias(one):
                raise NotFusable("where it goes is not known in time")
            found.append(one)
            waiting += one.all_input_nodes
        return found

    def storing(self, group: FusedGroup, part: Part) -> tuple[Program, list[Any], list[FxNode]]:
        """The group's program that writes the input, too, its arguments and its values."""
        program, kind = group.program, stored_as(self.place.meta["val"].dtype)
        assert program is not None
        if program.has(NodeKind.INDEX) and not group.on_gpu:
            raise NotFusable("positions that may be wrong")
        nodes, made = list(program.nodes), part.number
        if nodes[made].dtype is not kind:
            nodes.append(Node(NodeKind.CAST, kind, (made,)))
            made = len(nodes) - 1
        self.check_reads(group, part, made)
        number = len(program.inputs)
        inputs = (
            *program.inputs,
            Input(InputKind.TENSOR, kind, (INDEXED, *part.dims[1:])),
            Input(InputKind.INT, DType.I64),
        )
        order = order_of(self.place.meta["val"])
        into = Output(made, part.dims, order, along=0, whole=number, offset=number + 1)
        stored = verified(program.rank, inputs, nodes, (*program.outputs, into))
        values = [*(group.values or values_of(group)), self.value]
        return stored, [*group.arguments, self.place, 0], values

    def check_reads(self, group: FusedGroup, part: Part, stored: int) -> None:
        """Whether what the group reads of the input is each element before it is written.

        Raises:
            NotFusable: it reads it otherwise.
        """
        program = group.program
        assert program is not None
        tensors = (node for node in group.arguments if isinstance(node, FxNode))
        inside = {
            node
            for node in tensors
            if isinstance(node.meta.get("val"), torch.Tensor)
            and not memory_of([node]).isdisjoint(self.memory)
        }
        if not inside:
            return
        written = inside & {*group.written}
        if not all(_are_apart(one, self.place) for one in written):
            raise NotFusable("several parts of one input")
        inside -= written
        read = {number for number, one in enumerate(group.arguments) if one in inside}
        if read and any(node.kind not in MAPS for node in program.nodes):
            raise NotFusable("what was there is read otherwise")
        for number in read:
            same = _place(group.arguments[number]) == _place(self.place)
            if not same or program.inputs[number].dims != part.dims:
                raise NotFusable("another part of what was there is read")
        reading: set[int] = set()
        for number, node in enumerate(program.nodes):
            loads = node.kind is NodeKind.LOAD and node.aux in read
            if loads or (node.kind is NodeKind.CAST and node.args[0] in reading):
                reading.add(number)
            elif number > stored and not reading.isdisjoint(node.args):
                raise NotFusable("what was there is read after that")


def _place(node: Any) -> Any:
    """Views alike are equal."""
    if isinstance(node, FxNode) and node.target is updated:
        return _place(node.args[0])
    if isinstance(node, FxNode) and is_alias(node) and not node.kwargs:
        base, *others = node.args
        return node.target, _place(base), *map(_place, others)
    return node


def _are_apart(part: Any, other: Any) -> bool:
    """Whether two parts have no element in common, as slices of one tensor."""
    if any(one.target is not aten.slice.Tensor or one.kwargs for one in (part, other)):
        return False
    (base, *first), (same, *second) = part.args, other.args
    if _place(base) != _place(same) or len(first) != 3 or len(second) != 3:
        return False
    if not all(isinstance(one, int) and one >= 0 for one in (*first, *second)):
        return False
    (dim, start, end), (along, begin, last) = first, second
    return bool(dim == along and (end <= begin or last <= start))


def _is_view(step: Any) -> bool:
    if not isinstance(step, FxNode):
        return False
    return step.op == "placeholder" or step.target is updated or is_alias(step)


def _never_raises(step: Any) -> bool:
    if isinstance(step, FusedGroup):
        return step.program is not None and not step.program.has(NodeKind.INDEX)
    return step.op in ("placeholder", "get_attr") or step.target in _SAFE or is_symbol(step)
