"""Fused operators store what a program keeps in its inputs: no copy, and never too early."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm.backend import schedules
from magjit_dvm.schedule import Schedule
from tests.dvm.checking import machine

Program = Callable[..., Any]
Tensor = torch.Tensor


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=made).to(dtype)


def ran(
    program: Program,
    *states: Tensor,
    given: Callable[[int], tuple[Any, ...]],
    dynamic: bool | None = None,
    device: str = "cpu",
    near: float | None = None,
) -> list[Schedule]:
    """Call a program four times, as eager mode does; the schedules that it has become.

    Args:
        program, states, given: the program, what it writes, and the other arguments of a turn.
        dynamic: of ``magjit.compile``.
        device: where all of it is.
        near: by how much results may differ, if not by a rounding.
    """
    close = {"rtol": near, "atol": near}
    before = {id(one) for one in schedules()}
    compiled = magjit.compile(program, backend="dvm", dynamic=dynamic, fullgraph=True)
    mine, theirs = ([one.to(device, copy=True) for one in states] for _ in "ab")
    with torch.no_grad():
        for turn in range(4):
            versions = [one._version for one in mine]
            others = [one.to(device) for one in given(turn)]
            found, wanted = compiled(*mine, *others), program(*theirs, *others)
            torch.testing.assert_close(found, wanted, **close)
            torch.testing.assert_close(mine, theirs, **close)
            assert all(one._version > old for one, old in zip(mine, versions, strict=True))
    assert magjit.stats(compiled).replays >= 2
    return [one for one in schedules() if id(one) not in before]


def copies(made: list[Schedule]) -> int:
    return sum(len(re.findall(r"copy__default(?:_\d+)?\(", one.source)) for one in made)


def stores(made: list[Schedule]) -> int:
    return sum(len(group.stores) for one in made for group in one.fusion.groups)


# -- stored --


def whole(state: Tensor, x: Tensor) -> Tensor:
    state.copy_(x.sin() + 1)
    return x * 2


def part(state: Tensor, x: Tensor) -> Tensor:
    state[:, 2:9] = x[:, 2:9] * 2
    return x + 1


def part_of_a_part(state: Tensor, x: Tensor) -> None:
    state[1:, 2:][:, ::3] = x[1:, 2::3].exp()


def row(state: Tensor, x: Tensor) -> None:
    state[-2] = x[0] * x[1]


def average(state: Tensor, x: Tensor) -> None:
    state.mul_(0.9).add_(x, alpha=0.1)


def average_of_a_part(state: Tensor, x: Tensor) -> Tensor:
    state[:, 3:7].mul_(0.5).add_(x[:, :4])
    return x.amax()


def turned(state: Tensor, x: Tensor) -> None:
    state.t().copy_(x.t().relu() - 1)


def rows(state: Tensor, x: Tensor) -> None:
    state.copy_((x * 3).softmax(-1))


def columns(state: Tensor, x: Tensor) -> None:
    state[:1] = x.sum(0, keepdim=True)


def kept_as_well(state: Tensor, x: Tensor) -> Tensor:
    made = x.sigmoid()
    state.copy_(made)
    return made


def read_again(state: Tensor, x: Tensor) -> Tensor:
    state[:, :4] = x[:, :4].exp()
    return state @ state.t()


def joined(state: Tensor, x: Tensor) -> None:
    state.copy_(torch.cat([x[:, :5].relu(), x[:, 5:] * 2], 1))


def two_states_of_one(state: Tensor, x: Tensor) -> Tensor:
    state.mul_(2)
    y = state + x
    state.add_(1)
    return y


STORED = [whole, part, part_of_a_part, row, average, average_of_a_part, turned, rows, columns]
STORED += [kept_as_well, read_again, joined, two_states_of_one]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", STORED, ids=lambda one: one.__name__)
def test_what_is_computed_is_stored(program: Program, dynamic: bool | None) -> None:
    made = ran(program, randn(260, 270), given=lambda turn: (randn(260, 270, seed=turn),))
    assert copies(made) == 0 and stores(made) == len(made)
    # Of symbolic sizes, or small: the same results.
    ran(program, randn(6, 11), given=lambda turn: (randn(6, 11, seed=turn),), dynamic=dynamic)


@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(kept: torch.dtype, given: torch.dtype) -> None:
    """What is stored is rounded as the copy would."""

    def program(state: Tensor, x: Tensor) -> Tensor:
        state[:, 1:].copy_(x * 1.5)
        return state.sum()

    states = randn(300, 257, dtype=kept)
    made = ran(program, states, given=lambda turn: (randn(300, 256, seed=turn, dtype=given),))
    assert copies(made) == 0 and stores(made)


def test_products_by_panels() -> None:
    """Panels are stored where they belong; but what the product reads is not written meanwhile."""

    def apart(state: Tensor, x: Tensor, weight: Tensor) -> None:
        state[:, 1:] = F.gelu(F.linear(x, weight))

    def itself(state: Tensor, x: Tensor, weight: Tensor) -> None:
        state.copy_((x @ state).relu() * 0.1)

    weight = randn(64, 8)
    with machine((4096, 4096, 64)):
        made = ran(apart, randn(2000, 65), given=lambda turn: (randn(2000, 8, seed=turn), weight))
        assert copies(made) == 0 and "panels" in made[-1].source
        square = randn(400, 400) / 20
        made = ran(itself, square, given=lambda turn: (randn(400, 400, seed=turn) / 20, weight))
        assert copies(made) == 0 and "panels" not in made[-1].source


def test_stacks() -> None:
    """Fused operators that store into different inputs run in one call; into the same, in turn."""

    def program(one: Tensor, other: Tensor, x: Tensor) -> Tensor:
        late = one.exp()
        one[:, :200] = x[:, :200].sin()
        other.mul_(0.5).add_(x.cos())
        one[:, 100:] = x[:, 100:] * 2
        return late

    states = randn(300, 300), randn(300, 300)
    made = ran(program, *states, given=lambda turn: (randn(300, 300, seed=turn),))
    assert copies(made) == 0


@pytest.mark.parametrize("first", [300, 299, 301, 0])
def test_several_parts_by_one_operator(first: int) -> None:
    """Those that are known to be apart; where the second is over the first, one is copied."""

    def program(state: Tensor, x: Tensor) -> None:
        state[:, :300] = x.sin()
        state[:, first : first + 300] = x.cos() + 1

    states = randn(8000, 601)
    made = ran(program, states, given=lambda turn: (randn(8000, 300, seed=turn),))
    assert stores(made) + copies(made) == (1 if first == 0 else 2)
    assert copies(made) == (first == 299)


# -- not stored --


def shifted(state: Tensor, x: Tensor) -> None:
    state[:, :9] = state[:, 1:10] * 2


def turned_itself(state: Tensor, x: Tensor) -> None:
    state[:9, :9] = state[:9, :9].t() + 1


def by_its_mean(state: Tensor, x: Tensor) -> None:
    state.sub_(state.mean(0))


def repeated(state: Tensor, x: Tensor) -> None:
    state[:, :4] = (x[:, :1] * 2).expand(-1, 4)


def not_computed(state: Tensor, x: Tensor) -> None:
    state[:, :4] = x[:, 2:6]


@pytest.mark.parametrize("program", [shifted, turned_itself, by_its_mean, repeated, not_computed])
def test_what_is_read_otherwise_is_copied(program: Program) -> None:
    made = ran(program, randn(260, 270), given=lambda turn: (randn(260, 270, seed=turn),))
    assert copies(made) == 1 and stores(made) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int32, torch.bool])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Of the same the machine stores them, on a CPU; others are copied."""

    def program(state: Tensor, other: Tensor, x: Tensor) -> None:
        state[:, 1:] = torch.where(x[:, 1:] > 0, state[:, 1:], state[:, 1:] * 3)
        other[:, 1:] = x[:, 1:] * 2

    states = [randn(260, 270, seed=k).mul(3).to(dtype) for k in (1, 2)]
    made = ran(program, *states, given=lambda turn: (randn(260, 270, seed=turn),))
    found = {torch.float64: (2, 0), torch.bool: (0, 2)}.get(dtype, (1, 1))  # three times a bool
    assert (stores(made), copies(made)) == found  # is an int


