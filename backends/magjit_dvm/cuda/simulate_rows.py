"""What words that reduce mean, of a row in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = [
    "FOLD",
    "Accumulators",
    "fused",
    "identity",
    "norm_gradient",
    "normalized",
    "softmax",
    "standardized",
]

Array = Any
FOLD = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


def identity(name: str) -> float:
    """What a reduction begins with."""
    return {
        "f.sum": 0.0,
        "f.prod": 1.0,
        "f.max": -np.inf,
        "f.min": np.inf,
        "i.max": -(2**31),
        "i.min": 2**31 - 1,
        "i.sum": 0,
    }[name]


def normalized(row: Array, inverse: Array, epsilon: Array) -> tuple[Array, Array, Array]:
    """A row's mean, its inverse deviation, and the row less the one, times the other."""
    mean = row.sum(dtype=np.float32) / np.float32(len(row))
    squares = np.square(row - mean).sum(dtype=np.float32)
    root = np.float32(1 / np.sqrt(np.float64(squares * inverse + epsilon)))
    return mean, root, (row - mean) * root


def softmax(row: Array) -> Array:
    """Exponentials of what is beyond the largest, by their sum."""
    powers = np.exp(row - row.max())
    return powers / powers.sum(dtype=np.float32)


def standardized(tile: Array, mean: Array | None, root: Array) -> Array:
    """(tile − mean) · root, of arrays of float32; tile · root without a mean."""
    return (tile if mean is None else tile - mean) * root


def norm_gradient(row: Array, norm: Array, share: Array, root: Array, centered: bool) -> Array:
    """The gradient of a norm's input, of the one that comes and of the norm itself."""
    product = np.multiply(row, norm).sum(dtype=np.float32) * share
    total = row.sum(dtype=np.float32) * share if centered else np.float32(0)
    return (row - total - norm * product) * root


def fused(a: Array, b: Array, c: Array) -> Array:
    """Registers of a · b + c, rounded once."""
    with np.errstate(all="ignore"):
        product = a.view(np.float32).astype(np.float64) * b.view(np.float32)
        return (product + c.view(np.float32)).astype(np.float32).view(np.uint32)


class Accumulators:
    """What is kept of a row in chunks, by its warps.

    Attributes:
        accumulators: of each, two numbers a warp: what a sum rounds off is beside it; beside the
            largest element, the sum of exponentials of what is beyond it.
    """

    A: Array
    valid: Array
    x: int
    y: int
    w1: int
    more: int
    group: int
    accumulators: dict[int, tuple[Array, Array]]
    set_number: Callable[[int, Array], None]

    def reduce(self, name: str) -> None:
        kind, op = name.split(".")
        if op == "softmax":
            self.reduce_online()
            return
        values = self.A.view(np.float32 if kind == "f" else np.int32)
        with np.errstate(all="ignore"):
            found = [
                FOLD[op].reduce(v[m], initial=identity(name))
                for v, m in zip(values, self.valid, strict=True)
            ]
            total = np.array(found, values.dtype)
            low = np.zeros_like(total)
            if self.more:
                high, rest = self.accumulators[self.x]
                before = high.view(values.dtype)
                joined = FOLD[op](before, total)
                if name == "f.sum":
                    part = joined - before
                    low = rest + ((before - (joined - part)) + (total - part))
                total = joined
        self.accumulators[self.x] = (total.view(np.uint32), low)

    def finish(self, name: str) -> None:
        kind, op = name.split(".")
        if op == "softmax":
            self.finish_online()
            return
        high, low = self.accumulators[self.y]
        values = high.view(np.float32 if kind == "f" else np.int32)
        with np.errstate(all="ignore"):
            if name == "f.sum":
                values = np.where(np.isfinite(values), values + low, values)
            total = FOLD[op].reduce(values, dtype=values.dtype)
        self.set_number(self.x, np.full(self.group, total).view(np.uint32))

    @np.errstate(all="ignore")
    def reduce_online(self) -> None:
        """Each warp's largest, and its sum of exponentials."""
        before = (np.full(self.group, -np.inf, np.float32), np.zeros(self.group, np.float32))
        if self.more:
            before = self.accumulators[self.x]
        values = self.A.view(np.float32)
        most, totals = before[0].copy(), before[1].copy()
        for warp, here in enumerate(self.valid):
            most[warp] = np.append(values[warp][here], before[0][warp]).max()
            away = 0 if np.isneginf(most[warp]) else most[warp]
            powers = np.exp(values[warp][here] - away).sum(dtype=np.float32)
            totals[warp] = before[1][warp] * np.exp(before[0][warp] - away) + powers
        self.accumulators[self.x] = most, totals

    @np.errstate(all="ignore")
    def finish_online(self) -> None:
        most, totals = self.accumulators[self.y]
        largest = most.max()
        total = (totals * np.exp(most - largest)).sum(dtype=np.float32)
        self.set_number(self.x, np.full(self.group, largest).view(np.uint32))
        self.set_number(self.w1, np.full(self.group, total).view(np.uint32))
