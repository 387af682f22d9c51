"""Groups that must be divided: each part is grouped anew, nothing of it is lost to ATen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit_dvm.backend import schedules
from magjit_dvm.program import NodeKind


@pytest.mark.parametrize("width", [9, 10])
@pytest.mark.parametrize("training", [False, True])
def test_batch_norm(training: bool, width: int) -> None:
    """Of images that are square, two loops have one size: each dimension finds its own."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)]
    model = nn.Sequential(*layers, nn.BatchNorm2d(4), nn.ReLU()).train(training)
    twin = nn.Sequential(*(type(one)(*_made_of(one)) for one in model)).train(training)
    twin.load_state_dict(model.state_dict())
    before = {id(one) for one in schedules()}
    compiled = magjit.compile(model, backend="dvm")
    for turn in range(3):
        x = torch.randn(4, 3, 9, width, generator=torch.Generator().manual_seed(turn))
        got, wanted = compiled(x), twin(x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        if training:
            got.square().sum().backward()
            wanted.square().sum().backward()
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if training:
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    made = [one for one in schedules() if id(one) not in before]
    left = {
        step.target._schema.name
        for one in made
        for step in one.fusion.steps
        if isinstance(step, torch.fx.Node) and hasattr(step.target, "_schema")
        if all(value.alias_info is None for value in step.target._schema.returns)
    }
    written = {"aten::_foreach_add_", "aten::_foreach_copy_"} if training else set()
    assert left <= {"aten::convolution", "aten::convolution_backward", *written}
    assert not any(one.fusion.reasons for one in made)
    assert all(len(one.fusion.groups) <= 2 + 2 * training for one in made)


def _made_of(one: nn.Module) -> tuple[int, ...]:
    if isinstance(one, nn.Conv2d):
        return (one.in_channels, one.out_channels, 3)
    return (one.num_features,) if isinstance(one, nn.BatchNorm2d) else ()


def test_tensors_of_which_only_sizes_are_read() -> None:
    """The group has no bytecode here; operator by operator, it reads all operands."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 3).cumsum(0) + y

    compiled = magjit.compile(program, backend="dvm")
    x, y = torch.randn(0, 4), torch.randn(0, 4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # that it runs eagerly
        for _ in range(3):
            assert compiled(x, y).shape == (0, 4)
    assert magjit.stats(compiled).captures == 1


def test_a_size_that_only_a_larger_tensor_has() -> None:
    """Of what is computed only for its shape, the operator that asks is a group of its own."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.full_like(torch.maximum(x, y).amax(0), 3)

    before = {id(one) for one in schedules()}
    compiled = magjit.compile(program, backend="dvm")
    x, y = torch.randn(5, 7), torch.randn(5, 1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(compiled(x, y), program(x, y))
    (made,) = (one for one in schedules() if id(one) not in before)
    for _, fused in made.programs():
        assert fused.encode(*([x, y] if len(fused.source.inputs) == 2 else [x[0]]))


@pytest.mark.parametrize("returned", [False, True])
def test_what_is_reduced_is_not_reduced_again_for_other_loops(returned: bool) -> None:
    """Means of rows, for what has other columns: a group of their own, whoever else wants them."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean = (x * 2).mean(1)
        found = (y - mean.view(-1, 1, 1)).exp() * mean.view(-1, 1, 1)
        return (found, mean) if returned else (found,)

    before = {id(one) for one in schedules()}
    compiled = magjit.compile(program, backend="dvm")
    for _ in range(3):
        given = torch.randn(4, 50), torch.randn(4, 7, 9)
        torch.testing.assert_close(compiled(*given), program(*given))
    (made,) = [one for one in schedules() if id(one) not in before]
    first, second = (group.program for group in made.fusion.groups)
    assert first is not None and second is not None
    reduces = [sum(node.kind is NodeKind.REDUCE for node in one.nodes) for one in (first, second)]
    assert reduces == [1, 0] and len(second.nodes) < 8


def _groups(program: Callable[..., Any], *given: torch.Tensor) -> list[list[str]]:
    """The nodes of each group of a program, whose results are eager mode's."""
    before = {id(one) for one in schedules()}
    compiled = magjit.compile(program, backend="dvm", fullgraph=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(*given), program(*given), rtol=1e-4, atol=1e-4)
    (made,) = (one for one in schedules() if id(one) not in before)
    return [[node.name for node in group.nodes] for group in made.fusion.groups]


@pytest.mark.parametrize("rows, groups", [(2100, 1), (21, 2)])
def test_what_reads_the_same_large_tensor_is_one_group(rows: int, groups: int) -> None:
    """It is read once; of small ones the operators are a stack."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin() * 2, (x + y).relu()

    x = torch.randn(rows, 1024)
    assert len(_groups(program, x, torch.randn(rows, 1024))) == groups


def test_what_is_not_read_alike_is_apart() -> None:
    def turned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin() * 2, x.t().cos() + 1

    def reduced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin() * 2, x.cos().sum(0), x[0] + 1

    def wider(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin() * 2, x.cos() + y

    x = torch.randn(1500, 1500)
    assert len(_groups(turned, x)) == 2
    assert len(_groups(reduced, x)) == 3
    assert len(_groups(wider, x, torch.randn(2, 1500, 1500))) == 2


def test_what_waits_for_the_other_is_apart() -> None:
    """A path that leaves one group and comes back into the other."""

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2) @ w + x.cos() / 2

    groups = _groups(program, torch.randn(1500, 1500), torch.randn(1500, 1500) / 1500)
    assert len(groups) == 2
