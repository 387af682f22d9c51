"""A fused operator before its shapes are known: DVM's rgraph (Figure 6).

Grammar::

    Program = Input* Node+ Output+
    Input   = tensor dtype dims | (int | float) dtype | int size-of-dim
    Node    = load input | constant number | scalar input | numel dims | iota dim
            | index input(positions) | compute instruction(args) | cast(arg)
            | reduce instruction(arg) dims | broadcast(arg) dims | scan instruction(arg) dim
            | draw input(seed, place, shares) order
    Output  = node dims order [place]
    place   = part of another Output along a dimension
            | input (where it begins) along a dimension of (another Output | an input that is
              written | a result of the size that an input says)
    dims    = for each dimension of a tensor: one of the group's, 1 (``ONE``), or the
              one that an index replaces (``INDEXED``)

Values have no shape of their own: a value varies along some of the group's dimensions and
is the same along the others, which is all that broadcasting is.  The sizes of the group's
dimensions come with each call's arguments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from magjit_dvm.instructions import DTYPES, INSTRUCTIONS, DType

__all__ = [
    "ACROSS",
    "DRAWN",
    "INDEXED",
    "MAPS",
    "MAX_DIMS",
    "MAX_INPUTS",
    "MAX_NODES",
    "MAX_OUTPUTS",
    "NUMBER",
    "ONE",
    "Input",
    "InputKind",
    "Node",
    "NodeKind",
    "Output",
    "Program",
    "across",
    "drawn",
    "has_machine",
    "order_of_draw",
    "pruned",
    "varying",
]

ONE = -1
INDEXED = -2
MAX_DIMS, MAX_NODES, MAX_INPUTS, MAX_OUTPUTS = 8, 224, 64, 32

NUMBER = {one.name: number for number, one in enumerate(INSTRUCTIONS)}
"""Instruction's name to its number in bytecode."""


def has_machine(device: torch.device) -> bool:
    """Whether programs run on a device: on the CPU, and on NVIDIA GPUs from sm_80 on.

    ``MAGJIT_DVM_CUDA=0`` leaves GPUs to ATen; with 1 nothing is asked about the GPU.
    """
    if device.type == "cuda":
        asked = os.environ.get("MAGJIT_DVM_CUDA", "")
        return asked == "1" if asked in ("0", "1") else _is_usable(device)
    return device.type == "cpu"


def _is_usable(device: torch.device) -> bool:
    if torch.version.cuda is None or not torch.cuda.is_available():
        return False
    # Imported late: a machine without GPUs does not need it.
    from magjit_dvm.cuda.build import usable

    return usable(torch.cuda.current_device() if device.index is None else device.index)


class InputKind(IntEnum):
    """What a call passes."""

    TENSOR = 0
    INT = 1
    FLOAT = 2


class NodeKind(IntEnum):
    """As in ``csrc/program.h``."""

    LOAD = 0
    CONSTANT = 1
    SCALAR = 2
    NUMEL = 3
    IOTA = 4
    INDEX = 5
    COMPUTE = 6
    CAST = 7
    REDUCE = 8
    BROADCAST = 9
    SCAN = 10
    DRAW = 11


MAPS = frozenset(
    {NodeKind.LOAD, NodeKind.CONSTANT, NodeKind.SCALAR, NodeKind.COMPUTE, NodeKind.CAST}
)
"""What computes an element of elements at the same place."""


@dataclass(frozen=True, slots=True)
class Input:
    """An argument of each call; of numbers, an int may have one dim, whose size it is."""

    kind: InputKind
    dtype: DType
    dims: tuple[int, ...] = ()


DRAWN = 3
"""Ints that each call passes for what is drawn."""
ROUNDED, ACROSS = 1, 2
"""What ``aux`` says of nodes that are computed, and of reductions."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value; ``args`` are numbers of earlier nodes, ``dims`` a set of the group's.

    Attributes:
        aux: an input, or of positions a dimension; of what is computed ``ROUNDED`` where the
            program that it is taken from rounds it to 16 bits at once; of a sum ``ACROSS`` where it
            goes over all that other reductions keep, and is only stored; of what is drawn, the
            first of three ints that each call passes (``philox.py``); −1 otherwise.
        number: of a constant; of what is drawn, ``order_of_draw``, packed.
    """

    kind: NodeKind
    dtype: DType
    args: tuple[int, ...] = ()
    op: str = ""
    aux: int = -1
    dims: frozenset[int] = frozenset()
    number: float | int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """A result: its dims, and their positions from the outermost in memory inwards.

    Attributes:
        into: of a part of a result, the output that stands for the whole: its first part.
        along: the dimension along which ``parts`` of equal size lie side by side.
        part: which of them this is.
        whole: of a part of any size, the input that it is written into.
        total: of the first such part of a new result, the input that is the size of the
            whole along ``along``; others are ``into`` it.
        offset: the input that says where along ``along`` such a part begins.
    """

    node: int
    dims: tuple[int, ...]
    order: tuple[int, ...]
    into: int = -1
    along: int = -1
    part: int = 0
    parts: int = 1
    whole: int = -1
    total: int = -1
    offset: int = -1

    @property
    def allocated(self) -> bool:
        """Whether a call makes a tensor for it."""
        return self.into < 0 and self.whole < 0


