"""Programs that write what they are given on a GPU: time beside eager mode and Inductor.

    python benchmarks/dvm_gpu_writes.py

Parts of buffers, averages that a layer keeps, a step of Adam, a decoding step that puts its keys
and values into caches.  Measured as `dvm_gpu.py` does; `bytes` is what has to be read and written.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import dvm_gpu
import magjit
from dvm_peers import another
from harness import Benchmark, Row, argument_parser

_IMAGES = (8, 64, 256, 256)
_MATRIX = (4096, 8192)
_CACHE = (16, 16, 4096, 64)
_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Case:
    """A program, its arguments, and the bytes that it has to move; unknown of a library's part."""

    name: str
    function: Callable[..., Any]
    make: Callable[[], list[Tensor]]
    bytes: int = 0


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def buffer() -> list[Tensor]:
    """One of twice as many channels as images have, and images."""
    count, channels, *size = _IMAGES
    return [half(count, 2 * channels, *size), half(*_IMAGES)]


def part(whole: Tensor, x: Tensor) -> None:
    whole[:, : x.shape[1]] = x * 2


def both_parts(whole: Tensor, x: Tensor) -> None:
    whole[:, : x.shape[1]] = x * 2
    whole[:, x.shape[1] :] = x.relu()


def read_beside(whole: Tensor, x: Tensor) -> Tensor:
    whole[:, : x.shape[1]] = x * 2
    return whole[:, x.shape[1] :] + 1


def average(kept: Tensor, x: Tensor) -> None:
    kept.mul_(0.9).add_(x, alpha=0.1)


def average_of_part(whole: Tensor, x: Tensor) -> None:
    whole[:, x.shape[1] :].mul_(0.9).add_(x)


def adam(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor) -> None:
    mean.mul_(0.9).add_(gradient, alpha=0.1)
    square.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
    weight.sub_(1e-3 * mean / (square.sqrt() + 1e-8))


def decode(
    keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, at: Tensor
) -> Tensor:
    keys.index_copy_(2, at, key)
    values.index_copy_(2, at, value)
    return F.scaled_dot_product_attention(query, keys, values) * 2


def caches() -> list[Tensor]:
    batch, heads, _, width = _CACHE
    new = [half(batch, heads, 1, width) for _ in range(3)]
    return [half(*_CACHE), half(*_CACHE), *new, torch.tensor([77], device="cuda")]


def cases() -> Iterator[Case]:
    """All programs."""
    images = 2 * int(torch.Size(_IMAGES).numel())
    matrix = 4 * int(torch.Size(_MATRIX).numel())
    yield Case("half of a buffer", part, buffer, 2 * images)
    yield Case("both halves of a buffer", both_parts, buffer, 3 * images)
    yield Case("half of a buffer, the other read", read_beside, buffer, 4 * images)
    yield Case(
        "an average in float32 of float16",
        average,
        lambda: [torch.zeros(_IMAGES, device="cuda"), half(*_IMAGES)],
        5 * images,
    )
    yield Case("an average in half of a buffer", average_of_part, buffer, 3 * images)
    yield Case(
        "a step of Adam, float32",
        adam,
        lambda: [torch.rand(_MATRIX, device="cuda") for _ in range(4)],
        7 * matrix,
    )
    yield Case("a decoding step with caches", decode, caches)


def measure(benchmark: Benchmark, case: Case, turns: int) -> None:
    """Times of MagJIT, eager mode and Inductor, in turns; what was written is compared first."""
    torch.manual_seed(0)
    given = case.make()
    torch._dynamo.reset()
    runs: dict[str, Callable[..., Any]] = {
        "magjit": magjit.compile(case.function, backend="dvm"),
        "eager": case.function,
        "inductor": torch.compile(another(case.function, "static"), dynamic=False),
    }
    note = ""
    mine, theirs = ([one.clone() for one in given] for _ in "ab")
    for _ in range(3):
        made, wanted = runs["magjit"](*mine), case.function(*theirs)
        pairs = [*zip(mine, theirs, strict=True), *([] if wanted is None else [(made, wanted)])]
        if not all(torch.allclose(x, y, _TOLERANCE, _TOLERANCE) for x, y in pairs):
            note = "magjit: not eager's result"
    del mine, theirs, made, wanted
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(run, *given) for name, run in runs.items()
    }
    name = f"gpu, writes: {case.name}"
    times = dvm_gpu.microseconds(calls, turns)
    benchmark.add(Row.of(name, "run_us", "µs", times, note))
    if case.bytes:
        values = dvm_gpu.fractions(calls, case.bytes, turns)
        benchmark.add(Row.of(name, "fraction of copy bandwidth", "", values))


def part_writes(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """All rows."""
    with torch.no_grad():
        for case in cases():
            measure(benchmark, case, options.turns)
            benchmark.write()


def chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What to run."""
    parser = argument_parser(__doc__)
    parser.add_argument("--turns", type=int, default=15)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    return dvm_gpu.run_alone(chosen(arguments), part_writes)


if __name__ == "__main__":
    sys.exit(main())
