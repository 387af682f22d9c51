"""``cat`` and ``stack`` of parts that one group cannot hold together (DVM, §4.1: ViewStore).

Parts of different sizes run along different loops, and parts of different groups are computed
at different times.  Each is stored into its place of the whole by the group that computes it;
what comes from elsewhere is copied there by a fused operator of its own.  The first of these
operators allocates the whole, the others get it as an argument that they write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit.plugin.inference import order_of
from magjit_dvm.builder import (
    Builder,
    NotFusable,
    Value,
    size_key,
    stored_as,
)
from magjit_dvm.cuda.support import NOT_HELD
from magjit_dvm.groups import VIEWS, FusedGroup, Fusion, Size
from magjit_dvm.instructions import DType
from magjit_dvm.operators import argument
from magjit_dvm.panels import CUBES
from magjit_dvm.program import (
    INDEXED,
    MAX_INPUTS,
    MAX_OUTPUTS,
    ONE,
    Input,
    InputKind,
    Node,
    NodeKind,
    Output,
    Program,
    has_machine,
)
from magjit_dvm.translate import translate

__all__ = ["Joiner", "Part", "join_parts", "joined_by_aten", "values_of", "verified"]

aten = torch.ops.aten


@dataclass(slots=True)
class Part:
    """A part: the value of which group, along which dimensions of the whole.

    Attributes:
        node: the operand of ``cat``, or of what else puts it there.
        group: what stores it; None until a copy is made.
        value: what of the group it is, perhaps through views.
        number: of that value in the group's program, or -1 for a copy.
        dims: the group's, for each dimension of the whole.
        views: between value and operand.
    """

    node: FxNode
    group: FusedGroup | None = None
    value: FxNode | None = None
    number: int = -1
    dims: tuple[int, ...] = ()
    views: tuple[FxNode, ...] = ()


def join_parts(joiner: Joiner) -> None:
    """Let groups store the parts of each ``cat`` and ``stack`` that is a step of its own."""
    fusion = joiner.fusion
    for step in list(fusion.steps):
        if isinstance(step, FxNode) and step.target in (aten.cat.default, aten.stack.default):
            try:
                joiner.join(step)
                fusion.reasons.pop(step, None)
            except NotFusable as reason:
                fusion.reasons[step] = str(reason)


class Joiner:
    """What is known of a fusion whose groups store into memory that is not theirs.

    Args:
        fusion: changed in place.
        fixed: sizes that are ints are the same in all calls; otherwise each call finds them.
    """

    def __init__(self, fusion: Fusion, fixed: bool) -> None:
        self.fusion = fusion
        self.fixed = fixed
        self.copied: dict[FxNode, set[FxNode]] = {}  # of wholes: the operands that are read
        self.dead: set[FxNode] = set()

    def join(self, node: FxNode) -> None:
        """Make groups store the parts of ``node``.

        Raises:
            NotFusable: it stays with ATen; nothing has been changed.
        """
        tensor = node.meta["val"]
        if not isinstance(tensor, torch.Tensor) or not has_machine(tensor.device):
            raise NotFusable("not a tensor on a CPU or GPU")
        stacked = node.target is aten.stack.default
        axis = argument(node, 1, "dim", 0) % tensor.dim()
        parts = self.parts_of(node, axis, stacked)
        for one in parts:
            self.find_group(one)
            if stacked and one.group is not None:
                one.dims = (*one.dims[:axis], ONE, *one.dims[axis:])
        copies = any(one.group is None for one in parts)
        if copies and tensor.is_cuda and tensor.dtype == torch.int64:
            raise NotFusable(NOT_HELD)
        if all(one.group is None for one in parts) and _copied_well_by_aten(node, axis, stacked):
            raise NotFusable("parts that nobody computes")
        try:
            _Whole(self, node, axis, parts).store()
        except NotFusable:
            if all(one.number < 0 for one in parts):
                raise
            _Whole(self, node, axis, [Part(one.node) for one in parts]).store()

    def parts_of(self, node: FxNode, axis: int, stacked: bool) -> list[Part]:
        """The parts that have elements; ``cat`` takes empty ones of one dimension with any."""
        given: Any = node.args[0]
        rank = node.meta["val"].dim() - stacked
        found: list[Part] = []
        for one in given:
            own = one.meta["val"]
            if own.device != node.meta["val"].device:
                raise NotFusable(f"a tensor on {own.device}")
            if own.dim() != rank or (not stacked and self.fixed and size_key(own.shape[axis]) == 0):
                continue
            found.append(Part(one))
        if not 1 <= len(found) <= MAX_OUTPUTS:
            raise NotFusable("no part, or too many")
        return found

    def find_group(self, part: Part) -> None:
        """Find the group that computes a part, and the part's dimensions there."""
        base, views = part.node, list[FxNode]()
        makers = {one: group for group in self.fusion.groups for one in group.outputs}
        while base not in makers and base.target in VIEWS and isinstance(base.args[0], FxNode):
            views.insert(0, base)
            base = base.args[0]
        group = makers.get(base)
        if group is None or group.program is None or base in self.copied:
            return
        pairs = zip(group.program.outputs, group.values or values_of(group), strict=True)
        output = next(one for one, value in pairs if value is base and one.offset < 0)
        if output.parts > 1:
            return  # a whole itself
        builder, shape = Builder(), tuple(base.meta["val"].shape)
        builder.values[base] = Value(0, DType.F32, output.dims, shape, torch.float32)
        try:
            for view in views:
                translate(builder, view)
        except NotFusable:
            return
        value = builder.values[part.node]
        if any(d == ONE and size_key(n) != 1 for d, n in zip(value.dims, value.shape, strict=True)):
            return
        part.group, part.value, part.number = group, base, output.node
        part.dims, part.views = value.dims, tuple(views)

    def needed(self, value: FxNode, group: FusedGroup) -> bool:
        """Whether anybody but the group still reads ``value``."""
        alone = {one for one in self.fusion.steps if isinstance(one, FxNode)}
        within = set(group.nodes) - alone  # views may be ATen's, too
        return any(
            user not in within
            and user not in self.dead
            and user not in self.fusion.stored
            and value in self.copied.get(user, (value,))
            for user in value.users
        )

    def leave_views(self, part: Part) -> None:
        """Views between a group's value and what is stored of it are dead if nobody reads them."""
        assert part.group is not None
        for view in reversed(part.views):
            if not self.needed(view, part.group):
                self.dead.add(view)

    def remove_dead(self) -> None:
        """Have no steps for what is dead."""
        steps = self.fusion.steps
        steps[:] = [one for one in steps if not (isinstance(one, FxNode) and one in self.dead)]

    def change(
        self,
        group: FusedGroup,
        parts: Sequence[Part],
        program: Program,
        arguments: list[Any],
        values: list[FxNode],
    ) -> None:
        """Give a group a program that stores parts, without results that nobody needs any more."""
        stored = {part.value for part in parts}
        needless = {one for one in group.outputs if one in stored and not self.needed(one, group)}
        kept = [
            number
            for number, (one, value) in enumerate(zip(program.outputs, values, strict=True))
            if one.offset >= 0 or value not in needless
        ]
        place = {number: k for k, number in enumerate(kept)}
        outputs = [program.outputs[number] for number in kept]
        outputs = [replace(one, into=place.get(one.into, -1)) for one in outputs]
        group.program = replace(program, outputs=tuple(outputs))
        group.arguments = arguments
        group.values = [values[number] for number in kept]
        group.outputs = [one for one in group.outputs if one not in needless]
        for part in parts:
            group.nodes += (view for view in part.views if view not in group.nodes)


