"""Leaves of autograd that a program makes: what it returns begins gradients as in eager mode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.nn import functional as F

import magjit
from magjit.dispatch import MagJITWarning

Program = Callable[[torch.Tensor], Any]


def loss_as_variable(x: torch.Tensor) -> torch.Tensor:
    loss = F.binary_cross_entropy(x.sigmoid(), (x > 0).float())
    return Variable(loss, requires_grad=True)


def detached(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).detach().requires_grad_()


def by_attribute(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).detach()
    y.requires_grad = True
    return y


def of_factories(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * 2, torch.zeros(3, requires_grad=True), torch.full((2,), 1.0, requires_grad=True)


def parameter(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(x * 2)


def parameter_beside_its_data(x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
    data = x * 2
    return data, nn.Parameter(data)


def frozen_parameter(x: torch.Tensor) -> torch.Tensor:
    return x * nn.Parameter(x * 2, requires_grad=False)


def read_before(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).detach()
    z = y + 1
    return y.requires_grad_(), z, y.detach()


def view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).detach()
    return y, y[0].requires_grad_()


def changed_before(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, 3)
    y += x.detach()
    return y.requires_grad_()


def twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).detach().requires_grad_()
    return y, y


def no_longer(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).detach().requires_grad_().requires_grad_(False)


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (x * 2).requires_grad_()


RETURNED = [
    loss_as_variable,
    detached,
    by_attribute,
    of_factories,
    parameter,
    parameter_beside_its_data,
    frozen_parameter,
    read_before,
    view,
    changed_before,
    twice,
    no_longer,
    without_gradients,
]


def computed_with(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).detach().requires_grad_()
    return y * 3, y


def view_of_a_leaf(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 2).detach().requires_grad_()
    return y, y[0]


def factory_computed_with(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w = torch.ones(3, requires_grad=True)
    return x.detach() * w, w


def parameter_computed_with(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    w = nn.Parameter(x * 2)
    return w * x, w


def outside_tensor(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_() * 2


def same_object_as_an_outside_tensor(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().requires_grad_() * 2


def within_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    def part(x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(3, requires_grad=True)

    made: torch.Tensor = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)
    return made


COMPUTED = [
    computed_with,
    view_of_a_leaf,
    factory_computed_with,
    parameter_computed_with,
    outside_tensor,
    same_object_as_an_outside_tensor,
    within_a_checkpoint,
]


def penalty(x: torch.Tensor) -> torch.Tensor:
    """As of a critic, by the gradient at points between samples."""
    points = (x * 0.5).detach().requires_grad_()
    score = (points * points).sum()
    (gradient,) = torch.autograd.grad(score, points)
    return gradient.pow(2).sum()


def backward_within(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone().requires_grad_()
    (y * y).sum().backward()
    assert y.grad is not None
    return y.grad


def tensors(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def looks(results: Any) -> list[Any]:
    """What autograd makes of each result, and which of them are one."""
    found = tensors(results)
    of_each = [(type(one), one.requires_grad, one.is_leaf, one.shape) for one in found]
    memory = [one.untyped_storage().data_ptr() for one in found]
    return [
        of_each,
        [list(map(id, found)).index(id(one)) for one in found],
        list(map(memory.index, memory)),
    ]


def gradients(results: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    found = tensors(results)
    loss = sum((k + 1) * one.sum() for k, one in enumerate(found) if one.requires_grad)
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return [x.grad, *[one.grad for one in found if one.is_leaf]]


@pytest.mark.parametrize("needed", [False, True], ids=["", "x needs gradients"])
@pytest.mark.parametrize("program", [*RETURNED, *COMPUTED], ids=lambda one: one.__name__)
@pytest.mark.parametrize("backend", ["dvm", "eager", "triton"])
def test_as_in_eager_mode(backend: str, program: Program, needed: bool) -> None:
    compare(backend, program, needed)


@pytest.mark.parametrize("needed", [False, True], ids=["", "x needs gradients"])
@pytest.mark.parametrize("program", [loss_as_variable, of_factories, parameter, computed_with])
def test_with_inductor(program: Program, needed: bool) -> None:
    compare("inductor", program, needed)


@pytest.mark.parametrize("program", [penalty, backward_within])
def test_gradients_within(program: Program) -> None:
    compare("dvm", program, needed=False)


def compare(backend: str, program: Program, needed: bool) -> None:
    compiled = magjit.compile(program, backend=backend)
    for turn in range(4):
        given = [torch.randn(4, 3).requires_grad_(needed) for _ in range(2)]
        with torch.no_grad():
            given[1].copy_(given[0])
        expected, found = program(given[0]), compiled(given[1])
        assert looks(found) == looks(expected), turn
        torch.testing.assert_close(found, expected)
        assert [one.requires_grad for one in given] == [given[0].requires_grad] * 2
        torch.testing.assert_close(gradients(found, given[1]), gradients(expected, given[0]))
    assert magjit.stats(compiled).replays + magjit.stats(compiled).region_replays >= 2


@pytest.mark.parametrize("program", RETURNED, ids=lambda one: one.__name__)
def test_what_is_returned_is_compiled(
    program: Program, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    caplog.set_level(logging.INFO, "magjit")
    report = magjit.explain(program, backend="dvm")(torch.randn(4, 3))
    assert report.notes == []
    assert "as it is" not in caplog.text
    assert not [one for one in recwarn if issubclass(one.category, MagJITWarning)]


@pytest.mark.parametrize("program", COMPUTED, ids=lambda one: one.__name__)
def test_what_is_computed_with_runs_as_it_is(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "magjit")
    report = magjit.explain(program, backend="dvm")(torch.randn(4, 3))
    (note,) = report.notes
    assert "as it is" in note and note in caplog.text
    first = program.__code__.co_firstlineno
    (line,) = [int(part) for part in note.replace(" ", ":").split(":") if part.isdigit()]
    assert __file__ in note and first < line <= first + 4
    assert note in str(report) and note in report.to_json()["notes"]


def test_what_needs_gradients_already_is_compiled() -> None:
    def asks_again(x: torch.Tensor) -> torch.Tensor:
        y = x.requires_grad_() * 2
        y.requires_grad_()
        return y * 3

    report = magjit.explain(asks_again, backend="dvm")(torch.randn(4, requires_grad=True))
    assert report.notes == []
    compiled = magjit.compile(asks_again, backend="dvm")
    for needed in (True, True, False, True):
        x = torch.randn(4).requires_grad_(needed)
        compiled(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [6.0] * 4
