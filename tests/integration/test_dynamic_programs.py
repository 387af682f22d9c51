"""Sizes in odd places of a program: what is not followed is a constant, never a wrong result."""

from __future__ import annotations

import copy
import itertools
import math
import random
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import magjit
from tests.twin import differ

SIZES = (5, 7, 9, 6, 4, 12, 8, 3)


class KeepsInt(torch.autograd.Function):
    """Its backward uses an int that its forward does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.n = x.shape[0]
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * ctx.n


class KeepsShape(torch.autograd.Function):
    """Its backward uses a shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.sum(0)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g.expand(ctx.shape)


def gradient(function: Any, x: torch.Tensor) -> Any:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function.apply(x).square().sum(), x)


def nested_dict(x: torch.Tensor) -> Any:
    table: dict[str, Any] = {"image": {}}
    table["image"]["h"] = x.shape[0]
    return x * 2 if table == {"image": {"h": 7}} else x * 3


def nested_text(x: torch.Tensor) -> Any:
    info: dict[str, Any] = {"shapes": {}}
    info["shapes"]["x"] = x.shape
    return x * 2, f"info: {info}"


def nested_sort(x: torch.Tensor) -> Any:
    held: list[list[int]] = [[], []]
    held[0].append(x.shape[0])
    held[1].append(6)
    held.sort()
    return x * 2, held


def nested_chain(x: torch.Tensor) -> Any:
    held: list[list[int]] = [[], []]
    held[0].append(x.shape[0])
    return x * sum(itertools.chain.from_iterable(held))


def aliased_list(x: torch.Tensor) -> Any:
    inner = [0]
    outer = [inner]
    inner[0] = x.shape[0]
    return x * 2, outer == [[7]]


def extended_in_place(x: torch.Tensor) -> Any:
    inner: list[int] = []
    outer = [inner]
    inner += x.shape
    return x * 2, outer == [[7, 4]]


def namespace(x: torch.Tensor) -> Any:
    box = types.SimpleNamespace(sizes=[])
    box.sizes.append(x.shape[0])
    return x * 2, box == types.SimpleNamespace(sizes=[7])


def error_text(x: torch.Tensor) -> Any:
    sizes: list[int] = []
    error = ValueError(sizes)
    sizes.append(x.shape[0])
    return x * 2, str(error)


def iterator_first(x: torch.Tensor) -> Any:
    sizes = [1]
    items = iter(sizes)
    sizes.append(x.shape[0])
    return x * sum(items)


def inserts(x: torch.Tensor) -> Any:
    values = list(range(20))
    values.insert(x.shape[0], 99)
    return x * values[7]


def cuts(x: torch.Tensor) -> Any:
    values = list(range(20))
    values[: x.shape[0]] = []
    return x * values[0]


def numpy_square(x: torch.Tensor) -> Any:
    n = x.shape[0]
    mask = np.tril(np.ones((20, 20), dtype=np.float32))
    return x.sum() * torch.from_numpy(mask[:n, :n].copy())


def numpy_store(x: torch.Tensor) -> Any:
    n = x.shape[0]
    mask = np.zeros((20, 20), dtype=np.float32)
    mask[:n, :n] = 1
    return torch.from_numpy(mask) * x.sum()


def index_object(x: torch.Tensor) -> Any:
    index = np.s_[: x.shape[0], 1]
    return x * 2, f"{index}", index == np.s_[:7, 1]


def negative_ratio(x: torch.Tensor) -> Any:
    k = int((x.shape[0] - 9) / 2)
    made = torch.zeros(5 - k)
    return made.shape, made, k == -1


def half(x: torch.Tensor) -> Any:
    return x if (x.shape[0] * 0.5) % 1 == 0 else -x


def rounding(x: torch.Tensor) -> Any:
    n = x.shape[0]
    return x if n * 0.1 + n * 0.2 == n * 0.3 else -x, (n + 0.1) - 0.1 == n, int(n * 0.29 * 100)


def integer_parts(x: torch.Tensor) -> Any:
    n = x.shape[0]
    return x[: int(n / 2)], x[: math.ceil(n / 3)], x[: math.floor(n / 2)], round(n / 3), ~n


