"""Sizes of one instance on the GPU: which elements there are, and where operands have them.

The space of a fused operator is one line of elements: the dimensions that are kept, then those that
reductions go over (the columns), each from the outermost in memory inwards.  An operand that lies
in memory in this order is contiguous; any other has a descriptor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from magjit_dvm.instructions import DType
from magjit_dvm.program import (
    ACROSS,
    INDEXED,
    ONE,
    InputKind,
    Node,
    NodeKind,
    Program,
    order_of_draw,
    varying,
)
from magjit_dvm.vm import NotEncodable

__all__ = ["Layout", "Operand", "Space", "laid_out"]

_LEAST_ROW = 64
"""Columns from which on what shares a position, or a vector, is a row."""
_MOST_OF_VECTOR, _FEW_ELEMENTS = 8192, 1 << 17
"""Columns up to which what shares a vector is, and elements below which nothing is gained."""


@dataclass(slots=True)
class Operand:
    """Where a tensor is: bytes along the group's dimensions, and its address as far as it matters.

    Attributes:
        argument: its number among inputs, then outputs.
        strides: bytes, of each of the group's dimensions; 0 where it has none.
        offset: bytes from the argument's address.
        low: the address, plus offset, modulo 16.
        size: bytes an element.
        bound, step: of a table, the positions that there are, and the bytes between them.
    """

    argument: int
    strides: list[int]
    offset: int
    low: int
    size: int
    bound: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a result that a call makes: sizes and strides, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True)
class Space:
    """Sizes of one instance.

    Attributes:
        size: of the group's dimensions.
        has: of each node, the dimensions of a size other than 1 that it varies along.
        active: all of those.
        reduced: those that reductions go over.
        rows_summed: those that sums go across; none without such sums.
        order: active ones from the outermost to the innermost.
        rows, cols: products of the sizes that are kept and reduced.
        each: elements a lane, R, where the space is divided into squares; otherwise 0.
        inputs, outputs: where tensors are; None for numbers.
        layouts: of outputs that a call makes.
    """

    program: Program
    size: list[int]
    has: list[frozenset[int]] = field(default_factory=list)
    active: frozenset[int] = frozenset()
    reduced: frozenset[int] = frozenset()
    rows_summed: frozenset[int] = frozenset()
    order: list[int] = field(default_factory=list)
    rows: int = 1
    cols: int = 1
    each: int = 0
    inputs: list[Operand | None] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in self.size

    def contiguous(self, one: Operand, along: Collection[int] | None = None) -> bool:
        """Whether the operand's elements are in the order of the space.

        Args:
            along: dimensions that it has; along all others it is the same.  All by default.
        """
        expected = one.size
        for d in reversed(self.order):
            inside = along is None or d in along
            if one.strides[d] != (expected if inside else 0):
                return False
            expected *= self.size[d] if inside else 1
        return True

    def rows_side_by_side(self, one: Operand) -> bool:
        """Whether the columns of each row are contiguous."""
        expected = one.size
        for d in reversed([d for d in self.order if d in self.reduced]):
            if one.strides[d] != expected:
                return False
            expected *= self.size[d]
        return True

    @property
    def has_positions(self) -> bool:
        """Whether there are positions along dimensions, or tables."""
        return any(node.kind in (NodeKind.IOTA, NodeKind.INDEX) for node in self.program.nodes)

    @property
    def draws(self) -> bool:
        """Whether there are random numbers."""
        return any(node.kind is NodeKind.DRAW for node in self.program.nodes)

    @property
    def kept(self) -> frozenset[int]:
        """The dimensions of rows."""
        return self.active - self.reduced

    def descriptor(
        self, one: Operand, dims: Sequence[int], apart: bool = False
    ) -> tuple[tuple[int, int], ...]:
        """(size, stride) of ``dims``, innermost first, neighbours in memory as one if not apart.

        Raises:
            NotEncodable: a size or stride has more than 31 bits.
        """
        found: list[tuple[int, int]] = []
        for d in reversed(dims):
            size, stride = self.size[d], one.strides[d]
            if found and not apart and stride == found[-1][1] * found[-1][0]:
                found[-1] = (found[-1][0] * size, found[-1][1])
            else:
                found.append((size, stride))
        if any(size >= 1 << 31 or abs(stride) >= 1 << 31 for size, stride in found):
            raise NotEncodable("a view of more than 31 bits")
        return tuple(found)


def laid_out(program: Program, arguments: Sequence[Any]) -> Space:
    """The sizes of a call; ``empty`` ones go no further than ``layouts``.

    Raises:
        NotEncodable: the arguments do not fit the program, or the GPU has no words for it.
    """
    space = Space(program, _sizes(program, arguments))
    space.active = frozenset(d for d, n in enumerate(space.size) if n != 1)
    _masks(space, arguments)
    for number, (given, value) in enumerate(zip(program.inputs, arguments, strict=True)):
        space.inputs.append(
            _input(space, number, value) if given.kind is InputKind.TENSOR else None
        )
    for number in range(len(program.outputs)):
        _place(space, number, arguments)
    _rows_of_positions(space)
    _rows_of_vectors(space)
    _order(space)
    _check_draws(space)
    return space


def _check_draws(space: Space) -> None:
    """What is drawn is drawn in the order of the space."""
    for node in space.program.nodes:
        if node.kind is NodeKind.DRAW:
            if [d for d in order_of_draw(node) if d in space.active] != space.order:
                raise NotEncodable("numbers that are drawn in another order")


def _whole_output(space: Space) -> Operand | None:
    """The first output that has all dimensions."""
    full = (k for k, one in enumerate(space.program.outputs) if space.has[one.node] == space.active)
    return next((space.outputs[k] for k in full), None)


def _rows_of_positions(space: Space) -> None:
    """Without reductions, what shares a position, or an int64, is a row if it lies side by side.

    What rows have one number of is then computed once for each.
    """
    program = space.program
    like = _whole_output(space)
    if space.reduced or like is None or not space.has_positions:
        return
    found, size, at = set[int](), like.size, _dims_of_positions(space)
    lines = {node.aux for node in program.nodes if node.kind is NodeKind.IOTA}
    inner = {stride: d for d, stride in enumerate(like.strides) if d in space.active}
    # With positions along them, the innermost alone are columns.
    while size in inner and inner[size] not in at | found and found.isdisjoint(lines):
        if found and inner[size] in lines:
            break
        found.add(inner[size])
        size *= space.size[inner[size]]
    if len(found) < len(space.active) and size >= _LEAST_ROW * like.size:
        space.reduced = frozenset(found)


def _rows_of_vectors(space: Space) -> None:
    """Without reductions, the vector of columns that do not come by four makes rows of them.

    Its elements would have an address each; a row's are side by side.
    """
    program = space.program
    like = _whole_output(space)
    if space.reduced or like is None or space.has_positions or space.draws:
        return
    vectors: dict[frozenset[int], list[Operand]] = {}
    for n, node in enumerate(program.nodes):
        one = space.inputs[node.aux] if node.kind is NodeKind.LOAD else None
        if one is not None and one.size in (2, 4) and one.low % (4 * one.size) == 0:
            vectors.setdefault(space.has[n], []).append(one)
    found, cols = frozenset[int](), 1
    inner = {stride: d for d, stride in enumerate(like.strides) if d in space.active}
    steps = {d: stride // like.size for stride, d in inner.items()}
    while like.size * cols in inner and len(found) + 1 < len(space.active):
        d = inner[like.size * cols]
        found |= {d}
        cols *= space.size[d]
        if cols > _MOST_OF_VECTOR:
            return
        if (
            cols >= _LEAST_ROW
            and cols % 4
            and any(
                all(one.strides[k] == steps[k] * one.size for k in found)
                for one in vectors.get(found, ())
            )
        ):
            if prod(space.size) >= _FEW_ELEMENTS:
                space.reduced = found
            return


def _dims_of_positions(space: Space) -> set[int]:
    """Along which int64 of memory, and what tables are looked up at, varies."""
    found = set[int]()
    for n, node in enumerate(space.program.nodes):
        if node.kind is NodeKind.LOAD and node.dtype is DType.I64:
            found |= space.has[n]
        elif node.kind is NodeKind.INDEX:
            found |= space.has[node.args[0]]
    return found


def _sizes(program: Program, arguments: Sequence[Any]) -> list[int]:
    size = [-1] * program.rank
    for given, value in zip(program.inputs, arguments, strict=True):
        if given.kind is InputKind.TENSOR:
            shape = tuple(value.shape)
            if len(shape) != len(given.dims) or value.dtype is not given.dtype.torch:
                raise NotEncodable("a tensor of another dtype or rank")
        else:
            shape = (value,) * len(given.dims)
        for d, n in zip(given.dims, shape, strict=True):
            if n < 0:
                raise NotEncodable("a negative size")
            if d >= 0 and n != 1:
                if size[d] not in (-1, n):
                    raise NotEncodable("sizes do not agree")
                size[d] = n
            elif d == ONE and n != 1:
                raise NotEncodable("a size is not 1")
    return [1 if n < 0 else n for n in size]


def _masks(space: Space, arguments: Sequence[Any]) -> None:
    program = space.program
    for node in program.nodes:
        if node.dtype is DType.F64:
            raise NotEncodable(f"no words for {node.kind.name.lower()} of {node.dtype.text}")
        has = varying(node, space.has, program.inputs) & space.active
        if node.kind in (NodeKind.LOAD, NodeKind.INDEX):
            dims, shape = program.inputs[node.aux].dims, arguments[node.aux].shape
            own = {d for d, n in zip(dims, shape, strict=True) if n != 1}
            has = (has & own).union(*(space.has[arg] for arg in node.args))
        if node.kind in (NodeKind.REDUCE, NodeKind.SCAN):
            _reduces(space, node)
        space.has.append(has)
    if space.rows_summed:
        columns = space.active - space.rows_summed
        if space.reduced not in (frozenset(), columns) or not columns:
            raise NotEncodable("sums across rows of other columns")
        space.reduced = columns


def _reduces(space: Space, node: Node) -> None:
    over = node.dims & space.active
    if not over <= space.has[node.args[0]]:
        raise NotEncodable("a reduction over a dimension that is broadcast")
    if node.aux == ACROSS:
        if over and space.rows_summed and space.rows_summed != over:
            raise NotEncodable("sums across different rows")
        space.rows_summed = over or space.rows_summed
        return
    if over and space.reduced and space.reduced != over:
        raise NotEncodable("reductions over different dimensions")
    space.reduced = over or space.reduced


def _input(space: Space, number: int, value: torch.Tensor) -> Operand:
    item = value.element_size()
    strides, bound, step = [0] * space.program.rank, 0, 0
    for d, n, stride in zip(
        space.program.inputs[number].dims, value.shape, value.stride(), strict=True
    ):
        if d >= 0 and n != 1:
            strides[d] += stride * item
        if d == INDEXED:
            bound, step = n, stride * item
    if bound >= 1 << 31 or abs(step) >= 1 << 31:
        raise NotEncodable("a table of more than 31 bits")
    address = value.data_ptr()
    if address % item:
        raise NotEncodable("an element that is not aligned")
    return Operand(number, strides, 0, address % 16, item, bound, step)


def _place(space: Space, number: int, arguments: Sequence[Any]) -> None:
    """The shape of a result, or of the whole that an output is part of, and where it lies."""
    program = space.program
    out = program.outputs[number]
    whole = arguments[out.whole] if out.whole >= 0 else None
    item = program.nodes[out.node].dtype.size
    sizes, strides = [1] * len(out.dims), [1] * len(out.dims)
    along, stride, offset = [0] * program.rank, 1, 0
    for k in reversed(out.order):
        d = out.dims[k]
        there = d >= 0 and (d in space.has[out.node] or space.size[d] == 1)
        if d >= 0 and not there:
            raise NotEncodable("an output lacks a dimension")
        own = space.size[d] if there else 1
        sizes[k], strides[k] = own, whole.stride(k) if whole is not None else stride
        step = strides[k] * item
        if k == out.along and out.offset >= 0:
            first = arguments[out.offset]
            total = out.total if out.into < 0 else program.outputs[out.into].total
            sizes[k] = whole.shape[k] if whole is not None else arguments[total]
            if not 0 <= first <= sizes[k] - own:
                raise NotEncodable("a part beyond its whole")
            offset += first * step
        elif k == out.along:
            sizes[k] = own * out.parts
            offset += out.part * own * step
        elif whole is not None and whole.shape[k] != own:
            raise NotEncodable("a whole of another size")
        if d >= 0 and own != 1:
            along[d] = step
        stride *= max(sizes[k], 1)
    base = len(program.inputs) + (number if out.into < 0 else out.into)
    low = offset
    if whole is not None:
        base, low = out.whole, whole.data_ptr() + offset
    space.layouts.append(Layout(tuple(sizes), tuple(strides)))
    space.outputs.append(Operand(base, along, offset, low % 16, item))


def _order(space: Space) -> None:
    """The order in memory of what moves most: the first output, or input, with all dimensions."""
    program, like = space.program, None
    if not space.reduced:
        like = _whole_output(space)
    for number, node in enumerate(program.nodes):
        if like is None and node.kind is NodeKind.LOAD and space.has[number] == space.active:
            like = space.inputs[node.aux]
    dims = sorted(space.active)
    if like is not None:
        for i in range(1, len(dims)):
            for j in range(i, 0, -1):
                before, after = (abs(like.strides[d]) for d in (dims[j - 1], dims[j]))
                if before == 0 or after == 0 or before >= after:
                    break
                dims[j - 1], dims[j] = dims[j], dims[j - 1]
    kept = [d for d in dims if d not in space.reduced]
    reduced = [d for d in dims if d in space.reduced]
    space.order = kept + reduced
    for d in kept:
        space.rows *= space.size[d]
    for d in reduced:
        space.cols *= space.size[d]
