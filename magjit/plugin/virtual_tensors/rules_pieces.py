"""Rules of operators that put several tensors, or a tensor and values, into one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import sympy
import torch

from magjit.plugin.virtual_tensors.calls import Call, Operand
from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod, index_symbols, size_expr
from magjit.plugin.virtual_tensors.mapping import Movement, Part
from magjit.plugin.virtual_tensors.rules import ONE_TO_MANY, Directions, rule
from magjit.plugin.virtual_tensors.rules_views import box, clipped, dimension

__all__: list[str] = []

aten = torch.ops.aten
Sizes = Sequence[sympy.Expr]
_MIXED = "operands of other dtypes are converted"
_OVERWRITTEN = "a part of the operand is overwritten in the result"
_CUT = "elements of the operand are cut off"


@rule(aten.cat.default, aten.concat.default, aten.concatenate.default)
def _cat(call: Call) -> Directions:
    shape = call.shape
    k = dimension(call["dim"], len(shape))
    if any(one.dtype != call.results[0].dtype for one in call.operands):
        return Directions(reason=_MIXED)
    parts: list[Part] = []
    operands: dict[int, Movement] = {}
    start: sympy.Expr = sympy.S.Zero
    for operand in call.operands:
        if operand.shape == (0,) and len(shape) != 1:
            continue  # which cat skips
        stop = start + operand.shape[k]
        starts, stops = [sympy.S.Zero] * len(shape), list(shape)
        starts[k], stops[k] = start, stop
        condition, inside = box(shape, starts, stops)
        parts.append(Part(condition, operand.position, inside))
        operands[operand.position] = _placed(operand, k, start)
        start = stop
    return Directions((Movement(shape, tuple(parts)),), operands)


def _placed(operand: Operand, k: int, start: sympy.Expr) -> Movement:
    index = list(index_symbols(len(operand.shape)))
    index[k] = index[k] + start
    return Movement.of(operand.shape, index)


@rule(aten.stack.default)
def _stack(call: Call) -> Directions:
    shape = call.shape
    k = dimension(call["dim"], len(shape))
    if any(one.dtype != call.results[0].dtype for one in call.operands):
        return Directions(reason=_MIXED)
    symbols = index_symbols(len(shape))
    parts: list[Part] = []
    operands: dict[int, Movement] = {}
    for operand in call.operands:
        alone = len(call.operands) == 1
        condition = sympy.true if alone else sympy.Eq(symbols[k], operand.position)
        parts.append(Part(condition, operand.position, symbols[:k] + symbols[k + 1 :]))
        operands[operand.position] = _selected(operand, k, sympy.Integer(operand.position))
    return Directions((Movement(shape, tuple(parts)),), operands)


def _selected(operand: Operand, k: int, place: sympy.Expr) -> Movement:
    index = list(index_symbols(len(operand.shape)))
    index.insert(k, place)
    return Movement.of(operand.shape, index)


# -- a tensor with a part of it replaced --


def _replaced(
    call: Call,
    condition: sympy.logic.boolalg.Boolean,
    within: Sequence[sympy.Expr],
    placement: Sequence[sympy.Expr],
) -> Directions:
    base, source = call.operands
    if base.dtype != source.dtype:
        return Directions(reason=_MIXED)
    here = index_symbols(len(base.shape))
    parts = [Part(condition, 1, tuple(within))]
    if condition != sympy.true:
        parts.append(Part(sympy.Not(condition), 0, here))
    moves = {1: Movement.of(source.shape, placement)}
    return Directions((Movement(base.shape, tuple(parts)),), moves, _OVERWRITTEN)


@rule(aten.slice_scatter.default)
def _slice_scatter(call: Call) -> Directions:
    base, source = call.operands
    k = dimension(call["dim"], len(base.shape))
    size, step = base.shape[k], size_expr(call["step"])
    start = clipped(call.size("start"), size, sympy.S.Zero)
    if start is None:
        return Directions(reason="where the slice starts depends on the size")
    here, there = index_symbols(len(base.shape)), index_symbols(len(source.shape))
    within, placement = list(here), list(there)
    stop = start + source.shape[k] * step
    if step == 1:
        starts, stops = [sympy.S.Zero] * len(here), list(base.shape)
        starts[k], stops[k] = start, stop
        condition, inside = box(base.shape, starts, stops)
        within = list(inside)
    else:
        condition = sympy.And(
            here[k] >= start, here[k] < stop, sympy.Eq(Mod(here[k] - start + step, step), 0)
        )
        within[k] = FloorDiv(here[k] - start + step, step) - 1
    placement[k] = start + there[k] * step
    return _replaced(call, condition, within, placement)


@rule(aten.select_scatter.default)
def _select_scatter(call: Call) -> Directions:
    base, source = call.operands
    k = dimension(call["dim"], len(base.shape))
    place = clipped(call.size("index"), base.shape[k], sympy.S.Zero)
    if place is None:
        return Directions(reason="which element is written depends on the size")
    here = index_symbols(len(base.shape))
    placement = list(index_symbols(len(source.shape)))
    placement.insert(k, place)
    condition = sympy.true if base.shape[k] == 1 else sympy.Eq(here[k], place)
    return _replaced(call, condition, here[:k] + here[k + 1 :], placement)


@rule(aten.diagonal_scatter.default)
def _diagonal_scatter(call: Call) -> Directions:
    base, source = call.operands
    rank, offset = len(base.shape), call["offset"]
    one, other = (dimension(call[name], rank) for name in ("dim1", "dim2"))
    here = index_symbols(rank)
    rest = [here[k] for k in range(rank) if k not in (one, other)]
    along = here[one] - max(-offset, 0)
    condition = sympy.And(
        sympy.Eq(here[other] - here[one], offset), along >= 0, along < source.shape[-1]
    )
    *placement, last = index_symbols(len(source.shape))
    places = {one: last + max(-offset, 0), other: last + max(offset, 0)}
    for k in sorted(places):
        placement.insert(k, places[k])
    return _replaced(call, condition, [*rest, along], placement)


@rule(aten.copy.default)
def _copy(call: Call) -> Directions:
    base, source = call.operands
    if base.dtype != source.dtype:
        return Directions(reason=_MIXED)
    lead = len(base.shape) - len(source.shape)
    symbols = index_symbols(len(base.shape))[lead:]
    index = [
        sympy.S.Zero if size == 1 and base.shape[lead + k] != 1 else symbol
        for k, (size, symbol) in enumerate(zip(source.shape, symbols, strict=True))
    ]
    movement = Movement(base.shape, (Part(sympy.true, 1, tuple(index)),))
    if base.shape != source.shape:
        return Directions((movement,), reason=ONE_TO_MANY)
    identity = Movement.of(base.shape, index_symbols(len(base.shape)))
    return Directions((movement,), {1: identity}, _OVERWRITTEN)


# -- values around a tensor --


@rule(aten.constant_pad_nd.default)
def _constant_pad(call: Call) -> Directions:
    (given,) = call.operands
    before, after = _paddings(call["pad"], len(given.shape))
    if any(not _known_sign(one) for one in (*before, *after)):
        return Directions(reason="whether it pads or crops depends on a size")
    starts = [sympy.Max(one, 0) for one in before]
    stops = [size - sympy.Max(one, 0) for size, one in zip(call.shape, after, strict=True)]
    condition, _ = box(call.shape, starts, stops)
    symbols = index_symbols(len(call.shape))
    inside = tuple(symbol - one for symbol, one in zip(symbols, before, strict=True))
    parts = [Part(condition, 0, inside)]
    if condition != sympy.true:
        parts.append(Part(sympy.Not(condition), -1, (), call["value"]))
    movement = Movement(call.shape, tuple(parts))
    if any(one.is_negative for one in (*before, *after)):
        return Directions((movement,), reason=_CUT)
    placement = [symbol + one for symbol, one in zip(symbols, before, strict=True)]
    return Directions((movement,), {0: Movement.of(given.shape, placement)})


def _known_sign(size: sympy.Expr) -> bool:
    return bool(size.is_nonnegative or size.is_negative)


def _paddings(pads: Sequence[int], rank: int) -> tuple[list[sympy.Expr], list[sympy.Expr]]:
    before = [sympy.S.Zero] * rank
    after = [sympy.S.Zero] * rank
    for number in range(len(pads) // 2):
        before[rank - 1 - number] = size_expr(pads[2 * number])
        after[rank - 1 - number] = size_expr(pads[2 * number + 1])
    return before, after


def _bordered(call: Call, *, reflect: bool) -> Directions:
    """Borders made of the tensor itself: three cases a padded dimension."""
    (given,) = call.operands
    before, after = _paddings(call["padding"], len(given.shape))
    if any(not one.is_nonnegative for one in (*before, *after)):
        return Directions(reason="whether it pads or crops depends on a size, or it crops")
    symbols = index_symbols(len(call.shape))
    cases: list[list[tuple[sympy.logic.boolalg.Boolean, sympy.Expr]]] = []
    for symbol, size, left, right in zip(symbols, given.shape, before, after, strict=True):
        if left == right == 0:
            cases.append([(sympy.true, symbol)])
            continue
        low = left - symbol if reflect else sympy.S.Zero
        high = 2 * (size - 1) - (symbol - left) if reflect else size - 1
        cases.append(
            [
                (symbol < left, low),
                (sympy.And(symbol >= left, symbol < left + size), symbol - left),
                (symbol >= left + size, high),
            ]
        )
    parts = tuple(
        Part(sympy.And(*(one for one, _ in case)), 0, tuple(index for _, index in case))
        for case in product(*cases)
    )
    return Directions((Movement(call.shape, parts),), reason=ONE_TO_MANY)


@rule(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default)
def _reflection_pad(call: Call) -> Directions:
    return _bordered(call, reflect=True)


@rule(
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
)
def _replication_pad(call: Call) -> Directions:
    return _bordered(call, reflect=False)


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Directions:
    symbols = index_symbols(len(call.shape))
    beside = symbols[-1] - symbols[-2] - call["diagonal"]
    kept = beside <= 0 if call.target is aten.tril.default else beside >= 0
    parts = (Part(kept, 0, symbols), Part(sympy.Not(kept), -1, (), 0))
    return Directions((Movement(call.shape, parts),), reason=_OVERWRITTEN)


@rule(aten.diag_embed.default)
def _diag_embed(call: Call) -> Directions:
    (given,) = call.operands
    rank, offset = len(call.shape), call["offset"]
    one, other = (dimension(call[name], rank) for name in ("dim1", "dim2"))
    here = index_symbols(rank)
    rest = [here[k] for k in range(rank) if k not in (one, other)]
    along = here[one] - max(-offset, 0)
    on = sympy.And(sympy.Eq(here[other] - here[one], offset), along >= 0, along < given.shape[-1])
    parts = (Part(on, 0, (*rest, along)), Part(sympy.Not(on), -1, (), 0))
    *placement, last = index_symbols(len(given.shape))
    places = {one: last + max(-offset, 0), other: last + max(offset, 0)}
    for k in sorted(places):
        placement.insert(k, places[k])
    return Directions((Movement(call.shape, parts),), {0: Movement.of(given.shape, placement)})
