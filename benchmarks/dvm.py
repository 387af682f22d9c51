"""Fused operators as bytecode on the CPU, beside eager mode, Inductor, numexpr and a copy.

sets      the operator sets of DVM's paper over random shapes
chains    chains of vector operators from 64 KB to 256 MB
products  matrix products and convolutions with what follows them
shapes    10,000 shapes through one compiled function: memory, first and repeated calls
models    cold starts, steady state, the share of operators that the virtual machine runs
varied    40 batch and sequence sizes through BERT
training  50 steps of BERT

With --device cuda, on a GPU: `sets` of the paper's own sizes in float16; `chains`, bandwidth of
chains and norms; `shapes`, host time at new shapes and calls over small tensors; `models`, 25 sizes
of BERT (`training`, too), experts and a language model's block.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import dvm_gpu
import dvm_gpu_all
import dvm_gpu_models
import dvm_gpu_sets
import dvm_gpu_shapes
import dvm_models
import dvm_training
import magjit
from dvm_cases import (
    CHAINS,
    LARGEST,
    LARGEST_QUICK,
    PRODUCTS,
    SETS,
    Arguments,
    OperatorSet,
    Program,
    drawn,
    layer_norm,
)
from dvm_peers import (
    PEERS,
    Entrants,
    add_encoding,
    add_speed,
    another,
    encodings,
    percentile,
    resident,
    set_up,
)
from harness import (
    Benchmark,
    Row,
    Task,
    argument_parser,
    earlier_rows,
    median_times,
    no_collection,
)

SEED = 1
ROUNDS = 9
SHAPES = 60
STATIC_SHAPES = 6
FIRST_CALLS = 5
NEW_SHAPES = 10_000
SIZES = {"64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
SIZES |= {"256 MB": 256 << 20}
QUICK_SIZES = ("64 KB", "1 MB")
LARGE_SIZES = ("16 MB", "64 MB")


def counted(threads: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)}"


# -- operator sets ------------------------------------------------------------------------------


def measure_set(
    benchmark: Benchmark, operators: OperatorSet, threads: int, options: argparse.Namespace
) -> None:
    """Encodings at shapes that have not been seen, then times."""
    count, largest = (4, LARGEST_QUICK) if options.quick else (SHAPES, LARGEST)
    case = f"sets: {operators.program.name}, {counted(threads)}"
    sampled = set(range(0, count, max(1, count // STATIC_SHAPES)))
    entrants = Entrants(operators.program, [name for name in options.peers if name in COMPARED])
    times: list[dict[str, float]] = []
    for arguments in drawn(operators, 2, SEED + 1, largest):  # loads the backend
        entrants.magjit(*arguments)
    taken, ran = encoded(entrants, drawn(operators, count, SEED, largest))
    for number, arguments in enumerate(drawn(operators, count, SEED, largest)):
        tasks = entrants.tasks(arguments, static=number in sampled)
        times.append(median_times(tasks, rounds=options.rounds, seconds=0.01))
    add_encoding(benchmark, case, taken)
    if taken:
        benchmark.add(Row(case, "compile/run ratio", "share", sum(taken) / ran))
    add_speed(benchmark, case, times, "; ".join(entrants.wrong[:3]))
    total = {name: sum(one[name] for one in times if name in one) for name in ("magjit", "eager")}
    total = {name: value / 1000 for name, value in total.items() if value}
    benchmark.add(Row.of(case, "total_ms", "ms", total))


COMPARED = ("eager", "inductor-static", "inductor-dynamic")


def encoded(entrants: Entrants, calls: Iterator[Arguments]) -> tuple[list[int], float]:
    """Nanoseconds of each encoding, and of all calls, in the first calls at each shape.

    Calls that capture count neither here nor there.
    """
    taken: list[int] = []
    ran = 0
    for arguments in calls:
        task = functools.partial(entrants.magjit, *arguments)
        for _ in range(FIRST_CALLS):
            captures = magjit.stats(entrants.magjit).captures
            start = time.perf_counter_ns()
            found = encodings(task, 1)
            spent = time.perf_counter_ns() - start
            if magjit.stats(entrants.magjit).captures == captures:
                taken += found
                ran += spent
    return taken, ran


def part_sets(benchmark: Benchmark, options: argparse.Namespace) -> None:
    for threads in options.threads:
        for operators in SETS:
            with benchmark.console.status(f"{operators.program.name}, {threads}"):
                set_up(threads)
                measure_set(benchmark, operators, threads, options)


# -- chains -------------------------------------------------------------------------------------


def measure_chain(
    benchmark: Benchmark,
    program: Program,
    threads: int,
    options: argparse.Namespace,
    part: str = "chains",
) -> dict[str, dict[str, float]]:
    """Milliseconds of each contestant by size; a row each."""
    entrants = Entrants(program, options.peers)
    found: dict[str, dict[str, float]] = {}
    taken: list[int] = []
    for title in sizes_of(part, options):
        size = SIZES[title]
        arguments = program.inputs(size)
        entrants.wrong.clear()
        tasks = entrants.tasks(arguments)
        rounds = options.rounds if size < 64 << 20 else max(3, options.rounds // 3)
        times = {
            name: value / 1000
            for name, value in median_times(tasks, rounds=rounds, seconds=0.02).items()
        }
        found[title] = times
        case = f"{part}: {program.name}, {title}, {counted(threads)}"
        benchmark.add(Row.of(case, "run_ms", "ms", times, "; ".join(entrants.wrong)))
        if "magjit" in tasks and size < 64 << 20:
            taken += encodings(tasks["magjit"], 50)
    add_encoding(benchmark, f"{part}: {program.name}, {counted(threads)}", taken)
    return found


def sizes_of(part: str, options: argparse.Namespace) -> list[str]:
    """Of products, the large ones: the others stay in the caches as they are."""
    large = ("1 MB",) if options.quick else LARGE_SIZES
    return [title for title in options.sizes if part == "chains" or title in large]


def part_chains(
    benchmark: Benchmark,
    options: argparse.Namespace,
    part: str = "chains",
    programs: Sequence[Program] = CHAINS,
) -> None:
    for threads in options.threads:
        found = []
        for program in programs:
            if options.programs and program.name not in options.programs:
                continue
            with benchmark.console.status(f"{program.name}, {threads}"):
                set_up(threads)
                found.append(measure_chain(benchmark, program, threads, options, part))
        for title in sizes_of(part, options):
            times = [one[title] for one in found]
            add_speed(benchmark, f"{part}: all, {title}, {counted(threads)}", times)


def part_products(benchmark: Benchmark, options: argparse.Namespace) -> None:
    part_chains(benchmark, options, "products", PRODUCTS)


# -- new shapes ---------------------------------------------------------------------------------


def new_shapes(count: int) -> list[tuple[int, int, int]]:
    """Different ones, of 1 KB to 2 MB."""
    chosen = random.Random(SEED)
    found: dict[tuple[int, int, int], None] = {}
    while len(found) < count:
        found[chosen.randint(1, 16), chosen.randint(4, 128), chosen.randint(64, 256)] = None
    return list(found)


def normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(layer_norm(x * 2 + 1, weight, bias)) + x


def timed(call: Task) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1000


def first_and_repeated(
    function: Callable[..., Any], shapes: Sequence[tuple[int, int, int]]
) -> tuple[list[float], list[float]]:
    """Microseconds of the first and of the third call at each shape."""
    base = [torch.randn(16 * 128 * 256), torch.randn(256), torch.randn(256)]
    first, repeated = [], []
    with no_collection():
        for batch, length, width in shapes:
            x = base[0][: batch * length * width].view(batch, length, width)
            arguments = x, base[1][:width], base[2][:width]
            call = functools.partial(function, *arguments)
            first.append(timed(call))
            timed(call)
            repeated.append(timed(call))
    return first, repeated


def part_shapes(benchmark: Benchmark, options: argparse.Namespace) -> None:
    set_up(1)
    shapes = new_shapes(200 if options.quick else NEW_SHAPES)
    functions: dict[str, Callable[..., Any]] = {
        "eager": normed,
        "magjit": magjit.compile(normed, backend="dvm", dynamic=True),
    }
    if "inductor-dynamic" in options.peers:
        functions["inductor-dynamic"] = torch.compile(another(normed, "new_shapes"), dynamic=True)
    rows: dict[str, dict[str, float]] = {}
    for name, function in functions.items():
        first_and_repeated(function, shapes[:50])
        before = resident()
        first, repeated = first_and_repeated(function, shapes[50:])
        after = resident()
        found = {"rss_before_mb": before / 1e6, "rss_growth_mb": (after - before) / 1e6}
        found |= {"first_us_p50": percentile(first, 0.5), "first_us_p99": percentile(first, 0.99)}
        found |= {"repeated_us_p50": percentile(repeated, 0.5)}
        for metric, value in found.items():
            rows.setdefault(metric, {})[name] = value
    case = f"shapes: {len(shapes)}, 1 thread"
    for metric, values in rows.items():
        unit = "MB" if metric.endswith("mb") else "µs"
        benchmark.add(Row.of(case, metric, unit, values))
    captures = magjit.stats(functions["magjit"]).captures
    benchmark.add(Row(case, "captures", "count", captures))


# -- varied sizes through a model ---------------------------------------------------------------


def part_varied(benchmark: Benchmark, options: argparse.Namespace) -> None:
    for threads in options.threads:
        set_up(threads)
        count = 6 if options.quick else 40
        runs: dict[str, dict[str, Any]] = {}
        for name in ("eager", "magjit", "inductor-dynamic"):
            if name == "magjit" or name in options.peers:
                runs[name] = dvm_models.varied(name, count)
        case = f"varied: BERT-12, {count} shapes, {counted(threads)}"
        notes = [f"{name}: {note}" for name, run in runs.items() for note in run["notes"]]
        for metric, unit in dvm_models.VARIED.items():
            values = {name: run[metric] for name, run in runs.items() if metric in run}
            benchmark.add(Row.of(case, metric, unit, values, "; ".join(notes)))


# -- models -------------------------------------------------------------------------------------


def part_models(benchmark: Benchmark, options: argparse.Namespace) -> None:
    for size in options.model_sizes:
        for name in options.models:
            if name in dvm_models.COLD:
                with benchmark.console.status(f"{name}, {size}, cold"):
                    dvm_models.add_cold(benchmark, __file__, name, size, options)
        for threads in options.threads:
            for name in options.models:
                with benchmark.console.status(f"{name}, {size}, {threads}"):
                    set_up(threads)
                    case = f"models: {name}, {size}, {counted(threads)}"
                    dvm_models.add_steady(benchmark, case, name, size, options)


def part_training(benchmark: Benchmark, options: argparse.Namespace) -> None:
    for threads in options.threads:
        set_up(threads)
        case = f"training: BERT-12x64, {counted(threads)}"
        with benchmark.console.status(case):
            dvm_training.add_training(benchmark, case, options)
    dvm_training.add_coverage(benchmark)


PARTS: dict[str, Callable[[Benchmark, argparse.Namespace], None]] = {
    "sets": part_sets,
    "chains": part_chains,
    "products": part_products,
    "shapes": part_shapes,
    "models": part_models,
    "varied": part_varied,
    "training": part_training,
}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, help="of the chains")
    parser.add_argument("--programs", nargs="+", choices=[one.name for one in (*CHAINS, *PRODUCTS)])
    names = list(dvm_models.MODELS)
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--model-sizes", nargs="+", choices=("small", "full"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="few shapes, sizes and rounds")
    parser.add_argument("--keep", action="store_true", help="rows of other parts stay in FILE")
    names = list(dvm_gpu_models.MODELS)
    parser.add_argument("--gpu-models", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--one", nargs=4, metavar="ARG", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (3 if options.quick else ROUNDS)
    options.sizes = options.sizes or (QUICK_SIZES if options.quick else list(SIZES))
    options.model_sizes = options.model_sizes or (["small"] if options.quick else ["small", "full"])
    return options


def part_gpu_chains(benchmark: Benchmark, options: argparse.Namespace) -> None:
    dvm_gpu.part_gpu(benchmark, dvm_gpu.quick() if options.quick else dvm_gpu.chosen([]))


def part_gpu_shapes(benchmark: Benchmark, options: argparse.Namespace) -> None:
    dvm_gpu_shapes.part_new_shapes(benchmark, options)
    dvm_gpu_sets.part_small(benchmark, options)


GPU_PARTS: dict[str, Callable[[Benchmark, argparse.Namespace], None]] = {
    "chains": part_gpu_chains,
    "shapes": part_gpu_shapes,
    "sets": dvm_gpu_sets.part_sets,
    "models": dvm_gpu_models.part_models,
}


def on_gpu(options: argparse.Namespace) -> int:
    """The parts for GPUs that are asked for; 2 where there is none."""
    if reason := dvm_gpu.why_not():
        print(reason, file=sys.stderr)
        return 2
    with torch.no_grad():
        benchmark = Benchmark.start(options)
        benchmark.rows += earlier_rows(options.json, lambda _row: options.keep)
        dvm_gpu_all.compile_kernels()
        for name, part in GPU_PARTS.items():
            if name in options.only:
                part(benchmark, options)
                benchmark.write(quiet=True)
        benchmark.finish()
    return int(any("magjit" in row.note for row in benchmark.rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts; 1 when a result of MagJIT's was not eager's. As a child, one cold start."""
    options = parsed(arguments)
    if options.device == "cuda":
        os.environ |= {"MAGJIT_DVM_CUDA": "1", "MAGJIT_DVM_WAIT": "1"}
        return on_gpu(options)
    with torch.no_grad():
        if options.one:
            set_up(int(options.one[3]))
            json.dump(dvm_models.cold(*options.one[:3]), sys.stdout)
            return 0
        benchmark = Benchmark.start(options)
        if options.keep:
            benchmark.rows += earlier_rows(
                options.json, lambda row: row["case"].partition(":")[0] not in options.only
            )
        for part in options.only:
            PARTS[part](benchmark, options)
            torch.set_num_threads(max(options.threads))  # what the file says of the machine
            benchmark.write()
    benchmark.finish()
    return int(any("magjit" in row.note for row in benchmark.rows))


if __name__ == "__main__":
    raise SystemExit(main())
