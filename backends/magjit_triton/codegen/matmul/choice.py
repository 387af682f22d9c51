"""Whether a product is ours or the library's: one decision, which measurements can replace.

    Facts → ours_pays(facts, device)

The library multiplies faster than Triton does; ours moves fewer bytes and launches fewer kernels.
The estimate is a roofline of both.  It is conservative: what ours saves must be worth a pass over
the result at least, and ours must win by a margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magjit_triton.codegen.matmul.configuration import Extent, Work, default, seconds

__all__ = ["Device", "Facts", "current_device", "estimate", "ours_pays"]


_MARGIN = 0.9
_LAUNCH = 1.5e-6
# Seen on an H100: Triton's 16-bit products without TMA and specialised warps, of the library's.
_SHARE_OF_FLOPS = 0.55
_SHARE_OF_BANDWIDTH = 0.85
_REREAD = 0.4


@dataclass(frozen=True, slots=True)
class Device:
    """What the estimate knows of a GPU; numbers a second are those that the library reaches.

    Attributes:
        bandwidth: bytes a second of its memory.
        halves, tf32, floats: multiplications and additions a second of the 16-bit types, of
            float32 on tensor cores, and without them.
    """

    multiprocessors: int = 132
    bandwidth: float = 3.0e12
    halves: float = 6.5e14
    tf32: float = 3.3e14
    floats: float = 4.5e13

    def flops(self, work: Work) -> float:
        """A second, for these operands."""
        if work.dtype.itemsize == 2:
            return self.halves
        return self.floats if work.exact else self.tf32


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about one candidate kernel.

    Attributes:
        extent: likely sizes.
        work: what is multiplied.
        saved: bytes that the library's way writes and reads and ours does not: results that are
            never stored, operands that are never made.
        again: bytes that ours reads beyond one pass over what its operands are computed from.
        launches: kernels that are no longer launched.
        scattered: whether an operand's neighbouring elements are apart in memory.
    """

    extent: Extent
    work: Work
    saved: float
    again: float = 0.0
    launches: int = 0
    scattered: bool = False

    @property
    def result(self) -> float:
        """Bytes of one pass over the products."""
        one = self.extent.batch * self.extent.m * self.extent.n * self.work.dtype.itemsize
        return float(one * self.work.products)


def current_device() -> Device:
    """The first GPU, scaled from an H100's figures; an H100 where there is none."""
    if not torch.cuda.is_available():
        return Device()
    found = torch.cuda.get_device_properties(0)
    plain = Device()
    if found.major >= 9:
        return Device(multiprocessors=found.multi_processor_count)
    share = found.multi_processor_count / plain.multiprocessors * 0.4
    return Device(
        found.multi_processor_count,
        plain.bandwidth * 0.5,
        plain.halves * share,
        plain.tf32 * share,
        plain.floats * share,
    )


def estimate(facts: Facts, device: Device) -> tuple[float, float]:
    """Seconds of our kernel, and of the library's with the kernels that ours makes needless."""
    extent, work = facts.extent, facts.work
    count = extent.batch * work.products
    operations = 2.0 * count * extent.m * extent.n * extent.k
    left = extent.batch * extent.m * extent.k
    moved = float(left + count * (extent.k + extent.m) * extent.n) * work.dtype.itemsize
    compute = operations / device.flops(work)
    library = max(compute, (moved + (work.products - 1) * left) / device.bandwidth)
    library += facts.saved / device.bandwidth + facts.launches * _LAUNCH
    ours = max(
        compute / _SHARE_OF_FLOPS,
        moved / (device.bandwidth * _SHARE_OF_BANDWIDTH),
        seconds(
            default(extent, work, device.multiprocessors), extent, work, device.multiprocessors
        ),
    )
    ours += facts.again * _REREAD / device.bandwidth
    return ours, library


def ours_pays(facts: Facts, device: Device, times: tuple[float, float] | None = None) -> bool:
    """Whether a product should be computed by our kernel.

    Args:
        facts: about the kernel.
        device: where it runs.
        times: measured ones, as ``estimate`` gives them.
    """
    if times is not None:
        ours, library = times
        return ours < library
    if facts.saved < facts.result or facts.scattered or facts.work.exact:
        return False
    ours, library = estimate(facts, device)
    return ours < library * _MARGIN


def recomputing_pays(passes: int, read: float, made: float, device: Device) -> bool:
    """Whether an operand is better computed whenever it is read than once.

    Args:
        passes: how often it is read.
        read: bytes of what it is computed from.
        made: its own bytes.
    """
    once = read + made + passes * made * _REREAD + _LAUNCH * device.bandwidth
    return read + (passes - 1) * read * _REREAD < once
