"""Rules of operators that reorder, reshape, select and broadcast one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from magjit.plugin.virtual_tensors.calls import Call
from magjit.plugin.virtual_tensors.indexing import (
    FloorDiv,
    Mod,
    index_symbols,
    is_nonnegative,
    numel,
    simplify,
    size_expr,
)
from magjit.plugin.virtual_tensors.mapping import Movement, Part, contiguous_strides
from magjit.plugin.virtual_tensors.rules import LEFT_OUT, ONE_TO_MANY, Directions, rule

__all__ = ["box", "clipped", "dimension", "flattened", "reshaped", "unflattened"]

aten = torch.ops.aten
Sizes = Sequence[sympy.Expr]
_TURNS = "whether it turns by more than its size is not known"
_MEMORY = "what it gives depends on where the operand's elements are in memory"


def dimension(number: int, rank: int) -> int:
    """A dimension's number counted from the front."""
    return number + max(rank, 1) if number < 0 else number


def clipped(
    position: sympy.Expr | None, size: sympy.Expr, otherwise: sympy.Expr
) -> sympy.Expr | None:
    """A bound of a slice as a position from 0 to ``size``; None where it is not known which."""
    if position is None or position == 2**63 - 1:
        return otherwise
    if not is_nonnegative(position):
        if not is_nonnegative(-position):
            return None
        position = position + size
        if not is_nonnegative(position):
            return sympy.S.Zero if is_nonnegative(-position) else None
    if is_nonnegative(size - position):
        return position
    return size if is_nonnegative(position - size) else None


def flattened(index: Sizes, shape: Sizes) -> sympy.Expr:
    """The row-major number of an element."""
    strides = contiguous_strides(shape)
    return sympy.Add(*(one * stride for one, stride in zip(index, strides, strict=True)))


def unflattened(number: sympy.Expr, shape: Sizes) -> tuple[sympy.Expr, ...]:
    """The index of the element with a row-major number."""
    index = []
    for k, (size, stride) in enumerate(zip(shape, contiguous_strides(shape), strict=True)):
        place = FloorDiv(number, stride or sympy.S.One)  # a tensor without elements has no index
        index.append(place if k == 0 and size != 1 else Mod(place, size or sympy.S.One))
    return tuple(index)


def reshaped(old: Sizes, new: Sizes) -> Movement:
    """Row-major order kept: groups of dimensions with equal products are taken one by one."""
    symbols = index_symbols(len(new))
    ranges = dict(zip(symbols, new, strict=True))
    index: list[sympy.Expr] = []
    for olds, news in _groups(list(old), list(new)):
        number = flattened([symbols[k] for k in news], [new[k] for k in news])
        parts = unflattened(number, [old[k] for k in olds])
        index += [simplify(one, ranges) for one in parts]
    return Movement.of(new, index)


def _groups(old: list[sympy.Expr], new: list[sympy.Expr]) -> list[tuple[range, range]]:
    """Ranges of dimensions of both shapes that hold the same number of elements."""
    found = []
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while (i < len(old) or j < len(new)) and not _same(old[first_i:i], new[first_j:j]):
            left, right = numel(old[first_i:i]), numel(new[first_j:j])
            if i < len(old) and (j == len(new) or is_nonnegative(right - left)):
                i += 1
            elif j < len(new) and (i == len(old) or is_nonnegative(left - right)):
                j += 1
            else:  # sizes that cannot be compared: all that is left is one group
                i, j = len(old), len(new)
        found.append((range(first_i, i), range(first_j, j)))
    return found


def _same(old: Sizes, new: Sizes) -> bool:
    return bool(sympy.expand(numel(old) - numel(new)) == 0)


def _one_to_one(result: Movement, operand: Movement) -> Directions:
    return Directions((result,), {0: operand})


# -- reshapes --


@rule(
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten._reshape_alias.default,
    aten._reshape_alias_copy.default,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.ravel.default,
    aten.reshape_as.default,
    aten.view_as.default,
)
def _reshape(call: Call) -> Directions:
    old, new = call.operands[0].shape, call.shape  # another operand only lends its shape
    return _one_to_one(reshaped(old, new), reshaped(new, old))


