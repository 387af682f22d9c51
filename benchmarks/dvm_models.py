"""Whole models through the dvm backend: cold starts, steady state, what the machine runs of them.

cold_s         from `compile` to the end of the second call, in a process that has compiled another
               function before, with an empty cache folder of Inductor's
first_use_s    that other function, from `compile` to the end of its first call
run_ms         a warm call
in_vm          share of the operators, but for matrix products, convolutions, attention, views and
               allocations, that are part of a fused operator
operators      ATen operators dispatched in a warm call, views left out
"""

from __future__ import annotations

import argparse
import functools
import operator
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

import magjit
from agreement import differences
from compilers import warm_up
from dvm_networks import LlamaBlock, VisionTransformer
from dvm_peers import dvm
from harness import Benchmark, Row, add_medians, in_fresh_process, median_times
from models import MODELS as EXAMPLES
from models import ResNet, small_bert, small_resnet
from profiling import aten_operators, views

Example = tuple[nn.Module, tuple[Any, ...]]

TOLERANCE = (2e-3, 2e-3)
COLD = ("BERT-12", "ResNet-50", "LSTM")
LONGEST = 256
VARIED = {
    "captures": "count",
    "compile_s": "s",
    "first_ms_p50": "ms",
    "first_ms_max": "ms",
    "repeated_ms_p50": "ms",
    "first / repeated": "×",
    "total_s": "s",
}
# Parts of names: what an operator that works element by element or along rows is not.
OTHERS = ("mm", "linear", "conv", "attention", "lstm", "rnn", "embedding", "_unsafe_view")
NO_WORK = ("sym_size", "empty", "empty_like", "new_empty", "empty_strided")


# -- models ---------------------------------------------------------------------------------------


def bert(size: str) -> Example:
    if size == "full":
        return EXAMPLES["BERT"]("full")
    return small_bert()


def resnet(size: str) -> Example:
    if size == "full":
        return ResNet((3, 4, 6, 3)), (torch.randn(1, 3, 224, 224),)
    return small_resnet()


def lstm(size: str) -> Example:
    return EXAMPLES["LSTM tagger"]("full" if size == "full" else "small")


def vision(size: str) -> Example:
    if size == "full":
        return VisionTransformer(224, 16, 384, 12, 6), (torch.randn(1, 3, 224, 224),)
    return VisionTransformer(32, 8, 64, 6, 4), (torch.randn(1, 3, 32, 32),)


def llama(size: str) -> Example:
    if size == "full":
        return LlamaBlock(1024, 16, 2816), (torch.randn(1, 512, 1024),)
    return LlamaBlock(64, 4, 176), (torch.randn(2, 32, 64),)


MODELS: dict[str, Callable[[str], Example]] = {
    "BERT-12": bert,
    "ResNet-50": resnet,
    "LSTM": lstm,
    "ViT": vision,
    "Llama block": llama,
}


def built(name: str, size: str) -> Example:
    """A model in evaluation mode, always the same, and the arguments of a call."""
    torch.manual_seed(0)
    model, arguments = MODELS[name](size)
    return model.eval(), arguments


def compiled_by(compiler: str, model: Any, dynamic: bool | None = None) -> Callable[..., Any]:
    """A model as one of the contestants has it."""
    result: Callable[..., Any] = model
    if compiler == "magjit":
        result = magjit.compile(model, backend="dvm", dynamic=dynamic)
    elif compiler != "eager":
        result = torch.compile(model, dynamic=compiler == "inductor-dynamic")
    return result


# -- cold starts ----------------------------------------------------------------------------------


def cold(compiler: str, name: str, size: str) -> dict[str, Any]:
    """Seconds of a first use and of a model's first two calls, for a process of its own."""
    start = time.perf_counter()
    if compiler == "magjit":
        warm_up("magjit", "dvm")
    else:
        warm_up("torch.compile", "inductor")
    first_use = time.perf_counter() - start
    model, arguments = built(name, size)
    expected = model(*arguments)
    start = time.perf_counter()
    compiled = compiled_by(compiler, model)
    results = [compiled(*arguments) for _ in range(2)]
    taken = time.perf_counter() - start
    notes = [note for one in results for note in differences(expected, one, tolerance=TOLERANCE)]
    return {"cold_s": taken, "first_use_s": first_use, "notes": notes[:3]}


def add_cold(
    benchmark: Benchmark, script: str, name: str, size: str, options: argparse.Namespace
) -> None:
    """Rows of cold starts, medians over processes in turns."""
    compilers = ["magjit", *({"inductor-static"} & set(options.peers))]
    found: dict[str, list[dict[str, Any]]] = {compiler: [] for compiler in compilers}
    for turn in range(1 if options.quick else 3):
        for compiler in compilers if turn % 2 == 0 else compilers[::-1]:
            found[compiler].append(in_fresh_process(script, "--one", compiler, name, size, "1"))
    metrics = (("cold_s", "s"), ("first_use_s", "s"))
    add_medians(benchmark, f"models: {name}, {size}, 1 thread", found, metrics, "cold_s")


