"""What `magjit.set_stance` lets a call do that no record serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import magjit
from magjit import stances
from magjit.errors import ArgumentError, RecompileError


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trace.append("run")
        return x * self.scale


trace: list[str] = []
X = torch.ones(3)


@pytest.fixture(autouse=True)
def default_stance() -> Iterator[None]:
    trace.clear()
    yield
    assert stances.current() == "default", "the test left a stance behind"


def captured() -> tuple[Net, Any]:
    model = Net()
    compiled = magjit.compile(model, backend="eager", dynamic=False)
    compiled(X)
    compiled(X)
    return model, compiled


def test_fail_on_recompile_names_the_guard_and_runs_nothing() -> None:
    model, compiled = captured()
    done = len(trace)
    with magjit.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(X), X * 2)
        assert len(trace) == done + 1  # the list is one of the program's effects
        model.scale = 3.0
        with pytest.raises(RecompileError) as raised:
            compiled(X)
        assert len(trace) == done + 1
    text = str(raised.value)
    assert "scale: 2.0 -> 3.0" in text and "test_stances.py:" in text and "Net.forward" in text
    assert torch.equal(compiled(X), X * 3)
    assert magjit.stats(compiled).captures == 2


def test_fail_on_recompile_before_the_first_capture() -> None:
    compiled = magjit.compile(Net(), backend="eager")
    with magjit.set_stance("fail_on_recompile"), pytest.raises(RecompileError, match="no record"):
        compiled(X)
    assert trace == []


def test_eager_on_recompile_uses_what_fits() -> None:
    model, compiled = captured()
    with magjit.set_stance("eager_on_recompile"):
        compiled(X)
        model.scale = 3.0
        assert torch.equal(compiled(X), X * 3)
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays, stats.eager_calls) == (1, 2, 1)


def test_force_eager_uses_no_record_and_keeps_all() -> None:
    _, compiled = captured()
    with magjit.set_stance("force_eager"):
        assert torch.equal(compiled(X), X * 2)
    compiled(X)
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays, stats.eager_calls) == (1, 2, 1)


def test_nested_blocks_and_decorators() -> None:
    @magjit.set_stance("force_eager")
    def inside() -> str:
        return stances.current()

    assert stances.current() == "default"
    with magjit.set_stance("fail_on_recompile"):
        assert inside() == "force_eager"
        with magjit.set_stance("eager_on_recompile"):
            assert stances.current() == "eager_on_recompile"
        assert stances.current() == "fail_on_recompile"
    with pytest.raises(ValueError, match="body"), magjit.set_stance("force_eager"):
        raise ValueError("body")
    assert stances.current() == "default"
    magjit.set_stance("force_eager")
    assert stances.current() == "force_eager"
    magjit.set_stance()


def test_regions_of_a_program() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if bool(y.sum() > 0):
            return y * 2
        return y - 1

    compiled = magjit.compile(program, backend="eager")
    compiled(X)
    with magjit.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(X), (X + 1) * 2)
        with pytest.raises(RecompileError, match="True -> False"):
            compiled(-X * 5)
    with magjit.set_stance("force_eager"):
        assert torch.equal(compiled(-X * 5), -X * 5)


def test_a_program_that_takes_a_stance_is_not_captured_with_it() -> None:
    @magjit.compile(backend="eager")
    def program(x: torch.Tensor) -> Any:
        with magjit.set_stance("force_eager"):
            seen = stances.current()
        return x * 2, seen

    for _ in range(3):
        result, seen = program(X)
        assert torch.equal(result, X * 2) and seen == "force_eager"
        assert stances.current() == "default"


def test_an_unknown_stance() -> None:
    with pytest.raises(ArgumentError, match="eager_on_recompile"):
        magjit.set_stance("lazy")  # type: ignore[arg-type]
