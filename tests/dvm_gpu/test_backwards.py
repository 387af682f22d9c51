"""Gradients of norms and of their weights on a GPU, as the reference has them."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.launch import DeviceFused, gpu
from magjit_dvm.instructions import DType
from tests.dvm_cuda.test_backwards import Gradient, backs
from tests.dvm_gpu.test_gpu import on_gpu, require_reference

pytestmark = pytest.mark.gpu

SHAPES = ((3, 40), (700, 256), (2100, 768), (300, 1030), (64, 5000), (40, 8192))


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients(shape: tuple[int, int], dtype: DType, centered: bool, sums: bool) -> None:
    if sums and shape[1] % 4:
        shape = shape[0], shape[1] // 4 * 4
    one = Gradient(dtype, centered, True, shape[1])
    program, arguments = (one.with_sums() if sums else one).program(), one.arguments(*shape)
    given = [on_gpu(tensor) for tensor in arguments]
    image = encode(program, given, gpu(0).machine).image
    assert image is not None and len(backs(image)) == 1
    require_reference(program, DeviceFused(program)(*given), arguments)


def test_runs_of_tiles() -> None:
    """Whoever draws them: the same to the last bit, each time."""
    one = Gradient(DType.F16, True, True, 512).with_sums()
    program, arguments = one.program(), one.arguments(100_000, 512)
    given = [on_gpu(tensor) for tensor in arguments]
    image = encode(program, given, gpu(0).machine).image
    assert image is not None and image.draws and image.shift > 0
    fused = DeviceFused(program)
    first = fused(*given)
    norm = (given[1].double() - given[2].double()[:, None]) * given[3].double()[:, None]
    dy = given[0].double()
    for found, wanted in ((first[1], (norm * dy).sum(0)), (first[2], dy.sum(0))):
        torch.testing.assert_close(found.double(), wanted, rtol=2e-3, atol=0.5)
    for _ in range(20):
        assert all(map(torch.equal, fused(*given), first))