@rule(
    aten.alias.default,
    aten.alias_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
)
def _identity(call: Call) -> Directions:
    index = index_symbols(len(call.shape))
    return _one_to_one(Movement.of(call.shape, index), Movement.of(call.shape, index))


# -- permutations --


@rule(aten.permute.default, aten.permute_copy.default)
def _permute(call: Call) -> Directions:
    rank = len(call.shape)
    return _permuted(call, [dimension(one, rank) for one in call["dims"]])


@rule(aten.transpose.int, aten.transpose_copy.int, aten.swapaxes.default, aten.swapdims.default)
def _transpose(call: Call) -> Directions:
    rank = len(call.shape)
    order = list(range(rank))
    names = [name for name in call.arguments if name != "self"]
    one, other = (dimension(call[name], rank) for name in names)
    if rank:
        order[one], order[other] = order[other], order[one]
    return _permuted(call, order)


@rule(aten.t.default, aten.t_copy.default, aten.numpy_T.default, aten.mT.default)
def _reversed(call: Call) -> Directions:
    rank = len(call.shape)
    order = list(range(rank))
    if call.target is aten.mT.default:
        order[-2:] = order[:-3:-1]
    else:
        order.reverse()
    return _permuted(call, order)


def _permuted(call: Call, order: Sequence[int]) -> Directions:
    symbols = index_symbols(len(order))
    inverse = [order.index(k) for k in range(len(order))]
    return _one_to_one(
        Movement.of(call.shape, [symbols[k] for k in inverse]),
        Movement.of(call.operands[0].shape, [symbols[k] for k in order]),
    )


@rule(aten.flip.default)
def _flip(call: Call) -> Directions:
    rank = len(call.shape)
    index = list(index_symbols(rank))
    for one in call["dims"] if rank else ():
        k = dimension(one, rank)
        index[k] = call.shape[k] - 1 - index[k]
    return _one_to_one(Movement.of(call.shape, index), Movement.of(call.shape, index))


@rule(aten.roll.default)
def _roll(call: Call) -> Directions:
    shape = call.operands[0].shape
    shifts = [size_expr(one) for one in call["shifts"]]
    dims = [dimension(one, len(shape)) for one in call["dims"]]
    forth, back = list(index_symbols(len(shape))), list(index_symbols(len(shape)))
    if not dims:
        number = flattened(forth, shape)
        here, there = (_turned(number, by, numel(shape)) for by in (shifts[0], -shifts[0]))
        if here is None or there is None:
            return Directions(reason=_TURNS)
        forth, back = list(unflattened(here, shape)), list(unflattened(there, shape))
    for shift, k in zip(shifts, dims, strict=False):
        here, there = _turned(forth[k], shift, shape[k]), _turned(back[k], -shift, shape[k])
        if here is None or there is None:
            return Directions(reason=_TURNS)
        forth[k], back[k] = here, there
    return _one_to_one(Movement.of(shape, forth), Movement.of(shape, back))


def _turned(index: sympy.Expr, shift: sympy.Expr, size: sympy.Expr) -> sympy.Expr | None:
    """``index - shift`` modulo the size; None where it is not known to lie within one turn."""
    if size == 0:
        return index
    back = -shift
    if back.is_Integer and size.is_Integer:
        back = back % size
    elif not is_nonnegative(back):
        back = back + size
    return Mod(index + back, size) if is_nonnegative(back) else None


@rule(aten.rot90.default)
def _rot90(call: Call) -> Directions:
    shape = call.operands[0].shape
    one, other = (dimension(k, len(shape)) for k in call["dims"])
    turns = call["k"] % 4
    return _one_to_one(
        Movement.of(call.shape, _turned_by(call.shape, one, other, turns)),
        Movement.of(shape, _turned_by(shape, one, other, -turns % 4)),
    )


def _turned_by(shape: Sizes, one: int, other: int, turns: int) -> list[sympy.Expr]:
    """Where an element of the turned tensor comes from; ``shape`` is that of the turned one."""
    index = list(index_symbols(len(shape)))
    across, down = index[one], index[other]
    first, last = shape[one] - 1, shape[other] - 1
    index[one], index[other] = {
        0: (across, down),
        1: (down, first - across),
        2: (first - across, last - down),
        3: (last - down, across),
    }[turns]
    return index


