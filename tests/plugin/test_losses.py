"""Means and sums of losses, added up in float32 as eager mode's kernels do."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from magjit.plugin.losses import nll_loss

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(70,), (7, 3, 5)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [1, 2])
def test_losses_of_few_targets(
    dtype: torch.dtype, shape: tuple[int, ...], weighted: bool, reduction: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape[0], 6, *shape[1:]).log_softmax(1).to(dtype)
    target = torch.randint(0, 6, shape)
    target.view(-1)[::4] = -100
    weight = (torch.rand(6) + 0.5).to(dtype) if weighted else None
    operator = aten.nll_loss2d_forward if x.dim() > 2 else aten.nll_loss_forward
    found = nll_loss(operator.default, x, target, weight, reduction, -100)
    wide = None if weight is None else weight.double()
    wanted = operator.default(x.double(), target, wide, reduction, -100)
    for got, one in zip(found, wanted, strict=True):
        assert got.dtype == dtype and got.shape == ()
        torch.testing.assert_close(got, one.to(dtype))


@pytest.mark.parametrize("shape", [(90_000,), (3, 200, 150)])
def test_more_targets_than_float16_counts(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape[0], 6, *shape[1:]).log_softmax(1).half()
    target = torch.randint(0, 6, shape)
    operator = aten.nll_loss2d_forward if x.dim() > 2 else aten.nll_loss_forward
    mean, total = nll_loss(operator.default, x, target, None, 1, -100)
    torch.testing.assert_close(mean, F.nll_loss(x.float(), target).half())
    assert total.isinf(), "as eager mode's, which gradients are divided by"


@pytest.mark.parametrize("backend", ["dvm", "triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decompositions_count_in_float32(backend: str, dtype: torch.dtype) -> None:
    """No intermediate result of theirs is a count in half precision."""
    if backend == "dvm":
        from magjit_dvm.lowering import decompositions
    else:
        pytest.importorskip("triton")
        from magjit_triton.codegen.decompositions import decompositions
    x, target = torch.randn(80_000, 4).to(dtype), torch.randint(0, 4, (80_000,))

    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target)

    graph = make_fx(loss, decomposition_table=decompositions())(x, target)
    wanted = F.cross_entropy(x.float(), target).to(dtype)
    torch.testing.assert_close(graph(x, target), wanted)
