"""What a graph writes into its inputs: buffers of many layers by one call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit_dvm.backend import schedules


class Counting(nn.Module):
    """Writes buffers in more than one way, and returns what one was."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(5) for _ in range(3))
        for name in ("calls", "turns"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.register_buffer("sum", torch.zeros(5))
        self.register_buffer("last", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self.sum * 2
        for norm in self.norms:
            x = norm(x).relu()
        self.calls += 1
        self.turns += 2
        self.sum += x.detach().sum(0)
        self.last.copy_(x.detach()[0])
        return x, before, self.calls * 1


def sources(made: Callable[[], Any]) -> list[str]:
    before = {id(one) for one in schedules()}
    made()
    return [one.source for one in schedules() if id(one) not in before]


@pytest.mark.parametrize("gradients", [False, True])
def test_buffers_are_written_together(gradients: bool) -> None:
    torch.manual_seed(0)
    model = Counting().train()
    twin = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="dvm")

    def run() -> None:
        for turn in range(4):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(turn))
            with torch.set_grad_enabled(gradients):
                found, expected = compiled(x), twin(x)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(model.state_dict(), twin.state_dict())
            if gradients:
                for one in (found, expected):
                    one[0].square().sum().backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)

    made = "\n".join(sources(run))
    assert made.count("_foreach_copy__default([") == 1
    assert made.count("_foreach_add__Scalar([") == 1  # the norms' counts; two others alone
    assert magjit.stats(compiled).replays >= 2