# -- selections --


def box(
    shape: Sizes, starts: Sizes, stops: Sizes
) -> tuple[sympy.logic.boolalg.Boolean, tuple[sympy.Expr, ...]]:
    """``starts ≤ index < stops`` over a tensor, and the index within the box."""
    symbols = index_symbols(len(shape))
    conditions = []
    for symbol, size, start, stop in zip(symbols, shape, starts, stops, strict=True):
        if start != 0:
            conditions.append(symbol >= start)
        if stop != size:
            conditions.append(symbol < stop)
    inside = tuple(symbol - start for symbol, start in zip(symbols, starts, strict=True))
    return sympy.And(*conditions), inside


@rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def _slice(call: Call) -> Directions:
    return _part(call, size_expr(call["step"]))


@rule(aten.narrow.default, aten.narrow_copy.default)
def _narrow(call: Call) -> Directions:
    return _part(call, sympy.S.One)


def _part(call: Call, step: sympy.Expr) -> Directions:
    shape = call.operands[0].shape
    k = dimension(call["dim"], len(shape))
    start = clipped(call.size("start"), shape[k], sympy.S.Zero)
    if start is None:
        return Directions(reason="where the slice starts depends on the size")
    index = list(index_symbols(len(shape)))
    index[k] = start + index[k] * step
    return Directions((Movement.of(call.shape, index),), reason=LEFT_OUT)


@rule(aten.select.int, aten.select_copy.int)
def _select(call: Call) -> Directions:
    shape = call.operands[0].shape
    k = dimension(call["dim"], len(shape))
    place = clipped(call.size("index"), shape[k], sympy.S.Zero)
    if place is None:
        return Directions(reason="which element is selected depends on the size")
    index = list(index_symbols(len(call.shape)))
    index.insert(k, place)
    return Directions((Movement.of(call.shape, index),), reason=LEFT_OUT)


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def _diagonal(call: Call) -> Directions:
    shape = call.operands[0].shape
    one, other = (dimension(call[name], len(shape)) for name in ("dim1", "dim2"))
    *index, along = index_symbols(len(call.shape))
    offset = call["offset"]
    places = {one: along + max(-offset, 0), other: along + max(offset, 0)}
    for k in sorted(places):
        index.insert(k, places[k])
    return Directions((Movement.of(call.shape, index),), reason=LEFT_OUT)


@rule(aten.as_strided.default, aten.as_strided_copy.default)
def _as_strided(call: Call) -> Directions:
    (given,) = call.operands
    if not given.dense:
        return Directions(reason=_MEMORY)
    offset = size_expr(call["storage_offset"] or 0)
    symbols = index_symbols(len(call.shape))
    strides = [size_expr(one) for one in call["stride"]]
    number = offset + sympy.Add(*(a * b for a, b in zip(symbols, strides, strict=True)))
    return Directions(
        (Movement.of(call.shape, unflattened(number, given.shape)),), reason=ONE_TO_MANY
    )


@rule(aten.unfold.default, aten.unfold_copy.default)
def _unfold(call: Call) -> Directions:
    shape = call.operands[0].shape
    if not shape:
        return Directions((Movement.of(call.shape, ()),), reason=ONE_TO_MANY)
    k = dimension(call["dimension"], len(shape))
    *index, within = index_symbols(len(call.shape))
    index[k] = index[k] * size_expr(call["step"]) + within
    return Directions((Movement.of(call.shape, index),), reason=ONE_TO_MANY)


# -- splits --


@rule(
    aten.split.Tensor,
    aten.split_copy.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.chunk.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.unsafe_chunk.default,
    aten.tensor_split.sections,
    aten.tensor_split.indices,
)
def _split(call: Call) -> Directions:
    shape = call.operands[0].shape
    k = dimension(call["dim"], len(shape))
    symbols = index_symbols(len(shape))
    results: list[Movement] = []
    parts: list[Part] = []
    start: sympy.Expr = sympy.S.Zero
    for number, result in enumerate(call.results):
        index = list(symbols)
        index[k] = index[k] + start
        results.append(Movement.of(result.shape, index))
        starts, stops = [sympy.S.Zero] * len(shape), list(shape)
        starts[k], stops[k] = start, start + result.shape[k]
        condition, inside = box(shape, starts, stops)
        parts.append(Part(condition, number, inside))
        start = start + result.shape[k]
    return Directions(tuple(results), {0: Movement(tuple(shape), tuple(parts))})


