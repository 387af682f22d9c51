"""What a graph writes into its inputs: buffers of many layers by one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit_dvm.backend import schedules


class Counting(nn.Module):
    """Writes buffers in more than one way, and returns what one was."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(3))
        for name in ("calls", "turns"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_buffer("sum", torch.zeros(5))
        self.register_buffer("last", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.sum * 2
        for norm in self.norms:
            x = norm(x).relu()
        self.calls += 1
        self.turns += 2
        self.sum += x.detach().sum(0)
        self.last.copy_(x.detach()[0])
        return x, before, self.calls * 1


def sources(made: Callable[[], Any]) -> list[str]:
    before = {id(one) for one in schedules()}
    made()
    return [one.source for one in schedules() if id(one) not in before]


@pytest.mark.parametrize("gradients", [False, True])
def test_buffers_are_written_together(gradients: bool) -> None:
    torch.manual_seed(0)
    model = Counting().train()
    twin = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="dvm")

    def run() -> None:
        for turn in range(4):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(turn))
            with torch.set_grad_enabled(gradients):
                found, expected = compiled(x), twin(x)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(model.state_dict(), twin.state_dict())
            if gradients:
                for one in (found, expected):
                    one[0].square().sum().backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)

    made = "\n".join(sources(run))
    assert made.count("_foreach_copy__default([") == 1
    assert made.count("_foreach_add__Scalar([") == 1  # the norms' counts; two others alone
    assert magjit.stats(compiled).replays >= 2


def test_large_ones_and_views_are_written_alone() -> None:
    def program(x: torch.Tensor, state: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        state.mul_(2).add_(x)
        part[1:].add_(1)
        return (state * x).sum() + part.sum()

    compiled = magjit.compile(program, backend="dvm")

    def run() -> None:
        given = [torch.randn(300, 300), torch.randn(300, 300), torch.randn(4)]
        mine = [one.clone() for one in given]
        for _ in range(4):
            torch.testing.assert_close(compiled(*mine), program(*given))
            torch.testing.assert_close(mine, given)

    assert "_foreach" not in "\n".join(sources(run))


def test_what_is_written_is_not_read_meanwhile() -> None:
    """Buffers that change places, through views and as they are."""

    def program(x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        a, b, c, d = states
        old = a.clone()
        a.copy_(b.view(2, 3).t().reshape(6))
        b.copy_(c.view(3, 2).view(6))
        c.copy_(old * 1)
        d.copy_(c + x)
        return (a + b).sum() + d.view(2, 3).sum()

    compiled = magjit.compile(program, backend="dvm")
    states = [torch.arange(6.0) + 10 * k for k in range(4)]
    mine = [one.clone() for one in states]
    for turn in range(4):
        x = torch.full((6,), float(turn))
        torch.testing.assert_close(compiled(x, *mine), program(x, *states))
        torch.testing.assert_close(mine, states)


def test_versions_tell_of_writes() -> None:
    """Autograd sees that what it keeps has been changed."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).train()
    compiled = magjit.compile(model, backend="dvm")
    x = torch.randn(4, 3)
    compiled(x)  # the capture, as eager mode: its own kernels tell nobody
    for _ in range(2):
        scale = torch.ones(3, requires_grad=True)
        kept = [one for one in model.buffers() if one.dim()]
        uses = [(one * scale).sum() for one in kept]
        before = [one._version for one in model.buffers()]
        compiled(x)
        assert all(one._version > old for one, old in zip(model.buffers(), before, strict=True))
        for one in uses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one.backward()
