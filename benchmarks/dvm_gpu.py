"""Fused operators on a GPU: bandwidth beside a copy, eager mode and Inductor, and host time.

    python benchmarks/dvm_gpu.py --programs norms special --dtypes float16 --sizes "256 MB"

A call is timed between two events behind a kernel that sleeps until the host has queued it, after
160 MB of something else have been written, so that neither the host nor the L2 cache takes part.
All entrants take turns; a figure is the median over turns of bytes that have to move, by time, as a
fraction of what `copy_` of as many bytes reaches. `--seconds` starts no case after so long: the
first ones are those that matter most.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import magjit
from compilers import compile_without_limit
from dvm_gpu_cases import GROUPS, Case, cases
from dvm_peers import another, host_time, percentile
from harness import Benchmark, Row, argument_parser

_CALLS = 2000
_FLUSHED = 160 << 20
_SIZES = {
    "100 KB": 100 << 10,
    "16 MB": 16 << 20,
    "64 MB": 64 << 20,
    "256 MB": 256 << 20,
    "1 GB": 1 << 30,
}
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4}
_PEERS = ("eager", "static", "dynamic")
_CYCLES = 2000
"""Of the GPU's clock, a microsecond, at most."""

Entrant = tuple[str, Callable[[], Any]]


def why_not() -> str:
    """The reason if there is no GPU to measure on; empty if there is one."""
    if not torch.cuda.is_available():
        return "--device cuda: torch sees no NVIDIA GPU here; --device cpu measures the CPU"
    return ""


# -- measurement --