class _Whole:
    """One whole, and what each of the groups does for it."""

    def __init__(self, joiner: Joiner, node: FxNode, axis: int, parts: list[Part]) -> None:
        self.joiner, self.node, self.axis, self.parts = joiner, node, axis, parts
        self.fusion = joiner.fusion
        self.tensor = node.meta["val"]
        self.stacked = node.target is aten.stack.default
        self.dtype = stored_as(self.tensor.dtype)
        self.order = order_of(self.tensor)

    def store(self) -> None:
        """Make the programs, and only then change anything."""
        at = self.fusion.steps.index(self.node)
        copies = [self.copy(one) for one in self.parts if one.group is None]
        position = {id(step): k for k, step in enumerate(self.fusion.steps)}
        position.update({id(group): at for group in copies})
        groups = {id(one.group): one.group for one in self.parts if one.group is not None}
        ordered = sorted(groups.values(), key=lambda group: position[id(group)])
        made = [
            self.storing(group, position[id(group)], first=number == 0)
            for number, group in enumerate(ordered)
        ]
        joiner = self.joiner
        joiner.copied[self.node] = {one.node for one in self.parts if one.value is None}
        for one in self.parts:
            joiner.leave_views(one)
        for group, stored in zip(ordered, made, strict=True):
            parts = [one for one in self.parts if one.group is group]
            joiner.change(group, parts, *stored)
        ordered[0].outputs.append(self.node)
        ordered[-1].nodes.append(self.node)
        self.fusion.steps[at : at + 1] = copies
        joiner.remove_dead()

    def copy(self, part: Part) -> FusedGroup:
        """A group that copies a part from elsewhere; it is not a step yet."""
        builder = Builder()
        tensor = part.node.meta["val"]
        loops = builder.loops_of(tensor.shape)
        loaded = builder.load(part.node, loops).node
        nodes = builder.nodes
        if nodes[loaded].kind is NodeKind.CAST:  # half precision, which is not computed with
            loaded = nodes[loaded].args[0]
        program = Program(len(builder.loops), tuple(builder.inputs), tuple(nodes), ())
        group = FusedGroup([], program=program, arguments=list(builder.arguments))
        part.group, part.number = group, loaded
        part.dims = (*loops[: self.axis], ONE, *loops[self.axis :]) if self.stacked else loops
        return group

    # -- programs --

    def storing(
        self, group: FusedGroup, position: int, first: bool
    ) -> tuple[Program, list[Any], list[FxNode]]:
        """The program of a group that stores its parts, too, its arguments and its values."""
        program = group.program
        assert program is not None
        nodes, inputs, outputs = list(program.nodes), list(program.inputs), list(program.outputs)
        arguments: list[Any] = list(group.arguments)
        values = list(group.values or values_of(group)) if outputs else []

        def input(given: Input, argument: Any) -> int:
            inputs.append(given)
            arguments.append(argument)
            return len(inputs) - 1

        def size(upto: int | None) -> int:
            terms = [self.size_of(one, group, position) for one in self.parts[:upto]]
            return input(Input(InputKind.INT, DType.I64), _sum(terms))

        into = -1
        for number, part in enumerate(self.parts):
            if part.group is not group:
                continue
            made = part.number
            if nodes[made].dtype is not self.dtype:
                nodes.append(Node(NodeKind.CAST, self.dtype, (made,)))
                made = len(nodes) - 1
            place = Output(made, part.dims, self.order, along=self.axis, offset=size(number))
            if not first:
                dims = (*part.dims[: self.axis], INDEXED, *part.dims[self.axis + 1 :])
                whole = Input(InputKind.TENSOR, self.dtype, dims)
                added, own = inputs[(before := len(program.inputs)) :], self.node
                at = before + added.index(whole) if whole in added else input(whole, own)
                place = replace(place, whole=at)
            elif into < 0:
                into = len(outputs)
                place = replace(place, total=size(None))
            else:
                place = replace(place, into=into)
            outputs.append(place)
            values.append(part.node)
        return verified(program.rank, inputs, nodes, outputs), arguments, values

    def size_of(self, part: Part, group: FusedGroup, position: int) -> Any:
        """The size of a part along the axis, as a term that a call at ``position`` finds."""
        if self.stacked:
            return 1
        key = size_key(part.node.meta["val"].shape[self.axis])
        if key == 1 or (self.joiner.fixed and isinstance(key, int)):
            return key
        near = [one for one in group.arguments if isinstance(one, FxNode)]
        steps = self.fusion.steps[:position]
        far = [one for one in steps if isinstance(one, FxNode) and one.op == "placeholder"]
        if position == self.fusion.steps.index(self.node):
            near.insert(0, part.node)
        # A product that is read for its size is computed as a whole, not by panels.
        products = [one for one in near if one.target in CUBES]
        near = [one for one in near if one.target not in CUBES]
        for node in (*near, *far, *products):
            found = node.meta["val"]
            if isinstance(found, torch.SymInt) and size_key(found) == key:
                return node
            if isinstance(found, torch.Tensor) and (node is not part.node or part.value is None):
                for dim, size in enumerate(found.shape):
                    if size_key(size) == key:
                        return (node, dim)
        raise NotFusable("a part whose size is not known in time")


