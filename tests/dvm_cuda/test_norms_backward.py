"""Backwards of norms as the GPU has them: gradients as autograd's, in words without scratch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_dvm.fuser import fuse
from magjit_dvm.lowering import decompositions
from magjit_dvm.norms_backward import layer_norm_backward, rms_norm_backward
from tests.dvm_cuda.checking import check_words

aten = torch.ops.aten

SHAPES = (((5, 64), 1), ((3, 4, 33), 1), ((2, 3, 4, 5), 2), ((7,), 1))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=made, dtype=torch.float64)


def statistics(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean, 1 / deviation, and 1 / root of the mean square of rows of ``count`` dimensions."""
    over = list(range(x.dim() - count, x.dim()))
    mean = x.mean(over, keepdim=True)
    rstd = (x.var(over, correction=0, keepdim=True) + 1e-5).rsqrt()
    return mean, rstd, (x.square().mean(over, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_layer_norm(shape: tuple[int, ...], count: int, weighted: bool) -> None:
    x, dy, row = drawn(*shape) + 3, drawn(*shape, seed=1), shape[len(shape) - count :]
    weight = drawn(*row, seed=2) if weighted else None
    y = torch.nn.functional.layer_norm(x.requires_grad_(), row, weight, None)
    (wanted,) = torch.autograd.grad(y, [x], dy)
    mean, rstd, _ = statistics(x, count)
    with torch.no_grad():
        found = layer_norm_backward(dy, x, row, mean, rstd, weight, None, [True, False, False])
    assert found[1:] == (None, None)
    torch.testing.assert_close(found[0], wanted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("shape", "count"), SHAPES)
def test_rms_norm(shape: tuple[int, ...], count: int, weighted: bool) -> None:
    """Of the weight, the gradient is a kernel of ATen's on the GPU alone."""
    x, dy, row = drawn(*shape) + 1, drawn(*shape, seed=1), shape[len(shape) - count :]
    weight = drawn(*row, seed=2) if weighted else None
    y = torch.nn.functional.rms_norm(x.requires_grad_(), row, weight, 1e-5)
    (wanted,) = torch.autograd.grad(y, [x], dy)
    _, _, rstd = statistics(x, count)
    with torch.no_grad():
        found, nothing = rms_norm_backward(dy, x, row, rstd, weight, [True, False])
    assert nothing is None
    torch.testing.assert_close(found, wanted)


def test_what_is_left_to_aten() -> None:
    """Gradients of weights alone, and nothing to reduce."""
    x, row = drawn(4, 8), drawn(4, 1)
    for mask in ([False, True, True], [False, False, True], [True, True, False]):
        assert layer_norm_backward(x, x, [8], row, row, None, None, mask) is NotImplemented
    assert rms_norm_backward(x, x, [8], row, None, [False, True]) is NotImplemented
    empty = drawn(0, 8)
    assert rms_norm_backward(empty, empty, [8], row[:0], None, [True, False]) is NotImplemented


def test_gradients_of_weights_are_one_kernel_of_atens() -> None:
    """They are sums across rows, for which the GPU's words would need tensors between."""
    layer, rms = aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default

    def of_layer_norm(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any) -> Any:
        return layer(dy, x, [512], mean, rstd, weight, weight, [True, True, True])

    def of_rms_norm(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any) -> Any:
        return rms(dy, x, [512], rstd, weight, [True, True])

    for function, operator, mask in (
        (of_layer_norm, layer, [True, True, True]),
        (of_rms_norm, rms, [False, True]),
    ):
        with FakeTensorMode():
            x, weight = torch.empty(6, 512, device="cuda"), torch.empty(512, device="cuda")
            row = torch.empty(6, 1, device="cuda")
            graph = make_fx(function, decompositions())(x, x, row, row, weight).graph
        (left,) = (node for node in graph.nodes if node.target is operator)
        assert left.args[-1] == mask


def words_of(function: Callable[..., Any], given: Sequence[torch.Tensor]) -> list[str]:
    """Of the one group that a function is, checked against the reference."""
    graph = make_fx(function, decompositions(), "fake")(*given).graph
    (group,) = fuse(graph).groups
    places = [node for node in graph.nodes if node.op == "placeholder"]
    by_node = dict(zip(places, given, strict=True))
    image = check_words(group.program, [by_node[one] for one in group.arguments])
    assert image is not None
    return [one for word in image.words for one in (word.first, word.second) if one != "nop"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_no_tile_waits(dtype: torch.dtype) -> None:
    x, dy = (drawn(6, 512, seed=k).to(dtype) for k in range(2))
    mean, rstd, _ = (one.float() for one in statistics(x.double(), 1))

    def of_layer_norm(dy: Any, x: Any, mean: Any, rstd: Any) -> Any:
        return layer_norm_backward(dy, x, [512], mean, rstd, None, None, [True, False, False])[0]

    def of_rms_norm(dy: Any, x: Any, rstd: Any) -> Any:
        return rms_norm_backward(dy, x, [512], rstd, None, [True, False])[0]

    def of_softmax(dy: Any, y: Any) -> Any:
        return aten._softmax_backward_data.default(dy, y, 1, dtype)

    y = x.softmax(1)
    for function, given in (
        (of_layer_norm, [dy, x, mean, rstd]),
        (of_rms_norm, [dy, x, rstd]),
        (of_softmax, [dy, y]),
    ):
        found = words_of(function, given)
        assert not {"save", "la.scratch", "lt.scratch"} & {*found}, found
        assert 1 <= sum(one.startswith("row.") for one in found) <= 2
