"""The operator sets of DVM's paper on a GPU, and operators over small tensors.

sets   60 random shapes of the paper's ranges (Table 2) in float16: time on the GPU as in `dvm_gpu`,
       where a copy, eager mode and Inductor take turns; `inductor-static` is compiled for every
       second shape; `first_calls_s` is the time of all first calls at a shape, on the host
small  four operators over 60 to 140 KB, a call after the other, and within a CUDA graph; and four
       fused operators of which none needs another
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import magjit
from dvm_cases import balanced, if_else_add, layer_norm, matmul
from dvm_gpu import agrees, microseconds
from dvm_gpu_shapes import four_operators
from dvm_peers import add_speed, another, dvm, geomean
from harness import Benchmark, Row, median_times

SEED = 1
SHAPES, QUICK = 60, 6
STATIC = 2
TURNS = 7
CHECKED_ROWS = 512
MATRICES = (
    (4096, 4096),
    (11008, 4096),
    (4096, 11008),
    (5120, 5120),
    (13696, 5120),
    (5120, 13696),
    (8192, 8192),
    (28672, 8192),
    (8192, 28672),
)
"""(n, k) of layers of language models."""
SMALL = 40
"""Sizes."""
GROUPS = 50
"""Fused operators within a CUDA graph."""

Arguments = tuple[Any, ...]


# -- the sets -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuSet:
    """A function, how a call's arguments are drawn, and which of them have the result's rows."""

    name: str
    function: Callable[..., Tensor]
    draw: Callable[[random.Random], Arguments]
    with_rows: tuple[int, ...] = (0,)


def layer_norm_written(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    apart = x - mean
    variance = (apart * apart).mean(-1, keepdim=True)
    return apart * torch.rsqrt(variance + 1e-5) * weight + bias


def addmm(x: Tensor, weight: Tensor, added: Tensor) -> Tensor:
    return torch.addmm(added, x, weight)


def mm_add_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(torch.mm(x, weight) + bias)


def half(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def draw_norm(chosen: random.Random) -> Arguments:
    batch, width = chosen.randint(1, 60), chosen.choice((1024, 2048, 3072, 4096))
    return half(batch, 8192, width), half(width), half(width)


def draw_branch(chosen: random.Random) -> Arguments:
    shape = tuple(chosen.randint(1, most) for most in (256, 512, 8192))
    return half(*shape), half(*shape), chosen.random() < 0.5


def draw_product(chosen: random.Random) -> Arguments:
    n, k = chosen.choice(MATRICES)
    return half(chosen.randint(1, 8192), k), half(k, n).mul_(k**-0.5)


def draw_addmm(chosen: random.Random) -> Arguments:
    x, weight = draw_product(chosen)
    return x, weight, half(len(x), weight.shape[1])


def draw_biased(chosen: random.Random) -> Arguments:
    x, weight = draw_product(chosen)
    return x, weight, half(weight.shape[1])


SETS = (
    GpuSet("LayerNorm", layer_norm, draw_norm),
    GpuSet("LayerNorm, written out", layer_norm_written, draw_norm),
    GpuSet("if-else-add", if_else_add, draw_branch, (0, 1)),
    GpuSet("matmul", matmul, draw_product),
    GpuSet("addmm", addmm, draw_addmm, (0, 2)),
    GpuSet("mm, add, gelu", mm_add_gelu, draw_biased),
)


def wrong(operators: GpuSet, arguments: Arguments, found: Tensor) -> bool:
    """Whether the last rows of a result are not those of the function in float32."""

    def last(one: Tensor) -> Tensor:
        return one.reshape(-1, one.shape[-1])[-CHECKED_ROWS:]

    given = [
        last(one).float()
        if at in operators.with_rows
        else (one.float() if isinstance(one, Tensor) else one)
        for at, one in enumerate(arguments)
    ]
    return not agrees(last(found), operators.function(*given))


def measure_set(benchmark: Benchmark, operators: GpuSet, options: argparse.Namespace) -> float:
    """Rows of one set; how many times as long as MagJIT dynamic Inductor takes."""
    chosen = random.Random(SEED)
    torch.manual_seed(SEED)
    count = QUICK if options.quick else SHAPES
    compiled: dict[str, Callable[..., Any]] = {
        "magjit": magjit.compile(operators.function, backend="dvm", dynamic=True),
        "eager": operators.function,
    }
    if "inductor-dynamic" in options.peers:
        torch._dynamo.reset()
        dynamic = torch.compile(another(operators.function, "dynamic"), dynamic=True)
        compiled["inductor-dynamic"] = dynamic
    first, times = dict.fromkeys(compiled, 0.0), list[dict[str, float]]()
    notes = list[str]()
    for number in range(count):
        arguments = operators.draw(chosen)
        for name, function in compiled.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            function(*arguments)
            torch.cuda.synchronize()
            first[name] += time.perf_counter() - start
        if wrong(operators, arguments, compiled["magjit"](*arguments)):
            notes.append(f"magjit: {tuple(arguments[0].shape)} is not eager's in float32")
        runs = dict(compiled)
        if "inductor-static" in options.peers and number % STATIC == 0:
            function = another(operators.function, f"static_{number}")
            runs["inductor-static"] = torch.compile(function, dynamic=False)
        tasks: dict[str, Callable[[], Any]] = {
            name: functools.partial(function, *arguments) for name, function in runs.items()
        }
        times.append(microseconds(tasks, TURNS))
    case = f"sets: {operators.name}, float16, {count} shapes"
    add_speed(benchmark, case, times, "; ".join(notes[:3]))
    total = {name: sum(one[name] for one in times) / 1000 for name in compiled}
    benchmark.add(Row.of(case, "gpu_ms", "ms", total))
    benchmark.add(Row.of(case, "first_calls_s", "s", first))
    ratios = [one["inductor-dynamic"] / one["magjit"] for one in times if len(one) > 2]
    return geomean(ratios) if "inductor-dynamic" in options.peers else 1.0


def part_sets(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """All sets, and the geometric mean of what dynamic Inductor takes."""
    found = []
    for operators in SETS:
        with benchmark.console.status(operators.name):
            found.append(measure_set(benchmark, operators, options))
        benchmark.write(quiet=True)
    if "inductor-dynamic" in options.peers:
        peers = {"inductor-dynamic": geomean(found)}
        benchmark.add(Row("sets: all, float16", "speed", "× MagJIT's time", 1.0, peers))


# -- small tensors --------------------------------------------------------------------------------


def repeated(function: Callable[..., Any], given: list[Arguments]) -> Callable[[], None]:
    """A call for each of the arguments, then a wait for the GPU."""

    def run() -> None:
        for x in given:
            function(*x)
        torch.cuda.synchronize()

    return run


def captured(function: Callable[..., Any], given: Arguments) -> torch.cuda.CUDAGraph:
    """A CUDA graph of some calls, each on what the one before computed."""

    def called(x: Arguments) -> Arguments:
        found = function(*x)
        return found if isinstance(found, tuple) else (found,)

    called(called(given))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        called(called(given))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = given
        for _ in range(GROUPS):
            y = called(y)
    return graph


def independent(*given: Tensor) -> Arguments:
    """Fused operators of which none needs another."""
    return tuple(four_operators(x) for x in given)


def small_calls(
    benchmark: Benchmark, case: str, function: Any, given: list[Arguments], peers: list[str]
) -> None:
    """Microseconds of a call, end to end, and of one in a CUDA graph."""
    compiled: dict[str, Callable[..., Any]] = {
        "magjit": magjit.compile(function, backend="dvm", dynamic=True),
        "eager": function,
    }
    if "inductor-dynamic" in peers:
        torch._dynamo.reset()
        compiled["inductor-dynamic"] = torch.compile(another(function, "small"), dynamic=True)
    tasks = {name: repeated(one, given) for name, one in compiled.items()}
    for task in tasks.values():
        task()
    for x in given:
        torch.testing.assert_close(compiled["magjit"](*x), function(*x), rtol=2e-3, atol=2e-3)
    times = median_times(tasks, rounds=41, seconds=0.02)
    values = {name: value / len(given) for name, value in times.items()}
    benchmark.add(Row.of(case, "call_us", "µs", values))
    graphs = {name: captured(one, given[0]) for name, one in compiled.items()}
    times = microseconds({name: graph.replay for name, graph in graphs.items()}, 41)
    values = {name: value / GROUPS for name, value in times.items()}
    benchmark.add(Row.of(f"{case}, in a CUDA graph", "group_us", "µs", values))


def part_small(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """A fused operator over 100 KB, four that do not depend on one another, eight that do."""
    chosen = random.Random(SEED)
    one = [(half(50, 1024),)] + [(half(chosen.randint(30, 70), 1024),) for _ in range(SMALL - 1)]
    case = "shapes: 4 operators, 100 KB, float16"
    small_calls(benchmark, case, four_operators, one, options.peers)
    for each in (8, 16):
        dvm("cuda.launch").gpu(0).function(each, False, dvm("cuda.forms").STACKED)
    rows = [chosen.sample(range(30, 71), 4) for _ in range(SMALL)]
    several = [tuple(half(count, 1024) for count in counts) for counts in rows]
    case = "shapes: 4 × 4 operators, 100 KB each, float16"
    small_calls(benchmark, case, independent, several, options.peers)
    # Not half(): sums of exponentials, in the range of float32.
    tables = [(torch.randn(chosen.randint(6, 16), 12, device="cuda"),) for _ in range(SMALL)]
    case = "shapes: rows and columns by their sums, 4 times, 6 to 16 × 12, float32"
    small_calls(benchmark, case, balanced, tables, options.peers)