def test_large_ones_and_views_are_written_alone() -> None:
    def program(x: torch.Tensor, state: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        state.mul_(2).add_(x)
        part[1:].add_(1)
        return (state * x).sum() + part.sum()

    compiled = magjit.compile(program, backend="dvm")

    def run() -> None:
        given = [torch.randn(300, 300), torch.randn(300, 300), torch.randn(4)]
        mine = [one.clone() for one in given]
        for _ in range(4):
            torch.testing.assert_close(compiled(*mine), program(*given))
            torch.testing.assert_close(mine, given)

    assert "_foreach" not in "\n".join(sources(run))


def test_what_is_written_is_not_read_meanwhile() -> None:
    """Buffers that change places, through views and as they are."""

    def program(x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        a, b, c, d = states
        old = a.clone()
        a.copy_(b.view(2, 3).t().reshape(6))
        b.copy_(c.view(3, 2).view(6))
        c.copy_(old * 1)
        d.copy_(c + x)
        return (a + b).sum() + d.view(2, 3).sum()

    compiled = magjit.compile(program, backend="dvm")
    states = [torch.arange(6.0) + 10 * k for k in range(4)]
    mine = [one.clone() for one in states]
    for turn in range(4):
        x = torch.full((6,), float(turn))
        torch.testing.assert_close(compiled(x, *mine), program(x, *states))
        torch.testing.assert_close(mine, states)


def test_versions_tell_of_writes() -> None:
    """Autograd sees that what it keeps has been changed."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).train()
    compiled = magjit.compile(model, backend="dvm")
    x = torch.randn(4, 3)
    compiled(x)  # the capture, as eager mode: its own kernels tell nobody
    for _ in range(2):
        scale = torch.ones(3, requires_grad=True)
        kept = [one for one in model.buffers() if one.dim()]
        uses = [(one * scale).sum() for one in kept]
        before = [one._version for one in model.buffers()]
        compiled(x)
        assert all(one._version > old for one, old in zip(model.buffers(), before, strict=True))
        for one in uses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                one.backward()


def part(state: torch.Tensor, x: torch.Tensor) -> None:
    state[:, 2:5] = x * 2


def part_of_a_part(state: torch.Tensor, x: torch.Tensor) -> None:
    state[1:, 2:5][:, 1:] = x[1:, 1:] + 1


def one_row(state: torch.Tensor, x: torch.Tensor) -> None:
    state[-1, :3].mul_(2).add_(x[0])


def every_second(state: torch.Tensor, x: torch.Tensor) -> None:
    state[:, 1::2].add_(1)


def several(state: torch.Tensor, x: torch.Tensor) -> None:
    state[:, :3] = x
    state[:, 3:6] = x.relu()
    state[2:] = 7  # over both


def repeated(state: torch.Tensor, x: torch.Tensor) -> None:
    state[:, :4] = x[:, :1].double()


def behind_one_another(state: torch.Tensor, x: torch.Tensor) -> None:
    state[:, :3] = x
    state[:, 4:7] = state[:, :3] * 2 + state[:, 4:7]


def at_positions(state: torch.Tensor, x: torch.Tensor) -> None:
    state[:, torch.tensor([5, 0, 3], device=x.device)] = x


def where_true(state: torch.Tensor, x: torch.Tensor) -> None:
    state[state > 0] = 0.5


def copied_columns(state: torch.Tensor, x: torch.Tensor) -> None:
    state.index_copy_(1, torch.tensor([5, 0, 3], device=x.device), x)


def added_columns(state: torch.Tensor, x: torch.Tensor) -> None:
    state[:3].index_add_(1, torch.tensor([5, 0, 5], device=x.device), x[:3], alpha=2)


def scattered(state: torch.Tensor, x: torch.Tensor) -> None:
    state.scatter_(1, torch.tensor([[6, 0, 3]] * 4, device=x.device), x)


PARTS = [part, part_of_a_part, one_row, every_second, several, repeated, behind_one_another]
PARTS += [at_positions, where_true, copied_columns, added_columns, scattered]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("write", PARTS, ids=lambda one: one.__name__)
def test_parts_alone_are_written(write: Callable[..., Any], dynamic: bool | None) -> None:
    """No whole is made to be copied back, unless what is between writes is read."""

    def program(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before = state.sum() + x
        write(state, x)
        return before

    compiled = magjit.compile(program, backend="dvm", dynamic=dynamic, fullgraph=True)

    def run() -> None:
        mine, theirs = (torch.arange(28.0).reshape(4, 7) - 9 for _ in "ab")
        for turn in range(4):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(turn))
            versions = mine._version
            torch.testing.assert_close(compiled(mine, x), program(theirs, x))
            torch.testing.assert_close(mine, theirs)
            assert mine._version > versions

    made = "\n".join(sources(run))
    whole = any(f"{name}_default(" in made for name in ("slice_scatter", "index_put", "index_copy"))
    assert not whole or write is where_true
    assert magjit.stats(compiled).replays >= 2


def whole_and_part(state: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> Any:
    """A part is read from another input that is written, the first one's old values."""
    state[:, :3] = other[:, :3]
    other[:, 3:6] = x
    return x + 1


def both_of_one(state: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> Any:
    state[:, :3] = state[:, 4:7]
    other[:, :3].copy_(x)
    return state[:, 3:6] + x


def small_and_read(state: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> Any:
    state[:2, 0] = x[:2, 0]
    other[torch.tensor([0, 2])] = 3.0
    return state * 2, other[:, :3] + x


def returned(state: torch.Tensor, other: torch.Tensor, x: torch.Tensor) -> Any:
    state[:, :3] = x * 2
    return state[:, :3], other.narrow(1, 2, 2).zero_()


@pytest.mark.parametrize("program", [whole_and_part, both_of_one, small_and_read, returned])
def test_what_parts_are_made_of(program: Callable[..., Any]) -> None:
    """Old values of what is written, and new ones that are read."""
    compiled = magjit.compile(program, backend="dvm")
    mine = [torch.arange(28.0).reshape(4, 7) * k for k in (1, -1)]
    theirs = [one.clone() for one in mine]
    for turn in range(4):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(turn))
        torch.testing.assert_close(compiled(*mine, x), program(*theirs, x))
        torch.testing.assert_close(mine, theirs)


def test_parts_of_buffers_in_training() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("last", torch.zeros(64, 3))
            self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))

        def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
            x = self.linear(x).relu()
            self.last[at : at + x.shape[0]] = x.detach()
            self.calls[0] += 1
            return x * self.last[at].sum()

    torch.manual_seed(0)
    model = Keeping()
    twin = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="dvm")
    for turn in range(6):
        x = torch.randn(5 + turn % 2, 3)
        made, wanted = compiled(x, 7 * turn), twin(x, 7 * turn)
        torch.testing.assert_close(made, wanted)
        made.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(model.state_dict(), twin.state_dict())
        torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad)


def test_nothing_is_written_where_positions_are_wrong() -> None:
    def program(first: torch.Tensor, second: torch.Tensor, at: torch.Tensor) -> None:
        first[:, :2] += 1
        second[at] = 5.0

    compiled = magjit.compile(program, backend="dvm")
    first, second = torch.zeros(3, 4), torch.zeros(3, 4)
    for _ in range(3):
        compiled(first, second, torch.tensor([0, 2]))
    before = first.clone(), second.clone()
    with pytest.raises(IndexError):
        compiled(first, second, torch.tensor([0, 9]))
    torch.testing.assert_close(second, before[1])
    assert float(first[0, 0]) in (3.0, 4.0)  # eager mode writes the first before


