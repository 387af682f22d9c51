"""What words that reduce mean, of a row in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["FOLD", "fused", "identity", "norm_gradient", "normalized", "softmax", "standardized"]

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
