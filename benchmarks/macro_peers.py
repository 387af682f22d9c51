"""Groups and models by MagJIT, in eager mode and by torch.compile, for macro_kernels.py.

Times are of the device: the queue is full before a call begins, so that the host's time does not
count, and the second-level cache holds no operand. Peers take turns; medians over rounds.

Every case is measured beside eager mode first, and its rows are written; then, as long as there is
time, once more with torch.compile beside both.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import macro_groups
import magjit
from agreement import differences
from harness import Benchmark, Row, no_collection
from limits import Budget, attempted, renewed

Call = Callable[[Any], Any]

GROUP_TOLERANCE, MODEL_TOLERANCE = (3e-2, 3e-2), (8e-2, 8e-2)
_FLUSHED = 96 * 2**20
_CHECKED = 5


@contextmanager
def counted() -> Iterator[list[str]]:
    """The kernels that Triton is asked to compile meanwhile in this process, by name."""
    from triton import knobs

    found: list[str] = []

    def heard(*, src: Any, **_: Any) -> None:
        found.append(str(getattr(src, "name", src)))

    before, knobs.compilation.listener = knobs.compilation.listener, heard
    try:
        yield found
    finally:
        knobs.compilation.listener = before


@dataclass
class DeviceTimer:
    """Seconds of the device.

    Attributes:
        ahead_s: how long the device is kept busy while the host prepares a call.
        late: peers whose host took longer than that, with the worst time: the device may have
            waited.
    """

    ahead_s: float
    late: dict[str, float] = field(default_factory=dict)
    _cache: torch.Tensor = field(init=False)
    _cycles: int = field(init=False)

    def __post_init__(self) -> None:
        self._cache = torch.empty(_FLUSHED // 4, dtype=torch.int32, device="cuda")
        torch.cuda._sleep(1000)
        _, seconds = self._between(lambda: torch.cuda._sleep(10_000_000))
        self._cycles = round(self.ahead_s * 10_000_000 / seconds)

    def _between(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of the host and of the device."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        before = time.perf_counter()
        run()
        host = time.perf_counter() - before
        end.record()
        torch.cuda.synchronize()
        return host, float(begin.elapsed_time(end)) * 1e-3

    def medians(self, calls: dict[str, Call], value: Any, rounds: int) -> dict[str, float]:
        """Of each peer, in turns."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                self._cache.zero_()
                torch.cuda._sleep(self._cycles)
                host, device = self._between(partial(calls[name], value))
                times[name].append(device)
                if host > self.ahead_s:
                    self.late[name] = max(host, self.late.get(name, 0.0))
        return {name: statistics.median(found) for name, found in times.items()}


