"""Rules of operators whose elements are chosen by index tensors.

The result may be virtual of what is indexed. An operand may never be virtual of the result: an
index may name one element twice, which is known only when the program runs. Indices that are out
of range are an error in eager mode; whoever executes such a mapping has to check them.
"""

from __future__ import annotations

import sympy
import torch

from magjit.plugin.virtual_tensors.calls import Call, Operand
from magjit.plugin.virtual_tensors.indexing import At, Wrapped, index_symbols, numel
from magjit.plugin.virtual_tensors.mapping import Movement, Part
from magjit.plugin.virtual_tensors.rules import Directions, rule, unsupported
from magjit.plugin.virtual_tensors.rules_views import dimension, unflattened

__all__: list[str] = []

aten = torch.ops.aten
_DUPLICATES = "indices may name an element twice or not at all"


@rule(aten.embedding.default)
def _embedding(call: Call) -> Directions:
    _, indices = call.operands
    *place, column = index_symbols(len(call.shape))
    row = At(indices.position, *place)
    return Directions((Movement.of(call.shape, (row, column)),), reason=_DUPLICATES)


@rule(aten.index_select.default)
def _index_select(call: Call) -> Directions:
    given, indices = call.operands
    index = list(index_symbols(len(call.shape)))
    if not given.shape:
        return Directions((Movement.of(call.shape, ()),), reason=_DUPLICATES)
    k = dimension(call["dim"], len(given.shape))
    place = (index[k],) if indices.shape else ()
    index[k] = At(indices.position, *place)
    return Directions((Movement.of(call.shape, index),), reason=_DUPLICATES)


@rule(aten.gather.default)
def _gather(call: Call) -> Directions:
    given, indices = call.operands
    if not given.shape:
        return Directions((Movement.of(call.shape, ()),), reason=_DUPLICATES)
    place = index_symbols(len(call.shape))
    index = list(place)
    if indices.shape:
        index[dimension(call["dim"], len(given.shape))] = At(indices.position, *place)
    else:
        index = [At(indices.position)]
    return Directions((Movement.of(call.shape, index),), reason=_DUPLICATES)


@rule(aten.take.default)
def _take(call: Call) -> Directions:
    given, indices = call.operands
    number = At(indices.position, *index_symbols(len(call.shape)))
    wrapped = Wrapped(number, numel(given.shape))
    return Directions(
        (Movement.of(call.shape, unflattened(wrapped, given.shape)),), reason=_DUPLICATES
    )


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def _index(call: Call) -> Directions:
    given = call.operands[0]
    chosen: list[Operand | None] = list(call["indices"])
    tensors = [one for one in chosen if one is not None]
    if any(one.dtype in (torch.bool, torch.uint8) for one in tensors):
        return Directions(reason="the result's shape depends on a mask")
    chosen += [None] * (len(given.shape) - len(chosen))
    rank = max(len(one.shape) for one in tensors)
    places = [k for k, one in enumerate(chosen) if one is not None]
    together = places == list(range(places[0], places[-1] + 1))
    front = places[0] if together else 0
    symbols = index_symbols(len(call.shape))
    shared = symbols[front : front + rank]
    rest = iter(symbols[:front] + symbols[front + rank :])
    index = []
    for k, one in enumerate(chosen):
        if one is None:
            index.append(next(rest))
            continue
        trailing = shared[rank - len(one.shape) :]
        at = [
            sympy.S.Zero if size == 1 else symbol
            for size, symbol in zip(one.shape, trailing, strict=True)
        ]
        index.append(Wrapped(At(one.position, *at), given.shape[k]))
    return Directions((Movement.of(call.shape, index),), reason=_DUPLICATES)


@rule(aten.index_fill.int_Scalar, aten.masked_fill.Scalar)
def _fill(call: Call) -> Directions:
    if call.target is aten.masked_fill.Scalar:
        given, mask = call.operands
        symbols = index_symbols(len(call.shape))
        if given.shape != call.shape:
            return Directions(reason="the operand is broadcast to the mask")
        trailing = symbols[len(symbols) - len(mask.shape) :]
        at = [
            sympy.S.Zero if size == 1 else symbol
            for size, symbol in zip(mask.shape, trailing, strict=True)
        ]
        covered = sympy.Ne(At(mask.position, *at), 0)
        parts = (
            Part(covered, -1, (), call["value"]),
            Part(sympy.Not(covered), 0, symbols),
        )
        return Directions((Movement(call.shape, parts),), reason="masked elements are overwritten")
    return Directions(reason=_SCATTERED)


_SCATTERED = (
    "where an element of the result comes from is known only by searching the indices; "
    "the written tensor may be updated in place"
)
for _operator in (
    aten.scatter.src,
    aten.scatter.value,
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten.index_copy.default,
    aten.masked_scatter.default,
    aten.put.default,
):
    unsupported[_operator] = _SCATTERED