def test_numbers_are_copied() -> None:
    def program(scale: Tensor, x: Tensor) -> Tensor:
        scale.copy_(x.sum())
        return x * 2

    made = ran(program, torch.zeros(()), given=lambda turn: (randn(7, 9, seed=turn),))
    assert stores(made) == 0


def test_old_values_that_are_read_later() -> None:
    """What is computed early is not stored before the old value has been read."""

    def program(state: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        new = x.exp()
        old = torch.linalg.norm(state @ new)
        more = torch.cumsum(state * 2, 0)
        state.copy_(new)
        return old, more, new * 1

    ran(program, randn(260, 260), given=lambda turn: (randn(260, 260, seed=turn) / 9,))


def test_nothing_is_stored_before_what_raises() -> None:
    """Positions that are wrong leave an input as eager mode does: as it was."""

    def program(state: Tensor, x: Tensor, at: Tensor) -> Tensor:
        new = x.exp()
        found = x[at] * new
        state.copy_(new)
        return found

    compiled = magjit.compile(program, backend="dvm")
    state, x = randn(300, 300), randn(300, 300, seed=1)
    for _ in range(3):
        compiled(state, x, torch.arange(300))
    state.zero_()
    with pytest.raises(IndexError):
        compiled(state, x, torch.arange(300) + 7)
    assert not state.any()


def test_inputs_of_the_same_memory() -> None:
    """Views of one another, and an input that is expanded: as eager mode."""

    def program(state: Tensor, other: Tensor) -> Tensor:
        state[:, :4] = other[:, 1:5] * 2
        return other.sum(1) + state[:, 0]

    compiled = magjit.compile(program, backend="dvm")
    mine, theirs = randn(300, 300), randn(300, 300)
    for first in (0, 3, 4, 0):
        got = compiled(mine[:, first:], mine[:, 2:])
        torch.testing.assert_close(got, program(theirs[:, first:], theirs[:, 2:]))
        torch.testing.assert_close(mine, theirs)


def test_averages_in_training() -> None:
    """A layer's running values are stored in the forward pass; gradients are eager mode's."""

    class Keeping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(300, 300)
            self.register_buffer("average", torch.zeros(300, 300))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).tanh()
            self.average.mul_(0.9).add_(y.detach(), alpha=0.1)
            return y - self.average

    torch.manual_seed(0)
    model, twin = Keeping(), Keeping()
    twin.load_state_dict(model.state_dict())
    before = {id(one) for one in schedules()}
    compiled = magjit.compile(model, backend="dvm")
    for turn in range(4):
        x = randn(300, 300, seed=turn)
        made, wanted = compiled(x), twin(x)
        torch.testing.assert_close(made, wanted)
        torch.testing.assert_close(model.average, twin.average)
        made.square().sum().backward()
        wanted.square().sum().backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)
    assert stores([one for one in schedules() if id(one) not in before])


