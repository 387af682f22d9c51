"""Shapes that change from call to call, beside torch.compile's automatic dynamic mode.

BERT and DeBERTa over sequences of 32 to 256 tokens, ResNet-101 and DenseNet-121 over batches of 2
to 16, 40 random shapes each, without grad. Each compiler runs in a process of its own that has
compiled another function before; the order of the compilers alternates. Every result is compared
with eager's.

captures   runs of the front end that made a graph
compiles   graphs that the backend was given
total_s    seconds of the 40 calls, first calls included
warm_ms    median over the 40 shapes, once all have been seen
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import magjit
from agreement import differences
from compilers import COMPILERS, disable_caches, warm_up
from harness import Benchmark, add_medians, argument_parser, in_fresh_process, run_cases
from models import MODELS, small_bert

CALLS = 40
ROUNDS = 3
SEED = 1
LONGEST = 256
TOLERANCE = (2e-3, 2e-3)
SEQUENCES = ("BERT", "DeBERTa")
CASES = (*SEQUENCES, "ResNet-101", "DenseNet-121")
BACKENDS = ("eager", "inductor")


def shapes(name: str) -> list[int]:
    """The sizes of the calls: tokens or images."""
    chosen = random.Random(SEED)
    low, high = (32, LONGEST) if name in SEQUENCES else (2, 16)
    return [chosen.randint(low, high) for _ in range(CALLS)]


def inputs(name: str, arguments: tuple[Any, ...], size: int, device: str) -> tuple[Any, ...]:
    """Arguments of a call of this size, made of those of the registry."""
    torch.manual_seed(size)
    first: torch.Tensor = arguments[0]
    if name in SEQUENCES:
        return (torch.randint(0, 100, (1, size), device=device),)
    shape = (size, *first.shape[1:])
    return (torch.randn(shape, device=device, dtype=first.dtype),)


class Counting:
    """Counts what a backend is given."""

    def __init__(self, backend: str) -> None:
        self.graphs = 0
        self._compile = torch._dynamo.lookup_backend(backend)

    def __call__(self, module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = self._compile(module, list(example_inputs))
        return compiled


def timed(call: Callable[..., Any], arguments: tuple[Any, ...], device: str) -> tuple[Any, float]:
    """The result and its seconds."""
    start = time.perf_counter()
    result = call(*arguments)
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def measure(compiler: str, backend: str, name: str, device: str, size: str) -> dict[str, Any]:
    """All metrics of one compiler; for a process that has compiled nothing yet."""
    torch.manual_seed(0)
    if name == "BERT" and size == "small":
        model, arguments = small_bert(positions=LONGEST)
    else:
        model, arguments = MODELS[name](size)  # type: ignore[arg-type]
    model = model.eval().to(device)
    calls = [inputs(name, arguments, n, device) for n in shapes(name)]
    expected = [model(*call) for call in calls]
    if compiler == "eager":
        warm = [statistics.median(seconds(model, calls, device)) for _ in range(3)]
        return {"warm_ms": statistics.median(warm) * 1e3, "notes": []}
    warm_up(compiler, backend, device)
    counting = Counting(backend)
    compiled = COMPILERS[compiler](model, backend=counting)
    notes, taken = [], []
    for position, (call, wanted) in enumerate(zip(calls, expected, strict=True)):
        result, spent = timed(compiled, call, device)
        taken.append(spent)
        found = differences(wanted, result, tolerance=TOLERANCE)
        notes += [f"call {position}: {difference}" for difference in found]
    captures = counting.graphs
    if compiler == "magjit":
        captures = magjit.stats(compiled).captures
    warm = [statistics.median(seconds(compiled, calls, device)) for _ in range(3)]
    return {
        "captures": captures,
        "compiles": counting.graphs,
        "total_s": sum(taken),
        "warm_ms": statistics.median(warm) * 1e3,
        "notes": notes[:3],
    }


def seconds(
    call: Callable[..., Any], calls: Sequence[tuple[Any, ...]], device: str
) -> Iterator[float]:
    """Of each call in turn."""
    for arguments in calls:
        yield timed(call, arguments, device)[1]


def measure_case(benchmark: Benchmark, name: str, backend: str, options: Any) -> None:
    """One row a metric, medians over rounds."""
    names = [*COMPILERS, "eager"]
    found: dict[str, list[dict[str, Any]]] = {compiler: [] for compiler in names}
    for turn in range(options.rounds):
        for compiler in names[turn % 3 :] + names[: turn % 3]:
            arguments = (compiler, backend, name, options.device, options.size)
            found[compiler].append(in_fresh_process(__file__, "--one", *arguments))
    metrics = (
        ("captures", "count"),
        ("compiles", "count"),
        ("total_s", "s"),
        ("warm_ms", "ms"),
    )
    add_medians(benchmark, f"{name}, {backend}", found, metrics, "total_s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs all measurements, or, as a child, one of them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=CASES, metavar="NAME")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--one", nargs=5, metavar="ARG", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    disable_caches()
    with torch.no_grad():
        if options.one:
            json.dump(measure(*options.one), sys.stdout)
            return
        run_cases(options, options.models, measure_case)


if __name__ == "__main__":
    main()
