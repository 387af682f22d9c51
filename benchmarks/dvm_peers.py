"""One program as MagJIT's virtual machine, eager mode, Inductor, numexpr and a copy run it."""

from __future__ import annotations

import inspect
import math
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import magjit
from agreement import differences
from compilers import compile_without_limit, disable_caches
from dvm_cases import Arguments, Program
from harness import Benchmark, Row, Task

try:
    import numexpr
except ImportError:
    numexpr = None

PEERS = ("eager", "inductor-static", "inductor-dynamic", "numexpr", "clone")


def set_up(threads: int) -> None:
    """Threads of torch and numexpr; Inductor may compile as often as it is asked to."""
    torch.set_num_threads(threads)
    if numexpr is not None:
        numexpr.set_num_threads(threads)
    torch._dynamo.reset()
    compile_without_limit()
    disable_caches()


def another(function: Callable[..., Any], name: str) -> types.FunctionType:
    """A copy with code of its own: TorchDynamo keeps what it compiled by code object."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(
        code, function.__globals__, name, function.__defaults__, function.__closure__
    )


class Entrants:
    """A program compiled once for all shapes by those that can."""

    def __init__(self, program: Program, peers: Sequence[str]) -> None:
        self.program = program
        self.peers = peers
        self.wrong: list[str] = []
        self._compiled = 0
        self.magjit = magjit.compile(program.function, backend="dvm", dynamic=True)
        self.dynamic = torch.compile(another(program.function, "dynamic"), dynamic=True)

    def tasks(self, arguments: Arguments, static: bool = True) -> dict[str, Task]:
        """A task for each that can run the program and whose result is eager's, warm."""
        expected = self.program.function(*arguments)
        makers: dict[str, Callable[[], Task]] = {
            "magjit": lambda: lambda: self.magjit(*arguments),
            "eager": lambda: lambda: self.program.function(*arguments),
            "inductor-dynamic": lambda: lambda: self.dynamic(*arguments),
            "inductor-static": lambda: self._static(arguments),
            "numexpr": lambda: self._numexpr(arguments),
            "clone": lambda: copy_of(moved_bytes(arguments, expected)),
        }
        left_out = {"inductor-static"} if not static else set()
        if numexpr is None or not self.program.expression:
            left_out.add("numexpr")
        found: dict[str, Task] = {}
        for name in ("magjit", *self.peers):
            if name in left_out:
                continue
            task = makers[name]()
            if name == "clone" or self._right(name, task, arguments, expected):
                found[name] = task
        return found

    def _static(self, arguments: Arguments) -> Task:
        """Inductor's code for exactly these shapes."""
        self._compiled += 1
        function = another(self.program.function, f"static_{self._compiled}")
        compiled = torch.compile(function, dynamic=False)
        return lambda: compiled(*arguments)

    def _numexpr(self, arguments: Arguments) -> Task:
        names = list(inspect.signature(self.program.function).parameters)
        arrays = {name: value.numpy() for name, value in zip(names, arguments, strict=True)}
        expression = self.program.expression
        return lambda: numexpr.evaluate(expression, local_dict=arrays, global_dict={})

    def _right(self, name: str, task: Task, arguments: Arguments, expected: Tensor) -> bool:
        """Whether the first call's result, and the second one's, are what eager computes."""
        for _ in range(2):
            result: Any = task()
            actual = result if isinstance(result, Tensor) else torch.from_numpy(result)
            if self.program.check is not None:
                found = self.program.check(arguments, actual)
            else:
                compared = differences(expected, actual, tolerance=self.program.tolerance)
                found = "; ".join(compared)
            if found:
                shape = "×".join(str(size) for size in arguments[0].shape)
                self.wrong.append(f"{name}, {shape}: {found}")
                return False
        return True


def bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def moved_bytes(arguments: Arguments, result: Tensor) -> int:
    """What a program reads and writes at least."""
    return sum(bytes_of(value) for value in (*arguments, result))


def copy_of(moved: int) -> Task:
    """A copy that reads and writes so many bytes altogether."""
    source = torch.ones(max(1, moved // 8))
    return source.clone


# -- encoding -----------------------------------------------------------------------------------


def dvm(module: str) -> Any:
    """A module of the backend, which is loaded once something has been compiled for it."""
    return sys.modules[f"magjit_dvm.{module}"]


def encodings(task: Task, calls: int) -> list[int]:
    """Nanoseconds of each fused operator's encoding in some calls."""
    timing = dvm("vm").timing
    timing(True)
    try:
        for _ in range(calls):
            task()
    finally:
        taken: list[int] = timing(False)
    return taken


def host_time(call: Callable[..., Any], *given: Any) -> float:
    """Microseconds until a call has come back; what it gives is freed after that."""
    start = time.perf_counter()
    result = call(*given)
    taken = time.perf_counter() - start
    del result  # not before the clock has been read
    return taken * 1e6


def resident() -> int:
    """Bytes of the process's memory that are in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least so large a share of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def add_encoding(benchmark: Benchmark, case: str, taken: Sequence[int]) -> None:
    """Rows of the median and the 99th percentile; none where no operator was encoded."""
    if not taken:
        return
    for metric, share in (("encode_us_p50", 0.5), ("encode_us_p99", 0.99)):
        benchmark.add(Row(case, metric, "µs", percentile(taken, share) / 1000))


# -- ratios -------------------------------------------------------------------------------------


def geomean(values: Iterable[float]) -> float:
    return statistics.geometric_mean(values)


def add_speed(
    benchmark: Benchmark, case: str, found: Sequence[Mapping[str, float]], note: str = ""
) -> None:
    """How many times as long as MagJIT each peer takes, geometric mean over what it ran."""
    peers = dict.fromkeys(name for times in found for name in times if name != "magjit")
    values = {
        name: geomean(
            times[name] / times["magjit"] for times in found if {name, "magjit"} <= times.keys()
        )
        for name in peers
        if any({name, "magjit"} <= times.keys() for times in found)
    }
    if values:
        benchmark.add(Row(case, "speed", "× MagJIT's time", 1.0, values, note))
