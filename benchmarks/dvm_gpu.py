"""Fused operators on a GPU: host time of a call, and bandwidth beside a copy and eager mode."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import magjit
from dvm_peers import percentile
from harness import Benchmark, Row

_CALLS = 2000
_TURNS = 20
_SIZES = {"100 KB": 100 << 10, "16 MB": 16 << 20, "256 MB": 256 << 20, "1 GB": 1 << 30}
_QUICK = ("100 KB", "16 MB")
_WIDTHS = (1024, 2048, 4096)


def why_not() -> str:
    """The reason if there is no GPU to measure on; empty if there is one."""
    if not torch.cuda.is_available():
        return "--device cuda: torch sees no NVIDIA GPU here; --device cpu measures the CPU"
    return ""


def chain(operators: int) -> Callable[[Tensor], Tensor]:
    """So many cheap operators."""

    def run(x: Tensor) -> Tensor:
        for k in range(operators):
            x = (x * 1.01, x + 0.5, x.relu(), -x)[k % 4]
        return x

    return run


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def microseconds(run: Callable[[], Any]) -> float:
    """Of the GPU, a call, in the median of some turns."""
    run()
    times = []
    for _ in range(_TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return percentile(times, 0.5)


def measure(benchmark: Benchmark, case: str, function: Any, x: Tensor) -> None:
    """The fraction of a copy's bandwidth, and host time where that is what counts."""
    compiled = magjit.compile(function, backend="dvm")
    wanted = function(x)
    found = compiled(x)
    tolerance = 2e-2 if x.dtype is torch.bfloat16 else 2e-3
    wrong = not torch.allclose(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    note = "magjit: not eager's result" if wrong else ""
    other = torch.empty_like(x)
    copied = microseconds(lambda: other.copy_(x))
    runs = {"magjit": lambda: compiled(x), "eager": lambda: function(x)}
    values = {name: copied / microseconds(run) for name, run in runs.items()}
    benchmark.add(Row.of(case, "fraction of copy bandwidth", "", values, note))
    if x.numel() * x.element_size() <= 1 << 20:
        taken = {name: host_times(run) for name, run in runs.items()}
        for share, name in ((0.5, "median"), (0.99, "99th percentile")):
            found_times = {which: percentile(times, share) for which, times in taken.items()}
            benchmark.add(Row.of(case, f"host time, {name}", "us", found_times))


def host_times(run: Callable[[], Any]) -> list[float]:
    """Microseconds of each of many calls, none of which waits for the GPU."""
    for _ in range(20):
        run()
    times = []
    for number in range(_CALLS):
        if number % 100 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def part_gpu(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Chains of operators, then norms."""
    sizes = _QUICK if options.quick else tuple(_SIZES)
    for dtype in (torch.float16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        for size in sizes:
            for operators in (1, 4) if options.quick else (1, 2, 4, 8, 12):
                x = torch.randn(_SIZES[size] // dtype.itemsize, device="cuda").to(dtype)
                case = f"gpu: {operators} operators, {kind}, {size}"
                measure(benchmark, case, chain(operators), x)
        for width in _WIDTHS[:1] if options.quick else _WIDTHS:
            rows = (16 << 20 if options.quick else 256 << 20) // dtype.itemsize // width
            x = torch.randn(rows, width, device="cuda").to(dtype)
            for function in (layer_norm, rms_norm, softmax):
                case = f"gpu: {function.__name__}, {kind}, {rows} x {width}"
                measure(benchmark, case, function, x)
