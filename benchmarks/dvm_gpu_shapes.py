"""Calls on a GPU at shapes of which none comes twice: host time and its parts, memory left taken.

The host waits for the GPU before every thousandth call, so that no launch finds the queue full:
the GPU takes less time for a call than the host.  The call after a wait has a row of its own.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

import magjit
from dvm_peers import add_encoding, dvm, encodings, percentile, resident
from harness import Benchmark, Row

_NEW_SHAPES, _QUICK = 10_000, 500
_WAITS = 1000
_PARTS = ("arguments", "encoding", "results", "addresses", "driver")
"""Of a fused operator's call, as `cuda_spans` of the VM has them; the rest is MagJIT's dispatch."""


def four_operators(x: Tensor) -> Tensor:
    return -((x * 1.01 + 0.5).relu())


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def measure_new_shapes(benchmark: Benchmark, case: str, function: Any, count: int) -> None:
    """All rows of a function."""
    compiled = magjit.compile(function, backend="dvm", dynamic=True)
    whole = torch.randn(1 << 22, device="cuda")
    shapes = [(2 + k // 100, 64 + 7 * (k % 100)) for k in range(count + 200)]
    given = [whole[: rows * cols].view(rows, cols) for rows, cols in shapes]

    def timed(x: Tensor) -> float:
        start = time.perf_counter()
        compiled(x)
        return (time.perf_counter() - start) * 1e6

    def run_all() -> list[float]:
        times = []
        for number, x in enumerate(given[200:]):
            if number % _WAITS == 0:
                torch.cuda.synchronize()
            times.append(timed(x))
        return times

    for x in given[:200]:
        timed(x)
    before = resident(), torch.cuda.memory_allocated()
    times = run_all()
    after = resident(), torch.cuda.memory_allocated()
    dvm("vm").cuda_spans()
    taken = encodings(run_all, 1)
    spans = dvm("vm").cuda_spans()
    for share, name in ((0.5, "median"), (0.99, "99th percentile")):
        benchmark.add(Row(case, f"host time, {name}", "us", percentile(times, share)))
    first = percentile(times[::_WAITS], 0.5)
    benchmark.add(Row(case, "host time, median after a wait", "us", first))
    for part, found in zip(_PARTS, zip(*spans, strict=True), strict=True):
        middle = percentile([one / 1e3 for one in found], 0.5)
        benchmark.add(Row(case, f"host time of {part}, median", "us", middle))
    add_encoding(benchmark, case, taken)
    benchmark.add(Row(case, "growth of resident memory", "MB", (after[0] - before[0]) / 1e6))
    benchmark.add(Row(case, "growth of GPU memory", "MB", (after[1] - before[1]) / 1e6))
    benchmark.add(Row(case, "captures", "count", magjit.stats(compiled).captures))


def part_new_shapes(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """A chain and a reduction."""
    count = _QUICK if options.quick else _NEW_SHAPES
    for function in (four_operators, softmax):
        case = f"gpu: {count} new shapes, {function.__name__}"
        measure_new_shapes(benchmark, case, function, count)
