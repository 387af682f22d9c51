"""Group norms in parts, in training and inference, as in eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import magjit
from magjit_dvm import group_norms

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

CLOSE = {
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float32: {"rtol": 1e-4, "atol": 2e-5},
}


class Block(nn.Module):
    def __init__(self, channels: int, groups: int, affine: bool) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, affine=affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(self.norm(x)) + 1


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((4, 64, 128, 128), 8),  # rows that come in chunks, of float32
        ((2, 32, 256, 256), 4),
        ((8, 320, 32, 32), 32),
        ((8, 96, 45, 47), 1),
        ((4, 48, 9000), 6),
        ((2, 16, 24, 40, 44), 16),
    ],
)
def test_as_in_eager_mode(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, affine: bool
) -> None:
    torch.manual_seed(0)
    model = Block(shape[1], groups, affine).cuda().to(dtype)
    twin = copy.deepcopy(model)
    assert group_norms._pays(torch.empty(shape, device="cuda", dtype=dtype))
    compiled = magjit.compile(model, backend="dvm")
    for _ in range(2):
        x = torch.randn(shape, device="cuda", dtype=dtype) * 2 + 1
        dy = torch.randn_like(x)
        given = [x.clone().requires_grad_() for _ in range(2)]
        found, expected = compiled(given[0]), twin(given[1])
        torch.testing.assert_close(found, expected, **CLOSE[dtype])
        found.backward(dy)
        expected.backward(dy)
        torch.testing.assert_close(given[0].grad, given[1].grad, **CLOSE[dtype])
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        scale = other.grad.abs().max().item()
        relative = 1e-3 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(one.grad, other.grad, rtol=relative, atol=relative * scale)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x), **CLOSE[dtype])


def test_under_autocast_behind_a_convolution() -> None:
    """Where eager mode computes the norm in float32, of a convolution in float16."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(16, 64, 3, padding=1), Block(64, 8, True), nn.Conv2d(64, 16, 1)]
    model = nn.Sequential(*layers).cuda()
    twin = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="dvm")
    x = torch.randn(4, 16, 96, 96, device="cuda")
    for one in (compiled, twin):
        with torch.autocast("cuda", torch.float16):
            loss = one(x).float().square().mean()
        loss.backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        error = (one.grad - other.grad).norm() / other.grad.norm()
        assert error < 1e-2
