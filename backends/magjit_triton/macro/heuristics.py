"""Wave times from what is known of a GPU: for devices that nothing was measured on.

A tile's step over ``k`` takes as long as its slower part: operations at the share of the peak that
tiles of its shape reach, bytes from the second-level cache, or the latency that stages hide.  The
order of its values matters, not their size; measured times replace it.  A kernel is chosen over the
library only where it would win by ``HEDGE``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.macro.device import Device
from magjit_triton.macro.repository import Entry
from magjit_triton.macro.space import Space
from magjit_triton.macro.waves import Affine, Candidate, Library, Wave

__all__ = [
    "analytic",
    "converted",
    "default_configurations",
    "default_occupancy",
    "guessed",
    "least_seconds",
]

_LAUNCH = 2.5e-6
_LATENCY = 0.8e-6
_STEP_LATENCY = 6.0e-7
_CACHE_SHARE = 1.9  # of the memory's bandwidth
_SHARE_BY_ROWS = {16: 0.2, 32: 0.35, 64: 0.6, 128: 0.75, 256: 0.75}
_LIBRARY_SHARE = 0.8
_KNOTS = tuple(2**one for one in range(15)), (256, 1024, 4096, 16384), (256, 1024, 4096, 16384)
HEDGE = 0.1
"""By how much kernels must win where their times are not measured."""
_SHARE_BY_COLUMNS = {16: 0.4, 32: 0.7, 64: 0.9, 128: 1.0, 256: 1.0}


def default_occupancy(cut: Configuration, work: Work, device: Device) -> int:
    """Blocks of a multiprocessor, from a rough number of registers; at least 1."""
    registers = min(255, Space(work, device).registers(cut))
    return max(1, device.occupancy(cut.shared_memory(work), registers, cut.warps))


def analytic(cut: Configuration, work: Work, device: Device, occupancy: int) -> Candidate:
    """A configuration with estimated times."""
    rows, columns, itemsize = cut.block_m, cut.block_n * work.products, work.dtype.itemsize
    share = _SHARE_BY_ROWS[cut.block_m] * _SHARE_BY_COLUMNS[cut.block_n]
    flops = device.flops(itemsize, exact=work.exact) / device.multiprocessors * share
    compute = 2.0 * rows * columns * cut.block_k / flops
    read = (rows + columns) * cut.block_k * itemsize
    cached = device.bandwidth * _CACHE_SHARE
    waiting = _STEP_LATENCY / max(1, cut.stages - 1)

    def step(blocks: int, processors: int) -> float:
        """Of blocks that share each of so many multiprocessors."""
        moved = blocks * processors * read / cached
        return max(blocks * compute, moved, waiting)

    store = rows * columns * itemsize / cached * device.multiprocessors
    begin = _LAUNCH + _LATENCY
    wave = Wave(
        Affine(begin, step(1, 1)),
        Affine(begin + store, step(1, device.multiprocessors)),
        Affine(begin + occupancy * store, step(occupancy, device.multiprocessors)),
        Affine(
            _LATENCY * (0.3 if cut.programs else 0.6) + occupancy * store,
            step(occupancy, device.multiprocessors),
        ),
    )
    sums = (_LAUNCH, 5.0 / device.bandwidth) if cut.split_k > 1 else (0.0, 0.0)
    return Candidate(cut, occupancy, wave, *sums)


def default_configurations(work: Work, device: Device, count: int = 16) -> list[Configuration]:
    """Schedules for a device without measurements: of each height of a tile the likely best.

    Args:
        count: 12 to 24.
    """
    space = Space.small(work, device)

    def worth(cut: Configuration) -> float:
        """Operations a second of a whole wave."""
        occupancy = default_occupancy(cut, work, device)
        full = analytic(cut, work, device, occupancy).wave.steady.at(4096 / cut.block_k)
        return occupancy * cut.block_m * cut.block_n / full

    rows: dict[tuple[int, bool], list[Configuration]] = {}
    for cut in sorted(space.aligned, key=lambda one: (-worth(one), one)):
        rows.setdefault((cut.block_m, cut.split_k > 1), []).append(cut)
    # Every tile once, heights in turn, before any with other stages or warps.
    tiles: set[tuple[int, ...]] = set()
    first: list[Configuration] = []
    rest: list[Configuration] = []
    while rows:
        for key in sorted(rows):
            cut = rows[key].pop(0)
            if not rows[key]:
                del rows[key]
            tile = (cut.block_m, cut.block_n, cut.split_k)
            (rest if tile in tiles else first).append(cut)
            tiles.add(tile)
    return [*first, *rest][:count]


def _bounds(work: Work, device: Device, m: int, n: int, k: int) -> tuple[float, float]:
    """Seconds that operations take at the peak, and bytes at the bandwidth."""
    columns = n * work.products
    flops = 2.0 * m * columns * k / device.flops(work.dtype.itemsize, exact=work.exact)
    moved = (m * k + columns * k + m * n) * work.dtype.itemsize
    return flops, moved / device.bandwidth


def least_seconds(entry: Entry, device: Device, m: int, n: int, k: int) -> float:
    """Of a product that begins, computes at the peak and moves its bytes at the bandwidth."""
    return _LAUNCH + max(_bounds(_work_of(entry), device, m, n, k))


def _work_of(entry: Entry) -> Work:
    dtype: torch.dtype = getattr(torch, entry.facts["dtype"])
    exact = dtype == torch.float32 and entry.facts.get("precision") == "ieee"
    return Work(dtype, int(entry.facts["products"]), exact)


def guessed(entry: Entry, device: Device) -> Entry:
    """An entry that was built and not measured, with times from the device's description."""
    work = _work_of(entry)
    stored = []
    for one in entry.stored:
        made = analytic(one.configuration, work, device, one.occupancy)
        stored.append(
            replace(
                one,
                wave=made.wave,
                sum_fixed=made.sum_fixed,
                sum_each=made.sum_each,
                residuals=(),
            )
        )
    times = tuple(
        _LAUNCH + max(flops / _LIBRARY_SHARE, moved / _LIBRARY_SHARE)
        for m in _KNOTS[0]
        for n in _KNOTS[1]
        for k in _KNOTS[2]
        for flops, moved in [_bounds(work, device, m, n, k)]
    )
    facts = {**entry.facts, "hedge": HEDGE, "hedge_between": HEDGE, "search": "heuristic"}
    return replace(entry, stored=tuple(stored), library=Library(*_KNOTS, times), facts=facts)


