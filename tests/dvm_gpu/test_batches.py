"""Results of rows in batches, and rows that come again, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import magjit
from magjit_dvm.cuda.forms import BATCHED, READ_ONCE, form_of
from magjit_dvm.instructions import DType
from tests.dvm_cuda.test_batches import distances
from tests.dvm_cuda.test_chunks import summed
from tests.dvm_cuda.test_encoder import values
from tests.dvm_cuda.test_online import forward
from tests.dvm_cuda.test_repeats import masked, sums
from tests.dvm_cuda.test_row_words import special_rows
from tests.dvm_cuda.test_tables import positions
from tests.dvm_gpu.test_gpu import BIG, check_image

pytestmark = pytest.mark.gpu

F16, BF16, F32, BOOL = DType.F16, DType.BF16, DType.F32, DType.BOOL
ROWS = (4224, 4777, 9001)
"""Some are left in the end, of a batch and of a tile."""


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda one: one.text)
@pytest.mark.parametrize("cols", [481, 512, 768, 1000, 1024, 1025, 2048, 5000])
def test_losses(cols: int, dtype: DType) -> None:
    for rows in ROWS if cols < 2048 else ROWS[1:2]:
        x = values(dtype, rows, cols)
        image = check_image(forward(dtype), [x, positions(cols, rows), x], BIG)
        assert image is not None and form_of(image) == (READ_ONCE if cols > 1024 else BATCHED)


@pytest.mark.parametrize("cols", [600, 1024, 3000, 9000])
def test_means_and_deviations(cols: int) -> None:
    for rows in ROWS if cols < 3000 else ROWS[1:2]:
        given = [values(F16, rows, cols), values(F32, rows), values(F32, rows, seed=3)]
        image = check_image(distances(), given, BIG)
        assert image is not None and image.batched > 0


@pytest.mark.parametrize("cols", [600, 3000])
def test_special_values(cols: int) -> None:
    image = check_image(summed(F32), [special_rows(F32, 4300, cols)], BIG)
    assert image is not None and image.batched > 0


@pytest.mark.parametrize("cols", [64, 200, 480, 1000, 1024, 4096])
def test_rows_that_come_again(cols: int) -> None:
    for images, rows in ((30, 40), (9, 200), (7, 48)):
        x, mask = values(F16, images, rows, cols), values(BOOL, rows, cols)
        image = check_image(masked(), [x, mask], BIG)
        assert image is not None and image.repeats == [rows]
        image = check_image(sums(F16, 1, 2), [x, values(F16, rows, cols)], BIG)
        assert image is not None and image.repeats == [rows]


@pytest.mark.parametrize("backend", ["dvm", "triton"])
@pytest.mark.parametrize("count", [70_001, 131_072, 200_003])
def test_mean_losses_of_many_targets(count: int, backend: str) -> None:
    """More of them than float16 counts; gradients are eager mode's."""

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target)

    torch.manual_seed(0)
    x = torch.randn(count, 600, device="cuda", dtype=torch.float16)
    target = torch.randint(0, 600, (count,), device="cuda")
    target[::5] = -100
    compiled = magjit.compile(loss, backend=backend, fullgraph=True)
    wanted = F.cross_entropy(x.float(), target).half()
    for _ in range(2):
        torch.testing.assert_close(compiled(x, target), wanted)
    given, like = x[:3000].clone().requires_grad_(), x[:3000].clone().requires_grad_()
    compiled(given, target[:3000]).backward()
    loss(like, target[:3000]).backward()
    torch.testing.assert_close(given.grad, like.grad, rtol=4e-3, atol=1e-7)
