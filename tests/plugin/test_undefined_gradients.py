"""Gradients that eager mode leaves undefined, and those of zeros that it computes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magjit

BACKENDS = ["eager", "dvm", "triton"]


def weights(count: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 4, requires_grad=True) for _ in range(count)]


def heads(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    shared = torch.tanh(x @ u)
    return [shared @ v, torch.relu(shared @ w), (shared * 2).t()]


def stored(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    """What was made of a weight is seen, and no part of the result."""
    return [(x @ u).sigmoid(), v / v.norm(), w * 2]


def rounded(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    """The slope of what is rounded is zero, not undefined."""
    return [(x @ u).round(), (x @ u @ v).exp(), w.floor() + v]


def changed(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    y = x @ u
    y[1:] *= 2
    return [y, y[0] @ v, (w * 2).detach() + v, w.sum()]


def views(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    y = torch.exp(x @ u)
    return [y[1:], y.t(), v @ w, v.view(16)]


def apart(x: Tensor, u: Tensor, v: Tensor, w: Tensor) -> list[Tensor]:
    y = torch.where(x > 0, x @ u, torch.zeros_like(x))
    return [y.clamp(-1, 1), (v.sum(0) + w[0]).relu(), w[1:] * 2]


PROGRAMS = [heads, stored, rounded, changed, views, apart]


def gradients(
    function: Callable[..., list[Tensor]], asked: tuple[int, ...], *, leaves: bool
) -> list[Tensor | None]:
    given = weights()
    inputs = given if leaves else [one * 1 for one in given]
    results = function(torch.ones(4, 4) / 2, *inputs)
    torch.stack([results[one].sum() for one in asked]).sum().backward(retain_graph=True)
    first = [None if one.grad is None else one.grad.clone() for one in given]
    results[asked[0]].sum().backward()
    return [*first, *(one.grad for one in given)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("leaves", [True, False])
def test_of_eager_mode(program: Any, backend: str, *, leaves: bool) -> None:
    compiled = magjit.compile(program, backend=backend)
    for asked in [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)]:
        expected = gradients(program, asked, leaves=leaves)
        found = gradients(compiled, asked, leaves=leaves)
        assert [one is None for one in found] == [one is None for one in expected], asked
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_leaves_alone_what_was_not_used(backend: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.main(x).relu(), self.other(x).relu()

    model = Model()
    before = model.other.weight.detach().clone()
    compiled = magjit.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        compiled(torch.ones(4, 4))[0].sum().backward()
        optimizer.step()
    assert model.other.weight.grad is None and torch.equal(model.other.weight, before)


def test_nothing_outlives_a_call() -> None:
    compiled = magjit.compile(stored, backend="dvm")
    for _ in range(3):
        given = weights()
        results = compiled(torch.ones(4, 4), *given)
    seen = [weakref.ref(one) for one in (*results, *given)]
    results[0].sum().backward()
    del results, given
    gc.collect()
    assert not any(one() for one in seen)
