"""Sizes that tracing keeps apart, and that are equal all the same: what shares loops, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.functional import mse_loss

import magjit
from magjit_dvm import fuser, size_classes
from magjit_dvm.backend import schedules
from magjit_dvm.builder import size_key
from magjit_dvm.schedule import Schedule

R = torch.randn
Program = Callable[..., Any]


def mask(count: int, of: int = 12) -> torch.Tensor:
    """``count`` elements of ``of`` are chosen."""
    return torch.arange(of) < count


def flattened(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The addition says that the numbers of elements are equal; no symbol does."""
    return (x.flatten() * 2).exp() + (y.flatten() * 3).sin()


def chosen(x: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, z = x[m], x[n]
    w = y.exp() * 2 + z.relu() * 3
    return w, w.softmax(0), mse_loss(w, w * 2)


def parted(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[m], x[~m]]).exp() * 2 + x.sin()


def factored(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One size in two ways: s·(t + 1) and s·t + s."""
    x, y = x * 2, y * 3
    wide = torch.cat([x, y], 1).flatten()
    long = torch.cat([x.flatten(), y.flatten()])
    return wide.exp() + long.sin() * 2


CASES: dict[str, tuple[Program, list[tuple[torch.Tensor, ...]], int]] = {
    "flattened": (flattened, [(R(6, 4), R(8, 3)), (R(9, 2), R(6, 3)), (R(4, 4), R(8, 2))], 1),
    "chosen": (
        chosen,
        [(R(12), mask(4), mask(4)), (R(12), mask(7), mask(7)), (R(9), mask(2, 9), mask(2, 9))],
        1,
    ),
    "parted": (parted, [(R(12), mask(4)), (R(12), mask(12)), (R(9), mask(3, 9))], 2),
    "factored": (factored, [(R(6, 4), R(6, 2)), (R(5, 3), R(5, 7)), (R(2, 9), R(2, 2))], 3),
}


@pytest.fixture(params=[pytest.param(name, id=name) for name in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch.manual_seed(0)
    yield CASES[request.param]


def compiled_groups(program: Program, calls: list[tuple[torch.Tensor, ...]]) -> int:
    """The groups of a program, which is checked against eager."""
    before = {id(one) for one in schedules()}
    compiled = magjit.compile(program, backend="dvm", dynamic=True)
    with torch.no_grad():
        for call in calls:
            torch.testing.assert_close(compiled(*call), program(*call))
    made: list[Schedule] = [one for one in schedules() if id(one) not in before]
    assert magjit.stats(compiled).captures == len(made) <= 2
    return len(made[0].fusion.groups)


def test_loops_unite(case: Any) -> None:
    program, calls, wanted = case
    assert compiled_groups(program, calls) == wanted


def test_only_by_their_classes(case: Any) -> None:
    """Where sizes are compared as tracing names them, there are more groups."""
    program, calls, wanted = case
    plain = mock.Mock(of=size_key)
    with mock.patch.object(fuser, "SizeClasses", return_value=plain):
        assert compiled_groups(program, calls) > wanted


@pytest.mark.parametrize("counts", [(1, 5), (5, 1), (1, 1), (0, 0), (0, 1), (1, 0), (12, 12)])
def test_sizes_that_eager_broadcasts(counts: tuple[int, int]) -> None:
    """What was taken for equal need not be, where sizes are known only when the program runs."""

    def program(x: torch.Tensor, m: torch.Tensor, n: torch.Tensor) -> Any:
        y, z = x[m], x[n]
        ones = torch.ones_like(y)
        joined = torch.cat([y.sin(), z.sin()])
        return ones, ones + z, y.cumsum(0), y.exp().sum(), joined, (y * 2 + z * 3).softmax(0)

    compiled = magjit.compile(program, backend="dvm", dynamic=True)
    x = R(12)
    with torch.no_grad():
        compiled(x, mask(4), mask(4))
        compiled(x, mask(6), mask(6))
        call = (x, mask(counts[0]), mask(counts[1]))
        torch.testing.assert_close(compiled(*call), program(*call))
    assert magjit.stats(compiled).captures == 1


def test_sizes_that_do_not_fit() -> None:
    """Eager's error, from the program itself."""
    compiled = magjit.compile(chosen, backend="dvm", dynamic=True)
    x = R(12)
    with torch.no_grad():
        compiled(x, mask(4), mask(4))
        with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match"):
            compiled(x, mask(3), mask(4))
        torch.testing.assert_close(compiled(x, mask(5), mask(5)), chosen(x, mask(5), mask(5)))


def test_other_sizes_are_another_graph() -> None:
    """Sizes of different numbers of elements do not get into the graph of equal ones."""

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        a, b = x.flatten() * 2, y.flatten() * 3
        return a + b if a.shape == b.shape else (a.sum(), b.exp())

    compiled = magjit.compile(program, backend="dvm", dynamic=True)
    with torch.no_grad():
        for call in [(R(6, 4), R(8, 3)), (R(6, 4), R(5, 3)), (R(4, 3), R(6, 2)), (R(3, 2), R(5))]:
            torch.testing.assert_close(compiled(*call), program(*call))


def test_graphs_without_symbols_cost_nothing() -> None:
    """No propagation is run for them."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(-1).sum(0)

    x = R(4, 6)
    with mock.patch.object(size_classes, "propagate_shapes", side_effect=AssertionError) as called:
        compiled = magjit.compile(program, backend="dvm")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), program(x))
        assert not called.called
        assert magjit.stats(compiled).captures == 1


def test_it_is_run_once() -> None:
    x, y = R(6, 4), R(8, 3)
    wrapped = size_classes.propagate_shapes
    with mock.patch.object(size_classes, "propagate_shapes", side_effect=wrapped) as called:
        compiled = magjit.compile(flattened, backend="dvm", dynamic=True)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, y), flattened(x, y))
    assert called.call_count == 1


def test_what_cannot_hold() -> None:
    """Sizes are then compared as tracing names them."""
    error = size_classes.BackendError("No sizes satisfy this")
    with mock.patch.object(size_classes, "propagate_shapes", side_effect=error) as called:
        assert compiled_groups(flattened, CASES["flattened"][1]) == 2
    assert called.call_count == 1