@dataclass
class Case:
    """A group or a model with its inputs.

    Attributes:
        name: of the rows.
        calls: peers that have made their first calls.
        totals, starts: seconds of each peer's calls of all inputs, and of the first two.
        times: of each input and peer.
    """

    name: str
    model: nn.Module
    inputs: Sequence[Any]
    mode: str | None
    tolerance: tuple[float, float]
    rounds: int
    calls: dict[str, Call] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    times: list[dict[str, float]] = field(default_factory=list)

    def begin(self, peer: str) -> None:
        """Make a peer's first calls, and compare its results with eager mode's.

        MagJIT's notes name also what was compiled after the second call.
        """
        self._prepare(peer)
        call = self._made(peer)
        with no_collection(), counted() as compiled:
            begin = time.perf_counter()
            for position, value in enumerate(self.inputs):
                call(value)
                if position == 1:
                    torch.cuda.synchronize()
                    self.starts[peer] = time.perf_counter() - begin
                    compiled.clear()
            torch.cuda.synchronize()
            self.totals[peer] = time.perf_counter() - begin
        if peer == "magjit":
            captures = magjit.stats(call).captures
            self.notes.append(f"captures {captures}, compiled after call 2: {len(compiled)}")
            if compiled:
                self.notes.append(f"magjit: compiled later: {', '.join(sorted(set(compiled)))}")
            if captures == 0:
                self.notes.append("magjit: runs eagerly")
        self.calls[peer] = call
        if peer == "eager":
            return
        for value in self.inputs[:: max(1, len(self.inputs) // _CHECKED)]:
            expected, found = tree_leaves(self.model(value)), tree_leaves(call(value))
            different = differences(expected, found, tolerance=self.tolerance)
            self.notes += [f"{peer}: {text}" for text in different]

    @staticmethod
    def _prepare(peer: str) -> None:
        """Import what a peer needs, which is no part of compiling."""
        if peer == "torch.compile":
            import torch._dynamo
            import torch._inductor.compile_fx

            torch._dynamo.reset()

    def _made(self, peer: str) -> Call:
        if peer == "eager":
            return self.model
        if peer == "magjit":
            options = {"matmul": "macro"}
            return magjit.compile(self.model, backend="triton", dynamic=True, options=options)
        compiled: Call = torch.compile(self.model, dynamic=True, mode=self.mode)
        return compiled

    def measure(self, benchmark: Benchmark, timer: DeviceTimer) -> None:
        """Time all peers in turns, and write the rows."""
        timer.late.clear()
        self.times = [timer.medians(self.calls, value, self.rounds) for value in self.inputs]
        notes = list(self.notes)
        notes += [
            f"{peer}'s host is late by up to {1e3 * host:.1f} ms"
            for peer, host in timer.late.items()
        ]
        rows = ratios(self.name, self.times, "; ".join(notes))
        rows.append(Row.of(self.name, "total_s", "s", self.totals, "all first calls"))
        if self.starts:
            rows.append(Row.of(self.name, "first_calls_s", "s", self.starts, "the first two calls"))
        renewed(benchmark, rows)
        for row in rows:
            peers = {name: round(value, 4) for name, value in row.peers.items()}
            text = f"{row.case}, {row.metric}: {row.magjit:.4g} {peers or ''} {row.note}"
            benchmark.console.print(text, markup=False)


def ratios(case: str, times: Sequence[dict[str, float]], note: str) -> list[Row]:
    """The sum of the times, and each peer's time over MagJIT's as a geometric mean."""
    names = [name for name in times[0] if all(name in one for one in times)]
    sums = {name: 1e3 * sum(one[name] for one in times) for name in names}
    rows = [Row.of(case, "kernel_ms", "ms", sums, note)]
    for name in names:
        if name != "magjit":
            logarithms = [math.log(one[name] / one["magjit"]) for one in times]
            mean = math.exp(statistics.fmean(logarithms))
            note = f"least {math.exp(min(logarithms)):.3f} of {len(times)}"
            rows.append(Row(case, f"speedup over {name}", "×", mean, note=note))
    return rows


def run(
    benchmark: Benchmark,
    makes: Mapping[str, Callable[[], Case]],
    peers: Sequence[str],
    timer: DeviceTimer,
    seconds: float,
) -> list[Case]:
    """Every case beside eager mode, then beside the peers; gives those that were measured."""
    cases: list[Case] = []

    def first(name: str) -> None:
        case = makes[name]()
        for peer in ("eager", "magjit"):
            case.begin(peer)
        case.measure(benchmark, timer)
        cases.append(case)

    def beside(case: Case, peer: str) -> None:
        case.begin(peer)
        case.measure(benchmark, timer)

    stages = 1 + len(peers)
    budget = Budget(seconds, stages * len(makes))
    for name in makes:
        attempted(benchmark, name, budget.share(), partial(first, name))
    for peer in peers:
        for case in cases:
            work = partial(beside, case, peer)
            attempted(benchmark, case.name, budget.share(), work, f"{peer} failed")
        budget.cases -= len(makes) - len(cases)
    return cases


def measure_groups(
    benchmark: Benchmark,
    names: Sequence[str],
    dtype: str,
    peers: Sequence[str],
    count: int,
    seconds: float,
) -> None:
    """Every group on random numbers of rows."""
    rows = macro_groups.rows_of_groups(count)
    kind: torch.dtype = getattr(torch, dtype)

    def made(name: str) -> Case:
        model, inputs = macro_groups.group_of(name, kind, rows)
        mode = "max-autotune-no-cudagraphs"
        return Case(f"{name}, {dtype}", model, inputs, mode, GROUP_TOLERANCE, 7)

    makes = {f"{name}, {dtype}": partial(made, name) for name in names}
    cases = run(benchmark, makes, peers, DeviceTimer(1e-3), seconds)
    if len(cases) == len(macro_groups.GROUPS):
        every = [one for case in cases for one in case.times]
        renewed(benchmark, ratios(f"all groups, {dtype}", every, f"{len(rows)} shapes each"))


def measure_models(
    benchmark: Benchmark, names: Sequence[str], peers: Sequence[str], count: int, seconds: float
) -> None:
    """Every model on random shapes, in float16."""

    def made(name: str) -> Case:
        model = macro_groups.model_of(name).to(macro_groups.DEVICE, torch.float16).eval()
        inputs = macro_groups.inputs_of(name, 11, count)
        return Case(name, model, inputs, None, MODEL_TOLERANCE, 3)

    makes = {name: partial(made, name) for name in names}
    cases = run(benchmark, makes, peers, DeviceTimer(2.5e-2), seconds)
    if len(cases) == len(macro_groups.MODELS):
        every = [one for case in cases for one in case.times]
        renewed(benchmark, ratios("all models", every, f"{count} shapes each"))
