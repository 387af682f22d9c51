"""The six steps, with compilers that fail each of them in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from paritybench_runner.compilers import MagJIT, Problem
from paritybench_runner.corpus import Case
from paritybench_runner.protocol import SETTLES, CompilerRun, run_eagerly
from paritybench_runner.trial import Trial


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Branches(nn.Module):
    """Five operators, of which the last stands alone; `bool` of a tensor cuts before it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x + 1).relu()
        if x.sum() > 1:
            x = x * 2
        return x


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def trial(cls: Any = Net) -> Trial:
    return Trial(Case("f.py", 0, cls, lambda: ([], {}), lambda: ([torch.rand(4, 3)], {})), "cpu")


class Fake:
    """A compiler that runs eagerly, but for what a test changes."""

    name = "fake"
    insists = False

    def __init__(self, change: Callable[[Any, nn.Module, int], Any], **facts: Any) -> None:
        self.change = change
        self.facts = facts

    def warm_up(self) -> None:
        pass

    def reset(self) -> None:
        pass

    def compile(self, module: nn.Module, backend: str, *, whole: bool) -> Any:
        return FakeAttempt(self, module)


class FakeAttempt:
    attributes_visible = True

    def __init__(self, fake: Fake, module: nn.Module) -> None:
        self.fake, self.module, self.calls = fake, module, 0

    def call(self, *args: Any) -> Any:
        self.calls += 1
        return self.fake.change(self.module(*args), self.module, self.calls)

    def graph_count(self) -> int:
        return self.fake.facts.get("graphs", 1)

    @property
    def graphs(self) -> list[Any]:
        return []

    def captures(self) -> int:
        most = self.fake.facts.get("captures", 1)
        return min(self.calls, most)

    def missed(self) -> str:
        return "args[0] is another"

    def problem(self) -> Problem | None:
        return self.fake.facts.get("problem")

    def opaque(self) -> list[str]:
        return self.fake.facts.get("opaque", [])


def run(change: Callable[[Any, nn.Module, int], Any] = lambda y, m, n: y, **facts: Any) -> Any:
    return CompilerRun(trial(), Fake(change, **facts), "eager", 6).run()


def test_eager_runs() -> None:
    found = run_eagerly(trial())
    assert (found.status, found.deterministic, found.dynamic) == ("runs", True, "")
    assert run_eagerly(trial(Fails)).status == "eager"


def test_all_steps_hold() -> None:
    result = run()
    assert result.outcome == "whole" and result.whole
    assert result.steps == dict.fromkeys((2, 3, 4, 5, 6), "held")


def test_later_steps_alone() -> None:
    result = CompilerRun(trial(), Fake(lambda y, m, n: y), "eager", 6, first_step=5).run()
    assert result.steps == {5: "held", 6: "held"}
    assert result.outcome == "splits" and not result.whole and "left out" in result.reason
    wrong = CompilerRun(trial(), Fake(lambda y, m, n: y[:4]), "eager", 6, first_step=6).run()
    assert (wrong.outcome, wrong.step) == ("wrong", 6)


@pytest.mark.parametrize(("captures", "step"), [(1, "held"), (2, SETTLES), (9, "captured again")])
def test_a_program_that_sets_itself_up(captures: int, step: str) -> None:
    result = run(captures=captures)
    assert result.steps[3] == step and result.whole is (captures == 1)


def fail(y: Any, module: nn.Module, calls: int) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    ("change", "outcome", "step"),
    [
        (fail, "crashed", 2),
        (lambda y, m, n: y + 1, "wrong", 2),
        (lambda y, m, n: y.detach(), "wrong", 2),
        (lambda y, m, n: y + 1 if n == 2 else y, "wrong", 3),
        (lambda y, m, n: y.detach().requires_grad_() if m.training else y, "wrong", 5),
        (lambda y, m, n: y[:4], "wrong", 6),
    ],
    ids=["raises", "value", "gradient", "second call", "training", "batch"],
)
def test_a_step_fails(change: Any, outcome: str, step: int) -> None:
    result = run(change)
    assert (result.outcome, result.step) == (outcome, step), result.reason


def test_a_changed_attribute_is_a_wrong_state() -> None:
    def change(y: Any, module: nn.Module, calls: int) -> Any:
        module.calls = calls
        return y

    result = run(change)
    assert result.outcome == "wrong" and "state" in result.reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"problem": Problem("a print", "f.py:3 in f")}, "a print"),
        ({"captures": 9}, "captured again"),
        ({"opaque": ["mine"]}, "no torch operators: mine"),
        ({"graphs": 2}, "2 graphs"),
    ],
)
def test_right_but_not_whole(facts: dict[str, Any], reason: str) -> None:
    result = run(**facts)
    assert result.outcome == "splits" and not result.whole
    assert reason in result.reason


def test_more_operators_than_eager_are_not_whole() -> None:
    result = run(lambda y, m, n: y * 1)
    assert result.outcome == "splits"
    assert (
        result.reason.startswith("other operators than eager: ") and "+1 aten::mul" in result.reason
    )


def test_operators_of_a_backend_are_its_own() -> None:
    compiler = MagJIT()
    result = CompilerRun(trial(), compiler, "aot_eager", 3).run()
    compiler.reset()
    assert (result.outcome, result.graphs) == ("whole", 1), result.reason
    assert result.in_graphs


SHARED: list[torch.Tensor] = []


class Keeps(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        SHARED.append(super().forward(x))
        return SHARED[0] if self.training else SHARED[-1]


def test_what_eager_does_once_only_is_not_held_against_a_compiler() -> None:
    result = CompilerRun(trial(Keeps), Fake(lambda y, m, n: y), "eager", 6).run()
    assert result.outcome == "whole", result.reason
    assert result.steps[5].startswith("n/a")


def test_magjit_takes_the_module_whole() -> None:
    compiler = MagJIT()
    result = CompilerRun(trial(), compiler, "eager", 6).run()
    compiler.reset()
    assert (result.outcome, result.graphs) == ("whole", 1), result.reason
    assert set(result.steps.values()) == {"held"}


@pytest.mark.parametrize(("cls", "outside"), [(Net, 0), (Branches, 3)])
def test_operators_in_graphs_are_counted(cls: Any, outside: int) -> None:
    """`bool` of a tensor is `is_nonzero`, `item` and `_local_scalar_dense`, between the graphs."""
    compiler = MagJIT()
    with magjit.config.override(single_operators=True):
        one = trial(cls)
        run_eagerly(one)
        result = CompilerRun(one, compiler, "eager", 3).run()
    compiler.reset()
    assert result.steps == {2: "held", 3: "held"}
    assert result.dispatched > 3 and result.dispatched - result.in_graphs == outside
