"""Times on a device: of configurations on shapes, of their waves, of the library.

Every launch meets a second-level cache that holds none of its operands, and a full queue, so that
the host's time does not count.  Operands are places in memory that all shapes share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from magjit_triton.macro.device import Device
from magjit_triton.macro.errors import NoDeviceError, UnknownFamilyError
from magjit_triton.macro.families import FAMILIES, MacroFamily, Sizes
from magjit_triton.macro.library import library_way
from magjit_triton.macro.loading import Loaded, sizes_by_role
from magjit_triton.macro.repository import Stored
from magjit_triton.macro.waves import Affine, Wave

__all__ = [
    "Bench",
    "EventTimer",
    "Shape",
    "Timer",
    "rectangle",
    "wave_of",
]

Shape = tuple[int, int, int, int]
"""Batch, m, n, k."""
Run = Callable[[], None]


class Timer(Protocol):
    """What measures runs."""

    def __call__(self, run: Run, least: float = math.inf) -> float:
        """Seconds; of a run that is far slower than ``least``, roughly."""

    def race(self, runs: Sequence[Run], sure: Collection[int] = ()) -> list[float]:
        """Seconds of each: the fastest, and those at ``sure``, in turns, the others roughly."""


_FLUSHED = 96 * 2**20
_CYCLES_AHEAD = 120_000
_ROUNDS, _FEW_ROUNDS = 7, 3
_LONG = 5e-4
_FAR, _NEAR = 2.0, 1.3
_SHORT_K, _LONG_K = 1024, 4096
_WAVES = 3


class EventTimer:
    """Medians between CUDA events, with a cache that was just written over.

    Raises:
        NoDeviceError: there is no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NoDeviceError(
                "Times are measured on a CUDA device, and there is none",
                remedy="replay a recorded table, or build without measuring: --no-measure",
            )
        self._cache = torch.empty(_FLUSHED // 4, dtype=torch.int32, device="cuda")

    def rounds(self, runs: Sequence[Run], count: int) -> list[float]:
        """Median seconds of each run, in turns."""
        pairs = [
            [[torch.cuda.Event(enable_timing=True) for _ in "be"] for _ in runs]
            for _ in range(count)
        ]
        torch.cuda._sleep(_CYCLES_AHEAD * count * len(runs))  # While the host fills the queue.
        for turn, row in enumerate(pairs):
            places = range(len(runs))
            for place in (*places[turn % len(runs) :], *places[: turn % len(runs)]):
                begin, end = row[place]
                self._cache.zero_()
                begin.record()
                runs[place]()
                end.record()
        torch.cuda.synchronize()
        times = [[float(b.elapsed_time(e)) * 1e-3 for b, e in row] for row in pairs]
        return [statistics.median(column) for column in zip(*times, strict=True)]

    def __call__(self, run: Run, least: float = math.inf) -> float:
        """Seconds of a run; of one that is far slower than ``least``, of its second time alone."""
        run()
        (first,) = self.rounds([run], 1)
        if first > _FAR * least:
            return first
        (found,) = self.rounds([run], _FEW_ROUNDS if first > _LONG else _ROUNDS)
        return found

    def race(self, runs: Sequence[Run], sure: Collection[int] = ()) -> list[float]:
        """Seconds of each: the near and the sure in turns, the others of one time."""
        for run in runs:
            run()
        found = self.rounds(runs, 1)
        least = min(found)
        near = [place for place, one in enumerate(found) if one <= _NEAR * least or place in sure]
        count = _FEW_ROUNDS + 2 if least > _LONG else _ROUNDS
        again = self.rounds([runs[place] for place in near], count)
        for place, seconds in zip(near, again, strict=True):
            found[place] = seconds
        return found


def rectangle(tiles: int, ratio: float) -> tuple[int, int]:
    """Rows and columns of at most so many tiles, nearly all of them, about ``ratio`` high.

    Args:
        ratio: wanted rows for each column.
    """
    best = (0, 0.0, 1, 1)
    for rows in range(1, tiles + 1):
        columns = tiles // rows
        used = rows * columns
        shape = -abs(math.log(rows / columns / ratio))
        if used * 50 >= tiles * 49:  # nearly all
            best = max(best, (1, shape, rows, columns))
    return (best[2], best[3]) if best[0] else (1, tiles)


@dataclass
class Bench:
    """A family of the table on the current device.

    Attributes:
        family: with its template.
        timer: of runs.
        largest: of the shapes to come; memory is made for it.
        device: the current one.
        memory: of the operands and the result.
        where: it lies.
    """

    family: MacroFamily
    timer: Timer
    largest: Shape
    device: Device = field(default_factory=Device.current)
    memory: list[torch.Tensor] = field(default_factory=list)
    where: str = "cuda"

    def __post_init__(self) -> None:
        if self.family.template is None:
            raise UnknownFamilyError(
                f"{self.family.name} is a model's: only families of the table are measured alone",
                remedy=", ".join(FAMILIES),
            )
        self.reserve(self.largest)

    def _count(self, roles: Sequence[str], sizes: Sizes) -> int:
        return math.prod(sizes[role] for role in roles)

    def reserve(self, shape: Shape) -> list[torch.Tensor]:
        """Memory for each operand and the result, of at least so many elements."""
        assert self.family.template is not None
        sizes, dtype = sizes_by_role(*shape), self.family.family.dtype
        for number, roles in enumerate([*self.family.template.shapes, self.result]):
            count = self._count(roles, sizes)
            if number == len(self.memory):
                self.memory.append(torch.empty(0))
            if self.memory[number].numel() < count:
                self.memory[number] = torch.randn(count, device=self.where, dtype=dtype) * 0.1
        return list(self.memory)

    @property
    def result(self) -> tuple[str, ...]:
        """The roles of the result's sizes."""
        assert self.family.template is not None
        batched = len(self.family.template.shapes[0]) == 3
        return ("batch", "m", "n") if batched else ("m", "n")

    @cached_property
    def _workspace(self) -> torch.Tensor:
        batch, m, n, _ = self.largest
        return torch.empty(16 * batch * m * n, device=self.where)

    # Runs.

    def arguments(self, shape: Shape) -> list[torch.Tensor]:
        """The operands of a shape."""
        assert self.family.template is not None
        sizes = sizes_by_role(*shape)
        return [
            memory[: self._count(roles, sizes)].view([sizes[role] for role in roles])
            for memory, roles in zip(self.reserve(shape), self.family.template.shapes, strict=False)
        ]

    def library(self, shape: Shape) -> Run:
        """The library's way."""
        way, arguments = library_way(self.family, self.where, shape[2]), self.arguments(shape)

        def run() -> None:
            way(*arguments)

        return run

    def ours(self, stored: Stored, shape: Shape, *, part: int | None = None) -> Run:
        """A configuration on a shape: all its kernels, or one."""
        loaded = self._load(stored)
        sizes = sizes_by_role(*shape)
        tiles = stored.configuration
        count = shape[0] * -(-shape[1] // tiles.block_m) * -(-shape[2] // tiles.block_n)
        count *= tiles.split_k
        if tiles.programs:
            count = min(count, self.device.multiprocessors * stored.occupancy)
        held = self.reserve(shape)
        pointers = [held[number].data_ptr() for number in self.family.order]
        needed = loaded.workspace(sizes)
        if needed > self._workspace.numel():
            self.__dict__["_workspace"] = torch.empty(needed, device=self.where)
        held.append(self._workspace)
        workspace = held[-1].data_ptr() if needed else 0
        cuda = self.where == "cuda"
        stream = torch.cuda.current_stream().cuda_stream if cuda else 0

        def run(held: list[torch.Tensor] = held) -> None:
            if part is None:
                loaded(stream, count, pointers, sizes, workspace)
            else:
                loaded.start(part, stream, count, pointers, sizes, workspace)

        return run

    def _load(self, stored: Stored) -> Loaded:
        known: dict[int, Loaded] = self.__dict__.setdefault("_known", {})
        return known.setdefault(id(stored.assembled), Loaded(stored.assembled))

    # Checks.

    def error(self, stored: Stored, shape: Shape) -> float:
        """The largest difference from eager mode's result, over the largest value."""
        template = self.family.template
        assert template is not None
        expected = template.function(*self.arguments(shape)).float()
        self.memory[-1].fill_(math.nan)
        self.ours(stored, shape)()
        found = self.memory[-1][: expected.numel()].view(expected.shape).float()
        worst = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
        return math.inf if math.isnan(worst) else worst

    # Times.

    def seconds(self, stored: Stored, shape: Shape, least: float = math.inf) -> float:
        """Of a configuration on a shape; roughly, where it is far slower than ``least``."""
        return self.timer(self.ours(stored, shape), least)

    def race(
        self, stored: Sequence[Stored], shape: Shape, sure: Collection[int] = ()
    ) -> list[float]:
        """Seconds of configurations on a shape, and of the library at the end, in turns.

        Args:
            sure: places of those that are measured as well as the fastest are; the library is.
        """
        runs = [*(self.ours(one, shape) for one in stored), self.library(shape)]
        return self.timer.race(runs, {*sure, len(stored)})

    def waved(self, stored: Stored) -> Stored:
        """A configuration with the times of its waves."""
        fixed = each = 0.0
        cut = stored.configuration
        if cut.split_k > 1:
            points = []
            for m, n in ((64, 256), (1024, 2048)):
                run = self.ours(stored, (1, m, n, 1024), part=1)
                points.append((m * n * self.family.work.products * cut.split_k, self.timer(run)))
            line = Affine.through(*points)
            fixed, each = line.fixed, line.per_step

        def product(shape: Shape) -> float:
            return self.timer(self.ours(stored, shape, part=0))

        wave = wave_of(stored, self.device, self.family.fixed, product)
        return replace(stored, wave=wave, sum_fixed=fixed, sum_each=each)


def wave_of(
    stored: Stored, device: Device, fixed: Sizes, seconds: Callable[[Shape], float]
) -> Wave:
    """The times of a configuration's waves, through two lengths.

    Args:
        fixed: sizes that are numbers.
        seconds: measures the product on a shape.
    """
    cut = stored.configuration
    lengths = (_SHORT_K, _LONG_K)
    times: dict[str, list[tuple[float, float]]] = {
        name: [] for name in ("lone", "single", "full", "steady")
    }
    capacity = device.multiprocessors * stored.occupancy
    wanted = {"lone": cut.split_k, "single": device.multiprocessors, "full": capacity}
    for length in lengths:
        k = fixed.get("k", length * cut.split_k)
        blocks = -(-k // cut.block_k)
        steps = -(-blocks // cut.split_k)
        found = {}
        for name, tiles in {**wanted, "many": _WAVES * capacity}.items():
            found[name] = seconds(_shape_of(cut, tiles, fixed, k))
        found["steady"] = max(0.0, (found["many"] - found["full"]) / (_WAVES - 1))
        for name in times:
            times[name].append((float(steps), found[name]))
    if "k" in fixed:  # One length alone: all of it is the wave's.
        return Wave(*(Affine(points[0][1], 0.0) for points in times.values()))
    return Wave(*(Affine.through(*points) for points in times.values()))


def _shape_of(cut: Any, tiles: int, fixed: Sizes, k: int) -> Shape:
    each = max(1, tiles // cut.split_k)
    if "n" in fixed:
        columns = -(-fixed["n"] // cut.block_n)
        return 1, max(1, round(each / columns)) * cut.block_m, fixed["n"], k
    rows, columns = rectangle(each, cut.block_n / cut.block_m)
    return 1, rows * cut.block_m, columns * cut.block_n, k
