"""What the front end costs: a call, the first call, and memory while capturing; on one CPU thread.

Beside torch.compile, in turns, for a 12-layer BERT of width 64 and a ResNet-50 of width 16:

overhead_us        for both compilers the backend returns a stub that yields stored outputs;
                   a compiled call less a call of the stub on the flat inputs
overhead_real_us   the same around the real graph
call_us            the compiled call with the real graph, and eager
first_call_s       in a fresh process, after the imports and the compilation of another function
capture_peak       peak tensor bytes above the weights, over eager's, in a capture without grad
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from compilers import COMPILERS, RealGraph, Stub, compiled_pair, warm_up
from harness import (
    Benchmark,
    Row,
    Task,
    argument_parser,
    in_fresh_process,
    median_differences,
    median_times,
)
from models import FRONT_END, front_end_model
from profiling import peak_bytes

GRAD_MODES = {"no grad": False, "grad": True}
FIRST_CALLS = 3


def measure_calls(benchmark: Benchmark, name: str, mode: str) -> None:
    case = f"{name}, {mode}"
    with torch.set_grad_enabled(GRAD_MODES[mode]):
        for metric, make in (("overhead_us", Stub), ("overhead_real_us", RealGraph)):
            # One entry in torch.compile's cache, as a user has: more would slow its calls down.
            torch._dynamo.reset()
            pairs = {
                compiler: compiled_pair(compiler, *front_end_model(name), make())
                for compiler in COMPILERS
            }
            cost = median_differences(pairs)
            benchmark.add(Row.of(case, metric, "µs", cost))
        model, arguments = front_end_model(name)
        tasks: dict[str, Task] = {compiler: whole for compiler, (whole, _) in pairs.items()}
        tasks["eager"] = lambda: model(*arguments)
        benchmark.add(Row.of(case, "call_us", "µs", median_times(tasks)))


def first_call(compiler: str, name: str, mode: str) -> float:
    """Seconds of `compile` and the first call; for a process that has compiled nothing yet."""
    model, arguments = front_end_model(name)
    compile_with = COMPILERS[compiler]
    with torch.set_grad_enabled(GRAD_MODES[mode]):
        warm_up(compiler, "eager")
        start = time.perf_counter()
        compile_with(model, backend="eager")(*arguments)
        return time.perf_counter() - start


def measure_first_calls(benchmark: Benchmark, name: str, mode: str) -> None:
    taken: dict[str, list[float]] = {compiler: [] for compiler in COMPILERS}
    for _ in range(FIRST_CALLS):
        for compiler, seconds in taken.items():
            seconds.append(in_fresh_process(__file__, "--first-call", compiler, name, mode))
    medians = {compiler: statistics.median(seconds) for compiler, seconds in taken.items()}
    benchmark.add(Row.of(f"{name}, {mode}", "first_call_s", "s", medians))


def measure_capture_peak(benchmark: Benchmark, name: str) -> None:
    torch._dynamo.reset()
    peaks: dict[str, float] = {}
    model, arguments = front_end_model(name)
    with torch.no_grad():
        model(*arguments)
        eager = peak_bytes(lambda: model(*arguments))
        for compiler, compile_with in COMPILERS.items():
            warm_up(compiler, "eager")
            compiled = compile_with(front_end_model(name)[0], backend="eager")
            peaks[compiler] = peak_bytes(partial(compiled, *arguments)) / eager
    note = f"eager's peak is {eager / 1024:.0f} KiB"
    peaks["eager"] = 1.0
    benchmark.add(Row.of(f"{name}, no grad", "capture_peak", "× eager", peaks, note))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all measurements, or, as a child, one first call."""
    parser = argument_parser(__doc__)
    parser.add_argument("--first-call", nargs=3, metavar="ARG", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.first_call:
        json.dump(first_call(*options.first_call), sys.stdout)
        return
    benchmark = Benchmark.start(options)
    with benchmark.console.status("") as status:
        for name in FRONT_END:
            status.update(f"{name}: memory")
            measure_capture_peak(benchmark, name)
            for mode in GRAD_MODES:
                status.update(f"{name}, {mode}: calls")
                measure_calls(benchmark, name, mode)
                status.update(f"{name}, {mode}: first calls")
                measure_first_calls(benchmark, name, mode)
    benchmark.finish()


if __name__ == "__main__":
    main()
