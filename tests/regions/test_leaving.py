"""A run that comes to what is recorded already is left: the rest of the call is replayed."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import magjit

STEPS = 12


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


def count(x: torch.Tensor) -> int:
    """A number that no guard knows."""
    return int(x[0].item())


def given(steps: int = STEPS, width: int = 4) -> torch.Tensor:
    x = torch.randn(width)
    x[0] = steps
    return x


def plain(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    for _ in range(count(x)):
        y = (y + x).tanh()
    return y.sum()


def nested(x: torch.Tensor) -> list[torch.Tensor]:
    made = []
    y = x
    for k in range(count(x)):
        for _ in range(count(x) - k):
            y = (y + 1).sin()
        made.append(y)
    return made


def one_after_the_other(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x
    for _ in range(count(x)):
        y = y.sin()
    z = y + x
    for _ in range(count(x)):
        z = z.cos()
    return y, z * y


def with_cells(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    calls = 0

    def step(y: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return y * 0.5 + x

    y = x
    for _ in range(count(x)):
        y = step(y)
    return y, calls


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(4, 4)
        self.steps = 0

    def once(self, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.part(y).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(count(x)):
            y = self.once(y)
        return y


def until(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    while bool(y.sum() < 100):
        y = y.abs() + 1
    return y.sum()


PROGRAMS: list[Callable[[torch.Tensor], Any]] = [
    until,
    plain,
    nested,
    one_after_the_other,
    with_cells,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_rest_of_a_call_is_replayed(program: Callable[[torch.Tensor], Any]) -> None:
    compiled = magjit.compile(program, backend="eager")
    left = 0
    for steps in (STEPS, 10, 7, 9, 3, 5):
        x = given(steps)
        before = magjit.stats(compiled)
        torch.testing.assert_close(compiled(x), program(x))
        now = magjit.stats(compiled)
        left += now.captures > before.captures and now.region_replays > before.region_replays
    assert left


def test_modules_and_their_counters() -> None:
    model, other = Looping(), Looping()
    other.load_state_dict(model.state_dict())
    compiled = magjit.compile(model, backend="eager")
    for steps in (STEPS, 5, 8):
        x = given(steps)
        torch.testing.assert_close(compiled(x), other(x))
        assert model.steps == other.steps
        assert type(model.steps) is int


def test_gradients() -> None:
    model = Looping()
    compiled = magjit.compile(model, backend="eager")
    for steps in (STEPS, 6):
        x = given(steps)
        found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
        torch.testing.assert_close(
            found, torch.autograd.grad(model(x).sum(), list(model.parameters()))
        )


def _in_try(x: torch.Tensor, log: list[str]) -> torch.Tensor:
    y = x
    try:
        for _ in range(count(x)):
            y = y.sin()
    except BaseException as error:
        log.append(type(error).__name__)
        raise
    finally:
        log.append("finally")
    return y


def _in_with(x: torch.Tensor, log: list[str]) -> torch.Tensor:
    y = x
    with torch.no_grad():
        for _ in range(count(x)):
            y = y.sin()
        log.append(str(torch.is_grad_enabled()))
    return y


@torch.no_grad()
def _decorated(x: torch.Tensor, log: list[str]) -> torch.Tensor:
    y = x
    for _ in range(count(x)):
        y = y.sin()
    log.append(str(torch.is_grad_enabled()))
    return y


def _calls_from_try(x: torch.Tensor, log: list[str]) -> torch.Tensor:
    try:
        return plain(x)
    finally:
        log.append("finally")


@pytest.mark.parametrize(
    "program", [_in_try, _in_with, _decorated, _calls_from_try], ids=lambda f: f.__name__
)
def test_handlers_see_nothing(program: Callable[[torch.Tensor, list[str]], torch.Tensor]) -> None:
    compiled = magjit.compile(program, backend="eager")
    for steps in (STEPS, 5, 8):
        found: list[str] = []
        expected: list[str] = []
        x = given(steps)
        torch.testing.assert_close(compiled(x, found), program(x, expected))
        assert found == expected
        assert torch.is_grad_enabled()


def test_an_error_after_the_run_was_left() -> None:
    def program(x: torch.Tensor, parts: list[Any]) -> torch.Tensor:
        y = x
        for k in range(count(x)):
            if k == 9:
                y = y @ parts[0]
            y = y.sin()
        return y

    compiled = magjit.compile(program, backend="eager")
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            compiled(given(), [torch.ones(3, 3)])
        names = [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert "program" in names
        assert caught.value.__context__ is None
    x = given()
    parts = [torch.eye(4)]
    torch.testing.assert_close(compiled(x, parts), program(x, parts))


def test_the_frames_let_go_of_what_they_hold() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        while bool(y.sum() < 100):
            y = y.abs() + 1
        return y.sum()

    compiled = magjit.compile(program, backend="eager")
    gc.disable()
    try:
        x = given()
        kept = weakref.ref(x)
        compiled(x)
        assert magjit.stats(compiled).region_replays > 0
        del x
        assert kept() is None
    finally:
        gc.enable()


def test_sizes_that_are_symbols_stay_so_behind_the_loop() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(3 + count(x) % 2):
            y = (y + 1).sin()
        return y.view(-1) * y.shape[0]

    compiled = magjit.compile(program, backend="eager")
    for width in (6, 9):
        compiled(given(4, width))
    before = magjit.stats(compiled).captures
    for width in (7, 11, 5):
        x = given(4, width)
        torch.testing.assert_close(compiled(x), program(x))
    assert magjit.stats(compiled).captures == before


def test_a_cache_that_grows_is_recorded_with_symbols_at_once() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        cache, place = x[1:].clone(), len(x) - 1
        while count(cache.sum()[None]) >= 0 and place < 20:
            cache = torch.cat([cache, cache[-1:].abs()])
            place += 1
        return cache, place

    compiled = magjit.compile(program, backend="eager")
    x = given(width=6).abs()
    torch.testing.assert_close(compiled(x), program(x))
    stats = magjit.stats(compiled)
    assert stats.captures <= 4, "up to the loop, a step from its start, one from its end, the rest"
    assert stats.region_replays > 0


def test_reports_show_the_whole_call() -> None:
    report = magjit.explain(plain, backend="eager")(given(4))
    assert "tanh" in str(report)
