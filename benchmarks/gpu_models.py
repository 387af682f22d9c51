"""Whole models on a GPU, batch 1: MagJIT with Inductor beside torch.compile and eager.

BERT-base, ResNet-101, DenseNet-121 and DeBERTa-base at their published sizes, without grad, in
modes default and reduce-overhead. Results are compared with eager's before anything is measured.

call_us        wall time a call, the device synchronised at both ends of a round of calls
first_call_s   seconds of the first call, Inductor's caches off
graphs         graphs that the front end made
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.utils import fresh_cache
from torch.utils._pytree import tree_map

from agreement import differences
from compilers import COMPILERS, RealGraph, disable_caches, warm_up
from harness import Benchmark, Row, Task, argument_parser, median_times
from models import MODELS

GPU_MODELS = ("BERT", "ResNet-101", "DenseNet-121", "DeBERTa")
MODES = ("default", "reduce-overhead")
CALLS = 10
TOLERANCES = {torch.float32: (2e-3, 2e-3), torch.float16: (2e-2, 2e-2), torch.bfloat16: (0.1, 0.1)}


def build(name: str, dtype: torch.dtype, size: Any) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A model and its arguments on the GPU, with floating-point tensors in a dtype."""
    model, arguments = MODELS[name](size)

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to("cuda", dtype if value.is_floating_point() else None)

    return model.to("cuda", dtype), tree_map(place, arguments)


def synchronised(call: Callable[..., Any], arguments: tuple[Any, ...]) -> Task:
    """Several calls and a wait for the device."""

    def run() -> None:
        for _ in range(CALLS):
            call(*arguments)
        torch.cuda.synchronize()

    return run


def count_graphs(name: str, dtype: torch.dtype, size: Any) -> dict[str, float]:
    """Graphs that each front end makes of a model."""
    counts: dict[str, float] = {}
    for compiler, compile_with in COMPILERS.items():
        torch._dynamo.reset()
        backend = RealGraph()
        model, arguments = build(name, dtype, size)
        compile_with(model, backend=backend)(*arguments)
        counts[compiler] = len(backend.graphs)
    return counts


def measure(
    name: str, mode: str, dtype: torch.dtype, size: Any
) -> tuple[dict[str, float], dict[str, float], str]:
    """Microseconds a call and seconds of the first call by compiler, and where results differ."""
    eager, arguments = build(name, dtype, size)
    expected = eager(*arguments)
    tasks: dict[str, Task] = {"eager": synchronised(eager, arguments)}
    first: dict[str, float] = {}
    notes: list[str] = []
    torch._dynamo.reset()
    for compiler, compile_with in COMPILERS.items():
        with fresh_cache():  # the second would find the first one's kernels
            warm_up(compiler, "inductor", "cuda")
            call = compile_with(build(name, dtype, size)[0], backend="inductor", mode=mode)
            start = time.perf_counter()
            call(*arguments)
            torch.cuda.synchronize()
            first[compiler] = time.perf_counter() - start
        for _ in range(3):
            actual = call(*arguments)
        found = differences(expected, actual, tolerance=TOLERANCES[dtype])
        notes += [f"{compiler}: {difference}" for difference in found]
        tasks[compiler] = synchronised(call, arguments)
    times = median_times(tasks, rounds=15, seconds=0.1)
    return {task: total / CALLS for task, total in times.items()}, first, "; ".join(notes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the chosen models in the chosen modes."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=GPU_MODELS, metavar="NAME")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    disable_caches()
    dtype = getattr(torch, options.dtype)
    benchmark = Benchmark.start(options)
    with torch.no_grad():
        for name in options.models:
            case = f"{name}, {options.dtype}"
            benchmark.add(Row.of(case, "graphs", "count", count_graphs(name, dtype, options.size)))
            for mode in options.modes:
                benchmark.console.print(f"{case}, {mode} …")
                times, first, note = measure(name, mode, dtype, options.size)
                benchmark.add(Row.of(f"{case}, {mode}", "call_us", "µs", times, note))
                benchmark.add(Row.of(f"{case}, {mode}", "first_call_s", "s", first))
    benchmark.finish()


if __name__ == "__main__":
    main()
