"""Gradients of norms and their weights: the kernels against autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.forms import GRADIENTS, form_of
from magjit_dvm.cuda.launch import DeviceFused, gpu
from magjit_dvm.instructions import DType
from magjit_dvm.wide_norms import WideNorm, norm_gradients

pytestmark = pytest.mark.gpu

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
_LARGEST = {F32: 2e-6, F16: 4e-4, BF16: 3e-3}
"""Of an error, of the norm of what it is in."""


def close(one: torch.Tensor, other: torch.Tensor, dtype: DType) -> None:
    error = (one.double() - other).norm() / other.norm()
    assert error < _LARGEST[dtype], error.item()
    assert torch.isfinite(one).all()


def wanted(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, centered: bool
) -> tuple[torch.Tensor, ...]:
    given = [one.double().requires_grad_() for one in (x, weight)]
    if centered:
        given.append(torch.zeros_like(given[1], requires_grad=True))
        y = F.layer_norm(given[0], weight.shape, given[1], given[2])
    else:
        y = F.rms_norm(given[0], weight.shape, given[1], 1e-5)
    return torch.autograd.grad(y, given, dy.double())


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    "cols", [448, 512, 1024, 1500, 2048, 4096, 5000, 8192, 9728, 12000, 16384, 16600]
)
def test_in_one_word(cols: int, centered: bool, dtype: DType) -> None:
    """Of many rows, the last tile of which is not whole; twice, with the same bits."""
    if dtype is F32 and cols > 9000:
        pytest.skip("no room for two stages")
    # Blocks have many tiles of these, of which most are drawn: sums are written several times.
    rows = 528 * max(19 // -(-cols // 512), 1) * (3 if cols < 5000 else 1) + 5
    x = (torch.randn(rows, cols, device="cuda") + 0.5).to(dtype.torch)
    dy = torch.randn_like(x)
    weight = torch.randn(cols, device="cuda").to(dtype.torch)
    wide = x.double()
    mean = wide.mean(1).float()
    square = wide.var(1, correction=0) if centered else wide.square().mean(1)
    root = (square + 1e-5).rsqrt().float()
    given = [dy, x, *([mean] if centered else []), root, weight]
    program = norm_gradients(dtype, dtype, F32 if centered else None, centered, cols)
    image = encode(program, given, gpu(0).machine).image
    assert image is not None and form_of(image) == GRADIENTS
    run = DeviceFused(program)
    first, again = run(*given), run(*given)
    for one, other, like in zip(first, wanted(dy, x, weight, centered), first, strict=True):
        close(one, other, F32 if like.dtype is torch.float32 and dtype is F32 else dtype)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def layer(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, weight.shape, weight, bias)


def root_mean_square(x: Any, weight: Any, bias: Any) -> Any:
    return F.rms_norm(x, weight.shape, weight, 1e-5) + 0 * bias


@pytest.mark.parametrize("function", [layer, root_mean_square])
@pytest.mark.parametrize("rows", [1200, 40])
@pytest.mark.parametrize("mixed", [False, True])
def test_of_wide_rows(
    function: Callable[..., Any], rows: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user has them, also of weights in float32; of few rows, ATen computes them."""
    found = []
    by_words = WideNorm._by_words

    def watched(self: WideNorm, *given: Any) -> Any:
        found.append(by_words(self, *given))
        return found[-1]

    monkeypatch.setattr(WideNorm, "_by_words", watched)
    dtype = torch.float32 if mixed else torch.bfloat16
    x = torch.randn(2, rows // 2, 16384, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    vectors = [torch.randn(16384, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2)]
    dy = torch.randn_like(x)
    with torch.autocast("cuda", torch.bfloat16, enabled=False):
        compiled = magjit.compile(function, backend="dvm", fullgraph=True)
        if mixed and function is layer:
            pytest.skip("eager mode has no layer norm of two dtypes")
        for _ in range(2):
            y = compiled(x, *vectors)
            got = torch.autograd.grad(y, [x, vectors[0]], dy.to(y.dtype))
    centered = function is layer
    for one, other in zip(got, wanted(dy, x.detach(), vectors[0].detach(), centered), strict=False):
        close(one, other, BF16)
    if not mixed:
        assert found and all((one is not None) == (rows > 528) for one in found)