_LARGE = 8 << 20
"""Bytes of a whole that is better written past the caches, and by all cores."""


def _copied_well_by_aten(node: FxNode, axis: int, stacked: bool) -> bool:
    """Whether the parts lie in memory as the whole does: then ATen copies whole rows of them."""
    whole: torch.Tensor = node.meta["val"]
    if not any(isinstance(size, torch.SymInt) for size in whole.shape):
        if whole.numel() * whole.element_size() >= _LARGE:
            return False
    order = order_of(whole)
    if stacked:
        if order[-1] == axis:
            return False
        order = tuple(dim - (dim > axis) for dim in order if dim != axis)
    given: Any = node.args[0]
    parts = [one.meta["val"] for one in given]
    return all(
        one.dim() != len(order)
        or not order
        or (order_of(one)[-1] == order[-1] and 1 in map(size_key, one.stride()))
        for one in parts
    )


def verified(
    rank: int, inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]
) -> Program:
    """A program that stores parts, too.

    Raises:
        NotFusable: there is none of these.
    """
    if len(inputs) > MAX_INPUTS or len(outputs) > MAX_OUTPUTS:
        raise NotFusable("the group has too many inputs or results")
    made = Program(rank, tuple(inputs), tuple(nodes), tuple(outputs))
    try:
        made.verify()
    except ValueError as error:
        raise NotFusable(str(error)) from error
    return made