@rule(aten.unbind.int, aten.unbind_copy.int)
def _unbind(call: Call) -> Directions:
    shape = call.operands[0].shape
    k = dimension(call["dim"], len(shape))
    results, parts = [], []
    symbols = index_symbols(len(shape))
    for number, result in enumerate(call.results):
        index = list(index_symbols(len(result.shape)))
        index.insert(k, sympy.Integer(number))
        results.append(Movement.of(result.shape, index))
        condition = sympy.Eq(symbols[k], number) if len(call.results) > 1 else sympy.true
        parts.append(Part(condition, number, symbols[:k] + symbols[k + 1 :]))
    return Directions(tuple(results), {0: Movement(tuple(shape), tuple(parts))})


# -- broadcasts --


@rule(
    aten.expand.default, aten.expand_copy.default, aten.expand_as.default, aten.broadcast_to.default
)
def _expand(call: Call) -> Directions:
    shape, new = call.operands[0].shape, call.shape
    symbols = index_symbols(len(new))[len(new) - len(shape) :]
    index = [
        sympy.S.Zero if size == 1 else symbol for size, symbol in zip(shape, symbols, strict=True)
    ]
    movement = Movement.of(new, index)
    if _same(shape, new):
        return _one_to_one(movement, reshaped(new, shape))
    return Directions((movement,), reason=ONE_TO_MANY)


@rule(aten.repeat.default, aten.tile.default)
def _repeat(call: Call) -> Directions:
    shape, new = call.operands[0].shape, call.shape
    symbols = index_symbols(len(new))[len(new) - len(shape) :]
    index = [Mod(symbol, size) for symbol, size in zip(symbols, shape, strict=True)]
    movement = Movement.of(new, index)
    if _same(shape, new):
        return _one_to_one(movement, reshaped(new, shape))
    return Directions((movement,), reason=ONE_TO_MANY)


@rule(aten.repeat_interleave.self_int)
def _repeat_interleave(call: Call) -> Directions:
    shape, times = call.operands[0].shape, call.size("repeats")
    if call["dim"] is None:
        (symbol,) = index_symbols(1)
        index = list(unflattened(FloorDiv(symbol, times), shape))
    else:
        index = list(index_symbols(len(call.shape)))
        k = dimension(call["dim"], len(shape))
        index[k] = FloorDiv(index[k], times)
    return Directions((Movement.of(call.shape, index),), reason=ONE_TO_MANY)


# -- blocks of pixels and channels --


@rule(aten.pixel_shuffle.default)
def _pixel_shuffle(call: Call) -> Directions:
    return _shuffled(call, call.operands[0].shape, call.shape, call["upscale_factor"])


@rule(aten.pixel_unshuffle.default)
def _pixel_unshuffle(call: Call) -> Directions:
    both = _shuffled(call, call.shape, call.operands[0].shape, call["downscale_factor"])
    return _one_to_one(both.operands[0], both.results[0])


def _shuffled(call: Call, small: Sizes, large: Sizes, factor: int) -> Directions:
    *batch, channel, row, column = index_symbols(len(large))
    forth = [
        *batch,
        channel * factor**2 + Mod(row, factor) * factor + Mod(column, factor),
        FloorDiv(row, factor),
        FloorDiv(column, factor),
    ]
    back = [
        *batch,
        FloorDiv(channel, factor**2),
        row * factor + Mod(FloorDiv(channel, factor), factor),
        column * factor + Mod(channel, factor),
    ]
    return _one_to_one(Movement.of(large, forth), Movement.of(small, back))


@rule(aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def _channel_shuffle(call: Call) -> Directions:
    shape, groups = call.shape, call["groups"]
    batch, channel, *rest = index_symbols(len(shape))
    each = FloorDiv(shape[1], groups)
    forth = (batch, Mod(channel, groups) * each + FloorDiv(channel, groups), *rest)
    back = (batch, Mod(channel, each) * groups + FloorDiv(channel, each), *rest)
    return _one_to_one(Movement.of(shape, forth), Movement.of(shape, back))
