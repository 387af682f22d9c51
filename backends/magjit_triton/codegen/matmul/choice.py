"""Whether a product is ours or the library's: one decision, which measurements can replace.

    Facts → ours_pays(facts, device)

Ours moves fewer bytes and launches fewer kernels; the library multiplies faster than Triton does,
unless descriptors load the operands.  The estimate is a roofline of both.  It is conservative: what
ours saves must be worth a pass over the result at least, and ours must win by a margin.

A product with nothing around it is ours where descriptors load it, it takes no longer, and its
operands are so large that the library reads them from memory again and again (``spared``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from magjit_triton.codegen.matmul.configuration import Extent, Work, default, seconds

__all__ = ["Device", "Facts", "current_device", "estimate", "ours_pays"]


_MARGIN = 0.9
_LAUNCH = 1.5e-6
# Seen on an H100: Triton's 16-bit products without TMA and specialised warps, of the library's.
_SHARE_OF_FLOPS = 0.55
_SHARE_OF_BANDWIDTH = 0.85
# Where descriptors load the operands, both are known better: how long the library needs besides
# its multiplications, how long what follows takes for a wave of our larger tiles.
_LIBRARY_STARTS = 4e-6
_LIBRARY_IS_FASTER = 1.08
_FOLLOWS = 4e-6
_MARGIN_DESCRIBED = 0.97
# Bytes of the L2 cache that a multiprocessor finds, and what a wave of tiles reads of operands:
# rows and columns of an all but square part of the result.
_CACHE = 25 << 20
_SPARED = 0.3
_NO_SLOWER = 1.03
_REREAD = 0.4


@dataclass(frozen=True, slots=True)
class Device:
    """What the estimate knows of a GPU; numbers a second are those that the library reaches.

    Attributes:
        bandwidth: bytes a second of its memory.
        halves, tf32, floats: multiplications and additions a second of the 16-bit types, of
            float32 on tensor cores, and without them.
        describes: whether it loads tiles by descriptors (from sm_90 on).
    """

    multiprocessors: int = 132
    bandwidth: float = 3.0e12
    halves: float = 6.5e14
    tf32: float = 3.3e14
    floats: float = 4.5e13
    describes: bool = True

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
        follows: whether something is computed of the product.
    """

    extent: Extent
    work: Work
    saved: float
    again: float = 0.0
    launches: int = 0
    scattered: bool = False
    follows: bool = False

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
        describes=False,
    )


def estimate(facts: Facts, device: Device) -> tuple[float, float]:
    """Seconds of our kernel, and of the library's with the kernels that ours makes needless."""
    extent, work = facts.extent, facts.work
    count = extent.batch * work.products
    operations = 2.0 * count * extent.m * extent.n * extent.k
    left = extent.batch * extent.m * extent.k
    moved = float(left + count * (extent.k + extent.m) * extent.n) * work.dtype.itemsize
    compute = operations / device.flops(work)
    bandwidth = device.bandwidth
    cut = default(extent, work, device.multiprocessors)
    least = compute / _SHARE_OF_FLOPS
    if cut.described:
        compute /= _LIBRARY_IS_FASTER
        bandwidth, least = bandwidth * _SHARE_OF_BANDWIDTH, compute
    library = max(compute, (moved + (work.products - 1) * left) / device.bandwidth)
    library += facts.saved / bandwidth + facts.launches * _LAUNCH
    ours = max(
        least,
        moved / (device.bandwidth * _SHARE_OF_BANDWIDTH),
        seconds(cut, extent, work, device.multiprocessors),
    )
    if cut.described:
        library += _LIBRARY_STARTS
        waves = -(-cut.tiles(extent) // device.multiprocessors)
        ours += waves * cut.block_n / 256 * work.products * _FOLLOWS * facts.follows
    ours += facts.again * _REREAD / device.bandwidth
    return ours, library


def spared(facts: Facts, device: Device) -> float:
    """Bytes that the order of tiles of a described kernel need not read again, as a guess.

    Each wave of tiles reads rows and columns of the operands.  Where those, and each operand, are
    more than a cache holds, the library reads them anew; ours finds a part (``described``).
    """
    extent, work = facts.extent, facts.work
    cut = default(extent, work, device.multiprocessors)
    side = math.sqrt(device.multiprocessors * cut.block_m * cut.block_n)
    length = extent.k * work.dtype.itemsize
    if not cut.described or min(extent.m, extent.n, 2 * side) * length <= _CACHE:
        return 0.0
    waves = extent.m * extent.n / side**2
    return _SPARED * waves * 2 * side * length


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
    if facts.scattered or facts.work.exact:
        return False
    if facts.saved < facts.result:
        if spared(facts, device) < facts.result:
            return False
        ours, library = estimate(facts, device)
        return ours <= library * _NO_SLOWER
    ours, library = estimate(facts, device)
    described = default(facts.extent, facts.work, device.multiprocessors).described
    return ours < library * (_MARGIN_DESCRIBED if described else _MARGIN)


def recomputing_pays(passes: int, read: float, made: float, device: Device) -> bool:
    """Whether an operand is better computed whenever it is read than once.

    Args:
        passes: how often it is read.
        read: bytes of what it is computed from.
        made: its own bytes.
    """
    once = read + made + passes * made * _REREAD + _LAUNCH * device.bandwidth
    return read + (passes - 1) * read * _REREAD < once
