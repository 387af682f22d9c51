"""Wave times from what is known of a GPU: for devices that nothing was measured on.

A tile's step over ``k`` takes as long as its slower part: operations at the share of the peak that
tiles of its shape reach, bytes from the second-level cache, or the latency that stages hide.  The
order of its values matters, not their size; measured times replace it.
"""

from __future__ import annotations

from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.macro.device import Device
from magjit_triton.macro.space import Space
from magjit_triton.macro.waves import Affine, Candidate, Wave

__all__ = ["analytic", "default_configurations", "default_occupancy"]

_LAUNCH = 2.5e-6
_LATENCY = 0.8e-6
_STEP_LATENCY = 6.0e-7
_CACHE_SHARE = 1.9  # of the memory's bandwidth
_SHARE_BY_ROWS = {16: 0.2, 32: 0.35, 64: 0.6, 128: 0.75, 256: 0.75}
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
