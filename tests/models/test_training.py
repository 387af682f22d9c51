"""Training mode: loss, every gradient and two optimizer steps are eager's, dropout included."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from agreement import differences, module_state

from .zoo import EXAMPLES, TRANSFORMERS, Model

STEPS = 3


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result that have a gradient."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
        return
    if dataclasses.is_dataclass(output):
        output = vars(output)
    items = output.values() if isinstance(output, dict) else output
    for item in items if isinstance(items, list | tuple | type({}.values())) else ():
        yield from tensors(item)


class Trainer:
    """A model, its optimizer, and one step of training that returns the loss and the gradients."""

    def __init__(self, model: nn.Module, call: Any) -> None:
        self.model, self.call = model, call
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(self, number: int, args: Any, kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(number)
        self.optimizer.zero_grad()
        output = self.call(*args, **kwargs)
        loss = torch.stack([part.square().mean() for part in tensors(output)]).sum()
        loss.backward()
        gradients = {name: value.grad for name, value in self.model.named_parameters()}
        seen = {name: None if grad is None else grad.clone() for name, grad in gradients.items()}
        self.optimizer.step()
        return loss.detach(), seen


LIKE_OTHERS = {f"example {name}" for name in ("TridentNet", "DenseNet-121", "ALIGN", "ResNet-101")}
"""Their gradients are those of tests/test_examples.py, and their steps like the others'."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[pytest.mark.slow] if row.name in LIKE_OTHERS else [])
        for row in TRANSFORMERS + EXAMPLES
    ],
    ids=lambda row: row.name,
)
def test_training(row: Model, recwarn: pytest.WarningsRecorder) -> None:
    eager, model = row.make().train(), row.make()
    compiled = magjit.compile(model, backend="eager", fullgraph=not row.splits_in_training)
    compiled.train()
    assert model.training
    trainers = Trainer(eager, eager), Trainer(model, compiled)
    for number in range(STEPS):
        inputs = row.inputs()
        expected, actual = (trainer.step(number, *inputs) for trainer in trainers)
        assert not list(differences(expected, actual, "loss and gradients"))
        assert any(grad is not None for grad in actual[1].values())
        assert not list(differences(module_state(eager), module_state(model), "state"))
        assert not list(differences(eager.state_dict(), model.state_dict(), "weights"))
    stats = magjit.stats(compiled)
    if row.splits_in_training:
        assert stats.splits >= 1 and stats.regions >= 1 and stats.eager_calls == 0
        assert not [w for w in recwarn if w.category is magjit.MagJITWarning]
    else:
        assert (stats.captures, stats.replays, stats.splits) == (1, STEPS - 1, 0)