# -- steady state ---------------------------------------------------------------------------------


def add_steady(
    benchmark: Benchmark, case: str, name: str, size: str, options: argparse.Namespace
) -> None:
    """Rows of warm calls and of what the virtual machine runs."""
    model, arguments = built(name, size)
    expected = model(*arguments)
    tasks: dict[str, Callable[[], object]] = {}
    notes: list[str] = []
    before = {id(one) for one in schedules()}
    for compiler in ("magjit", *(one for one in options.peers if one in STEADY)):
        compiled = compiled_by(compiler, model)
        results = [compiled(*arguments) for _ in range(2)]
        wrong = [note for one in results for note in differences(expected, one, "", TOLERANCE)]
        notes += [f"{compiler}: {note}" for note in wrong[:1]]
        if not wrong:
            tasks[compiler] = functools.partial(compiled, *arguments)
    rounds = options.rounds if size == "small" else max(3, options.rounds // 2)
    times = median_times(tasks, rounds=rounds)
    times = {compiler: value / 1000 for compiler, value in times.items()}
    benchmark.add(Row.of(case, "run_ms", "ms", times, "; ".join(notes)))
    share, rest = in_machine([one for one in schedules() if id(one) not in before])
    left = ", ".join(f"{count} {operator}" for operator, count in rest.most_common(6))
    benchmark.add(Row(case, "in_vm", "share", share, note=f"outside: {left}" if left else ""))
    dispatched: dict[str, float] = {
        compiler: sum(aten_operators(tasks[compiler]).values())
        for compiler in ("magjit", "eager")
        if compiler in tasks
    }
    benchmark.add(Row.of(case, "operators", "count", dispatched))


STEADY = ("eager", "inductor-static")


def schedules() -> list[Any]:
    """The graphs of the backend that are in use."""
    try:
        found: list[Any] = dvm("backend").schedules()
    except KeyError:  # nothing has been compiled for it yet
        return []
    return found


def in_machine(made: list[Any]) -> tuple[float | None, Counter[str]]:
    """The share of the operators that are part of fused ones, and which are not."""
    inside, outside = 0, Counter[str]()
    for schedule in made:
        for step in schedule.fusion.steps:
            if isinstance(step, torch.fx.Node):
                outside.update(operators([step]))
            else:
                inside += len(list(operators(step.nodes)))
    total = inside + outside.total()
    return (inside / total if total else None), outside


def operators(nodes: list[torch.fx.Node]) -> Iterator[str]:
    """Names of the nodes' operators, less views and what is no vector operator."""
    for node in nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or schema.name in views():
            continue
        name = schema.name.removeprefix("aten::")
        if name not in NO_WORK and not any(other in name for other in OTHERS):
            yield name


# -- sizes that change ----------------------------------------------------------------------------


def varied_shapes(count: int) -> list[tuple[int, int]]:
    """Batch and length of each call, all different."""
    chosen = random.Random(1)
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        found[chosen.randint(1, 8), chosen.randint(16, LONGEST)] = None
    return list(found)


def varied(compiler: str, count: int) -> dict[str, Any]:
    """All metrics of BERT over sizes that change, then over the same sizes again.

    Each call comes after one in eager mode, so that caches and memory are in the same state.
    """
    torch.manual_seed(0)
    model = small_bert(positions=LONGEST)[0].eval()
    compiled = compiled_by(compiler, model, dynamic=True)
    counters.clear()
    start = time.perf_counter()
    compiled(torch.randint(0, 100, (3, 20)))
    compile_s = time.perf_counter() - start
    shapes, notes = varied_shapes(count), list[str]()
    turns: tuple[list[float], list[float]] = ([], [])
    for times in turns:
        for shape in shapes:
            ids = torch.randint(0, 100, shape)
            expected = model(ids)
            start = time.perf_counter()
            result = compiled(ids)
            times.append(time.perf_counter() - start)
            notes += differences(expected, result, tolerance=TOLERANCE)
    first, repeated = turns
    found: dict[str, Any] = {
        "compile_s": compile_s,
        "first_ms_p50": statistics.median(first) * 1e3,
        "first_ms_max": max(first) * 1e3,
        "repeated_ms_p50": statistics.median(repeated) * 1e3,
        "first / repeated": statistics.median(map(operator.truediv, first, repeated)),
        "total_s": sum(first) + sum(repeated),
        "notes": notes[:3],
    }
    if compiler == "magjit":
        found["captures"] = magjit.stats(compiled).captures
    elif compiler != "eager":
        found["captures"] = counters["stats"]["unique_graphs"]
    return found
