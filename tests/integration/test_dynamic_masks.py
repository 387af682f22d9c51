"""Sizes that change from call to call beside sizes that depend on data: one record serves both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import magjit

SIZES = (6, 7, 9, 12, 7, 5, 6)


def masked(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    y = (x * 2).relu() + 1
    keep = t >= 0
    return y[keep] * 2 + y[:1], y, y[keep].sum(0)


def loss(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    y = x.softmax(1) * 3
    return F.cross_entropy(y[t >= 0], t[t >= 0]) / x.shape[0], y.sum()


def in_place(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    y = x.exp() + 1
    y[t >= 0] = y[t >= 0] * 2
    y.sub_(y[t >= 0].mean(0))
    return y, y.shape[0] * y[1:]


def by_sizes(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    n, c = x.shape
    y = x.sin() * n
    found = (t >= 0).nonzero()[:, 0]
    return torch.cat([y, y[found]]).view(-1, c), y.new_zeros(n, c).index_add(0, found, y[found])


def joined(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    y = (x * 2 - 1).tanh()
    values, counts = torch.unique(t, return_counts=True)
    return torch.cat([x, y, y[t > 0]]), values + len(x), counts


def by_a_loop(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    y = x * 2 + 1
    out = y.clone()
    for k in range(2):
        at = t == k
        out[at] = out[at] - y[at].mean(0)
    return out, y.sum(1)


def cut_behind(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    y = x.sigmoid() * 2
    found = y[t >= 0] + 1
    if t[0].item() > 100:
        return found, y
    z = found.sin() * 2 + found.mean()
    return z, y * z.mean()


PROGRAMS: list[Callable[..., Any]] = [masked, loss, in_place, by_sizes, joined, by_a_loop]


def given(size: int, seed: int, gradients: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x, t = torch.randn(size, 4).requires_grad_(gradients), torch.randint(-1, 3, (size,))
    t[:3] = torch.tensor([0, 1, -1])
    return x, t


def outcome(function: Callable[..., Any], x: Tensor, t: Tensor) -> Any:
    results = function(x, t)
    floats = [one.sum() for one in results if one.requires_grad]
    if floats:
        torch.stack(floats).sum().backward()
    return [one.detach() for one in results], x.grad


def check(program: Callable[..., Any], backend: str, gradients: bool) -> Any:
    compiled = magjit.compile(program, backend=backend)
    for seed, size in enumerate(SIZES):
        found = outcome(compiled, *given(size, seed, gradients))
        wanted = outcome(program, *given(size, seed, gradients))
        torch.testing.assert_close(found, wanted, msg=lambda m, n=size: f"of {n}: {m}")
    return magjit.stats(compiled)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", ["eager", "dvm", "triton"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_two_captures_are_enough(program: Any, backend: str, gradients: bool) -> None:
    stats = check(program, backend, gradients)
    assert (stats.captures, stats.replays, stats.eager_calls) == (2, len(SIZES) - 2, 0)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", ["eager", "dvm"])
def test_a_program_that_is_cut_behind_a_mask(backend: str, gradients: bool) -> None:
    stats = check(cut_behind, backend, gradients)
    assert stats.splits and stats.eager_calls < len(SIZES)


def test_what_a_shape_says_is_not_taken_from_a_mask() -> None:
    """What reads a size that depends on data is cut, with sizes that are symbols, too."""

    def program(x: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        found = (x * 2 + 1)[t >= 0]
        return (found * found.shape[0], x * len(x))

    check(program, "dvm", gradients=False)