@dataclass(frozen=True, slots=True)
class Program:
    """A fused operator for any sizes; ``rank`` counts the group's dimensions."""

    rank: int
    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def compiled(self, fallback: Callable[..., Any] | None = None) -> Any:
        """A callable that encodes and runs the program at each call.

        Args:
            fallback: called with the same arguments where they have no bytecode; without it
                ``NotEncodable`` is raised.

        Raises:
            ValueError: the program is malformed.
        """
        from magjit_dvm.vm import Fused

        return Fused(self.rank, *self._as_lists(), fallback, self)

    def verify(self) -> None:
        """Raise ValueError, with the reason, if the program is malformed."""
        self.compiled()

    def has(self, kind: NodeKind) -> bool:
        """Whether a value is of this kind."""
        return any(node.kind is kind for node in self.nodes)

    def _as_lists(self) -> tuple[list[Any], list[Any], list[Any]]:
        inputs = [(one.kind, one.dtype.code, one.dims) for one in self.inputs]
        nodes = []
        for node in self.nodes:
            args = (*node.args, -1, -1, -1)[:3]
            if not all(0 <= d < MAX_DIMS for d in node.dims):
                raise ValueError(f"dimensions {sorted(node.dims)} are not all there")
            mask = sum(1 << d for d in node.dims)
            op = NUMBER.get(node.op, 0)
            integer = _as_int(node.number)
            nodes.append(
                (node.kind, node.dtype.code, op, *args, node.aux, mask, float(node.number), integer)
            )
        outputs = [
            (one.node, one.dims, one.order, one.into, one.along, one.part, one.parts, *places)
            for one in self.outputs
            for places in [(one.whole, one.total, one.offset)]
        ]
        return inputs, nodes, outputs

    @property
    def varies(self) -> list[frozenset[int]]:
        """The dimensions that each node varies along."""
        found: list[frozenset[int]] = []
        for node in self.nodes:
            found.append(varying(node, found, self.inputs))
        return found

    def rows(self, used: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Of the dimensions that are used, those that sums go across, and those reduced in a row.

        Sums that go across different rows have none in common: the first are none at all.
        """
        reducing = [one for one in self.nodes if one.kind in (NodeKind.REDUCE, NodeKind.SCAN)]
        over = frozenset[int]().union(*(one.dims for one in reducing if one.aux != ACROSS))
        sums = {one.dims for one in reducing if one.aux == ACROSS}
        if not sums:
            return frozenset(), over
        (rows,) = sums if len(sums) == 1 else (frozenset[int](),)
        return rows, over or used - rows

    def __str__(self) -> str:
        lines = ["rgraph vec() {"]
        lines += [f"  {line}" for line in self._lines()]
        return "\n".join([*lines, "}"])

    def _lines(self) -> Sequence[str]:
        varies, lines = self.varies, []
        for number, node in enumerate(self.nodes):
            dims = ",".join(f"d{d}" for d in sorted(varies[number]))
            args = ", ".join(f"%{arg}" for arg in node.args)
            lines.append(f"%{number}[{dims}]<{node.dtype.text}> = {_call(node, args)}")
        for one in self.outputs:
            dims = ",".join("1" if d == ONE else f"d{d}" for d in one.dims)
            lines.append(f"Store(%{one.node}) // [{dims}]{_place(one)}")
        return lines


def drawn(first: int, dims: Sequence[int]) -> Node:
    """Random numbers, uniform in (0, 1]: element after element of a tensor of these dimensions.

    Args:
        first: the first of the inputs that say which, see ``philox.py``.
        dims: as of ``Input``; contiguous.
    """
    order = [d for d in dims if d >= 0]
    packed = sum((d + 1) << 4 * k for k, d in enumerate(order))
    return Node(NodeKind.DRAW, DType.F32, aux=first, dims=frozenset(order), number=packed)


def order_of_draw(node: Node) -> list[int]:
    """The dimensions of what is drawn, from the outermost to the innermost."""
    packed, order = int(node.number), list[int]()
    while packed:
        order.append(packed % 16 - 1)
        packed //= 16
    return order


def varying(
    node: Node, before: Sequence[frozenset[int]], inputs: Sequence[Input]
) -> frozenset[int]:
    """The dimensions that a value varies along, if no size is 1; ``before`` has the others'."""
    dims = frozenset[int]().union(*(before[arg] for arg in node.args))
    if node.kind in (NodeKind.LOAD, NodeKind.INDEX):
        return dims | {d for d in inputs[node.aux].dims if d >= 0}
    if node.kind is NodeKind.IOTA:
        return frozenset({node.aux})
    if node.kind is NodeKind.REDUCE:
        return dims - node.dims
    if node.kind is NodeKind.DRAW:
        return node.dims
    if node.kind is NodeKind.BROADCAST:
        return dims | node.dims
    return dims


def across(nodes: Sequence[Node], number: int) -> int:
    """The sum across rows that a value is, cast or not; −1 if it is none."""
    while nodes[number].kind is NodeKind.CAST:
        number = nodes[number].args[0]
    node = nodes[number]
    return number if node.kind is NodeKind.REDUCE and node.aux == ACROSS else -1


def pruned(program: Program, keep: Collection[int] = ()) -> tuple[Program, list[int]]:
    """``program`` without what no result needs, and the numbers of the inputs that it keeps.

    Args:
        program: with all inputs that it may need.
        keep: inputs that are kept whether they are read or not.
    """
    live = {one.node for one in program.outputs}
    for number in reversed(range(len(program.nodes))):
        if number in live:
            live.update(program.nodes[number].args)
    nodes = [program.nodes[number] for number in sorted(live)]
    reading = (NodeKind.LOAD, NodeKind.INDEX, NodeKind.SCALAR, NodeKind.DRAW)
    read = {node.aux for node in nodes if node.kind in reading} | set(keep)
    read.update(node.aux + k for node in nodes if node.kind is NodeKind.DRAW for k in range(DRAWN))
    read.update(
        number
        for one in program.outputs
        for number in (one.whole, one.total, one.offset)
        if number >= 0
    )
    # The sizes of loops come from inputs: positions and sizes may need one that is not read.
    for dim in sorted(_sized(nodes)):
        having = [k for k, one in enumerate(program.inputs) if dim in one.dims]
        if having and read.isdisjoint(having):
            read.add(having[0])
    kept = sorted(read)
    place = {number: k for k, number in enumerate(sorted(live))}
    input_place = {number: k for k, number in enumerate(kept)}
    moved = tuple(
        replace(
            node,
            args=tuple(place[arg] for arg in node.args),
            aux=input_place[node.aux] if node.kind in reading else node.aux,
        )
        for node in nodes
    )
    outputs = tuple(
        replace(
            one,
            node=place[one.node],
            whole=input_place.get(one.whole, -1),
            total=input_place.get(one.total, -1),
            offset=input_place.get(one.offset, -1),
        )
        for one in program.outputs
    )
    inputs = tuple(program.inputs[number] for number in kept)
    return Program(program.rank, inputs, moved, outputs), kept


def _sized(nodes: Sequence[Node]) -> set[int]:
    """The dimensions whose sizes are read."""
    along = {node.aux for node in nodes if node.kind is NodeKind.IOTA}
    of_args = (NodeKind.REDUCE, NodeKind.SCAN)
    return along.union(*(node.dims for node in nodes if node.kind not in of_args))


def _as_int(number: float | int) -> int:
    if isinstance(number, float):
        if number != number or abs(number) >= 2.0**63:
            return 0
        number = int(number)
    # Constants of unsigned or wrapped-around ints fit after reduction.
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _call(node: Node, args: str) -> str:
    dims = ",".join(f"d{d}" for d in sorted(node.dims))
    match node.kind:
        case NodeKind.LOAD:
            return f"Load(arg{node.aux})"
        case NodeKind.CONSTANT:
            return f"Constant({node.number})"
        case NodeKind.SCALAR:
            return f"Scalar(arg{node.aux})"
        case NodeKind.NUMEL:
            return f"Numel({dims})"
        case NodeKind.IOTA:
            return f"Iota(d{node.aux})"
        case NodeKind.INDEX:
            return f"IndexLoad(arg{node.aux}, {args})"
        case NodeKind.DRAW:
            order = ",".join(f"d{d}" for d in order_of_draw(node))
            return f"Draw(arg{node.aux}, arg{node.aux + 1}, arg{node.aux + 2}) in order {order}"
        case NodeKind.CAST:
            return f"Cast({args})"
        case NodeKind.REDUCE:
            how = "across" if node.aux == ACROSS else "over"
            return f"{_title(node.op)}({args}) {how} {dims}"
        case NodeKind.BROADCAST:
            return f"Broadcast({args}) to {dims}"
        case NodeKind.SCAN:
            return f"{_title(node.op)}({args}) along {dims}"
    return f"{_title(node.op)}({args})"


def _place(one: Output) -> str:
    """Where in its whole a part is."""
    if one.offset >= 0:
        whole = f"output {one.into}" if one.into >= 0 else f"arg{one.whole}"
        whole = f"a result of arg{one.total}" if one.total >= 0 else whole
        return f", from arg{one.offset} on along {one.along} of {whole}"
    return f", part {one.part + 1} of {one.parts} along {one.along}" if one.parts > 1 else ""


def _title(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


assert [dtype.code for dtype in DTYPES] == list(range(len(DTYPES)))
