"""Generated programs do in every call what eager does, whatever changes between the calls."""

from __future__ import annotations

import io
import linecache
import warnings
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import magjit
from magjit.refgraph import long_loops

from ..twin import differ
from .generated import SCOPE, State, changes, made, sources

LENIENT = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def result_of(function: Any, x: torch.Tensor, state: State) -> Any:
    shown = io.StringIO()
    with redirect_stdout(shown):
        try:
            result, raised = function(x, state), None
        except Exception as error:
            result, raised = None, error.with_traceback(None)
    return {
        "result": result,
        "raised": raised,
        "state": state,
        "printed": shown.getvalue(),
        "grad mode": torch.is_grad_enabled(),
    }


def check(source: str, between: list[str], backend: str = "eager") -> None:
    """Four calls of the program and of the compiled program, each in its world."""
    eager, program = made(source), made(source)
    compiled = magjit.compile(program, backend=backend)
    worlds = State(), State()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for call, change in enumerate(["pass", *between]):
                outcomes = []
                for function, state in zip((eager, compiled), worlds, strict=True):
                    exec(change, {"torch": torch, "state": state})
                    torch.manual_seed(call // 2)
                    outcomes.append(result_of(function, torch.randn(3), state))
                found = differ(*outcomes)
                assert found is None, f"call {call}: {found}\n{source}\n{between}"
    finally:
        magjit.reset(compiled)
        for name in [name for name in linecache.cache if name.startswith("<generated")]:
            del linecache.cache[name]


def test_the_scope_is_whole() -> None:
    assert set(SCOPE) >= {"torch", "outside", "Box", "reads"}


@settings(max_examples=15, deadline=None, suppress_health_check=LENIENT, derandomize=True)
@given(sources(), changes)
def test_programs(source: str, between: list[str]) -> None:
    check(source, between)


def check_cut_loops(source: str, between: list[str]) -> None:
    """The same where each loop over a size is too long to be unrolled."""
    few, limit = mock.patch.object(long_loops, "FEWEST", 2), magjit.config.override(unroll_limit=1)
    with few, limit:
        check(source.replace("range(3)", "range(x.size(0))"), between)


@settings(max_examples=10, deadline=None, suppress_health_check=LENIENT, derandomize=True)
@given(sources(), changes)
def test_programs_whose_loops_are_too_long(source: str, between: list[str]) -> None:
    check_cut_loops(source, between)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(10))
def test_many_programs(part: int) -> None:
    @settings(max_examples=2000, deadline=None, suppress_health_check=LENIENT, database=None)
    @given(sources(), changes)
    def many(source: str, between: list[str]) -> None:
        check(source, between)
        check_cut_loops(source, between)

    many()
