"""``mode="reduce-overhead"``: programs that are replayed as CUDA graphs compute what eager does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from control_flow import BlockDrop, LoopedLSTM
from magjit.plugin import cuda_graphs

pytestmark = pytest.mark.gpu


@pytest.fixture
def captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[list[Any]]:
    found, capture = [], cuda_graphs._capture

    def counted(*given: Any, **named: Any) -> Any:
        found.append(capture(*given, **named))
        return found[-1]

    monkeypatch.setattr(cuda_graphs, "_capture", counted)
    yield found
    assert "launched one by one, since" not in caplog.text


@pytest.mark.parametrize("limit", [50, 100_000], ids=["cut", "unrolled"])
def test_a_loop_of_any_length(captured: list[Any], limit: int) -> None:
    torch.manual_seed(0)
    model = LoopedLSTM(width=64, layers=3).cuda().eval()
    compiled = magjit.compile(model, backend="dvm", mode="reduce-overhead")
    with torch.no_grad(), magjit.config.override(unroll_limit=limit):
        for length in (5, 7, 4, 9, 6, 12, 5):
            x = torch.randn(length, 4, 64, device="cuda")
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert captured


@pytest.mark.parametrize("backend", ["dvm", "triton", "inductor"])
@pytest.mark.parametrize("first", [(0, 1), (0, 0)], ids=["two first", "one first"])
def test_one_tensor_for_two(backend: str, first: tuple[int, int]) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> Any:
        return a.exp() * b - 1, a + b.cos(), b

    compiled = magjit.compile(program, backend=backend, mode="reduce-overhead")
    given = [torch.randn(64, 64, device="cuda") for _ in range(3)]
    kept = [x.clone() for x in given]
    pairs = [(0, 0), (0, 1), (1, 1), (2, 2), (1, 2), (0, 2), (2, 1), (1, 1), (0, 0), (2, 2)]
    with torch.no_grad():
        for one, other in [first] * 4 + pairs:
            wanted = program(given[one], given[other])
            found = compiled(given[one], given[other])
            torch.testing.assert_close(found, wanted)
            assert found[2] is given[other]
    assert all(map(torch.equal, given, kept))


def test_blocks_that_share_code_have_graphs_of_their_own(captured: list[Any]) -> None:
    """They copy what goes from block to block, and no weights."""
    torch.manual_seed(0)
    model = BlockDrop(depth=5).cuda().eval()
    compiled = magjit.compile(model, backend="dvm", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(40):
            x = torch.randn(1, 3, 16, 16, device="cuda") + torch.randn(1, 3, 1, 1, device="cuda")
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    activation = torch.Size([1, 32, 16, 16])
    blocks = [one for one in captured if [x.shape for x in one.static] == [activation]]
    assert len(blocks) >= len(model.parts)
    assert not [one for one in captured if len(one.static) > 1]


def test_parameters_that_change_in_place_are_seen(captured: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda().eval()
    compiled = magjit.compile(model, backend="dvm", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(16, 32, device="cuda")
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            model[0].weight.mul_(0.9)
    assert len(captured) == 1


def test_results_are_the_callers(captured: list[Any]) -> None:
    compiled = magjit.compile(lambda x: (x.exp() + 1, x * 2), backend="dvm", mode="reduce-overhead")
    given = [torch.randn(64, 64, device="cuda") for _ in range(6)]
    with torch.no_grad():
        results = [compiled(x) for x in given]
    for x, (first, second) in zip(given, results, strict=True):
        torch.testing.assert_close(first, x.exp() + 1)
        torch.testing.assert_close(second, x * 2)
    assert captured


def test_results_that_are_views_are_made_of_the_copies(captured: list[Any]) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).exp()
        return x.t(), y, y[0], y[:, 3]

    compiled = magjit.compile(program, backend="dvm", mode="reduce-overhead")
    kept = []
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(64, 64, device="cuda")
            kept.append((compiled(x), program(x)))
            first, y, row, column = kept[-1][0]
            assert first.data_ptr() == x.data_ptr()
            assert row.data_ptr() == y.data_ptr() == column.data_ptr() - 12
    for results, wanted in kept:
        for one, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(one, other)
    assert captured


def written(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x.exp()


def drawn(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x, 0.5, True).exp()


@pytest.mark.parametrize("program", [written, drawn])
def test_what_no_graph_can_stand_for_runs_as_it_is(
    program: Callable[..., Any], captured: list[Any]
) -> None:
    compiled = magjit.compile(program, backend="dvm", mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(5):
            x = torch.randn(64, 64, device="cuda")
            y = x.clone()
            torch.manual_seed(seed)
            made = compiled(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(made, program(y))
            torch.testing.assert_close(x, y)
    assert not captured


def test_training_is_not_captured(captured: list[Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda()
    compiled = magjit.compile(model, backend="dvm", mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(6, 8, device="cuda")
        compiled(x).square().sum().backward()
        found = [one.grad.clone() for one in model.parameters()]
        model.zero_grad()
        model(x).square().sum().backward()
        for one, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad)
        model.zero_grad()
    assert not captured
