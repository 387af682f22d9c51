"""The timer of runs, on a device that is a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from magjit_triton.macro.errors import NoDeviceError
from magjit_triton.macro.measuring import EventTimer


class Clock:
    """What has run, and for how long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def run(self, name: str, seconds: Callable[[], float]) -> Callable[[], None]:
        def run() -> None:
            self.ran.append(name)
            self.now += seconds()

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    found = Clock()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = found.now

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    def pause(*_: object) -> None:
        found.now += 1.0

    empty = SimpleNamespace(zero_=pause)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", pause)
    monkeypatch.setattr(torch.cuda, "synchronize", pause)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: empty)
    yield found


def steady(seconds: float) -> Callable[[], float]:
    return lambda: seconds


def test_a_run_is_its_median_without_what_is_around_it(clock: Clock) -> None:
    times = iter([9e-5, 1e-5, 3e-5, 1e-5, 1e-5, 5e-5, 1e-5, 1e-5, 1e-5])
    assert EventTimer()(clock.run("a", lambda: next(times))) == pytest.approx(1e-5)
    assert len(clock.ran) == 9
    with pytest.raises(StopIteration):
        next(times)


def test_a_far_slower_run_is_measured_once(clock: Clock) -> None:
    assert EventTimer()(clock.run("a", steady(5e-5)), 2e-5) == pytest.approx(5e-5)
    assert len(clock.ran) == 2
    clock.ran.clear()
    assert EventTimer()(clock.run("b", steady(3e-5)), 2e-5) == pytest.approx(3e-5)
    assert len(clock.ran) == 9


def test_the_fastest_race_in_turns(clock: Clock) -> None:
    runs = [clock.run(name, steady(one)) for name, one in (("a", 1.1e-5), ("b", 1e-4), ("c", 1e-5))]
    assert EventTimer().race(runs) == pytest.approx([1.1e-5, 1e-4, 1e-5])
    assert clock.ran[:6] == ["a", "b", "c"] * 2
    assert clock.ran[6:12] == ["a", "c", "c", "a", "a", "c"]
    assert clock.ran.count("b") == 2


def test_what_must_be_sure_is_measured_as_well_as_the_fastest(clock: Clock) -> None:
    times = iter([1e-4, 9e-5, 2e-5, 2e-5, 2e-5, 2e-5, 2e-5, 2e-5, 2e-5])
    runs = [clock.run("a", steady(1e-5)), clock.run("b", lambda: next(times))]
    assert EventTimer().race(runs, {1}) == pytest.approx([1e-5, 2e-5])
    assert clock.ran.count("b") == 9


def test_without_a_device_there_are_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDeviceError):
        EventTimer()
