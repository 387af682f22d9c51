"""Graphs recorded in one pass, sizes as symbols included, do what ``make_fx``'s would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import magjit
from magjit.plugin import inference


def sums(x: Tensor, n: int) -> Tensor:
    return torch.arange(n + x.shape[0], dtype=torch.float32) * 2 + n


def products(x: Tensor, n: int) -> Tensor:
    return x.reshape(x.shape[0] * x.shape[1]) * n


def quotients(x: Tensor, n: int) -> Tensor:
    return x[: x.shape[0] // 2].relu() + x.shape[1] // 3


def positions(x: Tensor, n: int) -> Tensor:
    return x[n].sigmoid() * x[n - 1]


def sizes_unused(x: Tensor, n: int) -> Tensor:
    return (x.tanh() + 1).sum(1)


def by_views(x: Tensor, n: int) -> Tensor:
    return x.view(1, -1, 2).transpose(1, 2).reshape(2, x.numel() // 2) + n


def remainders(x: Tensor, n: int) -> Tensor:
    return x[: x.shape[0] % 3 + 1] * 2  # which only make_fx follows


PROGRAMS = [sums, products, quotients, positions, sizes_unused, by_views, remainders]


@pytest.mark.parametrize("program", PROGRAMS)
def test_symbols(program: Callable[[Tensor, int], Tensor]) -> None:
    fast: Callable[..., Any] = magjit.compile(program, backend="dvm", dynamic=True)
    for rows, columns, n in ((4, 6, 2), (5, 8, 3), (9, 4, 4), (12, 10, 7), (7, 6, 5)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(fast(x, n), program(x, n))
    assert magjit.stats(fast).eager_calls == 0


@pytest.mark.parametrize("program", [one for one in PROGRAMS if one is not remainders])
def test_one_pass(program: Callable[[Tensor, int], Tensor], monkeypatch: Any) -> None:
    """None of these needs ``make_fx``."""

    def refused(*args: Any) -> Any:
        raise AssertionError("make_fx")

    monkeypatch.setattr(inference, "_traced", refused)
    fast: Callable[..., Any] = magjit.compile(program, backend="dvm", dynamic=True)
    x = torch.randn(6, 8)
    torch.testing.assert_close(fast(x, 3), program(x, 3))
    assert magjit.stats(fast).captures == 1
    graph = magjit.compile(program, backend="dvm", dynamic=True)
    torch.testing.assert_close(graph(x[:4], 2), program(x[:4], 2))


def test_a_transposed_input_has_the_sizes_that_it_had() -> None:
    """Sizes are read before an operator changes the shape of what they are read from."""

    def program(x: Tensor) -> Tensor:
        y = x.relu()
        y.t_()
        return y.reshape(x.shape[0] * x.shape[1]) + x.shape[0]

    fast: Callable[..., Any] = magjit.compile(program, backend="dvm", dynamic=True)
    for shape in ((3, 5), (4, 7), (6, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x), program(x))


def test_sizes_that_depend_on_data_behind_symbols() -> None:
    def program(x: Tensor, n: int) -> Tensor:
        y = x.reshape(x.shape[0] * x.shape[1]) * n
        return y[y > 0].exp() * 2

    fast: Callable[..., Any] = magjit.compile(program, backend="dvm", dynamic=True)
    for shape in ((3, 5), (4, 7), (6, 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(fast(x, shape[0]), program(x, shape[0]))
    assert magjit.stats(fast).eager_calls == 0