def of_many(x: torch.Tensor) -> Any:
    n, m = x.shape
    return x * max(n, m, 6), x * min(3, n, m, 8)


def looked_up_by_c(x: torch.Tensor) -> Any:
    table = {"a": x.shape[0], "b": 6}
    return x * 2, sorted(["a", "b"], key=table.get), max("ab", key=table.__getitem__)


def mapped_lookup(x: torch.Tensor) -> Any:
    get = {"a": x.shape[0]}.get
    return x * sum(map(get, ["a"])), x * sum(map([x.shape[0], 2].__getitem__, [0, 1]))


def random_and_size(x: torch.Tensor) -> Any:
    k = random.random() * x.shape[0]
    return x * 2 if k > 3 else x * 3


def threshold_of_size(x: torch.Tensor) -> Any:
    return x * 2 if random.random() < x.shape[0] / 10 else x * 3


def with_int(x: torch.Tensor) -> Any:
    return gradient(KeepsInt, x)


def with_shape(x: torch.Tensor) -> Any:
    return gradient(KeepsShape, x)


PROGRAMS: list[Callable[[torch.Tensor], Any]] = [
    *(nested_dict, nested_text, nested_sort, nested_chain, aliased_list, extended_in_place),
    *(namespace, error_text, iterator_first, inserts, cuts, numpy_square, numpy_store),
    *(index_object, negative_ratio, half, rounding, integer_parts, of_many, looked_up_by_c),
    *(mapped_lookup, random_and_size, threshold_of_size, with_int, with_shape),
]


class Stateful(nn.Module):
    """A count of calls, a total and the last size; ``body`` is the program."""

    def __init__(self, body: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = body
        self.calls = self.total = self.last = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.body(self, x)


def scaled(s: Any, x: torch.Tensor) -> Any:
    return x * (s.calls * x.shape[0])


def decided(s: Any, x: torch.Tensor) -> Any:
    return x * 2 if s.calls < x.shape[0] else x * 3


def totalled(s: Any, x: torch.Tensor) -> Any:
    s.total += x.shape[0]
    return x * s.calls + s.total


def limited(s: Any, x: torch.Tensor) -> Any:
    s.last = min(s.last + x.shape[0], 20)
    return x * s.last if s.last < 20 else x


@pytest.mark.parametrize("dynamic", [None, True], ids=["seen", "at once"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_programs(program: Callable[[torch.Tensor], Any], dynamic: bool | None) -> None:
    compiled = magjit.compile(program, backend="eager", dynamic=dynamic)
    with magjit.config.override(record_limit=20), warnings.catch_warnings():
        warnings.simplefilter("ignore", magjit.MagJITWarning)
        for n in SIZES:
            x = torch.randn(n, 4)
            results = []
            for function in (program, compiled):
                random.seed(n)
                results.append(function(x.clone()))
            assert not differ(*results), n


@pytest.mark.parametrize("dynamic", [None, True], ids=["seen", "at once"])
@pytest.mark.parametrize("body", [scaled, decided, totalled, limited], ids=lambda p: p.__name__)
def test_with_counters(body: Callable[[Any, torch.Tensor], Any], dynamic: bool | None) -> None:
    eager, model = Stateful(body), Stateful(body)
    compiled = magjit.compile(model, backend="eager", dynamic=dynamic)
    for n in (*SIZES, *SIZES):
        x = torch.randn(n, 4)
        assert not differ(eager(x), compiled(x)), n
        state = [copy.copy(vars(m)) for m in (eager, model)]
        assert all(state[0][k] == state[1][k] for k in ("calls", "total", "last"))


def test_all_parts_of_a_guard_hold() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        y = y + 1 if y.shape[0] % 3 == 0 else y - 1
        return x.reshape(2, -1), y, y.stride()

    compiled = magjit.compile(program, backend="eager", dynamic=True)
    for n, m in [(8, 8), (10, 10), (14, 9), (4, 6), (6, 7)]:
        x = torch.arange(n * 4.0).view(4, n).t()
        for y in (torch.randn(m, 4), torch.randn(m, 8)[:, :4]):
            assert not differ(program(x, y), compiled(x, y)), (n, m)
