"""What the interpreter in plain Python reads and writes: an image, memory of CPU tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["BYTES", "HEADER_FIELDS", "ImageError", "Memory", "memory_of"]

Array = Any
HEADER_FIELDS = (
    *("n_words", "program_bytes", "n_in", "stages", "stage_bytes", "warps", "group", "cols"),
    *("chunks", "tiles", "by_rows", "passes", "epilogue"),
    *("first0", "first1", "first2", "first3", "rest0", "rest1", "rest2", "rest3"),
    *("numbers", "accumulators", "barriers_at", "rows_at", "partials_at", "scratch_at"),
    *("ring_at", "scratch_bytes", "prologue", "sums", "fixed", "elements", "rows", "counter"),
)
"""Of an image, in order: 32 of 32 bits, then 3 of 64."""
BYTES = {"32": 4, "f16": 2, "bf16": 2, "u8": 1, "i64": 8, "i64f": 8, "i64s": 8}
"""Of an element in memory."""


class ImageError(Exception):
    """An image does what none may do."""


@dataclass(slots=True)
class Memory:
    """Bytes from an address on."""

    address: int
    data: Array
    writable: bool


def memory_of(tensor: torch.Tensor, writable: bool) -> Memory:
    """All of a tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return Memory(whole.data_ptr(), whole.numpy(), writable)
