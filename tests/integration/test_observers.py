"""Debuggers, coverage, profilers and torch._dynamo around compiled calls: all as without MagJIT."""

from __future__ import annotations

import cProfile
import itertools
import pstats
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import magjit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.relu()


def helper(value: int) -> int:
    doubled = value * 2
    return doubled + 1


class Watcher:
    """A trace function as a debugger has it: notes the lines of some functions of this file."""

    NAMES = ("caller", "forward", "helper")

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != __file__ or frame.f_code.co_name not in self.NAMES:
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_name, frame.f_lineno))
        return self

    def seen(self, name: str) -> int:
        return sum(function == name for function, _ in self.lines)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    before = sys.gettrace()
    watcher = Watcher()
    sys.settrace(watcher)
    yield watcher
    sys.settrace(before)


def test_a_trace_function_stays(watcher: Watcher) -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    helper(1)
    before = watcher.seen("helper")
    assert before > 0
    for _ in range(3):
        assert torch.equal(compiled(x), model(x))
        assert sys.gettrace() is watcher
        helper(1)
    assert watcher.seen("helper") == before * 4
    assert watcher.seen("forward") > 0
    assert magjit.stats(compiled).replays == 2


def test_a_trace_function_stays_after_an_exception(watcher: Watcher) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    compiled = magjit.compile(program, backend="eager")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compiled(torch.ones(2))
        assert sys.gettrace() is watcher
    before = watcher.seen("helper")
    helper(1)
    assert watcher.seen("helper") > before


def test_the_frame_that_calls_is_traced_on(watcher: Watcher) -> None:
    compiled = magjit.compile(Net(), backend="eager")

    def caller() -> int:
        a = 1
        compiled(torch.ones(1, 4))
        b = 2
        compiled(torch.ones(1, 4))
        return a + b

    caller()
    lines = [line for name, line in watcher.lines if name == "caller"]
    assert len(lines) == 5 and lines == sorted(lines)


def test_a_program_that_sets_a_trace_function() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        sys.settrace(other)
        try:
            return x * helper(2)
        finally:
            sys.settrace(None)

    other = Watcher()
    compiled = magjit.compile(program, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 5.0))
    assert sys.gettrace() is None


def test_a_profile_function_stays() -> None:
    calls: list[str] = []

    def profiler(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            calls.append(frame.f_code.co_name)

    compiled = magjit.compile(Net(), backend="eager")
    sys.setprofile(profiler)
    try:
        for _ in range(2):
            compiled(torch.ones(1, 4))
            helper(1)
            assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert calls == ["forward", "helper", "helper"]


def test_cprofile() -> None:
    compiled = magjit.compile(Net(), backend="eager")
    profiler = cProfile.Profile()
    profiler.runcall(compiled, torch.ones(1, 4))
    profiler.runcall(helper, 1)
    names = {key[2] for key in pstats.Stats(profiler).stats}  # type: ignore[attr-defined]
    assert {"forward", "helper"} <= names


# --- coverage -----------------------------------------------------------------------------------


PROGRAM = """
import torch

def before(x):
    y = x + 1
    return y

def forward(x):
    y = x * 2
    if y.dim() > 5:
        y = y - 1
    return y

def after(x):
    y = x - 1
    return y
"""


@pytest.mark.parametrize("core", ["ctrace", "pytrace", "sysmon"])
def test_coverage(core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coverage = pytest.importorskip("coverage")
    if core == "sysmon" and sys.version_info < (3, 12):
        pytest.skip("needs sys.monitoring")
    if sys.gettrace() is not None:
        pytest.skip("the tests run under coverage themselves")
    path = tmp_path / "measured_program.py"
    path.write_text(PROGRAM)
    monkeypatch.setenv("COVERAGE_CORE", core)
    measured = coverage.Coverage(data_file=None, include=[str(path)], config_file=False)
    measured.start()
    try:
        space: dict[str, Any] = {"__name__": "measured_program"}
        exec(compile(PROGRAM, str(path), "exec"), space)
        compiled = magjit.compile(space["forward"], backend="eager", fullgraph=True)
        x = torch.ones(2)
        space["before"](x)
        for _ in range(2):
            assert torch.equal(compiled(x), x * 2)
        space["after"](x)
    finally:
        measured.stop()
    _, _, missing, _ = measured.analysis(str(path))
    lines = PROGRAM.splitlines()
    unseen = {lines[n - 1].strip() for n in missing if "forward" not in lines[n - 1]}
    # The line that never runs; during the capture a tracer may have missed the others.
    assert {"y = y - 1"} <= unseen <= {"y = x * 2", "if y.dim() > 5:", "y = y - 1", "return y"}
    assert magjit.stats(compiled).replays == 1


# --- torch._dynamo ------------------------------------------------------------------------------


def dynamo(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="eager")


def ours(model: nn.Module) -> Callable[..., Any]:
    return magjit.compile(model, backend="eager", fullgraph=True)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "order",
    list(itertools.permutations([dynamo, ours, dynamo, ours], 4))[::6],
    ids=lambda order: "-".join(step.__name__ for step in order),
)
def test_torch_compile_before_and_after(order: Any, fresh_dynamo: None) -> None:
    models = [Net() for _ in order]
    compiled = [make(model) for make, model in zip(order, models, strict=True)]
    for _ in range(3):
        for model, call in zip(models, compiled, strict=True):
            x = torch.randn(2, 4)
            torch.testing.assert_close(call(x), model(x))
    for make, call in zip(order, compiled, strict=True):
        if make is ours:
            assert magjit.stats(call).replays == 2


@pytest.mark.parametrize("first", [dynamo, ours], ids=["dynamo first", "ours first"])
def test_one_model_compiled_by_both(first: Any, fresh_dynamo: None) -> None:
    model = Net()
    second = ours if first is dynamo else dynamo
    calls = [first(model), second(model)]
    for _ in range(3):
        for call in calls:
            x = torch.randn(2, 4)
            torch.testing.assert_close(call(x), model(x))
        torch._dynamo.reset()


def test_torch_compile_in_another_thread(fresh_dynamo: None) -> None:
    model, other = Net(), Net()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for i in range(5):
                torch._dynamo.reset()
                call = dynamo(other)
                x = torch.randn(1 + i, 4)
                torch.testing.assert_close(call(x), other(x))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for i in range(20):
        call = ours(model)
        x = torch.randn(1 + i % 3, 4)
        torch.testing.assert_close(call(x), model(x))
        torch.testing.assert_close(call(x), model(x))
    thread.join(60)
    assert not failures


def test_what_torch_compile_leaves_behind_is_no_state_of_the_program(fresh_dynamo: None) -> None:
    """It lists every module that is made, also those that a slice of a ModuleList makes."""
    dynamo(Net())(torch.randn(2, 4))
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in layers[:2]:
            x = layer(x)
        return x

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), program(x))
    assert magjit.stats(compiled).replays == 2


def test_a_program_that_calls_torch_compile(fresh_dynamo: None) -> None:
    model = Net()
    inner = dynamo(model)

    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    compiled = magjit.compile(program, backend="eager")
    for _ in range(3):
        x = torch.randn(2, 4)
        torch.testing.assert_close(compiled(x), model(x) + 1)
