"""Reductions of few long rows on a GPU: steps against the reference and eager mode."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.instructions import DType
from tests.dvm_cuda.long_rows import largest, mean_square, normalized, softmaxed, weighed
from tests.dvm_cuda.test_encoder import values
from tests.dvm_gpu.test_gpu import check_gpu

pytestmark = pytest.mark.gpu

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)


@DTYPES
@pytest.mark.parametrize("length", [1 << 18, 1 << 22, 262_147, 3_000_017, 5 << 20])
def test_a_row(dtype: DType, length: int) -> None:
    x, y = values(dtype, 1, length), values(dtype, 1, length)
    check_gpu(mean_square(dtype), [x, y])
    check_gpu(largest(dtype), [x])
    odd = values(dtype, length + 3)[3:].view(1, -1)
    check_gpu(mean_square(dtype), [odd, y])
    check_gpu(largest(dtype), [odd])


@DTYPES
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1 << 21),
        (4, 1, 300_000),
        (3, 64, 4096),
        (8, 320, 1024),
        (30, 3, 70_000),
        (5, 1, 100_003),
    ],
)
def test_rows(dtype: DType, shape: tuple[int, ...]) -> None:
    x = values(dtype, *shape)
    check_gpu(normalized(dtype), [x + 2])
    check_gpu(softmaxed(dtype), [x])


@DTYPES
def test_what_a_row_shares(dtype: DType) -> None:
    for rows, cols in ((4096, 600), (131_072, 4)):
        check_gpu(weighed(dtype), [values(dtype, rows, cols), values(dtype, rows)])


def test_the_same_twice() -> None:
    """To the last bit; captured, and by several streams at once."""
    x = torch.randn(1, 3_000_017, device="cuda", dtype=torch.float16)
    fused = DeviceFused(mean_square(F16))
    zero = torch.zeros_like(x)
    wanted = fused(x, zero)
    torch.testing.assert_close(wanted.float(), x.float().square().mean(), rtol=2e-3, atol=0)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 4]):
            found = fused(x, zero)
        streams[turn % 4].synchronize()
        assert torch.equal(found, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused(x, zero)
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)


def standardized(x: torch.Tensor) -> torch.Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart * torch.rsqrt((apart * apart).mean(-1, keepdim=True) + 1e-5)


LOSSES: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "binary cross-entropy": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "norm": lambda x, y: torch.linalg.vector_norm(x - y),
    "largest": lambda x, y: (x * y).abs().amax(),
    "unit": lambda x, y: x / torch.linalg.vector_norm(x + y),
    "softmax": lambda x, y: (x + y).view(2, -1).softmax(-1),
    "rows of mean 0": lambda x, y: standardized((x * y).view(3, -1)),
    "mean and deviation": lambda x, y: ((x - x.mean()) ** 2 + y * 0).mean().sqrt(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    """Compiled once for all sizes; the figures of float64 are as near as eager mode's."""
    compiled = magjit.compile(LOSSES[name], backend="dvm")
    for rows in (1000, 768, 1200, 768):
        x, y = (torch.randn(rows, 3 * 1025, device="cuda") for _ in range(2))
        exact = LOSSES[name](x.double(), y.double())
        eager, found = LOSSES[name](x, y), compiled(x, y)
        error = (found.double() - exact).norm()
        assert error <= 2 * (eager.double() - exact).norm() + 2e-6 * exact.norm()
    assert magjit.stats(compiled).replays >= 2


def test_training_with_a_loss() -> None:
    """Gradients of a loss over all elements, beside eager mode's."""
    layer, x = torch.nn.Linear(512, 1024).cuda(), torch.randn(1000, 512, device="cuda")
    y = torch.randn(1000, 1024, device="cuda")

    def step() -> torch.Tensor:
        loss = F.mse_loss(layer(x).tanh(), y)
        loss.backward()
        return loss.detach()

    wanted = step()
    gradients = [one.grad.clone() for one in layer.parameters() if one.grad is not None]
    compiled = magjit.compile(step, backend="dvm")
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        torch.testing.assert_close(compiled(), wanted)
        for one, other in zip(layer.parameters(), gradients, strict=True):
            torch.testing.assert_close(one.grad, other, rtol=1e-3, atol=1e-6)


def test_memory_stays() -> None:
    fused = DeviceFused(normalized(F16))
    x = torch.randn(2, 3, 300_000, device="cuda", dtype=torch.float16)
    fused(x)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        fused(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
