"""How a product is cut into tiles: the schedule space of the matmul kernels.

    Configuration ::= block_m, block_n, block_k, group_m, warps, stages, split_k, programs,
                      described

It holds nothing of the operands: one configuration with one family (``family``) is one source, for
all sizes.  What a tile costs on a multiprocessor is told from it before anything is compiled, so
that ``space`` is aligned with the hardware (TSCompiler §5.1, Figure 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from magjit_triton.codegen.matmul.described import programs_for

__all__ = [
    "MOST_SHARED_MEMORY",
    "Configuration",
    "Extent",
    "Work",
    "default",
    "described",
    "seconds",
    "space",
]

MOST_SHARED_MEMORY = 227 * 1024
_MOST_ACCUMULATORS = 128
_MOST_WITH_EPILOGUE = 64  # With more, a GELU and a residual spill registers.
_MULTIPROCESSORS = 132
_SHORTEST_SPLIT = 512


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes of a product: ``batch`` matrices of ``m`` by ``k`` times ``k`` by ``n``."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Work:
    """What decides about a good configuration besides the sizes.

    Attributes:
        dtype: of the operands.
        products: how many products one kernel makes of one left operand: 1 or 2.
        exact: whether float32 is multiplied without tensor cores.
        computed: whether an operand is computed when it is read, in registers.
        described: whether descriptors can load all operands (``described``).
        pairs: columns that a tile must have at least, aligned: what follows exchanges them.
        heavy: whether what follows needs a tile in float32.
    """

    dtype: torch.dtype
    products: int = 1
    exact: bool = False
    computed: bool = False
    described: bool = False
    pairs: int = 1
    heavy: bool = False


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """The cut of a kernel.

    Attributes:
        block_m, block_n, block_k: elements of a tile; powers of two, at least 16.
        group_m: rows of tiles that follow one another, so that they find operands in the cache;
            columns of tiles where operands are described.
        warps: of a program.
        stages: how many steps over ``k`` are loaded ahead.
        split_k: into how many parts ``k`` is cut; parts are summed by a second kernel in order.
        programs: how many programs take tiles in turn; 0 where each has one.
        described: whether descriptors load the operands.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    warps: int = 4
    stages: int = 3
    split_k: int = 1
    programs: int = 0
    described: bool = False

    def __post_init__(self) -> None:
        for size in (self.block_m, self.block_n, self.block_k):
            if size < 16 or size & (size - 1):
                raise ValueError(f"{self}: tiles are powers of two of at least 16")
        if self.warps not in (1, 2, 4, 8, 16) or min(self.group_m, self.stages, self.split_k) < 1:
            raise ValueError(f"{self}: no kernel is cut like this")
        if self.programs < 0:
            raise ValueError(f"{self}: a negative number of programs")
        if self.described and (self.split_k > 1 or not self.programs):
            raise ValueError(f"{self}: descriptors are for programs that take whole tiles in turn")

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Configuration:
        """What ``numbers`` gave.

        Raises:
            ValueError: they are no configuration's.
        """
        if len(numbers) != len(fields(cls)):
            raise ValueError(f"{len(numbers)} numbers for a configuration")
        named: dict[str, Any] = dict(zip((one.name for one in fields(cls)), numbers, strict=True))
        return cls(**{**named, "described": bool(named["described"])})

    @property
    def numbers(self) -> list[int]:
        """It as numbers, which JSON has."""
        return [int(getattr(self, one.name)) for one in fields(self)]

    def shared_memory(self, work: Work) -> int:
        """Bytes of the tiles that are loaded ahead."""
        tile = (self.block_m + work.products * self.block_n) * self.block_k
        return self.stages * tile * work.dtype.itemsize

    def accumulators(self, work: Work) -> int:
        """Registers of a thread that hold parts of results."""
        return work.products * self.block_m * self.block_n // (32 * self.warps)

    def piece(self, work: Work) -> int:
        """Columns of a tile for which what follows is computed at a time."""
        whole = not self.described or self.accumulators(work) <= _MOST_WITH_EPILOGUE
        return self.block_n if whole else self.block_n // 2

    def is_legal(self, work: Work) -> bool:
        """Whether the tiles fit onto a multiprocessor, with an even share for each warp."""
        most = _MOST_ACCUMULATORS // 4 if work.exact else _MOST_ACCUMULATORS
        return (
            self.shared_memory(work) <= MOST_SHARED_MEMORY
            and self.accumulators(work) <= most
            and self.block_m * self.block_n >= 16 * 16 * self.warps // 2
            and self.piece(work) >= work.pairs
            and (work.described or not self.described)
            and not (
                work.heavy and work.pairs > 1 and self.accumulators(work) > _MOST_WITH_EPILOGUE
            )
        )

    def tiles(self, extent: Extent) -> int:
        """How many programs a launch has, were each to make one tile."""
        rows, columns = -(-extent.m // self.block_m), -(-extent.n // self.block_n)
        return extent.batch * rows * columns * self.split_k

    def __str__(self) -> str:
        text = f"{self.block_m}x{self.block_n}x{self.block_k} g{self.group_m} w{self.warps}"
        text += f" s{self.stages}"
        if self.split_k > 1:
            text += f" /{self.split_k}"
        text += f" p{self.programs}" if self.programs else ""
        return text + (" described" if self.described else "")


def space(work: Work) -> Iterator[Configuration]:
    """Every legal configuration without splits, from small tiles to large ones."""
    for block_m in (16, 32, 64, 128, 256):
        for block_n in (16, 32, 64, 128, 256):
            for block_k in (16, 32, 64, 128):
                for warps in (2, 4, 8):
                    for stages in (2, 3, 4, 5):
                        one = Configuration(block_m, block_n, block_k, 8, warps, stages)
                        if one.is_legal(work):
                            yield one


def default(extent: Extent, work: Work, multiprocessors: int = _MULTIPROCESSORS) -> Configuration:
    """A configuration without a measurement: the one for which ``seconds`` is least.

    Args:
        extent: the likely sizes.
        work: what is multiplied.
        multiprocessors: of the device.
    """
    candidates = [_completed(m, n, split, extent, work) for m, n, split in _cuts(extent, work)]
    legal = [
        one
        for one in candidates
        if one.is_legal(work) and one.accumulators(work) <= _MOST_WITH_EPILOGUE
    ]
    legal += [one for one in described(extent, multiprocessors) if one.is_legal(work)]
    return min(legal, key=lambda one: (seconds(one, extent, work, multiprocessors), one))


def described(extent: Extent, multiprocessors: int) -> Iterator[Configuration]:
    """The cuts whose operands descriptors load, for products that fill such tiles."""
    if extent.batch > 1 or extent.m < _DESCRIBED_ROWS or extent.k < _SHORTEST_SPLIT:
        return
    for columns, stages in ((256, 3), (128, 4)):
        tiles = -(-extent.m // _DESCRIBED_ROWS) * -(-extent.n // columns)
        group = 2048 // columns
        programs = programs_for(tiles, multiprocessors, group)
        yield Configuration(_DESCRIBED_ROWS, columns, 64, group, 8, stages, 1, programs, True)


def _cuts(extent: Extent, work: Work) -> Iterator[tuple[int, int, int]]:
    """Tiles that are not much larger than the result, and splits that leave a long way each."""
    most = 64 if work.exact else 128
    for block_m in (16, 32, 64, 128):
        for block_n in (16, 32, 64, 128, 256):
            if block_m > min(most, _power(extent.m)) and block_m > 16:
                continue
            if block_n > max(min(2 * most, _power(extent.n)), work.pairs, 16):
                continue
            if work.exact and block_n > max(most, work.pairs):
                continue
            if block_n < work.pairs:
                continue
            for split in (1, 2, 4, 8):
                if split == 1 or extent.k >= split * _SHORTEST_SPLIT:
                    yield block_m, block_n, split


def _completed(block_m: int, block_n: int, split: int, extent: Extent, work: Work) -> Configuration:
    """With the steps, warps and stages that go with a tile."""
    row = 128 if work.dtype.itemsize == 2 else 64
    most = 32 if work.exact else row if block_m <= 32 else row // 2
    block_k = min(most, max(16, _power(-(-extent.k // split))))
    area = block_m * block_n * work.products
    if work.exact:
        warps = min(8, max(2, area // (32 * 32)))
    else:
        warps = 8 if area > 128 * 64 else 4 if area >= 32 * 32 else 2
    for stages in (4, 3, 2):
        one = Configuration(block_m, block_n, block_k, 8, warps, stages, split)
        if one.shared_memory(work) <= MOST_SHARED_MEMORY * 3 // 4:
            return one
    return one


_FLOPS = {2: 4.9e12, 4: 2.4e12}
"""Of a multiprocessor on tensor cores, for elements of so many bytes."""
_DESCRIBED_FLOPS = {256: 5.65e12, 128: 4.8e12}
"""The same where descriptors load operands, for tiles of so many columns."""
_SECONDS_OF_START = 3e-6
_SECONDS_OF_STORES = 1.2e-6  # of a wave of the larger tiles
_DESCRIBED_ROWS = 128
_EXACT_FLOPS = 3.0e11
_CACHE_BANDWIDTH = 4.2e10
_DESCRIBED_CACHE_BANDWIDTH = 7.0e10
_BANDWIDTH = 3.0e12
_SECONDS_OF_STEP = 1.5e-7
_SECONDS_OF_SPLIT = 3e-6
_SHARE_BY_ROWS = {16: 0.15, 32: 0.25, 64: 0.55, 128: 0.7, 256: 0.7}
_SHARE_BY_COLUMNS = {16: 0.4, 32: 0.7, 64: 0.9, 128: 1.0, 256: 1.0}


def seconds(cut: Configuration, extent: Extent, work: Work, multiprocessors: int) -> float:
    """A rough time: waves of tiles, of which each computes, reads or waits (TSCompiler §6).

    Its constants are an H100's; only the order of its values matters.
    """
    length = -(-extent.k // cut.split_k)
    flops = _FLOPS[work.dtype.itemsize]
    flops *= _SHARE_BY_ROWS[cut.block_m] * _SHARE_BY_COLUMNS[cut.block_n]
    cache = _CACHE_BANDWIDTH
    if cut.described:
        flops, cache = _DESCRIBED_FLOPS[cut.block_n], _DESCRIBED_CACHE_BANDWIDTH
    if work.exact:
        flops = _EXACT_FLOPS
    operations = 2.0 * cut.block_m * cut.block_n * work.products * length
    read = (cut.block_m + cut.block_n * work.products) * length * work.dtype.itemsize
    steps = -(-length // cut.block_k)
    waiting = steps * _SECONDS_OF_STEP
    tiles = cut.tiles(extent)
    waves = -(-tiles // multiprocessors)
    # Tiles that share a multiprocessor wait at the same time.
    shared = max(1, min(4, MOST_SHARED_MEMORY // max(1, cut.shared_memory(work))))
    busy = waves * max(operations / flops, read / cache)
    result = max(busy, -(-waves // shared) * waiting)
    if cut.described:
        result += _SECONDS_OF_START + waves * cut.block_n / 256 * _SECONDS_OF_STORES
    if cut.split_k > 1:
        sums = extent.batch * extent.m * extent.n * work.products * 4.0
        result += _SECONDS_OF_SPLIT + 2 * cut.split_k * sums / _BANDWIDTH
    return result


def _power(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
