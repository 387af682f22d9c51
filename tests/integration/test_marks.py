"""What a program can tell the recorder: where graphs end, and what to take as it is."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from compilers import RealGraph
from magjit.errors import ArgumentError, GraphBreakError

LOG: list[float] = []


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    magjit.graph_break()
    return y + 1


def breaks_with_reason(x: torch.Tensor) -> torch.Tensor:
    magjit.graph_break("because of this")
    return x + 1


@magjit.disable
def excluded(x: torch.Tensor, *, scale: float = 2.0) -> torch.Tensor:
    """Doc of the function."""
    LOG.append(x.sum().item())
    return x * scale


@magjit.disable(reason="because of this")
def excluded_with_reason(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class Excluded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


MODULE = magjit.disable(Excluded())


class Holder:
    @magjit.disable
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def calls_excluded(x: torch.Tensor) -> torch.Tensor:
    return excluded(x, scale=3.0) + 1


def calls_excluded_method(x: torch.Tensor) -> torch.Tensor:
    return Holder().method(x) + 1


def calls_excluded_module(x: torch.Tensor) -> torch.Tensor:
    return MODULE(x) + 1


def calls_from_c(x: torch.Tensor) -> torch.Tensor:
    return sum(map(excluded_with_reason, (x, x + 1)))  # type: ignore[return-value]


def calls_a_partial(x: torch.Tensor) -> torch.Tensor:
    return functools.partial(excluded, scale=4.0)(x)


def enters_a_block(x: torch.Tensor) -> torch.Tensor:
    with magjit.disable(reason="because of this"):
        y = x * x.sum().item()
    return y


def changes_settings(x: torch.Tensor) -> torch.Tensor:
    with magjit.config.override(record_limit=3):
        return x * magjit.config.current().record_limit


def counts(x: torch.Tensor) -> torch.Tensor:
    return x * magjit.stats().captures


SPLITS: list[tuple[Callable[..., Any], str]] = [
    (breaks, r"graph_break\(\)"),
    (breaks_with_reason, r"graph_break\(\): because of this"),
    (calls_excluded, "calls excluded"),
    (calls_excluded_method, r"calls Holder\.method"),
    (calls_excluded_module, r"calls Excluded\.forward"),
    (calls_from_c, "calls excluded_with_reason .*: because of this"),
    (calls_a_partial, "calls excluded"),
    (enters_a_block, "enters a block .*: because of this"),
    (changes_settings, r"magjit\.config"),
    (counts, r"magjit\.stats"),
]


@pytest.mark.parametrize(
    "program, reason", SPLITS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_split(
    program: Callable[..., Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(3)
    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    with pytest.raises(GraphBreakError, match=reason) as error:
        compiled(x)
    if program is not changes_settings:
        assert error.value.location is not None
        assert error.value.location.filename == __file__
    compiled = magjit.compile(program, backend="eager")
    with caplog.at_level("INFO", "magjit"), warnings.catch_warnings():
        warnings.simplefilter("ignore", magjit.MagJITWarning)
        result = compiled(x)
    assert re.search(rf"(runs eagerly|is cut|done eagerly).*: .*{reason}", caplog.text)
    if program is not counts:
        assert torch.equal(result, program(x))
        assert torch.equal(compiled(x), program(x))
    assert magjit.stats(compiled).splits >= 1


def test_outside_captures_marks_do_nothing() -> None:
    x = torch.ones(3)
    assert torch.equal(calls_excluded(x), x * 3 + 1)
    assert torch.equal(breaks(x), x * 2 + 1)
    assert excluded.__name__ == "excluded" and excluded.__doc__ == "Doc of the function."
    assert not magjit.is_compiling()
    with magjit.disable() as manager:
        assert manager is not None
    with pytest.raises(ValueError), magjit.disable():
        raise ValueError


def test_compiled_objects_inside_excluded_code_use_their_records() -> None:
    inner = magjit.compile(lambda x: x + 1, backend="eager", fullgraph=True)

    @magjit.disable
    def program(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    for _ in range(3):
        assert torch.equal(program(torch.ones(2)), torch.full((2,), 4.0))
    assert magjit.stats(inner).replays == 2


def test_is_compiling_is_false_in_a_capture_and_no_split() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if magjit.is_compiling() else x * 3

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    assert magjit.stats(compiled).replays == 1


def test_the_first_use_of_a_mark_is_no_change_of_the_package() -> None:
    code = """
import torch, magjit
compiled = magjit.compile(lambda x: x * 2 if magjit.is_compiling() else x * 3, backend="eager")
for _ in range(3):
    compiled(torch.ones(2))
print(magjit.stats(compiled).captures)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


# --- allow_in_graph -----------------------------------------------------------------------------


@magjit.allow_in_graph
def tricky(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Decides on data: followed, it would be a split."""
    return x * scale if x.sum() > 0 else x - scale


def two_results(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return x + 1, [x * 2, x * 3]


def test_an_allowed_function_is_one_operator() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return tricky(x + 1, scale=2.0).relu() + tricky(x)

    backend = RealGraph()
    compiled = magjit.compile(program, backend=backend, fullgraph=True)
    for x in (torch.ones(3), -torch.ones(3) * 5, torch.ones(3)):
        assert torch.equal(program(x), compiled(x))
    assert magjit.stats(compiled).replays == 2
    (graph,) = backend.graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(tricky) == 2


def test_results_of_an_allowed_function_in_containers() -> None:
    assert magjit.allow_in_graph([two_results]) == [two_results]

    def program(x: torch.Tensor) -> torch.Tensor:
        first, rest = two_results(x)
        return first + rest[0] * rest[1]

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(3)
        assert torch.equal(program(x), compiled(x))
    assert magjit.stats(compiled).replays == 1


def test_gradients_through_an_allowed_function() -> None:
    compiled = magjit.compile(lambda x: tricky(x * 2), backend="eager", fullgraph=True)
    for sign in (1, -1, 1):
        x = torch.full((3,), 2.0 * sign, requires_grad=True)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_an_allowed_function_called_from_c_or_with_strange_arguments_splits() -> None:
    for program in (
        lambda x: sum(map(tricky, (x, x))),
        lambda x: tricky(x, scale=object()) if x is None else tricky(x, Holder and 2.0),
    ):
        compiled = magjit.compile(program, backend="eager")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", magjit.MagJITWarning)
            for _ in range(3):
                x = torch.randn(3)
                assert torch.equal(program(x), compiled(x))


@pytest.mark.parametrize(
    "wrong",
    [3, "name", torch.relu, nn.Linear(1, 1), None],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_wrong_arguments(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match="allow_in_graph"):
        magjit.allow_in_graph(wrong)
    if not callable(wrong) and wrong is not None:
        with pytest.raises(ArgumentError, match="disable"):
            magjit.disable(wrong)


def test_the_public_names() -> None:
    for name in magjit.__all__:
        assert getattr(magjit, name) is not None
        assert name in dir(magjit)
    wanted = "compile disable graph_break allow_in_graph is_compiling explain reset list_backends"
    assert {*wanted.split(), "config"} <= set(magjit.__all__)
    assert {"eager", "inductor"} <= set(magjit.list_backends())
