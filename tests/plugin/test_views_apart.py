"""Graphs in parts: views of inputs, what is computed, and views of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from magjit.plugin.aliases import results_are_their_own
from magjit.plugin.recording import record
from magjit.plugin.views_apart import without_symbols, without_views

Function = Callable[..., Sequence[Any]]


def step_of(x: torch.Tensor, h: torch.Tensor, t: int) -> tuple[torch.Tensor, ...]:
    return (x.select(0, t + 1).view(2, 4) + h).tanh(), h * 2


def all_of(x: torch.Tensor, h: torch.Tensor, t: int) -> tuple[torch.Tensor, ...]:
    return (x.select(0, t) + x.sum(0), h * 2)


def lengths_of(x: torch.Tensor, h: torch.Tensor, t: int) -> tuple[torch.Tensor, ...]:
    return (x.select(0, t) * x.shape[0] + h,)


def graph_of(program: Function, x: torch.Tensor, h: torch.Tensor) -> torch.fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(one: torch.Tensor, *dynamic: int) -> torch.Tensor:
        static, changing = DimDynamic.STATIC, DimDynamic.DYNAMIC
        dims = [changing if k in dynamic else static for k in range(one.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        return mode.from_tensor(one, symbolic_context=context)

    fakes, t = [fake(x, 0), fake(h)], fake(torch.empty(3), 0).shape[0]
    with enable_python_dispatcher():
        return record(program, [*fakes, t], mode, {})


def test_steps_of_a_sequence_are_views_and_a_static_graph() -> None:
    x, h = torch.randn(9, 8), torch.randn(2, 4)
    parts = without_symbols(graph_of(step_of, x, h))
    assert parts is not None
    views, computed = parts
    assert {node.target for node in computed.graph.nodes if node.op == "call_function"} >= {
        torch.ops.aten.tanh.default,
        torch.ops.aten.view.default,
    }
    for length, t in ((9, 3), (5, 0), (7, 4)):
        x = torch.randn(length, 8)
        made = computed(*views(x, h, t))
        for one, other in zip(made, step_of(x, h, t), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("program", [all_of, lengths_of])
def test_sizes_that_are_computed_with_stay_symbols(program: Function) -> None:
    assert without_symbols(graph_of(program, torch.randn(9, 4), torch.randn(4))) is None


def plain_graph_of(program: Function, *given: torch.Tensor) -> torch.fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return record(program, [mode.from_tensor(one, static_shapes=True) for one in given], mode, {})


def decisions(x: torch.Tensor) -> Sequence[torch.Tensor]:
    keep = x.mean(1) > 0
    return keep, x.exp(), keep[0], keep[1]


def halves(x: torch.Tensor) -> Sequence[torch.Tensor]:
    first, second = x.exp().chunk(2, 1)
    return first, second.t(), x.sum()


def inputs_too(x: torch.Tensor) -> Sequence[torch.Tensor]:
    y = x.t() + 1
    return x, x[1:], y, y[:2], y


def moved(x: torch.Tensor) -> Sequence[torch.Tensor]:
    y = x.t().relu()
    return y, y.as_strided((2, 2), (1, 1), 1)


@pytest.mark.parametrize("program", [decisions, halves, inputs_too, moved])
def test_results_that_are_views_are_made_afterwards(program: Function) -> None:
    """As in eager mode they share memory with one another, and with the inputs."""
    x = torch.randn(3, 4)
    graph = plain_graph_of(program, x)
    assert not results_are_their_own(graph)
    parts = without_views(graph)
    if program is moved:  # Where an element is depends on the memory, which is another one.
        assert parts is None
        return
    assert parts is not None
    computed, after = parts
    assert results_are_their_own(computed)
    made = [one.clone() for one in computed(x)]
    results, wanted = after(*made, x), program(x)
    for one, other in zip(results, wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert one.stride() == other.stride()

    def shared(tensors: Sequence[torch.Tensor]) -> list[int]:
        places = [one.untyped_storage().data_ptr() for one in (x, *tensors)]
        return [places.index(place) for place in places]

    assert shared(results) == shared(wanted)


def last_rows(x: torch.Tensor) -> Sequence[torch.Tensor]:
    y = x.exp()
    return y[-1], y[-2]


def unknown(x: torch.Tensor) -> Sequence[Any]:
    y = x.exp()
    return y, y[0], 3


@pytest.mark.parametrize("program", [last_rows, unknown])
def test_little_of_much_is_not_copied_with_the_rest(program: Function) -> None:
    assert without_views(plain_graph_of(program, torch.randn(9, 4))) is None


def of_both_sizes(x: torch.Tensor) -> Sequence[torch.Tensor]:
    rows, columns = x.shape
    y = x.exp().view(rows * columns)
    return y, y.view(columns, rows).t(), x.view(columns * rows)


def of_half_the_rows(x: torch.Tensor) -> Sequence[torch.Tensor]:
    y = x.exp()
    return y[: x.shape[0] // 2], y.t()


def of_rows_of_a_product(x: torch.Tensor) -> Sequence[torch.Tensor]:
    y = torch.cat([x, x.exp()])
    return y.view(y.shape[1], y.shape[0]), y


@pytest.mark.parametrize("program", [of_both_sizes, of_half_the_rows, of_rows_of_a_product])
def test_views_of_sizes_that_are_symbols(program: Function) -> None:
    """They are computed from the inputs' again; nothing is asserted of the symbols."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = mode.from_tensor(torch.randn(9, 4), symbolic_context=context)
    with enable_python_dispatcher():
        graph = record(program, [fake], mode, {})
    environment = mode.shape_env
    assert environment is not None
    before = len(environment.guards)
    parts = without_views(graph)
    assert len(environment.guards) == before
    assert parts is not None
    computed, after = parts
    for rows in (9, 6):
        x = torch.randn(rows, 4)
        made = [one.clone() for one in computed(x)]
        for one, other in zip(after(*made, x), program(x), strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()
