"""Sums across rows on a GPU: the kernels against the reference, gradients against eager mode's."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.instructions import DType
from tests.dvm_cuda import test_sums as words
from tests.dvm_gpu.exact import require_as_near
from tests.dvm_gpu.test_gpu import check_gpu, on_gpu

pytestmark = pytest.mark.gpu

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("rows", [2, 133, 5000])
@pytest.mark.parametrize("cols", [64, 131, 300, 1024, 4096, 8192])
def test_kernels(rows: int, cols: int, dtype: DType) -> None:
    rows = min(rows, (1 << 22) // cols)
    x, w = words.drawn(dtype, rows, cols), words.drawn(F32, rows, seed=1)
    check_gpu(words.alone(dtype), [x])
    check_gpu(words.beside_rows(dtype), [x, w])


def test_a_sum_of_the_same_is_the_same() -> None:
    """To the last bit; captured, too."""
    x = words.drawn(F32, 80_000, 512).cuda()
    fused = DeviceFused(words.alone(F32))
    first = fused(x)
    torch.testing.assert_close(first.double(), x.double().sum(0), rtol=1e-5, atol=2e-3)
    for _ in range(20):
        assert torch.equal(fused(x), first)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fused(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = fused(x)
    for _ in range(5):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(made.double(), x.double().sum(0), rtol=1e-5, atol=2e-3)


def test_streams_and_memory() -> None:
    """The memory of parts goes back at once: what is queued after it in its stream comes later."""
    given = [on_gpu(words.drawn(F16, 3000, 512)), on_gpu(words.drawn(F32, 3000))]
    fused = DeviceFused(words.beside_rows(F16))
    wanted = fused(*given)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    made: list[Any] = []
    for _ in range(3):
        with torch.cuda.stream(torch.cuda.Stream()):
            made += [fused(*given) for _ in range(30)]
    torch.cuda.synchronize()
    for results in made:
        for one, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
    del made, results, one
    assert torch.cuda.memory_allocated() == before


class Norms(torch.nn.Module):
    """Both norms with weights, and a layer whose bias has a gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
        self.rms = torch.nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms(F.gelu(self.linear(self.norm(x)))) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 256, 302, 1000, 8400])
def test_gradients(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Norms(width).cuda().to(dtype)
    compiled = magjit.compile(model, backend="dvm")
    exact = Norms(width).cuda().double()
    exact.load_state_dict({name: one.double() for name, one in model.state_dict().items()})
    for rows in (700, 900):
        x = torch.randn(3, rows, width, device="cuda", dtype=dtype)
        gradients = []
        for module, given in ((compiled, x), (model, x), (exact, x.double())):
            given = given.detach().requires_grad_()
            parameters = list((exact if module is exact else model).parameters())
            module(given).square().mean().backward()
            gradients.append([given.grad, *(one.grad for one in parameters)])
            for one in parameters:
                one.grad = None
        require_as_near(*gradients)
