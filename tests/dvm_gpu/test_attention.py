"""Attention that a program writes out, by the flash kernel of GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit
from magjit_dvm.backend import schedules
from tests.dvm_cuda.test_attention import ATTENTION, BFLOAT, HALF, divided, merged

pytestmark = pytest.mark.gpu

INF, NAN = float("inf"), float("nan")
Function = Callable[..., Any]


def operands(
    dtype: torch.dtype, batch: int = 2, heads: int = 4, rows: int = 33, columns: int = 33
) -> list[torch.Tensor]:
    """Of 64 elements a head; of few bits, so that products of query and key are not rounded."""
    torch.manual_seed(0)
    sizes = [(batch, count, heads, 64) for count in (rows, columns, columns)]
    made = [torch.randint(-8, 9, one, device="cuda").to(dtype).transpose(1, 2) for one in sizes]
    return [made[0] / 16, made[1] / 4, made[2]]


def compiled(function: Function, *args: Any, **options: Any) -> tuple[Any, str]:
    """What has been called twice, and the schedules that were made for it."""
    before = schedules()
    made = magjit.compile(function, backend="dvm", fullgraph=True, **options)
    with torch.no_grad():
        for _ in range(2):
            made(*args)
    return made, "\n".join(one.source for one in schedules() if one not in before)


def check(made: Function, function: Function, *args: torch.Tensor) -> None:
    """No farther from what float64 gives than eager mode is, and a unit of the last place."""
    with torch.no_grad():
        found, eager = made(*args), function(*args)
        exact = function(*[one.double() for one in args])
    assert found.dtype == eager.dtype and found.stride() == eager.stride()
    last = torch.finfo(eager.dtype).eps * exact.abs().amax()
    assert (found - exact).abs().max() <= 1.2 * (eager - exact).abs().max() + last


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize("function", ATTENTION)
def test_what_is_attention(function: Function, dtype: torch.dtype, dynamic: bool | None) -> None:
    given = operands(dtype)
    made, source = compiled(function, *given, dynamic=dynamic)
    assert "= attention(" in source and "softmax" not in source
    check(made, function, *given)


def test_sizes() -> None:
    made, _ = compiled(divided, *operands(HALF), dynamic=True)
    for batch, heads, rows, columns in ((1, 1, 5, 9), (3, 2, 300, 17), (2, 5, 17, 1000)):
        check(made, divided, *operands(HALF, batch, heads, rows, columns))
    assert magjit.stats(made).captures <= 2


def test_operands_that_do_not_lie_in_16_bytes() -> None:
    made, _ = compiled(divided, *operands(HALF))
    for k in range(3):
        given = operands(HALF)
        sizes = (*given[k].shape[:3], 65)
        given[k] = torch.empty(sizes, dtype=HALF, device="cuda")[..., 1:].copy_(given[k])
        check(made, divided, *given)


def test_width_that_only_a_call_knows() -> None:
    made, source = compiled(divided, *operands(HALF), dynamic=True)
    assert "= attention(" in source
    for width in (20, 24, 40):
        given = [one[..., :width].contiguous() for one in operands(HALF)]
        check(made, divided, *given)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("number", [NAN, INF])
def test_numbers_that_are_not_finite(number: float, which: int) -> None:
    """NaN is where eager mode has it: of a row of the query, of a head's key or value."""
    made, _ = compiled(divided, *operands(HALF))
    given = operands(HALF)
    given[which] = given[which].clone()
    given[which][1, 2, 3, 4] = number
    with torch.no_grad():
        found, wanted = made(*given), divided(*given)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())


def test_cuda_graphs() -> None:
    given = operands(HALF)
    made, source = compiled(merged, *given, mode="reduce-overhead")
    assert "= attention(" in source
    for turn in range(4):
        given[0] = given[0] * (turn + 1) / 4
        check(made, merged, *given)


def test_scores_are_nowhere_in_memory() -> None:
    given = operands(HALF, heads=8, rows=2048, columns=2048)
    made, _ = compiled(merged, *given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        made(*given)
    scores = 2 * 8 * 2048 * 2048 * 2
    assert torch.cuda.max_memory_allocated() - before < scores // 4


def test_gradients_are_those_of_the_program() -> None:
    given = [one.requires_grad_() for one in operands(HALF)]
    made = magjit.compile(divided, backend="dvm", fullgraph=True)
    for _ in range(2):
        found = torch.autograd.grad(made(*given).float().square().sum(), given)
        wanted = torch.autograd.grad(divided(*given).float().square().sum(), given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
