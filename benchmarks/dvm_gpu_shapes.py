"""Calls on a GPU at shapes of which none comes twice: host time and its parts, memory left taken.

A call ends when the launch is under way; that its result is freed again comes after.  Beside the
call of what ``magjit.compile`` gave stand that of its fused operator alone (arguments, encoding,
results and launch, without guards), eager mode's, and one operator of eager mode, which says what
the machine's host is like.  They take turns, by a thousand shapes.

The host waits for the GPU before every thousandth call, so that no launch finds the queue full: the
GPU takes less time for a call than the host.  The call after a wait, which is the first since the
others' turns, has a row of its own.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import magjit
from dvm_peers import add_encoding, dvm, encodings, host_time, percentile, resident
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
    others = schedules()
    for x in given[:200]:
        compiled(x)
    (schedule,) = schedules() - others
    ((_, operator),) = schedule.programs()
    calls = {"magjit": compiled, "operator alone": operator, "eager": function, "relu": torch.relu}
    before = resident(), torch.cuda.memory_allocated()
    times = run_in_turns(calls, given[200:])
    after = resident(), torch.cuda.memory_allocated()
    dvm("vm").cuda_spans()
    taken = encodings(lambda: run_in_turns({"magjit": compiled}, given[200:]), 1)
    spans = dvm("vm").cuda_spans()
    for share, name in ((0.5, "median"), (0.99, "99th percentile")):
        shown = {who: percentile(every, share) for who, every in times.items()}
        benchmark.add(Row.of(case, f"host time, {name}", "us", shown))
    first = percentile(times["magjit"][::_WAITS], 0.5)
    benchmark.add(Row(case, "host time, median after a wait", "us", first))
    for part, found in zip(_PARTS, zip(*spans, strict=True), strict=True):
        for share, name in ((0.5, "median"), (0.99, "99th percentile")):
            value = percentile([one / 1e3 for one in found], share)
            benchmark.add(Row(case, f"host time of {part}, {name}", "us", value))
    add_encoding(benchmark, case, taken)
    benchmark.add(Row(case, "growth of resident memory", "MB", (after[0] - before[0]) / 1e6))
    benchmark.add(Row(case, "growth of GPU memory", "MB", (after[1] - before[1]) / 1e6))
    benchmark.add(Row(case, "captures", "count", magjit.stats(compiled).captures))


def schedules() -> set[Any]:
    """The backend's graphs; none before something has been compiled."""
    backend = sys.modules.get("magjit_dvm.backend")
    return set() if backend is None else set(backend.schedules())


def run_in_turns(
    calls: Mapping[str, Callable[[Tensor], Any]], given: Sequence[Tensor]
) -> dict[str, array[float]]:
    """Microseconds of each call; who is first changes."""
    times = {who: array("d") for who in calls}  # small: memory is looked at as well
    order = list(calls)
    for start in range(0, len(given), _WAITS):
        for who in order:
            torch.cuda.synchronize()
            times[who].extend(map(partial(host_time, calls[who]), given[start : start + _WAITS]))
        order.append(order.pop(0))
    return times


def part_new_shapes(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """A chain and a reduction."""
    count = _QUICK if options.quick else _NEW_SHAPES
    for function in (four_operators, softmax):
        case = f"gpu: {count} new shapes, {function.__name__}"
        measure_new_shapes(benchmark, case, function, count)