def test_views_of_what_is_written_are_returned() -> None:
    """They are the caller's input, as in eager mode, and no whole is made for them."""

    def program(state: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        state[:, :200] = x * 2
        return state[:, 100:], state[:3].t(), state[:, 100:] * 2

    before = {id(one) for one in schedules()}
    compiled = magjit.compile(program, backend="dvm", fullgraph=True)
    mine, theirs = randn(300, 300), randn(300, 300)
    with torch.no_grad():
        for turn in range(4):
            x = randn(300, 200, seed=turn)
            found, wanted = compiled(mine, x), program(theirs, x)
            torch.testing.assert_close(found, wanted)
            assert [one.stride() for one in found] == [one.stride() for one in wanted]
            for one, other in zip(found, wanted, strict=True):
                one.mul_(0.5)
                other.mul_(0.5)
            torch.testing.assert_close(mine, theirs)
    made = [one for one in schedules() if id(one) not in before]
    assert stores(made) == 1 and "scatter" not in made[0].source


def test_what_is_returned_apart_is_apart() -> None:
    """A new value that the program keeps beside the input is not in its memory."""

    def program(state: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        new = torch.slice_scatter(state, x, 1, 0, 200)
        state.copy_(new)
        return new, state[:, :3]

    compiled = magjit.compile(program, backend="dvm", fullgraph=True)
    mine, theirs = randn(300, 300), randn(300, 300)
    with torch.no_grad():
        for turn in range(4):
            x = randn(300, 200, seed=turn)
            found, wanted = compiled(mine, x), program(theirs, x)
            mine.zero_()
            theirs.zero_()
            torch.testing.assert_close(found, wanted)
