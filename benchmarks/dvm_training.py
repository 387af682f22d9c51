"""BERT trained for 50 steps: eager's losses, and the time of a step.

loss_apart     largest difference of a step's loss from eager's, relative
step_ms        median of the steps after the first five
in_vm          share of the operators, as in `dvm_models`, of forward and backward
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from dvm_models import MODELS, built, compiled_by, in_machine, schedules
from harness import Benchmark, Row
from models import small_bert

STEPS, WARM = 50, 5
BATCH, LENGTH, CLASSES = 8, 16, 10


class Trainee:
    """A model in training; weights, batches and dropout are the same for every compiler."""

    def __init__(self, compiler: str) -> None:
        torch.manual_seed(0)
        self.model = small_bert()[0].train()
        self.head = torch.nn.Linear(64, CLASSES)
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        self.compiled = compiled_by(compiler, self.model)
        self.batches = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        self.drawn = torch.get_rng_state()  # dropout goes on from here
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self) -> None:
        ids = torch.randint(0, 100, (BATCH, LENGTH), generator=self.batches)
        wanted = ids[:, 0] % CLASSES
        torch.set_rng_state(self.drawn)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.head(self.compiled(ids).pooled), wanted)
        loss.backward()
        self.optimizer.step()
        self.times.append(time.perf_counter() - start)
        self.losses.append(loss.item())
        self.drawn = torch.get_rng_state()

    def step_ms(self) -> float:
        """The median of the steps after the first."""
        return statistics.median(self.times[WARM:]) * 1e3


def add_training(benchmark: Benchmark, case: str, options: argparse.Namespace) -> None:
    """Rows of the losses and times of each contestant."""
    count = 2 * WARM if options.quick else STEPS
    before = {id(one) for one in schedules()}
    compilers = ("eager", "magjit", *({"inductor-static"} & set(options.peers)))
    found = {compiler: Trainee(compiler) for compiler in compilers}
    with torch.enable_grad():
        for turn in range(count):
            for compiler in compilers if turn % 2 == 0 else compilers[::-1]:
                found[compiler].step()
    share, rest = in_machine([one for one in schedules() if id(one) not in before])
    left = ", ".join(f"{n} {name}" for name, n in rest.most_common(6))
    apart: dict[str, float] = {}
    notes = []
    for compiler, one in found.items():
        pairs = zip(one.losses, found["eager"].losses, strict=True)
        apart[compiler] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        if compiler == "magjit" and not apart[compiler] < 1e-3:
            notes.append("magjit: another loss curve")
    times = {compiler: one.step_ms() for compiler, one in found.items()}
    benchmark.add(Row.of(case, "loss_apart", "relative", apart, "; ".join(notes)))
    benchmark.add(Row.of(case, "step_ms", "ms", times))
    benchmark.add(Row(case, "in_vm", "share", share, note=f"outside: {left}" if left else ""))


def add_coverage(benchmark: Benchmark) -> None:
    """What the virtual machine runs of the models' forward and backward passes in training."""
    for name in MODELS:
        model, arguments = built(name, "small")
        arguments = tuple(torch.cat([one, one]) for one in arguments)  # batches that norms take
        compiled = compiled_by("magjit", model.train())
        before = {id(one) for one in schedules()}
        with torch.enable_grad():
            for _ in range(2):
                result = compiled(*arguments)
                leaves = tree_leaves(getattr(result, "pooled", result))
                sum(one.sum() for one in leaves if one.requires_grad).backward()
        share, rest = in_machine([one for one in schedules() if id(one) not in before])
        left = ", ".join(f"{n} {operator}" for operator, n in rest.most_common(6))
        note = f"outside: {left}" if left else ""
        benchmark.add(Row(f"training: {name}, small", "in_vm", "share", share, note=note))
