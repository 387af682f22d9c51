"""Programs that change an input after they have used it: gradients are of what it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import magjit
from magjit.dispatch import MagJITWarning
from magjit.plugin import BackendContext, CompiledGraph
from magjit.plugin.aot import aot, core_aten_decompositions
from magjit.plugin.fx_helpers import runnable


def used_by_copy(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    y = x * state.clone()
    state.add_(1)
    return y


def changed_twice(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    y = (x * state.sin()).sin()
    state.mul_(2)
    z = y * state.cos()
    state.copy_(x.detach())
    return z


def old_value(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    old = state.clone()
    state.zero_()
    return x * old, state[0] * 2


def views(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = state.view(2, 2)
    y = x.view(2, 2).t() * (half.t() + 0.5)
    state.add_(3)
    return y, half + 1


def returned(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * (state * 3)
    with torch.no_grad():
        state.lerp_(x, 0.5)
    return y.sin(), state


def changed_before(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    state += 1
    return x * state, state.view(2, 2)


def recomputed(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(state) + state.cos()
    y = x * s * s
    state.mul_(0.5)
    return y.sin() * s


PROGRAMS = [used_by_copy, changed_twice, old_value, views, returned, changed_before, recomputed]


class ByAten:
    """ATen's operators as AOTAutograd gives them."""

    name = "by ATen"

    def __init__(self, within: bool) -> None:
        self.within = within

    def supports(self, gm: GraphModule) -> list[str]:
        return []

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        return aot(
            gm,
            example_inputs,
            context,
            forward=lambda graph, inputs: runnable(graph),
            decompositions=core_aten_decompositions(),
            mutations_in_graph=self.within,
        )


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("backend", ["dvm", "inductor", "triton", "within", "behind"])
def test_gradients(backend: str, program: Callable[..., Any]) -> None:
    """Written within the graph, or behind it."""
    chosen: Any = ByAten(backend == "within") if backend in ("within", "behind") else backend
    check(magjit.compile(program, backend=chosen), program, torch.arange(4.0) + 1)


def test_a_state_with_gaps() -> None:
    """Of which a copy has none: it runs as it is, and says so."""
    compiled = magjit.compile(used_by_copy, backend="dvm")
    with pytest.warns(MagJITWarning, match="gaps"):
        check(compiled, used_by_copy, (torch.arange(8.0) + 1)[::2])


def check(compiled: Callable[..., Any], program: Callable[..., Any], state: torch.Tensor) -> None:
    states = [torch.empty_strided(state.shape, state.stride()).copy_(state) for _ in range(2)]
    for turn in range(4):
        given = [torch.arange(4.0).add(turn).requires_grad_() for _ in range(2)]
        found, expected = compiled(given[0], states[0]), program(given[1], states[1])
        torch.testing.assert_close(found, expected)
        for results in (found, expected):
            several = results if isinstance(results, tuple) else (results,)
            total = sum((one.sum() for one in several if one.requires_grad), torch.zeros(()))
            total.backward()
        torch.testing.assert_close(given[0].grad, given[1].grad)
        torch.testing.assert_close(states[0], states[1])
