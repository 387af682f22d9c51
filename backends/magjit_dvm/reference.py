"""What programs mean, in plain Python over small tensors.

``run`` interprets a ``Program`` by the definition of its nodes: every value is a tensor with all
of the group's dimensions.  ``run_bytecode`` does the same for what ``Fused.encode`` returns; it
is in ``reference_machine``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from magjit_dvm.instructions import INSTRUCTIONS, DType
from magjit_dvm.philox import uniforms
from magjit_dvm.program import (
    DRAWN,
    INDEXED,
    ONE,
    InputKind,
    Node,
    NodeKind,
    Output,
    Program,
    order_of_draw,
)
from magjit_dvm.reference_machine import BytecodeError, run_bytecode

__all__ = ["BytecodeError", "run", "run_bytecode"]

_BY_NAME = {one.name: one for one in INSTRUCTIONS}
_ADDS = ("sum", "prod")


def run(program: Program, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The results of ``program`` for these arguments, of which wholes are written.

    Raises:
        ValueError: sizes do not agree, or a result lacks a dimension.
        IndexError: a position is out of bounds.
    """
    sizes = _sizes(program, arguments)
    values: list[torch.Tensor] = []
    for node in program.nodes:
        values.append(_value(program, node, values, arguments, sizes))
    parts = [_result(values[one.node], one, sizes) for one in program.outputs]
    for one, part in zip(program.outputs, parts, strict=True):
        if one.whole >= 0:
            _write(arguments[one.whole], one, part, arguments)
    return tuple(
        _joined(parts, program, number, arguments)
        for number, one in enumerate(program.outputs)
        if one.allocated
    )


def _write(
    whole: torch.Tensor, one: Output, part: torch.Tensor, arguments: Sequence[Any]
) -> torch.Tensor:
    first, size = arguments[one.offset], part.shape[one.along]
    if first < 0 or first + size > whole.shape[one.along]:
        raise ValueError("a part beyond its whole")
    whole.narrow(one.along, first, size).copy_(part)
    return whole


def _joined(
    parts: Sequence[torch.Tensor], program: Program, number: int, arguments: Sequence[Any]
) -> torch.Tensor:
    """The whole that an output is the first part of."""
    first = program.outputs[number]
    if first.offset >= 0:
        shape = list(parts[number].shape)
        shape[first.along] = arguments[first.total]
        whole = _laid_out(shape, first.order, parts[number].dtype)
        for p, one in enumerate(program.outputs):
            if number in (p, one.into):
                _write(whole, one, parts[p], arguments)
        return whole
    if first.parts == 1:
        return parts[number]
    others = {one.part: p for p, one in enumerate(program.outputs) if one.into == number}
    return torch.cat(
        [parts[number], *(parts[others[k]] for k in range(1, first.parts))], first.along
    )


def _sizes(program: Program, arguments: Sequence[Any]) -> list[int]:
    sizes: dict[int, int] = {ONE: 1}
    for given, value in zip(program.inputs, arguments, strict=True):
        shape = value.shape if given.kind is InputKind.TENSOR else (value,) * len(given.dims)
        for dim, size in zip(given.dims, shape, strict=True):
            if dim != INDEXED and sizes.setdefault(dim, size) != size:
                raise ValueError("sizes do not agree")
    return [sizes.get(dim, 1) for dim in range(program.rank)]


def _value(
    program: Program,
    node: Node,
    values: Sequence[torch.Tensor],
    arguments: Sequence[Any],
    sizes: Sequence[int],
) -> torch.Tensor:
    """A node's value: along each of the group's dimensions its size, or 1."""
    rank, dtype = program.rank, node.dtype.torch
    args = [values[number] for number in node.args]
    match node.kind:
        case NodeKind.LOAD:
            return _spread(arguments[node.aux], program.inputs[node.aux].dims, rank)
        case NodeKind.CONSTANT:
            return _number(node.number, dtype, rank)
        case NodeKind.SCALAR:
            return _number(arguments[node.aux], dtype, rank)
        case NodeKind.NUMEL:
            return _number(torch.Size([sizes[d] for d in node.dims]).numel(), dtype, rank)
        case NodeKind.IOTA:
            return _along(torch.arange(sizes[node.aux]), node.aux, rank)
        case NodeKind.DRAW:
            return _drawn(node, arguments, sizes)
        case NodeKind.INDEX:
            return _looked_up(arguments[node.aux], program.inputs[node.aux].dims, args[0])
        case NodeKind.COMPUTE:
            reference = _BY_NAME[node.op].reference
            assert reference is not None
            return torch.as_tensor(reference(*args)).to(dtype)
        case NodeKind.CAST:
            return args[0].to(dtype)
        case NodeKind.REDUCE:
            return _reduced(node, args[0], sizes)
        case NodeKind.SCAN:
            return _scanned(node, args[0], sizes)
    return args[0].expand([n if d in node.dims else -1 for d, n in enumerate(sizes)])


