"""Elements of memory as the 32 bits that a register has of them, and back, over NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["elements_of", "registers_of"]

Array = Any


def registers_of(raw: Array, what: str) -> Array:
    """Bytes of elements as the 32 bits that a register gets."""
    raw = np.ascontiguousarray(raw)
    if what == "32":
        return raw.view(np.uint32)[..., 0]
    if what == "f16":
        return raw.view(np.float16)[..., 0].astype(np.float32).view(np.uint32)
    if what == "bf16":
        return raw.view(np.uint16)[..., 0].astype(np.uint32) << 16
    if what == "u8":
        return raw[..., 0].astype(np.uint32)
    long = raw.view(np.int64)[..., 0]
    if what == "i64":
        return long.astype(np.uint32)
    if what == "i64f":
        return long.astype(np.float32).view(np.uint32)
    return np.clip(long, -(2**31), 2**31 - 1).astype(np.int32).view(np.uint32)


def elements_of(values: Array, what: str) -> Array:
    """Registers as the bytes of elements."""
    if what == "32":
        made = values
    elif what == "f16":
        with np.errstate(over="ignore"):
            made = values.view(np.float32).astype(np.float16)
    elif what == "bf16":
        line = torch.from_numpy(values.view(np.float32).copy()).to(torch.bfloat16)
        made = line.view(torch.int16).numpy()
    elif what == "u8":
        made = values.astype(np.uint8)
    elif what == "i64":
        made = values.view(np.int32).astype(np.int64)
    else:
        wide = np.nan_to_num(values.view(np.float32).astype(np.float64), nan=0.0)
        made = np.clip(wide, -(2.0**63), 2.0**63 - 1024).astype(np.int64)
    return np.ascontiguousarray(made).view(np.uint8).reshape(*values.shape, -1)
