"""An operator that fails in a replay: the program's own exception, and the state of eager."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit

TABLE = torch.arange(12.0).reshape(4, 3)
GOOD, BAD = torch.tensor([1, 2]), torch.tensor([1, 7])


def looked_up(index: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(index, TABLE)


def in_no_grad(index: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return looked_up(index) * 2


def in_enable_grad(index: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.enable_grad():
        return looked_up(index) * 2


@torch.no_grad()
def decorated(index: torch.Tensor) -> torch.Tensor:
    return looked_up(index) * 2


def in_inference_mode(index: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return (looked_up(index) * 2).sum()


def in_autocast(index: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return looked_up(index) @ TABLE.t()


def in_nested_autocast(index: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = TABLE @ TABLE.t()
        with torch.autocast("cpu", enabled=False):
            return looked_up(index) @ TABLE.t() + y.float().sum()


def after_a_region(index: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = TABLE * 2
    return looked_up(index) + y.sum()


def with_dropout(index: torch.Tensor) -> torch.Tensor:
    y = nn.functional.dropout(TABLE, 0.5)
    return looked_up(index) + y.sum()


PROGRAMS = [
    looked_up,
    in_no_grad,
    in_enable_grad,
    decorated,
    in_inference_mode,
    in_autocast,
    in_nested_autocast,
    after_a_region,
    with_dropout,
]


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_exception_is_eagers(program: Callable[..., Any], grad: bool) -> None:
    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    texts = []
    with torch.set_grad_enabled(grad):
        compiled(GOOD)
        for call in (program, compiled):
            with pytest.raises(IndexError) as caught:
                call(BAD)
            texts.append(str(caught.value))
            assert torch.is_grad_enabled() == grad
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_autocast_enabled("cpu")
            caught.value.__traceback__ = None
        level = torch.autocast_increment_nesting()
        torch.autocast_decrement_nesting()
        assert level == 1
        torch.manual_seed(0)
        expected = program(GOOD)
        torch.manual_seed(0)
        torch.testing.assert_close(compiled(GOOD), expected)
    assert texts[0] == texts[1]
    assert magjit.stats(compiled).captures == 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.log: list[str] = []
        self.last: Any = None

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        self.log.append("begins")
        with torch.no_grad():
            y = self.embedding(index)
        self.last = y
        self.log.append("ends")
        return y


def test_the_state_is_eagers() -> None:
    eager, model = Net(), Net()
    model.load_state_dict(eager.state_dict())
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    for index in (GOOD, GOOD, BAD, GOOD, BAD):
        for call in (eager, compiled):
            try:
                call(index)
            except IndexError:
                pass
        assert eager.log == model.log
        torch.testing.assert_close(eager.last, model.last)
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays) == (1, 4)


def test_the_traceback_leads_through_the_program() -> None:
    compiled = magjit.compile(Net(), backend="eager", fullgraph=True)
    compiled(GOOD)
    with pytest.raises(IndexError) as caught:
        compiled(BAD)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "y = self.embedding(index)" in [frame.line for frame in frames]
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def test_a_graph_that_changes_its_inputs_is_not_repeated() -> None:
    """What it has changed before it failed stays changed, once."""

    def program(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        with torch.no_grad():
            return looked_up(index) + x.sum()

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    compiled(torch.zeros(2), GOOD)
    x = torch.zeros(2)
    with pytest.raises(IndexError):
        compiled(x, BAD)
    assert torch.equal(x, torch.ones(2))
    assert torch.is_grad_enabled()


def test_compiled_code_that_fails_where_the_program_does_not() -> None:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise RuntimeError("at run time")

        return run

    model = nn.Linear(3, 3)
    compiled = magjit.compile(model, backend=backend)
    x = torch.randn(2, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x))
    (text,) = [str(w.message) for w in caught if w.category is magjit.MagJITWarning]
    assert "at run time" in text and "Linear" in text
    compiled = magjit.compile(model, backend=backend, fullgraph=True)
    compiled(x)
    with pytest.raises(magjit.errors.BackendError, match="at run time") as error:
        compiled(x)
    assert isinstance(error.value.__cause__, RuntimeError)


def test_an_interrupt_in_a_replay_passes() -> None:
    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            torch._C._set_grad_enabled(False)
            raise KeyboardInterrupt

        return run

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x + 1
        return x * y

    compiled = magjit.compile(program, backend=backend)
    compiled(torch.ones(2))
    with pytest.raises(KeyboardInterrupt):
        compiled(torch.ones(2))
    assert torch.is_grad_enabled()
