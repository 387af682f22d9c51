"""Ints divide, shift and have powers as in torch; a divisor of 0 is the error that eager raises."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit
from magjit_dvm.backend import schedules

DTYPES = (torch.int64, torch.int32, torch.uint8)

DIVISIONS: dict[str, Callable[[Any, Any], Any]] = {
    "floor_divide": torch.floor_divide,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "left": torch.bitwise_left_shift,
    "right": torch.bitwise_right_shift,
    "left by operator": lambda a, b: a << b,
    "right by operator": lambda a, b: a >> b,
    "pow": torch.pow,
}


def values(dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(dtype)
    some = [0, 1, 2, 3, 7, 8, 31, 63, 64, 100, limits.max, limits.max - 1]
    some += [-one for one in some] + [limits.min, limits.min + 1] if limits.min else []
    return torch.tensor(some, dtype=dtype)


def fused(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a group that ATen has no part in."""
    before = set(schedules())
    run = magjit.compile(function, backend="dvm")
    result = run(*args)
    (made,) = set(schedules()) - before
    assert made.fusion.groups and not made.fusion.reasons
    return result


@pytest.mark.parametrize(("of", "by"), list(itertools.product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize("name", [*DIVISIONS, *OTHERS])
def test_pairs(name: str, of: torch.dtype, by: torch.dtype) -> None:
    a = values(of).repeat_interleave(len(values(by)))
    b = values(by).repeat(len(values(of)))
    if name in DIVISIONS:
        # torch's own division of the least int by −1 ends the process.
        least = torch.iinfo(torch.promote_types(of, by)).min
        fine = (b != 0) & ((a != least) | (b != -1))
        a, b = a[fine], b[fine]
    function = {**DIVISIONS, **OTHERS}[name]
    got = fused(lambda x, y: function(x, y) + 0, a, b)
    torch.testing.assert_close(got, function(a, b), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*DIVISIONS, *OTHERS])
def test_numbers(name: str, dtype: torch.dtype) -> None:
    function = {**DIVISIONS, **OTHERS}[name]
    for number in (1, 2, 3, 5, 7, 62):
        given = values(dtype)
        got = fused(lambda x, n=number: function(x, n), given)
        torch.testing.assert_close(got, function(given, number), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", list(DIVISIONS))
def test_zero(name: str, dtype: torch.dtype) -> None:
    run = magjit.compile(lambda a, b: DIVISIONS[name](a + 1, b) * 2, backend="dvm")
    a, b = torch.arange(70_000).to(dtype), torch.full((70_000,), 3, dtype=dtype)
    torch.testing.assert_close(run(a, b), DIVISIONS[name](a + 1, b) * 2)
    b[69_998] = 0
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            run(a, b)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        magjit.compile(lambda a: DIVISIONS[name](a, 0), backend="dvm")(a)
    assert run(a[:0], b[:0]).shape == (0,)


def test_negative_powers_are_refused() -> None:
    run = magjit.compile(lambda a: (a + 1) ** -1, backend="dvm")
    with pytest.raises(RuntimeError, match="negative integer powers"):
        run(torch.arange(4))


def test_a_look_up_does_not_hide_a_zero() -> None:
    """What is not looked up is divided all the same."""

    def picked(a: Any, b: Any, at: Any) -> Any:
        return (a // b).gather(1, at)

    run = magjit.compile(picked, backend="dvm")
    a, b, at = torch.arange(12).reshape(3, 4), torch.ones(3, 4).long(), torch.zeros(3, 1).long()
    torch.testing.assert_close(run(a, b, at), picked(a, b, at))
    b[1, 3] = 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(a, b, at)
