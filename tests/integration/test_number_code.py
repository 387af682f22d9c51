"""Numbers of a record as straight-line code: the same as walking them."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import magjit
from magjit.refgraph import relations as r
from magjit.refgraph.number_code import checked, computed
from magjit.refgraph.number_values import Argument, Length, Number, Reads, Size

FUNCTIONS = [operator.add, operator.sub, operator.mul, operator.lt, max, math.atan2, operator.ne]
HOLDERS = (7, 2.5, [1, 2, 3], torch.ones(2, 5))


def sources() -> list[Any]:
    of_call = [Argument(None, None, r.Index(i), HOLDERS[i]) for i in range(2)]
    return [*of_call, Length(None, 3), Size(None, 0, 1, 5, None)]  # type: ignore[arg-type]


@st.composite
def numbers(draw: Any) -> tuple[Reads, list[Number]]:
    """Numbers over an argument, another one, a length and a size; some sources are pinned."""
    found = sources()
    made = [Number(source.value, source) for source in found]
    for source in found[:3]:
        source.pinned = draw(st.booleans())
    for _ in range(draw(st.integers(0, 8))):
        func = draw(st.sampled_from(FUNCTIONS))
        part = st.one_of(st.sampled_from(made), st.sampled_from([3, -1, 0.5]))
        args = (draw(part), draw(part))
        made.append(Number(None, None, func, args))
    free = [source for source in found if not source.pinned]
    return Reads(list(range(len(free))), free), made


@settings(max_examples=200, deadline=None)
@given(numbers(), st.integers(-3, 3))
def test_code_gives_what_walking_gives(case: tuple[Reads, list[Number]], step: int) -> None:
    reads, made = case
    holders = []
    for source in reads.reads:
        match source:
            case Argument(value=value):
                holders.append(value + step)
            case Length():
                holders.append([0] * (5 + step))
            case _:
                holders.append(torch.ones(2, 6 + step))
    walked_values = reads.values(tuple(holders))
    walked = [number.evaluate(walked_values) for number in made]
    found = computed(reads, made)(*holders)
    assert found == walked
    assert list(map(type, found)) == list(map(type, walked))
    outcomes = [(number, bool(value)) for number, value in zip(made, walked, strict=True)]
    assert checked(reads, outcomes)(*holders)
    for at in range(len(made)):
        turned = [(number, value != (i == at)) for i, (number, value) in enumerate(outcomes)]
        assert not checked(reads, turned)(*holders)


def test_what_raises_is_another_decision() -> None:
    argument = Argument(None, None, r.Index(0), 4)
    one = Number(0.25, None, operator.truediv, (1, Number(4, argument)))
    check = checked(Reads([0], [argument]), [(one, True)])
    assert check(2)
    assert not check(0)
    assert not check("text")


def test_deep_chains_need_no_stack() -> None:
    argument = Argument(None, None, r.Index(0), 0)
    last = Number(0, argument)
    for _ in range(3000):
        last = Number(0, None, operator.add, (last, 1))
    assert computed(Reads([0], [argument]), [last, last])(5) == [3005, 3005]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_rates_and_counters_of_a_program(backend: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0
            self.decay = 0.5

        def forward(self, x: torch.Tensor, rate: float) -> torch.Tensor:
            self.steps += 1
            scale = rate * self.decay / (1 + self.steps)
            if self.steps % 3 == 0:
                scale = max(scale, 0.125)
            return x * scale + self.steps

    eager, model = Model(), Model()
    compiled = magjit.compile(model, backend=backend)
    x = torch.randn(5)
    for step in range(12):
        rate = 1.0 / (step + 1)
        torch.testing.assert_close(compiled(x, rate), eager(x, rate))
        assert model.steps == eager.steps
        model.decay = eager.decay = 0.5 + step
