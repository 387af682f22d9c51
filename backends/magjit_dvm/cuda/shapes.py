"""Sizes of one instance on the GPU: which elements there are, and where operands have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magjit_dvm.cuda.columns import columns_without_reductions
from magjit_dvm.cuda.machine import Machine
from magjit_dvm.cuda.space import Layout, Operand, Space
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

__all__ = ["laid_out"]


def laid_out(
    program: Program, arguments: Sequence[Any], machine: Machine, crowded: bool = False
) -> Space:
    """The sizes of a call; ``empty`` ones go no further than ``layouts``.

    Args:
        program, arguments: of the call.
        machine: what it will run on.
        crowded: whole rows have turned out not to fit shared memory.

    Raises:
        NotEncodable: the arguments do not fit the program, or the GPU has no words for it.
    """
    space = Space(program, _sizes(program, arguments), crowded)
    space.active = frozenset(d for d, n in enumerate(space.size) if n != 1)
    _masks(space, arguments)
    for number, (given, value) in enumerate(zip(program.inputs, arguments, strict=True)):
        space.inputs.append(
            _input(space, number, value) if given.kind is InputKind.TENSOR else None
        )
    for number in range(len(program.outputs)):
        _place(space, number, arguments)
    if not space.reduced:
        space.reduced = columns_without_reductions(space, machine)
    _order(space)
    _check_draws(space)
    return space


def _check_draws(space: Space) -> None:
    """What is drawn is drawn in the order of the space."""
    for node in space.program.nodes:
        if node.kind is NodeKind.DRAW:
            if [d for d in order_of_draw(node) if d in space.active] != space.order:
                raise NotEncodable("numbers that are drawn in another order")


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
        like = space.whole_output
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