def values_of(group: FusedGroup) -> list[FxNode]:
    """What each output of a group's program is or is a part of."""
    assert group.program is not None
    found: list[FxNode] = []
    owners = iter(group.outputs)
    for one in group.program.outputs:
        found.append(next(owners) if one.into < 0 else found[one.into])
    return found


def _sum(terms: Sequence[Any]) -> int | Size:
    number = sum(one for one in terms if isinstance(one, int))
    others = tuple(one for one in terms if not isinstance(one, int))
    if not others:
        return number
    return Size((*others, number) if number else others)


def joined_by_aten(group: FusedGroup, compute: Callable[..., Any]) -> Callable[..., Any]:
    """A group operator by operator: ``compute`` has a value for each output of its program."""
    program = group.program
    assert program is not None
    outputs = program.outputs

    def run(*arguments: Any) -> tuple[torch.Tensor, ...]:
        made: dict[int, torch.Tensor] = {}
        for number, (one, value) in enumerate(zip(outputs, compute(*arguments), strict=True)):
            if one.offset < 0:
                if one.into < 0:
                    made[number] = value
                continue
            value = value if value.dim() == len(one.dims) else value.unsqueeze(one.along)
            if one.total >= 0:
                made[number] = _like(value, one, arguments[one.total], program)
            at = one.into if one.into >= 0 else number
            whole = arguments[one.whole] if one.whole >= 0 else made[at]
            first, size = arguments[one.offset], value.shape[one.along]
            whole.narrow(one.along, first, size).copy_(value)
        return tuple(made.values())

    return run


def _like(part: torch.Tensor, one: Output, total: int, program: Program) -> torch.Tensor:
    """Memory for the whole that ``part`` belongs to."""
    shape = [total if k == one.along else size for k, size in enumerate(part.shape)]
    strides, stride = [0] * len(shape), 1
    for k in reversed(one.order):
        strides[k] = stride
        stride *= max(shape[k], 1)
    dtype = program.nodes[one.node].dtype.torch
    return torch.empty_strided(shape, strides, dtype=dtype, device=part.device)