def _number(number: float | int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    exact = torch.float64 if isinstance(number, float) else torch.int64
    return torch.tensor(number, dtype=exact).to(dtype).reshape((1,) * rank)


def _along(line: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return line.reshape([-1 if d == dim else 1 for d in range(rank)])


def _spread(tensor: torch.Tensor, dims: Sequence[int], rank: int) -> torch.Tensor:
    """A tensor whose dimensions are ``dims`` as one with all of the group's."""
    places = [k for k, dim in enumerate(dims) if dim >= 0]
    ones = [k for k, dim in enumerate(dims) if dim == ONE]
    small = tensor.permute([*places, *ones]).flatten(len(places)) if ones else tensor
    small = small.squeeze(-1) if ones else small.permute(places)
    order = sorted(range(len(places)), key=lambda k: dims[places[k]])
    small = small.permute(order)
    shape = [1] * rank
    for k in places:
        shape[dims[k]] = tensor.shape[k]
    return small.reshape(shape)


def _drawn(node: Node, arguments: Sequence[Any], sizes: Sequence[int]) -> torch.Tensor:
    """Element after element in the order of its dimensions."""
    order = order_of_draw(node)
    shape = [sizes[d] for d in order]
    elements = np.arange(math.prod(shape), dtype=np.int64)
    found = torch.from_numpy(uniforms(elements, *arguments[node.aux : node.aux + DRAWN]))
    inputs_order = [order.index(d) for d in sorted(order)]
    spread = [sizes[d] if d in node.dims else 1 for d in range(len(sizes))]
    return found.reshape(shape).permute(inputs_order).reshape(spread)


def _looked_up(table: torch.Tensor, dims: Sequence[int], at: torch.Tensor) -> torch.Tensor:
    index = []
    for dim, size in zip(dims, table.shape, strict=True):
        if dim == INDEXED:
            if bool(((at < 0) | (at >= size)).any()):
                raise IndexError("index out of range in self")
            index.append(at.long())
        else:
            index.append(_along(torch.arange(size), dim, at.dim()))
    return table[tuple(index)]


def _reduced(node: Node, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    reference = _BY_NAME[node.op].reference
    assert reference is not None
    wide = node.op in _ADDS and node.dtype is DType.F32
    value = value.double() if wide else value
    for dim in node.dims:
        if value.shape[dim] != sizes[dim]:
            raise ValueError("a reduction over a dimension that is broadcast")
        if sizes[dim] == 0:
            raise ValueError("a reduction over nothing")
        value = reference(value, dim=dim, keepdim=True)
    return value.to(node.dtype.torch)


def _scanned(node: Node, value: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    reference = _BY_NAME[node.op].reference
    assert reference is not None
    (dim,) = node.dims
    if value.shape[dim] != sizes[dim]:
        raise ValueError("running results along a dimension that is broadcast")
    if sizes[dim] == 0:
        raise ValueError("running results of nothing")
    wide = value.double() if node.dtype is DType.F32 else value
    return torch.as_tensor(reference(wide, dim=dim)).to(node.dtype.torch)


def _result(value: torch.Tensor, output: Output, sizes: Sequence[int]) -> torch.Tensor:
    """The value along the output's dimensions, laid out in its order."""
    kept = [dim for dim in output.dims if dim >= 0]
    if any(value.shape[d] != 1 and d not in kept for d in range(value.dim())):
        raise ValueError("a result varies along a dimension that it does not have")
    if any(value.shape[d] != sizes[d] for d in kept):
        raise ValueError("an output lacks a dimension")
    shape = [1 if dim == ONE else sizes[dim] for dim in output.dims]
    others = [d for d in range(value.dim()) if d not in kept]
    moved = value.permute([*kept, *others]).reshape(shape)
    return _laid_out(shape, output.order, value.dtype).copy_(moved)


def _laid_out(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose dimensions are in this order in memory, from the outermost inwards."""
    strides, stride = [0] * len(shape), 1
    for k in reversed(order):
        strides[k] = stride
        stride *= max(shape[k], 1)
    return torch.empty_strided(shape, strides, dtype=dtype)
