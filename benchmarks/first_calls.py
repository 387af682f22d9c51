"""How long the first call of a deep model takes; sizes are symbols from the first call on.

Beside torch.compile with Inductor, and with `aot_eager`, which generates no code: what is left
then is the tracing that all backends need.

first_call_s   from `compile` to the end of the first call, with its backward pass in training; in
               a process that has compiled another function before, without caches
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compilers import COMPILERS, disable_caches, warm_up
from dvm_networks import LlamaBlock
from harness import Benchmark, Row, argument_parser, in_fresh_process
from models import Bert, BertConfig

CONTESTANTS = {
    "magjit": ("magjit", "dvm"),
    "torch.compile": ("torch.compile", "inductor"),
    "aot_eager": ("torch.compile", "aot_eager"),
}
SECONDS = 240.0


def bert(layers: int) -> tuple[nn.Module, Tensor]:
    """Layers of width 64 over 16 tokens; dropout in training."""
    config = BertConfig(100, hidden=64, layers=layers, heads=4, intermediate=128, positions=64)
    return Bert(config), torch.randint(0, 100, (2, 16))


def llama(layers: int) -> tuple[nn.Module, Tensor]:
    """Blocks of width 64 over 16 tokens."""
    blocks = nn.Sequential(*(LlamaBlock(64, 4, 128) for _ in range(layers)))
    return blocks, torch.randn(2, 16, 64)


MODELS: dict[str, tuple[Callable[[int], tuple[nn.Module, Tensor]], tuple[int, ...]]] = {
    "BERT": (bert, (12, 24)),
    "Llama blocks": (llama, (8, 32)),
}
MODES = ("inference", "training")


def first_call(contestant: str, name: str, layers: int, mode: str) -> float:
    """Seconds; for a process that has compiled nothing yet."""
    disable_caches()
    torch.manual_seed(0)
    compiler, backend = CONTESTANTS[contestant]
    model, x = MODELS[name][0](layers)
    model.train(mode == "training")
    torch.set_grad_enabled(mode == "training")
    warm_up(compiler, backend, sizes=(3, 5))
    start = time.perf_counter()
    result: Any = COMPILERS[compiler](model, backend=backend, dynamic=True)(x)
    if mode == "training":
        getattr(result, "pooled", result).square().sum().backward()
    return time.perf_counter() - start


def measure(benchmark: Benchmark, name: str, layers: int, mode: str, rounds: int) -> None:
    taken: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    notes = []
    for turn in range(rounds):
        contestants = list(CONTESTANTS)
        for contestant in contestants if turn % 2 == 0 else reversed(contestants):
            arguments = (contestant, name, str(layers), mode)
            try:
                seconds = in_fresh_process(__file__, "--one", *arguments, seconds=SECONDS)
            except subprocess.TimeoutExpired:
                notes.append(f"{contestant}: not done after {SECONDS:.0f} s")
            else:
                taken[contestant].append(seconds)
    # The fastest: what else the machine does only adds to a time that is measured once.
    best = {name: min(seconds) for name, seconds in taken.items() if seconds}
    case = f"{name}, {layers} layers, {mode}"
    benchmark.add(Row.of(case, "first_call_s", "s", best, "; ".join(dict.fromkeys(notes))))
    benchmark.write(quiet=True)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--one", nargs=4, metavar="ARG", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contestant, name, layers, mode = options.one
        json.dump(first_call(contestant, name, int(layers), mode), sys.stdout)
        return
    benchmark = Benchmark.start(options)
    for name in options.models:
        for layers in MODELS[name][1]:
            for mode in options.modes:
                with benchmark.console.status(f"{name}, {layers} layers, {mode}"):
                    measure(benchmark, name, layers, mode, options.rounds)
    benchmark.finish()


if __name__ == "__main__":
    main()
