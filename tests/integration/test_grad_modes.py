"""Grad mode that a program switches: what is computed while it is on has gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import magjit


def on_within(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * w


def on_within_off(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        z = x + 1
        with torch.enable_grad():
            y = z * w
        v = y * 2
    return y, v


@torch.no_grad()
def on_in_a_decorated_one(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        y = x * w
    return y.detach() + 1, y


def left_off(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    torch.set_grad_enabled(False)
    return y


def left_on(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    v = x + w
    torch.set_grad_enabled(True)
    return x * w, v


def off_within(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * w
    with torch.no_grad():
        z = (y + w).sin()
    return y * z, z


def no_inference(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        return x * w


PROGRAMS = [
    on_within,
    on_within_off,
    on_in_a_decorated_one,
    left_off,
    left_on,
    off_within,
    no_inference,
]


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("backend", ["dvm", "eager", "inductor", "triton"])
def test_as_in_eager_mode(backend: str, program: Callable[..., Any], outside: bool) -> None:
    compiled = magjit.compile(program, backend=backend)
    for turn in range(3):
        x = torch.ones(3) + turn
        weights = [torch.arange(3.0).requires_grad_() for _ in range(2)]
        results, modes = [], []
        for one, w in zip((program, compiled), weights, strict=True):
            with torch.set_grad_enabled(outside):
                found = one(x, w)
                modes.append(torch.is_grad_enabled())
            results.append(found if isinstance(found, tuple) else (found,))
        assert modes[0] == modes[1]
        looks = [[(one.requires_grad, one.is_leaf) for one in found] for found in results]
        assert looks[0] == looks[1]
        torch.testing.assert_close(results[0], results[1])
        for found in results:
            total = sum((one.sum() for one in found if one.requires_grad), torch.zeros(()))
            if total.requires_grad:
                total.backward()
        torch.testing.assert_close(weights[1].grad, weights[0].grad)
    assert magjit.stats(compiled).replays


def test_recurrent_layers_where_grad_mode_is_switched_on() -> None:
    """What an LSTM keeps for its backward AOTAutograd does not take."""
    layer = nn.LSTM(4, 4)

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            result: torch.Tensor = layer(x)[0]
        return result

    compiled = magjit.compile(program, backend="dvm")
    x = torch.randn(5, 2, 4)
    with torch.no_grad():
        for _ in range(3):
            gradients = []
            for one in (program, compiled):
                layer.zero_grad()
                found = one(x)
                assert found.requires_grad
                found.backward(torch.ones_like(found))
                gradients.append([weight.grad for weight in layer.parameters()])
            torch.testing.assert_close(gradients[1], gradients[0])