def test_a_cache_that_is_read_is_written_where_it_is() -> None:
    """What others read of it is its memory: no whole is made, and old values are read before."""

    def attend(
        keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, x: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        before = keys.relu()  # waits for what is made of it
        keys[:, 2:4] = x
        values.index_copy_(1, at, x * 2)
        scores = (q @ keys.transpose(1, 2)).softmax(-1)
        return scores @ values + before[:, :1] * q

    compiled = magjit.compile(attend, backend="dvm", fullgraph=True)

    def run() -> None:
        mine = [torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(k)) for k in (1, 2)]
        theirs = [one.clone() for one in mine]
        for turn in range(5):
            made = torch.Generator().manual_seed(turn)
            q, x = torch.randn(3, 1, 8, generator=made), torch.randn(3, 2, 8, generator=made)
            given = q, x, torch.tensor([turn, turn + 1])
            torch.testing.assert_close(compiled(*mine, *given), attend(*theirs, *given))
            torch.testing.assert_close(mine, theirs)

    made = "\n".join(sources(run))
    assert "slice_scatter" not in made and "index_copy_default(" not in made
    assert "index_put_default(" not in made
    assert magjit.stats(compiled).replays >= 2


def test_old_values_are_read_before_they_are_gone() -> None:
    """Also through views and pieces, by what is fused with what comes later."""

    def program(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, right = (state * 1).chunk(2, 1)
        old = [one.exp() for one in state.unbind(0)]
        state[:, 1] = x[:, 0]
        late = state.sin() + torch.stack(old)
        return late * x, left + right, old[0] + state[0]

    compiled = magjit.compile(program, backend="dvm")
    mine, theirs = (torch.linspace(-1, 1, 24).reshape(4, 6) for _ in "ab")
    for turn in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(turn))
        torch.testing.assert_close(compiled(mine, x), program(theirs, x))
        torch.testing.assert_close(mine, theirs)


def test_constants_have_their_sizes_with_symbols() -> None:
    """A tensor that the program holds is as large in each call: nothing is asked of its sizes."""

    def program(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return state.scatter(1, torch.tensor([[6, 0, 3]] * 4), x)

    for _ in range(5):  # what torch keeps of tensors decided about it
        compiled = magjit.compile(program, backend="dvm", dynamic=True)
        for _ in range(3):
            given = torch.zeros(4, 7), torch.randn(4, 3)
            torch.testing.assert_close(compiled(*given), program(*given))
        assert magjit.stats(compiled).captures == 1


@pytest.mark.parametrize("backend", ["dvm", "triton"])
def test_what_is_put_where_it_is(backend: str) -> None:
    """Nothing is written; what is read afterwards is what was there."""

    def program(state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        same = torch.slice_scatter(state, state[:, :3], 1, 0, 3)
        state.copy_(torch.slice_scatter(same, x, 1, 3, 6))
        return state * 2

    compiled = magjit.compile(program, backend=backend, fullgraph=True)
    mine, theirs = torch.ones(4, 7), torch.ones(4, 7)
    with torch.no_grad():
        for turn in range(4):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(turn))
            torch.testing.assert_close(compiled(mine, x), program(theirs, x))
            torch.testing.assert_close(mine, theirs)


def test_attention_over_a_cache_is_returned() -> None:
    """Its result is memory of its own, so no whole of the cache is made for it."""

    def attend(keys: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        keys[:, :, 2:4] = x
        return ((q @ keys.transpose(2, 3)) * 0.25).softmax(-1) @ keys

    compiled = magjit.compile(attend, backend="dvm", fullgraph=True)

    def run() -> None:
        mine, theirs = (torch.linspace(-1, 1, 2 * 3 * 64 * 16).reshape(2, 3, 64, 16) for _ in "ab")
        for turn in range(4):
            made = torch.Generator().manual_seed(turn)
            given = [torch.randn(2, 3, n, 16, generator=made) for n in (64, 2)]
            found, wanted = compiled(mine, *given), attend(theirs, *given)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine, theirs)
            found.zero_()
            torch.testing.assert_close(mine, theirs)

    with torch.no_grad():
        made = "\n".join(sources(run))
    assert "attention(" in made and "slice_scatter" not in made
