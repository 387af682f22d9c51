"""Numbers that the caller changes: inputs of one more capture, and always what eager does."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit

FLOATS = (0.5, 0.25, 2.0, -1.0, 0.5, 1e300, 0.0, -0.0, math.inf, 3.0)
INTS = (3, 4, 5, 2, 3, 0, -1, 10**30, 1, 7)


def scales(x: torch.Tensor, a: Any) -> Any:
    return x * a, a * x, x + a, a - x


def computes(x: torch.Tensor, a: Any) -> Any:
    b = a * 2 + 1
    return x * b, b, -b, (a, b), {"a": a}, [b]


def decides(x: torch.Tensor, a: Any) -> Any:
    if a > 1:
        return x * a
    return x - a if a else x


def stores(x: torch.Tensor, a: Any) -> Any:
    box = {"a": a, "twice": a + a}
    return box["a"] * x, box


def formats(x: torch.Tensor, a: Any) -> Any:
    return x * 2, f"{a}"


def calls(x: torch.Tensor, a: Any) -> Any:
    def inner(t: torch.Tensor, *more: Any, k: Any) -> Any:
        return t * more[0] + k

    return inner(x, a, k=a), (lambda v: x + v)(a)


def passes(x: torch.Tensor, a: Any) -> Any:
    return torch.clamp(x, max=float(a)), x.mul(a), torch.full((2,), float(a)), x.add(x, alpha=2)


def converts(x: torch.Tensor, a: Any) -> Any:
    return x * float(a), isinstance(a, float), type(a), abs(a), max(a, type(a)(2)), a == a


def gives_back(x: torch.Tensor, a: Any) -> Any:
    return a


def compares_identity(x: torch.Tensor, a: Any) -> Any:
    return a is None, a is a, x + 1


def loops(x: torch.Tensor, a: Any) -> Any:
    for _ in range(min(int(a), 4) if abs(a) < 100 else 1):
        x = x + 1
    return x


def raises(x: torch.Tensor, a: Any) -> Any:
    return x * (1 / a)


def mixes(x: torch.Tensor, a: Any) -> Any:
    return x * (a + x.shape[0]), a * x.shape[0]


PROGRAMS = [
    *(scales, computes, decides, stores, formats, calls, passes, converts, gives_back),
    *(compares_identity, loops, raises, mixes),
]


def same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert actual.dtype is expected.dtype
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected, strict=True):
            same(*pair)
    elif isinstance(expected, dict):
        same([*actual.items()], [*expected.items()])
    else:
        assert repr(actual) == repr(expected)


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


def run(program: Callable[..., Any], values: Any, **options: Any) -> Any:
    compiled = magjit.compile(program, backend="eager", **options)
    with magjit.config.override(record_limit=20), warnings.catch_warnings():
        warnings.simplefilter("error", magjit.MagJITWarning)
        for index, value in enumerate(values):
            x = torch.randn(3, 2)
            if index % 2:
                same(outcome(compiled, x, a=value), outcome(program, x, a=value))
            same(outcome(compiled, x, value), outcome(program, x, value))
    return magjit.stats(compiled)


@pytest.mark.parametrize("values", [FLOATS, INTS, (1, 2.0, 3, True, False, 0.5)], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_value_is_right(program: Callable[..., Any], values: Any) -> None:
    for dynamic in (None, True, False):
        run(program, values, dynamic=dynamic)


@pytest.mark.parametrize("program", [scales, computes, stores, calls, gives_back])
@pytest.mark.parametrize("values", [(0.5, 0.25, 2.0, 7.5), (3, 4, 5, 9)], ids=["float", "int"])
def test_one_more_capture_serves_all_values(program: Callable[..., Any], values: Any) -> None:
    compiled = magjit.compile(program, backend="eager")
    for value in values:
        x = torch.randn(3, 2)
        same(compiled(x, value), program(x, value))
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays) == (2, len(values) - 2)


def test_without() -> None:
    compiled = magjit.compile(scales, backend="eager", dynamic=False)
    for value in (0.5, 0.25, 0.75):
        compiled(torch.ones(2), value)
    assert magjit.stats(compiled).captures == 3


class Net(nn.Module):
    """A step counter, a coefficient that the loop sets, and a rate that comes with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.steps = 0
        self.coefficient = 1.0

    def forward(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        self.steps += 1
        h = self.layer(x).tanh()
        penalty = 1e-3 * self.steps * h.abs().mean()
        return (h * self.coefficient).square().mean() * rate + penalty


def test_a_training_loop_needs_three_captures() -> None:
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
    for step in range(200):
        epoch, batch = divmod(step, 20)
        model.coefficient = eager.coefficient = 1 / (1 + epoch)
        x, rate = torch.randn(8 if batch < 19 else 3, 4), 0.1 * math.cos(step / 50)
        for call, optimizer in zip((compiled, eager), optimizers, strict=True):
            optimizer.zero_grad()
            call(x, rate).backward()
            optimizer.step()
    assert magjit.stats(compiled).captures <= 3
    assert model.steps == eager.steps == 200
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one, other)


class Inner(nn.Module):
    """Has a coefficient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Outer(nn.Module):
    """Two parts, of which the loop changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Inner(), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


def test_an_attribute_that_the_caller_changes() -> None:
    model = Outer()
    compiled = magjit.compile(model, backend="eager")
    for value in (1.0, 0.5, 0.25, 3.0, -2.0):
        model.one.weight = value
        x = torch.randn(3)
        same(compiled(x), model(x))
    assert magjit.stats(compiled).captures == 2
    model.two.weight = 5.0
    same(compiled(x), model(x))
    model.one.weight = "no number"
    with pytest.raises(TypeError):
        compiled(x)
