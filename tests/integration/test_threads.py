"""Several threads call at once: one captures, the others replay or run eagerly; all are right."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit import observe

THREADS = 4
CALLS = 30


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu() * scale
        return x


def in_threads(work: Callable[[int], object], count: int = THREADS) -> None:
    """Run ``work(i)`` in threads that start together; raise what the first failing one raised."""
    failures: list[BaseException] = []
    together = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            together.wait(30)
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many captures ran at the same time, at the start of each."""
    running, seen = [0], []
    real = observe.observe

    def observed(*args: Any, **kwargs: Any) -> Any:
        running[0] += 1
        seen.append(running[0])
        try:
            return real(*args, **kwargs)
        finally:
            running[0] -= 1

    monkeypatch.setattr("magjit.dispatch.observe", observed)
    return seen


def test_one_compiled_object_in_all_threads(captures: list[int]) -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager")

    def work(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for call in range(CALLS):
            x = torch.randn(1 + call % 2, 8, generator=generator)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x))

    in_threads(work)
    work(0)
    stats = magjit.stats(compiled)
    assert stats.captures == 2 and max(captures) == 1
    assert stats.captures + stats.replays + stats.eager_calls == (THREADS + 1) * CALLS
    assert stats.replays > 0


def test_different_objects_at_once(captures: list[int]) -> None:
    models = [Net(1 + index) for index in range(THREADS)]
    compiled = [magjit.compile(model, backend="eager") for model in models]

    def work(index: int) -> None:
        for call in range(CALLS):
            x = torch.full((2, 8), float(call))
            for model, jit in zip(models, compiled, strict=True):
                torch.testing.assert_close(jit(x, scale=0.5), model(x, scale=0.5))

    in_threads(work)
    work(0)
    assert max(captures) == 1
    assert [magjit.stats(jit).captures for jit in compiled] == [1] * THREADS


def test_compiling_calling_and_resetting_in_all_threads(captures: list[int]) -> None:
    model = Net()
    shared = magjit.compile(model, backend="eager")

    def work(index: int) -> None:
        for call in range(CALLS):
            x = torch.full((2, 8), float(call))
            own = magjit.compile(model, backend="eager")
            expected = model(x)
            torch.testing.assert_close(own(x), expected)
            torch.testing.assert_close(own(x), expected)
            torch.testing.assert_close(shared(x), expected)
            if call % 5 == index:
                magjit.reset(shared)

    in_threads(work)
    assert max(captures) == 1


def test_modes_are_each_threads_own() -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager")

    def work(index: int) -> None:
        for call in range(CALLS):
            with torch.set_grad_enabled(index % 2 == 0):
                out = compiled(torch.full((2, 8), float(call)))
                assert out.requires_grad == (index % 2 == 0)

    in_threads(work)
    for index in range(2):
        work(index)
    assert magjit.stats(compiled).captures == 2


def test_others_run_on_while_one_thread_captures() -> None:
    model, slow_model = Net(), Net()
    ready = magjit.compile(model, backend="eager")
    x = torch.ones(2, 8)
    ready(x)
    inside, done = threading.Event(), threading.Event()
    lines: list[str] = []

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        done.wait(30)
        return slow_model(x)

    capturing = magjit.compile(slow, backend="eager")
    fresh = magjit.compile(model, backend="eager")
    thread = threading.Thread(target=capturing, args=(x,))
    thread.start()
    try:
        assert inside.wait(30)
        before = magjit.stats(ready).replays
        started = time.perf_counter()
        torch.testing.assert_close(ready(x), model(x))
        torch.testing.assert_close(fresh(x), model(x))
        assert time.perf_counter() - started < 20
        assert magjit.stats(ready).replays == before + 1
        assert magjit.stats(fresh).eager_calls == 1
        assert sys.gettrace() is None
        lines.append("ran")
    finally:
        done.set()
        thread.join(30)
    assert lines == ["ran"]
    torch.testing.assert_close(fresh(x), model(x))
    assert magjit.stats(fresh).captures == 1


def test_an_exception_in_one_thread_leaves_the_others_alone() -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager")

    def work(index: int) -> None:
        for call in range(CALLS):
            x = torch.full((2, 8 - index % 2), float(call))
            if index % 2:
                with pytest.raises(RuntimeError, match="shapes"):
                    compiled(x)
            else:
                torch.testing.assert_close(compiled(x), model(x))

    in_threads(work)
    work(0)
    assert magjit.stats(compiled).captures == 1


def test_training_in_threads() -> None:
    models = [Net() for _ in range(THREADS)]
    compiled = [magjit.compile(model, backend="eager") for model in models]

    def work(index: int) -> None:
        for call in range(10):
            x = torch.full((2, 8), float(call + index))
            models[index].zero_grad()
            compiled[index](x).square().sum().backward()
            actual = [p.grad.clone() for p in models[index].parameters()]
            models[index].zero_grad()
            models[index](x).square().sum().backward()
            expected = [p.grad for p in models[index].parameters()]
            torch.testing.assert_close(actual, expected)

    in_threads(work)


def test_a_capture_inside_a_capture_is_part_of_it() -> None:
    inner_model = Net()
    inner = magjit.compile(inner_model, backend="eager")

    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x) + 1

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(2, 8)
        torch.testing.assert_close(compiled(x), inner_model(x) + 1)
    assert magjit.stats(compiled).replays == 2
    assert magjit.stats(inner).captures == 0


def test_a_thread_that_the_program_starts() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(x * 2))
        thread.start()
        thread.join()
        return found[0] + 1

    compiled = magjit.compile(program, backend="eager")
    for _ in range(3):
        x = torch.randn(3)
        torch.testing.assert_close(compiled(x), x * 2 + 1)