def microseconds(runs: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """Of the GPU, a call of each, in the median of some turns; each turn begins with another."""
    longest = max(_host_time(run) for run in runs.values())
    flushed = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {one: [] for one in runs}
    for turn in range(turns):
        for name, run in rotated(list(runs.items()), turn):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            torch.cuda._sleep(int(_CYCLES * (2 * longest + 20)))
            start.record()
            run()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {
        name: percentile([start.elapsed_time(end) * 1e3 for start, end in pairs], 0.5)
        for name, pairs in events.items()
    }


def rotated(entrants: list[Entrant], turn: int) -> list[Entrant]:
    """In the order of this turn."""
    first = turn % len(entrants)
    return entrants[first:] + entrants[:first]


def _host_time(run: Callable[[], Any]) -> float:
    """Microseconds until a call returns, at most of a few, once it is warm."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(5):
        times.append(host_time(run))
    torch.cuda.synchronize()
    return max(times)


def replayed(
    case: Case, compiled: Callable[..., Tensor], given: Sequence[Tensor]
) -> tuple[Tensor, str]:
    """What a compiled program computes, and what is wrong with it; empty if nothing is.

    The result of the first call would be eager mode's own: the run that MagJIT watches.
    """
    compiled(*given)
    before = magjit.stats(compiled).replays
    found = compiled(*given)
    if magjit.stats(compiled).replays == before:
        return found, "magjit: runs eagerly"
    wide = [one.float() if one.is_floating_point() else one for one in given]
    wrong = not agrees(found, case.function(*wide))
    return found, "magjit: not eager's result in float32" if wrong else ""


def agrees(found: Tensor, wanted: Tensor) -> bool:
    """Whether a result is near one in float32, or what that is rounded to where it is too large.

    Beside its own share each element may be off by that of the largest, if that is below 1.
    """
    tolerance, rounded = _TOLERANCES[found.dtype], wanted.to(found.dtype)
    largest = float(wanted[wanted.isfinite()].abs().max())
    wanted = torch.where(rounded.isfinite(), wanted, rounded.float())
    beside = tolerance * min(largest, 1.0)
    return torch.allclose(found.float(), wanted, tolerance, beside, equal_nan=True)


def moved(tensors: Sequence[Tensor]) -> int:
    """Bytes of memory that tensors are of."""
    return sum(one.numel() * one.element_size() for one in tensors)


def peers(case: Case, given: list[Tensor], names: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """What takes turns with MagJIT; Inductor is asked for code of its own for each case."""
    runs: dict[str, Callable[[], Any]] = {}
    for peer in names:
        function: Callable[..., Any] = case.function
        if peer != "eager":
            torch._dynamo.reset()
            function = torch.compile(another(function, peer), dynamic=peer == "dynamic")
        runs[peer] = lambda function=function: function(*given)  # type: ignore[misc]
    return runs


def fractions(runs: dict[str, Callable[[], Any]], work: int, turns: int) -> dict[str, float]:
    """Of the bandwidth of a copy that moves ``work`` bytes, which is what each run has to move."""
    source = torch.empty(work // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = microseconds({"copy": lambda: target.copy_(source), **runs}, turns)
    return {one: taken["copy"] / taken[one] for one in runs}


def measure(
    benchmark: Benchmark, case: Case, dtype: torch.dtype, size: str, options: argparse.Namespace
) -> None:
    """Fractions of a copy's bandwidth, and host time where that is what counts."""
    given = case.make(_SIZES[size], dtype)
    name = f"gpu: {case.name}, {str(dtype).removeprefix('torch.')}, {size}"
    compiled = magjit.compile(case.function, backend="dvm")
    found, note = replayed(case, compiled, given)
    runs = {"magjit": lambda: compiled(*given), **peers(case, given, options.peers)}
    work = moved([*given, found])
    del found
    values = fractions(runs, work, options.turns)
    benchmark.add(Row.of(name, "fraction of copy bandwidth", "", values, note))
    if size == "100 KB":
        times = {one: host_times(run) for one, run in runs.items()}
        for share, text in ((0.5, "median"), (0.99, "99th percentile")):
            shown = {which: percentile(list_of, share) for which, list_of in times.items()}
            benchmark.add(Row.of(name, f"host time, {text}", "us", shown))


def host_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of each of many calls, none of which waits for the GPU."""
    for _ in range(20):
        run()
    times = []
    for number in range(_CALLS):
        if number % 100 == 0:
            torch.cuda.synchronize()
        times.append(host_time(run))
    return times


# -- what is run --


def part_gpu(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """All that is asked for, until time is up; a table of it so far is shown when a group ends."""
    until = time.monotonic() + options.seconds
    for dtype in options.dtypes:
        for size in options.sizes:
            for case in cases():
                if case.group not in options.programs:
                    continue
                if options.only and not any(text in case.name for text in options.only):
                    continue
                if options.widths and not {*case.name.split()} & {*map(str, options.widths)}:
                    continue
                if time.monotonic() > until:
                    print(f"time is up before {case.name}, {dtype}, {size}", file=sys.stderr)
                    return
                measure(benchmark, case, _DTYPES[dtype], size, options)


def chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What to run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--programs", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--dtypes", nargs="+", choices=_DTYPES, default=list(_DTYPES))
    parser.add_argument("--sizes", nargs="+", choices=_SIZES, default=list(_SIZES))
    parser.add_argument("--widths", nargs="+", type=int, help="only programs of these")
    parser.add_argument("--only", nargs="+", help="only programs whose names have one of these")
    parser.add_argument("--peers", nargs="*", choices=_PEERS, default=list(_PEERS))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so long")
    return parser.parse_args(arguments)


def quick() -> argparse.Namespace:
    """The essentials."""
    return chosen(["--dtypes", "float16", "--sizes", "256 MB", "--peers", "eager"])


def run_alone(
    options: argparse.Namespace, part: Callable[[Benchmark, argparse.Namespace], None]
) -> int:
    """A part as a program of its own: its table, and the exit status."""
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    compile_without_limit()
    os.environ["MAGJIT_DVM_WAIT"] = "1"  # kernels are there before anything is measured
    benchmark = Benchmark.start(options)
    part(benchmark, options)
    benchmark.finish()
    return int(any("magjit" in row.note for row in benchmark.rows))


def main(arguments: Sequence[str] | None = None) -> int:
    with torch.no_grad():
        return run_alone(chosen(arguments), part_gpu)


if __name__ == "__main__":
    sys.exit(main())
