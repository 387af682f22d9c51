"""Programs that write their inputs, lowered without AOTAutograd: when, and to what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, symbolic_trace

import magjit
from magjit.plugin.inference import lower_for_inference, written_inputs

aten = torch.ops.aten
Program = Callable[..., tuple[torch.Tensor, ...]]


def writes_a_part(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache.select(0, 1).copy_(x * 2)
    cache.narrow(0, 2, 1).copy_(x[None])
    return (cache.sum(0) + x,)


def writes_all(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache.mul_(2).add_(x)
    return (cache.exp(),)


def writes_both(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache.select(0, 0).copy_(x)
    x.zero_()
    return (cache * 2,)


def writes_its_own_too(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    y.select(0, 0).copy_(x[0])
    cache.select(0, 2).copy_(y)
    return (y,)


def copies_another(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache[0].copy_(x)
    return (x + 1,)


def returns_what_is_written(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache.add_(1)
    return (cache[1],)


def returns_the_writer(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (cache.add_(1),)


def turns_it(cache: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cache.add_(1)
    cache.t_()
    return (cache * 2,)


def lowered(program: Program, *, shared: bool = False) -> GraphModule | None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        whole = torch.zeros(4, 3)
        inputs = [whole[:3], whole[3]] if shared else [torch.zeros(3, 3), torch.zeros(3)]
    return lower_for_inference(symbolic_trace(program), inputs, mode, {}, to_inputs=True)


@pytest.mark.parametrize(
    "program", [writes_a_part, writes_all, writes_both, writes_its_own_too, copies_another]
)
def test_the_graph_ends_in_copies_to_what_is_written(program: Program) -> None:
    made = lowered(program)
    assert made is not None
    mutable = [
        node
        for node in made.graph.nodes
        if node.op == "call_function" and getattr(node.target, "_schema", None) is not None
        if node.target._schema.is_mutable
    ]
    assert {node.target for node in mutable} == {aten.copy_.default}
    assert {node.args[0] for node in mutable} == written_inputs(made)
    for _ in range(2):
        eager = [torch.randn(3, 3), torch.randn(3)]
        ours = [one.clone() for one in eager]
        for found, expected in zip(made(*ours), program(*eager), strict=True):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("program", [returns_what_is_written, returns_the_writer, turns_it])
def test_what_is_left_to_aotautograd(program: Program) -> None:
    assert lowered(program) is None


def test_inputs_that_share_memory_are_left_to_aotautograd() -> None:
    assert lowered(writes_a_part) is not None
    assert lowered(writes_a_part, shared=True) is None
    assert lowered(copies_another, shared=True) is None


def test_writes_are_refused_where_they_are_not_asked_for() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [torch.zeros(3, 3), torch.zeros(3)]
    assert lower_for_inference(symbolic_trace(writes_all), inputs, mode, {}) is None


def inverse(y: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(y) + 1


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("backend", ["dvm", "triton", "inductor"])
def test_an_operator_that_raises_in_eager_mode_raises(backend: str, trained: bool) -> None:
    """What only checks gives nothing, and is no dead code."""
    compiled: Any = magjit.compile(inverse, backend=backend)
    for _ in range(2):
        y = (torch.randn(4, 4) + 4 * torch.eye(4)).requires_grad_(trained)
        torch.testing.assert_close(compiled(y), inverse(y))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.ones(4, 4).requires_grad_(trained))
    assert magjit.stats(compiled).captures == 1
