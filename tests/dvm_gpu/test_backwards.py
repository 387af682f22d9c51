"""Gradients of norms and of their weights on a GPU, as the reference has them."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.forms import ADDING, form_of
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


OF_ADDERS = (
    *((14_001, 256), (12_500, 508), (7_200, 768), (8_500, 1024), (8_000, 900)),
    *((4_000, 2048), (1_800, 4096), (2_200, 3000), (700, 8192), (1_200, 6000)),
)
"""As many rows as blocks have four tiles of."""


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32])
@pytest.mark.parametrize("shape", OF_ADDERS)
def test_adders(shape: tuple[int, int], dtype: DType, centered: bool) -> None:
    """Sums of warps that do nothing else, the same to the last bit each time."""
    one = Gradient(dtype, centered, True, shape[1], added=True).with_sums()
    program, arguments = one.program(), one.arguments(*shape)
    given = [on_gpu(tensor) for tensor in arguments]
    image = encode(program, given, gpu(0).machine).image
    assert image is not None and image.adders and form_of(image) == ADDING
    fused = DeviceFused(program)
    first = fused(*given)
    require_reference(program, first, arguments)
    for _ in range(3):
        assert all(map(torch.equal, fused(*given), first))


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
