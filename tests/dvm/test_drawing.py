"""Random numbers are eager's to the bit: which are drawn, in which order, and what comes after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm.backend import schedules


def given(layout: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.Generator().manual_seed(1)
    if layout == "transposed":
        return torch.randn(6, 5, 4, generator=made).to(dtype).transpose(0, 2)
    if layout == "sliced":
        return torch.randn(4, 10, 6, generator=made).to(dtype)[:, ::2]
    if layout == "channels last":
        x = torch.randn(4, 5, 6, 2, generator=made).to(dtype)
        return x.contiguous(memory_format=torch.channels_last)
    return torch.randn(4, 5, 6, generator=made).to(dtype)


def check(program: Callable[..., Any], x: torch.Tensor, grad: bool) -> None:
    """Replays draw what eager draws and leave the generator where eager leaves it."""
    compiled = magjit.compile(program, backend="dvm")
    tolerance = 2e-2 if x.dtype in (torch.float16, torch.bfloat16) else 1e-5
    with torch.set_grad_enabled(grad):
        for seed in range(3):
            ours, eagers = (x.detach().requires_grad_(grad) for _ in range(2))
            torch.manual_seed(seed)
            wanted, state = program(eagers), torch.get_rng_state()
            torch.manual_seed(seed)
            results = compiled(ours)
            assert torch.equal(torch.get_rng_state(), state)
            pairs = zip(results, wanted, strict=True) if isinstance(wanted, tuple) else ()
            for got, one in pairs or [(results, wanted)]:
                torch.testing.assert_close(got, one, rtol=tolerance, atol=tolerance)
                assert got.stride() == one.stride()
            if grad and not isinstance(wanted, tuple):
                wanted.sum().backward()
                results.sum().backward()
                torch.testing.assert_close(ours.grad, eagers.grad, rtol=tolerance, atol=tolerance)
    assert magjit.stats(compiled).captures == 1


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout(dtype: torch.dtype, layout: str, grad: bool) -> None:
    check(lambda x: F.dropout(x * 2, 0.3).relu(), given(layout, dtype), grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: F.alpha_dropout(x, 0.5, training=True) + 1,
        lambda x: F.dropout1d(x, 0.5) * 2,
        lambda x: F.dropout(F.dropout(x, 0.5), 0.25),
        lambda x: F.dropout(x, 0.5, training=False) + F.dropout(x, 0.0) + F.dropout(x, 1.0),
        lambda x: x + torch.empty_like(x).bernoulli_(0.25),
        lambda x: x + torch.empty_like(x).bernoulli_(),
        lambda x: x + torch.bernoulli(x.detach(), 0.25),
        lambda x: torch.rand_like(x) + x,
        lambda x: (torch.rand_like(x) < 0.5) * x,
        lambda x: torch.randn_like(x) * x,
    ],
)
def test_draws(program: Callable[..., Any], layout: str, grad: bool) -> None:
    check(program, given(layout), grad)


def test_draws_in_order() -> None:
    """A group that waits for a later draw does not keep an earlier one waiting."""

    def program(x: torch.Tensor) -> Any:
        early = x * 2
        first = torch.rand_like(early @ early)
        second = torch.rand(3, 3)
        return first, second, early + second, torch.rand(3) + x

    check(program, torch.randn(3, 3), False)


def test_one_operator_draws_a_mask() -> None:
    before = {id(one) for one in schedules()}
    compiled = magjit.compile(lambda x: F.dropout(x * 2, 0.5) + x, backend="dvm")
    x = torch.randn(4, 6, requires_grad=True)
    compiled(x)
    compiled(x)
    made = [one for one in schedules() if id(one) not in before]
    sources = [one.source for one in made if "bernoulli" in one.source]
    assert len(sources) == 1
    assert "empty_like" not in sources[0]
