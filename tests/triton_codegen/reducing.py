"""Reductions of Triton's interpreter by halves, as a GPU's are: it combines element by element.

For what is run in the interpreter: most of its time went into maxima.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import ReduceOps

from magjit_triton.codegen import helpers


def by_halves(self: ReduceOps, given: tuple[Any, ...]) -> list[Any]:
    """In place of ``generic_reduce``: the same function, of two halves of the axis at once."""
    tensors, axis = self.unravel(given, self.axis)
    dtypes = [one.dtype for one in tensors]
    held = [np.moveaxis(one.handle.data, axis, 0) for one in tensors]
    kinds = [one.dtype for one in held]
    while (length := len(held[0])) > 1:
        assert length % 2 == 0, "a block whose size is no power of two"
        halves = [one[part] for part in _parts(length) for one in held]
        found = self.combine_fn.fn(*map(self.to_tensor, halves, dtypes * 2))
        made = found if isinstance(found, tuple) else (found,)
        held = [one.handle.data.astype(kind) for one, kind in zip(made, kinds, strict=True)]
    results = []
    for one, dtype in zip(held, dtypes, strict=True):
        result = one[0]
        if self.keep_dims:
            rank = given[0].handle.data.ndim
            result = np.expand_dims(result, axis if self.axis is not None else tuple(range(rank)))
        elif self.axis is None:
            result = result.item()
        results.append(self.to_tensor(result, dtype))
    return results


def _parts(length: int) -> tuple[slice, slice]:
    return slice(length // 2), slice(length // 2, None)


@triton.jit
def _reduced(x, place, floats, wholes):
    rows, columns = tl.arange(0, 8), tl.arange(0, 16)
    at = rows[:, None] * 16 + columns[None, :]
    value, index = tl.load(x + at), tl.load(place + at)
    tl.store(floats + rows, tl.reduce(value, 1, helpers.maximum))
    tl.store(floats + 8 + rows, tl.reduce(value, 1, helpers.minimum))
    tl.store(floats + 16 + rows[:, None], tl.reduce(value, 1, helpers.product, keep_dims=True))
    _, first = tl.reduce((value, index), 1, helpers.first_greatest)
    tl.store(wholes + rows, first)
    _, first = tl.reduce((value, index), 1, helpers.first_smallest)
    tl.store(wholes + 8 + rows, first)


_element_by_element = ReduceOps.generic_reduce


def install() -> None:
    """Have Triton's interpreter reduce so."""
    ReduceOps.generic_reduce = by_halves


def compare() -> str:
    """Where both ways differ, of maxima and of places, with NaN and with equal elements."""
    x = torch.randint(-4, 5, (8, 16), generator=torch.Generator().manual_seed(1)).float()
    x[2, 5] = x[3, 0] = x[3, 15] = torch.nan
    place = torch.arange(16).expand(8, 16)
    found = []
    for way in (by_halves, _element_by_element):
        ReduceOps.generic_reduce = way
        results = torch.empty(3, 8), torch.empty(2, 8, dtype=torch.int64)
        _reduced[(1,)](x.contiguous(), place.contiguous(), *results)
        found.append(results)
    install()
    same = (
        torch.equal(one.nan_to_num(99), two.nan_to_num(99)) for one, two in zip(*found, strict=True)
    )
    right = torch.equal(found[0][1][0], x.argmax(1))
    return "" if all(same) and right else str(found)
