"""Blocks and warps of a kernel, measured over a short list (``mode="max-autotune"``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from magjit_triton.codegen.attention import AttentionKernel
from magjit_triton.codegen.kernel import Kernel
from magjit_triton.codegen.nest import Hint
from magjit_triton.codegen.printer import Blocks
from magjit_triton.codegen.runtime import Launcher
from magjit_triton.measuring import Stopwatch, quietly

__all__ = ["candidates", "tuned"]

logger = logging.getLogger(__name__)

_MOST_WARPS = 16
_LARGEST_TILE = 16384
_MOST_BYTES = 4 << 30


def candidates(kernel: Kernel) -> Iterator[Blocks]:
    """Ways to cut a kernel, its own first; all compute the same."""
    own = kernel.blocks
    found = [own]
    if isinstance(kernel, AttentionKernel):
        found += [replace(own, warps=warps) for warps in (2, 4, 8)]
    elif kernel.nest.axis("r") is not None:
        found += [replace(own, warps=warps) for warps in (own.warps // 2, own.warps * 2)]
        found += [replace(own, p=p) for p in (own.p * 2, own.p * 4, own.p // 2)]
        if own.looped:
            found += [replace(own, inner=inner) for inner in (own.inner // 2, own.inner * 2)]
    elif kernel.nest.axis("q") is not None:
        found += [replace(own, warps=warps) for warps in (own.warps // 2, own.warps * 2)]
        found += [replace(own, p=p) for p in (own.p * 2, own.p // 2)]
        found.append(replace(own, p=max(1, own.p // 2), inner=own.inner * 2))
    elif own.p > 1:
        sizes = (128, 256, 512, 1024, 2048)
        found += [replace(own, p=p, warps=max(1, min(8, p // 128))) for p in sizes]
        found += [replace(own, warps=warps) for warps in (2, 4, 8)]
    for blocks in dict.fromkeys(found):
        fits = blocks.p >= 1 and blocks.inner >= 1 and blocks.p * blocks.inner <= _LARGEST_TILE
        if blocks == own or (fits and 1 <= blocks.warps <= _MOST_WARPS):
            yield blocks


def tuned(kernel: Kernel, hint: Hint, watch: Stopwatch) -> Blocks:
    """The fastest blocks of a kernel on the device of the stopwatch.

    Args:
        kernel: as it would be launched.
        hint: the likely value of a size.
        watch: when its time is over, what is best so far is taken.
    """
    # The graph is being compiled: tensors made here would be fake ones otherwise.
    with quietly():
        return _tuned(kernel, _arguments(kernel, hint, watch), watch)


def _tuned(kernel: Kernel, arguments: list[Any] | None, watch: Stopwatch) -> Blocks:
    best = kernel.blocks
    if arguments is None:
        return best
    launch = Launcher(kernel)
    for blocks in candidates(kernel):
        if blocks == kernel.blocks:
            continue
        if watch.is_over():
            break
        other = Launcher(kernel.with_blocks(blocks))
        try:
            if watch.is_faster(other, launch, *arguments):
                best, launch = blocks, other
        except Exception as error:
            # What needs more registers or shared memory than there are is no candidate.
            logger.debug("%s with %s: %s", kernel.name, blocks, error)
    return best


def _arguments(kernel: Kernel, hint: Hint, watch: Stopwatch) -> list[Any] | None:
    """A stream, memory of the kernel's own, and sizes; None where there is too much of it."""
    sizes = [hint(symbol) for symbol in kernel.symbols]
    reach = [hint(extent) for extent in kernel.extents[-len(kernel.buffers) :]]
    total = sum(n * dtype.itemsize for n, dtype in zip(reach, kernel.dtypes, strict=True))
    if total > _MOST_BYTES:
        return None
    device = torch.device("cuda" if watch.on_gpu else "cpu")
    # Zeros are indices that are in range.
    buffers = [
        torch.zeros(max(count, 1), dtype=dtype, device=device)
        for count, dtype in zip(reach, kernel.dtypes, strict=True)
    ]
    stream = torch.cuda.current_stream().cuda_stream if watch.on_gpu else 0
    return [stream, *buffers, *sizes]
