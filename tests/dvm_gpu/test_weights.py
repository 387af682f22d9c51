"""Vectors that all rows share, kept in shared memory: the kernel against torch in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.launch import DeviceFused, gpu
from magjit_dvm.instructions import DType
from tests.dvm_cuda.test_encoder import layer_norm
from tests.dvm_cuda.test_weights import scaled

pytestmark = pytest.mark.gpu

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
TOLERANCES = {F32: (1e-4, 2e-3), F16: (2e-3, 4e-3), BF16: (1.6e-2, 2e-2)}
MANY_ROWS = (
    *((60000, 512), (40000, 768), (25000, 1024), (20000, 1540), (12000, 2048), (6500, 4096)),
    *((5000, 5000), (3300, 8192), (1100, 16384)),
)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda x: x.text)
@pytest.mark.parametrize("shape", MANY_ROWS)
def test_vectors_that_are_kept(shape: tuple[int, int], dtype: DType) -> None:
    """By launches one after another, whose vectors kernels in front of them compute."""
    x = torch.randn(shape, device="cuda").to(dtype.torch)
    start = torch.randn(shape[1], device="cuda").to(dtype.torch)
    norm, product = layer_norm(dtype), scaled(dtype, "mul", "add")
    for program in (norm, product):
        image = encode(program, [x, start, start], gpu(0).machine).image
        assert image is not None
        assert image.weights == 2 or dtype is F32  # of which fewer fit
    rtol, atol = TOLERANCES[dtype]
    normed, multiplied = DeviceFused(norm), DeviceFused(product)
    for turn in range(3):
        weight, bias = start * (turn + 1), start - turn
        got = normed(x, weight, bias)[0]
        wanted = F.layer_norm(x.float(), shape[1:], weight.float(), bias.float())
        torch.testing.assert_close(got.float(), wanted, rtol=rtol, atol=atol)
        got = multiplied(x, weight, bias)
        wanted = x.float() * x.float().sum(1, keepdim=True) * weight.float() + bias.float()
        torch.testing.assert_close(got.float(), wanted, rtol=rtol, atol=atol)
