"""Settings, dynamic shapes, and the way through torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import magjit
from magjit.errors import BackendOptionError
from magjit_triton import backend, compile_for_torch
from tests.triton_backend.running import compiled


def mixed(x: Tensor, w: Tensor) -> Tensor:
    a, b = F.linear(x, w).chunk(2, -1)
    z = torch.cat([torch.sigmoid(a), torch.tanh(b)], -1)
    k = z[:, :, None].expand(-1, -1, 3, -1).reshape(z.shape[0], -1, z.shape[2])
    return (k.transpose(1, 2).contiguous() @ x.repeat(1, 3, 1)).clone()


def test_one_graph_for_all_sizes() -> None:
    call = compiled(mixed, dynamic=True)
    w = torch.randn(12, 8)
    with torch.no_grad():
        call(torch.randn(2, 3, 8), w)
        for length in (4, 7, 9, 30):
            x = torch.randn(2, length, 8)
            expected, actual = mixed(x, w), call(x, w)
            torch.testing.assert_close(actual, expected)
            assert actual.stride() == expected.stride()
    assert magjit.stats(call).records == 1


def test_through_torch_compile() -> None:
    torch._dynamo.reset()
    call = torch.compile(mixed, backend=compile_for_torch, fullgraph=True)
    x, w = torch.randn(2, 5, 8), torch.randn(12, 8)
    with torch.no_grad():
        torch.testing.assert_close(call(x, w), mixed(x, w))


def test_settings() -> None:
    made = backend.configure("reduce-overhead", {"objective": "memory"}, None)
    assert (made.settings.mode, made.settings.objective) == ("reduce-overhead", "memory")
    assert backend.configure(None, {"matmul": "triton"}, None).settings.matmul == "triton"
    wrong = [("fast", None), (None, {"objective": "speed"}), (None, {"other": 1})]
    for mode, options in (*wrong, (None, {"matmul": "cublas"})):
        with pytest.raises(BackendOptionError):
            backend.configure(mode, options, None)


def test_no_gpu_no_cuda_graphs() -> None:
    call = compiled(mixed, mode="reduce-overhead")
    x, w = torch.randn(2, 5, 8), torch.randn(12, 8)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(call(x, w), mixed(x, w))


@pytest.mark.gpu
def test_cuda_graphs_update_inputs_once_a_call() -> None:
    def function(x: Tensor, cache: Tensor) -> Tensor:
        cache[:, 1:2] += x
        return torch.cat([cache, x.sin()], 1)

    call = compiled(function, mode="reduce-overhead")
    x = torch.randn(4, 1, device="cuda")
    expected, cache = torch.zeros(4, 3, device="cuda"), torch.zeros(4, 3, device="cuda")
    results = []
    with torch.no_grad():
        for _ in range(5):
            results.append((function(x, expected), call(x, cache)))
    torch.testing.assert_close(cache, expected)
    for one, other in results:
        torch.testing.assert_close(other, one)
