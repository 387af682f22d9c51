"""What code outside compiled calls pays for MagJIT being loaded; on one CPU thread.

Worker processes that differ in one thing alone run the same work in turns: without MagJIT, with
MagJIT loaded and a record alive, with a compiled function that splits, and with torch.compile in
its place.

outside_cost   time with a compiled function alive over time without; "split" in the case's name
               stands for a function with a split point in it, whose frames need watching
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness import Benchmark, Row, argument_parser, no_collection
from models import front_end_model

WORKERS = ("nothing", "magjit", "magjit, split", "torch.compile", "torch.compile, split")
GENERATIONS = 4
ROUNDS = 12


class Point:
    """Something with attributes, a property and methods."""

    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y

    @property
    def size(self) -> int:
        return self.x * self.x + self.y * self.y

    def moved(self, by: int) -> Point:
        return Point(self.x + by, self.y - by)


def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def python_code() -> int:
    """Calls, attributes, generators, comprehensions, exceptions and dictionaries."""
    total = fibonacci(18)
    point = Point(0, 0)
    for _ in range(3000):
        point = point.moved(1)
        total += point.size & 7
    table = {str(i): [i, i + 1] for i in range(2000)}
    total += sum(first for first, _ in sorted(table.values(), key=lambda pair: -pair[0]))
    for key in table:
        try:
            table["-" + key]
        except KeyError:
            total += 1
    return total


def workloads() -> dict[str, Callable[[], object]]:
    model, arguments = front_end_model("BERT-12x64")

    def eager_model() -> None:
        with torch.no_grad():
            for _ in range(3):
                model(*arguments)

    return {"Python code": python_code, "eager BERT": eager_model}


def keep_compiled(kind: str) -> Any:
    """Whatever has to be alive in a worker of this kind; called, so that it is compiled."""
    name, _, variant = kind.partition(", ")
    if name == "nothing":
        return None
    compiler = importlib.import_module("magjit" if name == "magjit" else "torch")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.relu()
        if variant == "split" and y.sum() > 0:
            y = y * 2
        return y + 1

    compiled = compiler.compile(function, backend="eager")
    for _ in range(3):
        compiled(torch.ones(3))
    return compiled


def work(kind: str) -> None:
    """Answers each line with a workload's name on the standard input by the seconds it took."""
    torch.set_num_threads(1)
    alive = keep_compiled(kind)
    tasks = workloads()
    for task in tasks.values():
        task()
    with no_collection():
        for line in sys.stdin:
            task = tasks[line.strip()]
            start = time.perf_counter()
            task()
            print(time.perf_counter() - start, flush=True)
    del alive


class Worker:
    """A process that runs workloads when it is told to."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def seconds(self, workload: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(workload + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker with {self.kind!r} ended: run it alone to see why")
        return float(answer)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(names: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Seconds of each workload in each kind of worker, over a minimum of three a turn."""
    found: dict[tuple[str, str], list[float]] = {}
    for generation in range(GENERATIONS):
        workers = {kind: Worker(kind) for kind in WORKERS}
        kinds = list(WORKERS)
        for name in names:
            for kind in kinds:
                workers[kind].seconds(name)
            for turn in range(ROUNDS):
                shift = (turn + generation) % len(kinds)
                for kind in kinds[shift:] + kinds[:shift]:
                    best = min(workers[kind].seconds(name) for _ in range(3))
                    found.setdefault((name, kind), []).append(best)
        for worker in workers.values():
            worker.stop()
    return found


def relative(times: list[float], base: list[float]) -> float:
    """Median over the turns of one time over the other."""
    return statistics.median(time / other for time, other in zip(times, base, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all kinds of workers, or is one of them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker)
        return
    benchmark = Benchmark.start(options)
    names = list(workloads())
    with benchmark.console.status("measuring"):
        times = measure(names)
    for name in names:
        for variant in ("", ", split"):
            values = {
                compiler: relative(times[name, compiler + variant], times[name, "nothing"])
                for compiler in ("magjit", "torch.compile")
            }
            benchmark.add(Row.of(name + variant, "outside_cost", "× without", values))
    benchmark.finish()


if __name__ == "__main__":
    main()
