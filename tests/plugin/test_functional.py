"""Graphs that AOTAutograd gets wrong are told from those that it makes functional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace

import magjit
from magjit.plugin.functional import can_be_functional


def plain(x: Tensor, y: Tensor) -> Tensor:
    x[1:].mul_(2)
    return x.t() + y


def turned_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = (x * 1).t_()
    return z[1:].mul_(2)


def longer_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x.add_(1)
    y.squeeze_().unsqueeze_(0)
    return z.unsqueeze_(0) + y


def looked_at_otherwise(x: Tensor, y: Tensor) -> Tensor:
    part = x.as_strided((2, 2), (4, 1), 1)
    x.mul_(2)
    return part.add_(y[:2, :2])


def looked_at_only(x: Tensor, y: Tensor) -> Tensor:
    return x.as_strided((2, 2), (4, 1), 1) + y[:2, :2]


CASES = [
    (plain, True),
    (turned_in_place, False),
    (longer_in_place, False),
    (looked_at_otherwise, False),
    (looked_at_only, True),
]


@pytest.mark.parametrize(("function", "functional"), CASES)
def test_operators(function: Callable[..., Any], functional: bool) -> None:
    given = [torch.randn(4, 4), torch.randn(4, 4)]
    assert can_be_functional(symbolic_trace(function), given) == functional


def test_overlapping_inputs() -> None:
    base = torch.randn(6, 4)
    graph = symbolic_trace(plain)
    assert not can_be_functional(graph, [base[:4], base[2:]])
    assert can_be_functional(graph, [base[:3], base[3:]])
    assert can_be_functional(symbolic_trace(looked_at_only), [base[:4], base[2:]])


@pytest.mark.parametrize("function", [one for one, _ in CASES])
@pytest.mark.parametrize("backend", ["triton", "dvm"])
def test_results_are_those_of_eager_mode(function: Callable[..., Any], backend: str) -> None:
    call = magjit.compile(function, backend=backend)
    for _ in range(3):
        rows, other = torch.randn(8, 4), torch.randn(4, 4)
        eager, given = ([rows.clone()[::2], other.clone()] for _ in range(2))
        with torch.no_grad():
            expected, actual = function(*eager), call(*given)
        assert actual.stride() == expected.stride()
        for ours, theirs in zip([actual, *given], [expected, *eager], strict=True):
            torch.testing.assert_close(ours, theirs)
    magjit.reset()
