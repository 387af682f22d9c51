"""The order of steps in which fused operators wait for one another, as on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node as FxNode
from torch.nn import functional as F

import magjit
from magjit_dvm import stacking, waiting
from magjit_dvm.backend import schedules
from magjit_dvm.groups import FusedGroup
from magjit_dvm.program import NodeKind
from magjit_dvm.stacking import Stack
from magjit_dvm.waiting import gathered


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators on CPUs wait, too."""

    def may_wait(step: Any) -> bool:
        if not isinstance(step, FusedGroup) or step.cube >= 0 or step.program is None:
            return False
        return all(node.kind is not NodeKind.DRAW for node in step.program.nodes)

    monkeypatch.setattr(waiting, "may_wait", may_wait)
    monkeypatch.setattr(stacking, "may_wait", may_wait)


def steps_of(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Of the schedule that a first call makes; results are eager's."""
    before = set(schedules())
    compiled = magjit.compile(function, backend="dvm")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(*args), function(*args))
    (schedule,) = set(schedules()) - before
    return schedule._steps


def sizes(steps: list[Any]) -> list[int]:
    return [len(one.groups) for one in steps if isinstance(one, Stack)]


class Experts(nn.Module):
    """Products whose activations do not depend on one another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Linear(8, 16) for _ in range(count)])
        self.second = nn.ModuleList([nn.Linear(16, 4) for _ in range(count)])

    def forward(self, x: Tensor) -> list[Tensor]:
        pairs = zip(self.first, self.second, strict=True)
        return [second(F.gelu(first(x)) * 2 + 1) for first, second in pairs]


@pytest.mark.parametrize(("count", "expected"), [(1, []), (3, [3]), (8, [8]), (11, [8, 3])])
def test_activations_of_experts_are_one_launch(count: int, expected: list[int]) -> None:
    assert sizes(steps_of(Experts(count), torch.randn(5, 8))) == expected


def test_few_products_go_ahead() -> None:
    def chain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2 + 1
        for _ in range(waiting._AHEAD + 1):
            x = x @ w
        return y, x.exp() - 1

    x, w = torch.randn(8, 8), torch.randn(8, 8) * 0.1
    assert sizes(steps_of(chain, x, w)) == []


def test_what_needs_a_result_comes_behind() -> None:
    def diamond(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = x.exp() + 1
        b = a @ w
        c = x @ w
        d = c.sin() * 2
        e = (b + d @ w).softmax(-1)
        return a, b, e

    steps = steps_of(diamond, torch.randn(8, 8), torch.randn(8, 8))
    assert sizes(steps) == [2]


@pytest.mark.parametrize(
    "between",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: torch.rand_like(x) + x,
        lambda x: x.clone().index_put_((torch.tensor([0]),), torch.zeros(8)),
    ],
    ids=["dropout", "rand", "index_put_"],
)
def test_what_draws_or_writes_is_not_passed(between: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        a = x.exp() + 1
        b = between(x @ w)
        c = (x @ w).sin() * 2
        d = between(a @ w)
        return b, c, d

    x, w = torch.randn(8, 8), torch.randn(8, 8)
    compiled = magjit.compile(program, backend="dvm")
    with torch.no_grad():
        for seed in range(3):
            torch.manual_seed(seed)
            expected = program(x, w)
            torch.manual_seed(seed)
            torch.testing.assert_close(compiled(x, w), expected)


def test_parts_of_one_whole() -> None:
    def parts(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        whole = torch.cat([x.exp() + 1, y.sin() * 2, (x @ w).tanh() - 1])
        other = torch.cat([y.cos() * 3, x.exp() * 2])
        copied = torch.cat([x, y.cos() * 5])
        return whole, whole @ w, other.sum(0), (whole * 2).sum(1), copied

    steps_of(parts, torch.randn(3, 8), torch.randn(5, 8), torch.randn(8, 8))


def random_program(seed: int) -> Callable[..., list[Tensor]]:
    """Products, activations, norms and heads of drawn values."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    plan = [(drawn(7), drawn(1000), drawn(1000)) for _ in range(25)]

    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made = [x, x.sin() * 2]
        for kind, first, second in plan:
            a, b = made[first % len(made)], made[second % len(made)]
            match kind:
                case 0:
                    made.append(a @ w)
                case 1:
                    made.append((a * 0.5).tanh() + b)
                case 2:
                    made.append(F.layer_norm(a, (8,)) * 0.5)
                case 3:
                    made.append(a.softmax(-1) - b.mean(0))
                case 4:
                    turned = a.view(-1, 2, 4).transpose(0, 1).reshape(-1, 8)
                    made.append(turned.sigmoid() * 2)
                case 5:
                    made.append(torch.cat([(a + 1).cos() * 2, b.exp().clamp(max=2)])[: len(x)])
                case _:
                    made.append((a.t() @ b).t()[: len(x)] * 0.1 + 1)
        return made

    return program


@pytest.mark.parametrize("seed", range(40))
def test_drawn_programs(seed: int) -> None:
    torch.manual_seed(seed)
    steps_of(random_program(seed), torch.randn(8, 8), torch.randn(8, 8) * 0.1)


@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
def test_models(training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1 * training, batch_first=True)
    layer.train(training)
    compiled = magjit.compile(layer, backend="dvm", dynamic=True)
    for rows in (5, 7):
        found = []
        for call in (layer, compiled):
            torch.manual_seed(rows)
            x = torch.randn(2, rows, 16, requires_grad=training)
            result = call(x)
            if training:
                result.square().sum().backward()
            parameters = list(layer.parameters()) if training else []
            found.append([result, x.grad, *(one.grad for one in parameters)])
            layer.zero_grad()
        torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_time_is_linear() -> None:
    """A step is looked at once for each of the steps before it that may wait for it, at most."""

    def steps() -> Iterator[Any]:
        graph = torch.fx.Graph()
        node = graph.placeholder("x")
        for _ in range(3000):
            group = FusedGroup([node])
            group.arguments, group.outputs = [node], [graph.call_function(abs, (node,))]
            group.program = EMPTY
            yield group
            for _ in range(2):
                node = graph.call_function(torch.ops.aten.sin.default, (node,))
                yield node

    given = list(steps())
    found = gathered(given, {})
    assert len(found) == len(given) and set(map(id, found)) == set(map(id, given))
    assert sum(isinstance(one, FxNode) for one in found) == 6000
    assert max(map(len, _runs(found))) == waiting._AHEAD // 2


class _Empty:
    nodes = ()
    outputs = ()


EMPTY: Any = _Empty()


def _runs(steps: list[Any]) -> Iterator[list[Any]]:
    run: list[Any] = []
    for step in steps:
        if isinstance(step, FusedGroup):
            run.append(step)
        elif run:
            yield run
            run = []
    yield run
