"""Kernels in the tables take strides and ``out=`` without allocating or copying; others do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.profiler import ProfilerActivity, profile

from magjit_triton.kernels import _OUT, out_variant

aten = torch.ops.aten


def arguments(target: Any) -> tuple[Any, ...]:
    x, y = torch.rand(8, 32, 32) * 0.4 + 0.5, torch.rand(8, 32, 32) * 0.4 + 0.5
    match target:
        case aten.mm.default:
            return x[0], y[0]
        case aten.addmm.default:
            return torch.rand(32), x[0], y[0]
        case aten.bmm.default:
            return x, y
        case aten.baddbmm.default | aten.addcdiv.default | aten.addcmul.default:
            return x, x, y
        case aten.where.self:
            return x > 1, x, y
        case aten.clamp.default:
            return x, 0.6, 0.9
        case aten.clamp_max.default | aten.clamp_min.default | aten.pow.Tensor_Scalar:
            return x, 0.7
    two = len([one for one in target._schema.arguments if str(one.type) == "Tensor"]) == 2
    return (x, y) if two else (x,)


def allocated(call: Any) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("target", [*_OUT, aten.relu.default], ids=str)
def test_out_is_written_with_any_strides_and_nothing_is_allocated(target: Any) -> None:
    given = arguments(target)
    expected = target(*given)
    node = Graph().call_function(target)
    out = out_variant(node)
    assert out is not None
    wide = torch.full((*expected.shape[:-1], 3 * expected.shape[-1]), float("nan"))
    width = expected.shape[-1]
    place = wide[..., width : 2 * width]
    out(*given, out=place)
    assert torch.equal(place, expected)
    assert wide.isnan().sum() == 2 * expected.numel()
    turned = torch.full_like(expected, float("nan")).transpose(-1, -2)
    out(*given, out=turned)
    torch.testing.assert_close(turned, expected)
    # A broadcast bias is expanded into the place; nothing else may be made.
    assert allocated(lambda: out(*given, out=place)) < expected.nbytes // 4


def test_gelu_has_no_out_for_it_leaves_strided_memory_unwritten() -> None:
    assert out_variant(Graph().call_function(aten.gelu.default)) is None


def test_convolution_has_no_out_for_it_copies() -> None:
    given = (torch.rand(1, 4, 8, 8), torch.rand(4, 4, 3, 3), None, [1, 1], [1, 1], [1, 1])
    more = (False, [0, 0], 1)
    place = torch.empty(1, 8, 8, 8)[:, :4]
    assert out_variant(Graph().call_function(aten.convolution.default)) is None
    assert allocated(lambda: aten.convolution.out(*given, *more, out=place)) >= place.nbytes
