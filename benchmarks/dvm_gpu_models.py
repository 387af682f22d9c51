"""Whole models on a GPU at 25 random batch and sequence sizes: dvm beside torch.compile and eager.

total_s      25 calls, none at the size of another, first calls included
steady_ms    sum over the sizes of a warm call's median, in turns, the GPU waited for after each
graphed_ms   the same over the first sizes, with CUDA graphs (mode="reduce-overhead") on both sides

torch.compile is asked for dynamic sizes from the first call on, as MagJIT is. Results are compared
with eager's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magjit
from agreement import differences
from compilers import COMPILERS, compile_without_limit, disable_caches, warm_up
from dvm_networks import LlamaBlock, MixtureOfExperts
from harness import Benchmark, Row, in_fresh_process
from models import MODELS as EXAMPLES

SIZES, QUICK = 25, 4
GRAPHED = 6
SEED = 1
ROUNDS = 7
TOLERANCE = (3e-2, 3e-2)
BACKENDS = {"magjit": "dvm", "torch.compile": "inductor"}


@dataclass(frozen=True, slots=True)
class Model:
    """How a model is made, and a call's argument of drawn sizes."""

    build: Callable[[], nn.Module]
    draw: Callable[[random.Random], Tensor]
    dtype: torch.dtype = torch.float16
    training: bool = False


def tokens(chosen: random.Random) -> Tensor:
    return torch.randint(0, 1000, (chosen.randint(1, 16), chosen.randint(16, 256)))


def features(chosen: random.Random) -> Tensor:
    return torch.randn(chosen.randint(2048, 16384), 47104, device="cuda", dtype=torch.float16)


def states(chosen: random.Random) -> Tensor:
    shape = chosen.randint(1, 8), chosen.randint(32, 1024), 4096
    return torch.randn(shape, device="cuda", dtype=torch.float16)


def bert() -> nn.Module:
    return EXAMPLES["BERT"]("full")[0]


MODELS = {
    "BERT-base": Model(bert, tokens),
    "BERT-base, training": Model(bert, tokens, torch.bfloat16, training=True),
    "MMoE": Model(lambda: MixtureOfExperts(47104, 8, (512, 256), 3, 128), features),
    "Llama block": Model(lambda: LlamaBlock(4096, 32, 11008), states),
}


def made(model: Model) -> nn.Module:
    """On the GPU, always the same."""
    torch.manual_seed(0)
    built = model.build().to("cuda", model.dtype)
    return built.train() if model.training else built.eval()


def inputs(model: Model, count: int) -> list[Tensor]:
    """Arguments of calls at sizes of which none is that of another."""
    chosen = random.Random(SEED)
    torch.manual_seed(SEED)
    found: dict[torch.Size, Tensor] = {}
    while len(found) < count:
        x = model.draw(chosen).cuda()
        found.setdefault(x.shape, x)
    return list(found.values())


def step(model: nn.Module, call: Callable[..., Any], training: bool) -> Callable[[Tensor], Any]:
    """A forward pass, or a loss and its gradients, with dropout as a seed has it."""

    def infer(x: Tensor) -> Any:
        result = call(x)
        return getattr(result, "pooled", result)

    def train(x: Tensor) -> Tensor:
        model.zero_grad()
        torch.manual_seed(len(x))
        loss = F.cross_entropy(call(x).pooled.float(), x[:, 0] % 16)
        loss.backward()
        return loss.detach()

    return train if training else infer


def seconds(run: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, float]:
    """A call's result and time."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = run(x)
    torch.cuda.synchronize()
    return result, time.perf_counter() - start


def steady(runs: dict[str, Callable[[Tensor], Any]], calls: list[Tensor]) -> dict[str, float]:
    """Milliseconds of all calls, in the median of turns each."""
    total = dict.fromkeys(runs, 0.0)
    names = list(runs)
    for x in calls:
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(ROUNDS):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                times[name].append(seconds(runs[name], x)[1])
        for name in names:
            total[name] += statistics.median(times[name]) * 1e3
    return total


def measure(name: str, count: int) -> dict[str, Any]:
    """Values by metric and contestant; for a process that has compiled nothing yet."""
    disable_caches()
    compile_without_limit()
    model = MODELS[name]
    torch.set_grad_enabled(model.training)
    for one, backend in BACKENDS.items():
        warm_up(one, backend, "cuda", sizes=(3, 5, 3, 5))
    calls = inputs(model, count)
    eager = made(model)
    runs = {"eager": step(eager, eager, model.training)}
    expected = [runs["eager"](x) for x in calls]
    found: dict[str, Any] = {"total_s": {}, "notes": []}
    for compiler, backend in BACKENDS.items():
        ours = compiler == "magjit"
        each = made(model)
        call = COMPILERS[compiler](each, backend=backend, dynamic=True)
        runs[compiler] = run = step(each, call, model.training)
        total = 0.0
        for turn, (x, wanted) in enumerate(zip(calls, expected, strict=True)):
            result, taken = seconds(run, x)
            total += taken
            if ours or not model.training:  # torch.compile draws other numbers for dropout
                apart = differences(wanted, result, tolerance=TOLERANCE)
                found["notes"] += [f"{compiler}: call {turn}: {one}" for one in apart]
        found["total_s"][compiler] = total
        if ours:
            found["captures"] = magjit.stats(call).captures
    found["total_s"]["eager"] = sum(seconds(runs["eager"], x)[1] for x in calls)
    found["steady_ms"] = steady(runs, calls)
    if not model.training:
        found["graphed_ms"] = graphed(model, calls[:GRAPHED])
    return found


def graphed(model: Model, calls: list[Tensor]) -> dict[str, float]:
    """Warm calls with CUDA graphs on both sides."""
    torch._dynamo.reset()
    runs: dict[str, Callable[[Tensor], Any]] = {}
    for compiler, backend in BACKENDS.items():
        each = made(model)
        call = COMPILERS[compiler](each, backend=backend, dynamic=True, mode="reduce-overhead")
        runs[compiler] = step(each, call, training=False)
        for x in calls:
            for _ in range(4):
                runs[compiler](x)
    return steady(runs, calls)


def part_models(benchmark: Benchmark, options: argparse.Namespace) -> None:
    """All rows of the models that are asked for."""
    count = QUICK if options.quick else SIZES
    for name in options.gpu_models:
        case = f"models: {name}, {count} sizes"
        with benchmark.console.status(name):
            try:
                found = in_fresh_process(__file__, "--one", name, str(count))
            except RuntimeError as error:
                benchmark.add(Row(case, "total_s", "s", None, note=f"magjit: {str(error)[-300:]}"))
                continue
        notes = "; ".join(found["notes"][:3])
        benchmark.add(Row.of(case, "total_s", "s", found["total_s"], notes))
        benchmark.add(Row(case, "captures", "count", found["captures"]))
        for metric in ("steady_ms", "graphed_ms"):
            if metric in found:
                benchmark.add(Row.of(case, metric, "ms", found[metric]))
        benchmark.write(quiet=True)


def main() -> None:
    """One model, for a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SIZES"), required=True)
    name, count = parser.parse_args().one
    json.dump(measure(name, int(count)), sys.stdout)


if __name__ == "__main__":
    main()
