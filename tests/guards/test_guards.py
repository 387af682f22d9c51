"""Outside state: changed, captured anew and right; unchanged or unrelated, a hit and right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

import magjit
from magjit import config

from ..twin import Scene, differ, outcome
from .rows import ROWS
from .table import RECAPTURED, RIGHT, Row


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()


@dataclass(frozen=True)
class Step:
    """One call: how the world changes before it and how many captures and replays it adds."""

    name: str
    before: Callable[[Scene], object] | None
    captures: int
    replays: int


def steps(row: Row, scene: Scene) -> list[Step]:
    fresh = int(row.after == RECAPTURED)
    return [
        Step("first call", None, 1, 0),
        Step("nothing changed", None, 0, 1),
        Step("unrelated change", scene.unrelated, 0, 1),
        Step("change", scene.change, fresh, 1 - fresh),
        Step("nothing changed since", None, 0, 1),
    ]


def check_step(
    number: int, eager: Scene, jit: Scene, compiled: Callable, left: Step, right: Step
) -> None:
    """Change both worlds and call in both: the outcome is eager's."""
    for scene, step in ((eager, left), (jit, right)):
        if step.before is not None:
            scene.apply(step.before)
    expected = outcome(eager, eager.fn, number)
    found = differ(expected, outcome(jit, compiled, number))
    assert found is None, f"{left.name}: {found}"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=pytest.mark.slow if number % 3 else [])
        for number, row in enumerate(ROWS)
    ],
)
def test_results_with_rehearsals(row: Row) -> None:
    eager, jit = row.make(), row.make()
    compiled = magjit.compile(jit.fn, backend="eager")
    for number, (left, right) in enumerate(zip(steps(row, eager), steps(row, jit), strict=True)):
        check_step(number, eager, jit, compiled, left, right)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@config.override(rehearse=False)  # else a row that sets itself up counts other captures
def test_guard(row: Row) -> None:
    eager, jit = row.make(), row.make()
    compiled = magjit.compile(jit.fn, backend="eager", fullgraph=row.after != RIGHT)
    for number, (left, right) in enumerate(zip(steps(row, eager), steps(row, jit), strict=True)):
        seen = magjit.stats(compiled)
        counted = seen.captures, seen.replays
        check_step(number, eager, jit, compiled, left, right)
        if row.after != RIGHT:
            now = magjit.stats(compiled)
            added = now.captures - counted[0], now.replays - counted[1]
            wanted = (left.captures, left.replays)
            assert added == wanted, f"{left.name}: (captures, replays) {added}, wanted {wanted}"


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def test_two_instances_of_a_class_share_no_records() -> None:
    first, second = Layer(4), Layer(4)
    compiled = [magjit.compile(m, backend="eager", fullgraph=True) for m in (first, second)]
    x = torch.randn(2, 4)
    for _ in range(2):
        for module, jit in zip((first, second), compiled, strict=True):
            assert differ(module(x), jit(x)) is None
    assert [magjit.stats(jit).captures for jit in compiled] == [1, 1]
    assert [magjit.stats(jit).replays for jit in compiled] == [1, 1]


def test_one_function_over_instances_with_other_weights() -> None:
    layers = [Layer(4), Layer(4), Layer(5)]

    def program(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for _ in range(2):
        for layer in layers:
            x = torch.randn(2, 4)
            assert differ(layer(x), compiled(layer, x)) is None


def test_two_compiles_of_one_function_share_no_records() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = [magjit.compile(program, backend="eager", fullgraph=True) for _ in range(2)]
    compiled[0](torch.ones(2))
    assert [magjit.stats(jit).captures for jit in compiled] == [1, 0]


def test_an_older_record_is_used_again() -> None:
    holder = Layer(4)
    holder.scale = 2  # type: ignore[assignment]

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * holder.scale

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for scale in (2, 3, 2, 3, 3, 2):
        holder.scale = scale  # type: ignore[assignment]
        x = torch.randn(2, 4)
        assert differ(x * scale, compiled(x)) is None
    assert magjit.stats(compiled).captures == 2
    assert magjit.stats(compiled).replays == 4
