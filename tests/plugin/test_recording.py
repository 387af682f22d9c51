"""ATen graphs recorded in one pass are those that make_fx gives: right at every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from magjit.plugin import inference
from magjit.plugin.inference import lower_for_inference
from magjit.plugin.recording import NotRecorded, record

Program = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def squares(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    side = x.shape[0] // 2
    return (torch.arange(side * side) + x.sum(), x.new_ones(side**3))


def resized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    size = (x.shape[0] * 2, x.shape[1] // 2 + 1)
    return (F.interpolate(x[None, None], size=size, mode="bicubic", align_corners=False),)


def chosen_by_numbers(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x[torch.arange(x.shape[0]) // 2], x[:, torch.tensor([0, 1])])


def shares(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * (x.shape[0] / x.shape[1]), x + torch.sym_float(x.shape[0]) / 3.0)


def rounded_sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x * (0.1 * x.shape[0] + 0.2 + x.shape[1] * 0.3),)


def masked(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x[x > 0],)


def symbolic(x: torch.Tensor) -> tuple[FakeTensorMode, torch.Tensor]:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim())
    return mode, mode.from_tensor(x, symbolic_context=context)


def lowered(program: Program, given: torch.Tensor) -> Program:
    mode, x = symbolic(given)
    made = lower_for_inference(program, [x], fake_mode=mode, decompositions={})
    assert made is not None
    return made


@pytest.mark.parametrize("program", [squares, resized, chosen_by_numbers, shares])
def test_sizes_are_followed(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_traced", pytest.fail)
    recorded = lowered(program, torch.randn(12, 10))
    for shape in ((12, 10), (7, 9), (20, 4)):
        given = torch.randn(shape)
        for made, expected in zip(recorded(given), program(given), strict=True):
            torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("program", [rounded_sums, masked])
def test_what_is_left_to_make_fx(program: Program) -> None:
    """Sums that round keep their order; sizes of data get one symbol only."""
    given = torch.randn(12, 10)
    mode, x = symbolic(given)
    with pytest.raises(NotRecorded):
        record(program, [x], mode, {})
    for made, expected in zip(lowered(program, given)(given), program(given), strict=True):
        torch.testing.assert_close(made, expected)
