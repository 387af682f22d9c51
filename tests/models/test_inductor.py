"""Inductor behind the same front end: inference and training of a few models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from agreement import differences, module_state
from examples.models import build

from .test_training import Trainer

pytestmark = pytest.mark.slow
CLOSE = (1e-3, 1e-4)


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).eval(), torch.randn(6, 8)


def small_bert() -> tuple[nn.Module, torch.Tensor]:
    model, (tokens,) = build("BERT")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # Inductor draws other random numbers, as under torch.compile
    return model, tokens


MODELS = {"perceptron with batch norm": perceptron, "BERT": small_bert}


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    model, x = MODELS[name]()
    compiled = magjit.compile(model, backend="inductor", fullgraph=True)
    with torch.no_grad():
        for given in (x, x.flip(0), x.flip(-1)):
            assert not list(differences(model(given), compiled(given), tolerance=CLOSE))
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays) == (1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_training(name: str) -> None:
    eager, x = MODELS[name]()
    model = copy.deepcopy(eager)
    compiled: Any = magjit.compile(model, backend="inductor", fullgraph=True)
    trainers = Trainer(eager.train(), eager), Trainer(model.train(), compiled)
    for number, given in enumerate((x, x.flip(0), x.flip(-1))):
        expected, actual = (trainer.step(number, (given,), {}) for trainer in trainers)
        assert not list(differences(expected, actual, "loss and gradients", CLOSE))
        assert not list(differences(module_state(eager), module_state(model), "state", CLOSE))
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays) == (1, 2)


def test_the_first_backward_belongs_to_the_run_itself() -> None:
    """The capture's own result has eager's graph, the replay's that of AOTAutograd."""
    model, x = perceptron()
    compiled = magjit.compile(model, backend="inductor", fullgraph=True)
    gradients = []
    for _ in range(3):
        given = x.clone().requires_grad_()
        compiled(given).square().sum().backward()
        gradients.append(given.grad)
    assert not list(differences(gradients[0], gradients[1], tolerance=CLOSE))
    assert torch.equal(gradients[1], gradients[2])
