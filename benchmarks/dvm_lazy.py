"""A loop whose length and path depend on data: eager mode beside `magjit_dvm.lazy()`.

Each turn computes about twenty vector operators, reads one number, and branches on it.

loop_us       one run of the program, whose structures have been seen
first_ms      the first run, with all that had to be fused for it
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from harness import Benchmark, Row, argument_parser, median_times
from magjit.plugin import resolve

SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
TURNS = 12


def relaxed(x: Tensor, tolerance: float = 1e-3) -> Tensor:
    """A damped fixed-point iteration; it clamps where steps are large, and stops when small."""
    y = x
    for _ in range(TURNS):
        gain = torch.sigmoid(y * 0.5) * 0.9 + 0.1
        pull = torch.tanh(y * y * 0.25 - x) * gain
        step = (pull + 0.05 * y) / (1 + y.abs())
        z = y - 0.5 * step
        largest = (z - y).abs().max().item()
        if largest < tolerance:
            return z
        y = z.clamp(-2, 2) * 0.99 if largest > 0.1 else z + 0.01 * torch.sin(z)
    return y


@functools.cache
def backend() -> Any:
    """The backend's module, which its entry point loads."""
    resolve("dvm")
    return sys.modules["magjit_dvm"]


def lazily(x: Tensor) -> Tensor:
    """The same, its operators queued."""
    with backend().lazy():
        return relaxed(x)


def measure(benchmark: Benchmark, name: str, size: int) -> None:
    """One size: figures of both, after their results have been compared."""
    x = torch.randn(size // 4, generator=torch.Generator().manual_seed(1))
    start = time.perf_counter()
    found = lazily(x)
    first = (time.perf_counter() - start) * 1e3
    torch.testing.assert_close(found, relaxed(x), rtol=1e-4, atol=1e-5)
    tasks = {"magjit": functools.partial(lazily, x), "eager": functools.partial(relaxed, x)}
    with backend().lazy() as stats:
        relaxed(x)
    note = f"{stats.queued} operators in {sum(stats.flushes.values())} windows"
    benchmark.add(Row.of(name, "loop_us", "µs", median_times(tasks, rounds=9), note))
    benchmark.add(Row(name, "first_ms", "ms", first))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all measurements."""
    parser = argument_parser(__doc__)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    benchmark = Benchmark.start(options)
    with torch.no_grad():
        for name, size in SIZES.items():
            measure(benchmark, name, size)
    benchmark.finish()


if __name__ == "__main__":
    main()