def converted(entry: Entry, measured_on: Device, target: Entry, device: Device) -> Entry:
    """What was measured on a device, as it would be on another that runs the same machine code.

    A wave's time goes with the clock; the library's with what bounds it, operations or bytes.
    Residuals are of one device: the waves stand alone, with their hedge.  Between measured sizes it
    is no less than on the device that they were measured on.

    Args:
        target: the entry for the other device, ``building.retargeted``.
    """
    clock = measured_on.clock / device.clock
    waves = {one.configuration: one for one in entry.stored}
    stored = []
    for one in target.stored:
        wave = waves[one.configuration].wave
        assert wave is not None
        parts = (wave.lone, wave.single, wave.full, wave.steady)
        scaled = Wave(*(Affine(part.fixed * clock, part.per_step * clock) for part in parts))
        stored.append(replace(one, wave=scaled))
    library = entry.library
    if library is not None:
        work, times = _work_of(entry), []
        points = [(m, n, k) for m in library.m for n in library.n for k in library.k]
        for point, seconds in zip(points, library.seconds, strict=True):
            before, after = _bounds(work, measured_on, *point), _bounds(work, device, *point)
            bound = before.index(max(before))
            times.append(seconds * after[bound] / before[bound])
        library = replace(library, seconds=tuple(times))
    facts = {**entry.facts, "search": "heuristic"}
    hedge, between = entry.hedges
    facts["hedge"] = max(HEDGE, float(entry.facts.get("hedge_of_waves", hedge)))
    facts["hedge_between"] = max(facts["hedge"], between)
    return replace(target, stored=tuple(stored), library=library, facts=facts)
