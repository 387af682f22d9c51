"""A key that a program deletes and sets again comes last, behind keys that the run did not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit


class Box:
    def __init__(self) -> None:
        self.a, self.b, self.c = 0, 1, 2


def deletes_and_sets(box: Box, x: torch.Tensor) -> torch.Tensor:
    del box.a
    box.a = x
    return x + 1


def sets_first(box: Box, x: torch.Tensor) -> torch.Tensor:
    box.a = 1
    del box.a
    box.b = 5
    box.a = x
    return x + 1


def by_functions(box: Box, x: torch.Tensor) -> torch.Tensor:
    delattr(box, "b")
    setattr(box, "b", x)
    object.__delattr__(box, "a")
    object.__setattr__(box, "a", 3)
    return x + 1


def twice(box: Box, x: torch.Tensor) -> torch.Tensor:
    for name in ("a", "b", "a"):
        value = getattr(box, name)
        delattr(box, name)
        setattr(box, name, value)
    return x + 1


def leaves_it(box: Box, x: torch.Tensor) -> torch.Tensor:
    box.extra = x  # type: ignore[attr-defined]
    del box.extra  # type: ignore[attr-defined]
    return x + 1


def deletes_last(box: Box, x: torch.Tensor) -> torch.Tensor:
    if hasattr(box, "z"):
        del box.z
    box.z = x  # type: ignore[attr-defined]
    box.a = x
    return x + 1


def a_global(box: Box, x: torch.Tensor) -> torch.Tensor:
    global LAST
    LAST = 1
    del LAST
    LAST = x  # noqa: F841
    return x + 1


PROGRAMS = [deletes_and_sets, sets_first, by_functions, twice, leaves_it, deletes_last, a_global]


@pytest.mark.parametrize("program", PROGRAMS)
def test_order(program: Callable[[Box, torch.Tensor], torch.Tensor]) -> None:
    compiled: Any = magjit.compile(program, backend="eager")
    eager, ours = Box(), Box()
    for call in range(5):
        x = torch.randn(2)
        expected = program(eager, x)
        after_eager = [name for name in globals() if name in ("LAST", "FIRST")]
        found = compiled(ours, x)
        assert [name for name in globals() if name in ("LAST", "FIRST")] == after_eager
        torch.testing.assert_close(found, expected)
        assert list(vars(eager)) == list(vars(ours)), call
        assert {k: str(v) for k, v in vars(eager).items()} == {
            k: str(v) for k, v in vars(ours).items()
        }
        if call == 2:  # which the program does not read
            for box in (eager, ours):
                box.new = 5  # type: ignore[attr-defined]
            globals()["FIRST"] = 0
    assert magjit.stats(compiled).replays >= 2 and magjit.stats(compiled).captures <= 2
