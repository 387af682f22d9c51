"""What a mapping means, element by element in plain Python: every other executor must agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import Max, Min

from magjit.plugin.virtual_tensors.indexing import FloorDiv, Load, Mod, Wrapped, index_symbols
from magjit.plugin.virtual_tensors.mapping import Mapping

__all__ = ["evaluate", "value_of"]


def evaluate(
    mapping: Mapping, tensors: Sequence[torch.Tensor], sizes: dict[str, int] | None = None
) -> torch.Tensor:
    """The virtual tensor made.

    Args:
        mapping: as ``Mapping``.
        tensors: the physical tensors, of one dtype but for index tensors.
        sizes: the value of each size symbol by its name.

    Returns:
        A dense tensor of the mapping's shape and the dtype of the first physical tensor that it
        reads elements of.

    Raises:
        AssertionError: an index belongs to no piece or to several.
        IndexError: an offset is outside of its tensor's storage.
    """
    known = dict(sizes or {})
    memory = [_storage(tensor) for tensor in tensors]
    shape = [int(value_of(size, known, memory)) for size in mapping.shape]
    moved = [piece.source for piece in mapping.parts if piece.fill is None]
    dtype = tensors[moved[0] if moved else 0].dtype
    names = [symbol.name for symbol in index_symbols(len(shape))]
    elements = []
    for index in product(*map(range, shape)):
        here = known | dict(zip(names, index, strict=True))
        held = [one for one in mapping.parts if value_of(one.condition, here, memory)]
        assert len(held) == 1, f"{len(held)} pieces hold at {index} of {mapping}"
        (piece,) = held
        if piece.fill is not None:
            elements.append(piece.fill)
        else:
            elements.append(_element(memory, piece.source, value_of(piece.offset, here, memory)))
    return torch.tensor(elements, dtype=dtype).reshape(shape)


def _storage(tensor: torch.Tensor) -> list[Any]:
    first = tensor.storage_offset()
    count = tensor.untyped_storage().nbytes() // tensor.element_size() - first
    values: list[Any] = tensor.as_strided((count,), (1,), first).tolist()
    return values


def _element(memory: Sequence[list[Any]], source: int, offset: Any) -> Any:
    if not 0 <= offset < len(memory[source]):
        raise IndexError(f"offset {offset} of physical tensor {source}")
    return memory[source][offset]


def value_of(expr: Any, names: dict[str, int], memory: Sequence[list[Any]]) -> Any:
    """An expression or a condition at one index."""
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return names[expr.name]
    if expr in (sympy.true, sympy.false):
        return bool(expr)
    given = [value_of(one, names, memory) for one in expr.args]
    return _MEANING[_kind(expr)](given, memory)


def _kind(expr: Any) -> type:
    for kind in _MEANING:
        if isinstance(expr, kind):
            return kind
    raise TypeError(f"{type(expr).__name__} is not in the grammar: {expr}")


def _multiplied(factors: list[Any], _: Any) -> Any:
    total = 1
    for factor in factors:
        total *= factor
    return total


def _whole(value: Any) -> int:
    assert value == int(value), value
    return int(value)


_MEANING: dict[type, Any] = {
    FloorDiv: lambda given, _: given[0] // given[1],
    Mod: lambda given, _: given[0] % given[1],
    Load: lambda given, memory: _element(memory, given[0], _whole(given[1])),
    Wrapped: lambda given, _: given[0] + given[1] if given[0] < 0 else given[0],
    sympy.Add: lambda given, _: sum(given),
    sympy.Mul: _multiplied,
    sympy.Pow: lambda given, _: given[0] ** given[1],
    sympy.Rational: lambda given, _: given,
    sympy.And: lambda given, _: all(given),
    sympy.Or: lambda given, _: any(given),
    sympy.Not: lambda given, _: not given[0],
    sympy.Eq: lambda given, _: given[0] == given[1],
    sympy.Ne: lambda given, _: given[0] != given[1],
    sympy.Ge: lambda given, _: given[0] >= given[1],
    sympy.Gt: lambda given, _: given[0] > given[1],
    sympy.Le: lambda given, _: given[0] <= given[1],
    sympy.Lt: lambda given, _: given[0] < given[1],
    sympy.Max: lambda given, _: max(given),
    sympy.Min: lambda given, _: min(given),
    Max: lambda given, _: max(given),
    Min: lambda given, _: min(given),
}
