"""BERT trained for 50 steps: eager's losses, and the time of a step.

loss_apart     largest difference of a step's loss from eager's, relative
step_ms        median of the steps after the first five
in_vm          share of the operators, as in `dvm_models`, of forward and backward
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

from dvm_models import compiled_by, in_machine, schedules
from harness import Benchmark, Row
from models import small_bert

STEPS, WARM = 50, 5
BATCH, LENGTH, CLASSES = 8, 16, 10


def steps(compiler: str, count: int) -> tuple[list[float], float]:
    """Losses with dropout, weights and batches the same for every compiler; ms a step."""
    torch.manual_seed(0)
    model = small_bert()[0].train()
    head = torch.nn.Linear(64, CLASSES)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-3)
    compiled = compiled_by(compiler, model)
    made = torch.Generator().manual_seed(1)
    losses, times = [], []
    torch.manual_seed(2)  # dropout draws from here
    for _ in range(count):
        ids = torch.randint(0, 100, (BATCH, LENGTH), generator=made)
        wanted = ids[:, 0] % CLASSES
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(head(compiled(ids).pooled), wanted)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, statistics.median(times[WARM:]) * 1e3


def add_training(benchmark: Benchmark, case: str, options: argparse.Namespace) -> None:
    """Rows of the losses and times of each contestant."""
    count = 2 * WARM if options.quick else STEPS
    found: dict[str, tuple[list[float], float]] = {}
    before = {id(one) for one in schedules()}
    share: float | None = None
    with torch.enable_grad():
        for compiler in ("eager", "magjit", *({"inductor-static"} & set(options.peers))):
            torch._dynamo.reset()
            found[compiler] = steps(compiler, count)
            if compiler == "magjit":
                share, rest = in_machine([one for one in schedules() if id(one) not in before])
                left = ", ".join(f"{n} {name}" for name, n in rest.most_common(6))
    apart: dict[str, float] = {}
    notes = []
    for compiler, (losses, _) in found.items():
        pairs = zip(losses, found["eager"][0], strict=True)
        apart[compiler] = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        if compiler == "magjit" and not apart[compiler] < 1e-3:
            notes.append("magjit: another loss curve")
    times: dict[str, Any] = {compiler: ms for compiler, (_, ms) in found.items()}
    benchmark.add(Row.of(case, "loss_apart", "relative", apart, "; ".join(notes)))
    benchmark.add(Row.of(case, "step_ms", "ms", times))
    benchmark.add(Row(case, "in_vm", "share", share, note=f"outside: {left}" if left else ""))
