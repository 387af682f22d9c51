"""What the rows of a repository's file hold, as text and bytes: both ways.

Configuration ↔ JSON: its numbers
Part          ↔ JSON: its launch; machine code has a column of its own
residuals     ↔ doubles, compressed
"""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Sequence
from typing import Any

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.assemble import Axis, Part

__all__ = ["cut_of", "cut_text", "launch_text", "part_of", "residuals_bytes", "residuals_of"]

_CUT = ("block_m", "block_n", "block_k", "group_m", "warps", "stages", "split_k", "programs")


def cut_text(cut: Configuration) -> str:
    """A configuration as JSON."""
    return json.dumps([getattr(cut, name) for name in _CUT])


def cut_of(text: str) -> Configuration:
    """What ``cut_text`` gave."""
    named: dict[str, Any] = dict(zip(_CUT, map(int, json.loads(text)), strict=True))
    return Configuration(**named)


def residuals_bytes(residuals: Sequence[float]) -> bytes:
    """Doubles, little end first, compressed."""
    return lzma.compress(struct.pack(f"<{len(residuals)}d", *residuals))


def residuals_of(compressed: bytes) -> tuple[float, ...]:
    """What ``residuals_bytes`` gave; ``ValueError`` where it is something else."""
    content = lzma.decompress(compressed)
    if len(content) % 8:
        raise ValueError("residuals are doubles")
    return struct.unpack(f"<{len(content) // 8}d", content)


def launch_text(part: Part) -> str:
    """How a kernel is launched, as JSON."""
    grid = None
    if part.grid is not None:
        grid = [[list(axis.sizes), axis.factor, axis.block] for axis in part.grid]
    return json.dumps(
        {
            "metadata": part.metadata,
            "arguments": part.arguments,
            "types": part.types,
            "grid": grid,
            "resources": [part.warps, part.shared, part.registers, part.stack],
        }
    )


def part_of(name: str, cubin: bytes, launch: str) -> Part:
    """A kernel: machine code, and what ``launch_text`` gave."""
    found = json.loads(launch)
    grid = None
    if found["grid"] is not None:
        first, second = (
            Axis(tuple(sizes), factor, block) for sizes, factor, block in found["grid"]
        )
        grid = first, second
    return Part(
        name,
        cubin,
        found["metadata"],
        tuple(found["arguments"]),
        tuple(found["types"]),
        grid,
        *found["resources"],
    )
