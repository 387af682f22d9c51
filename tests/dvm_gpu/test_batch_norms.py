"""Batch norms in training: by each of the ways as in eager mode, running statistics included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import magjit
from magjit_dvm import batch_norms
from magjit_dvm.batch_norms import Way

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

TOLERANCE = {
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
}
SHAPES = [
    (4, 64, 56, 56),
    (16, 96, 9, 15),
    (2, 3, 300, 301),
    (40, 300, 33),
    (3, 17, 5, 6, 7),
    (64, 1024, 4, 4),
    (1, 24, 40, 40),
]


class Block(nn.Module):
    """One norm, and something smooth: where a ReLU begins, a last bit decides."""

    def __init__(self, dims: int, channels: int, affine: bool, tracks: bool) -> None:
        super().__init__()
        norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 3]
        self.norm = norm(channels, affine=affine, track_running_stats=tracks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.norm(x)) + x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", [None, *Way])
def test_as_in_eager_mode(
    way: Way | None, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody asks for a way, as sizes have it."""
    if way is not None:
        monkeypatch.setattr(batch_norms, "_way", lambda x, training: way)
        monkeypatch.setattr(batch_norms, "_backward_in_parts", lambda x: way is Way.PARTS)
    compare(shape, dtype, affine=True, tracks=True)


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("way", list(Way))
def test_without_weights_or_statistics(
    way: Way, affine: bool, tracks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_norms, "_way", lambda x, training: way)
    monkeypatch.setattr(batch_norms, "_backward_in_parts", lambda x: way is Way.PARTS)
    compare((8, 48, 20, 22), torch.float32, affine=affine, tracks=tracks)


def compare(shape: tuple[int, ...], dtype: torch.dtype, *, affine: bool, tracks: bool) -> None:
    torch.manual_seed(0)
    model = Block(len(shape), shape[1], affine, tracks).cuda().train()
    twin = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="dvm")
    close = TOLERANCE[dtype]
    for _ in range(3):
        x = torch.randn(shape, device="cuda", dtype=dtype) * 2 + 1
        dy = torch.randn_like(x)
        given = [x.clone().requires_grad_() for _ in range(2)]
        found, expected = compiled(given[0]), twin(given[1])
        torch.testing.assert_close(found, expected, **close)
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
        found.backward(dy)
        expected.backward(dy)
        torch.testing.assert_close(given[0].grad, given[1].grad, **close)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            wide = close["atol"] * x[:, 0].numel() ** 0.5  # a sum of as many
            torch.testing.assert_close(one.grad, other.grad, rtol=close["rtol"], atol=wide)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x), **close)
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
    model.eval(), twin.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x), **close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_kernels_are_eager_modes_own(dtype: torch.dtype) -> None:
    """To the last bit: channels that cuDNN reads once."""
    torch.manual_seed(0)
    model = nn.BatchNorm2d(256).cuda().train()
    model = model.double() if dtype is torch.float64 else model
    twin = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="dvm")
    for _ in range(3):
        x = torch.randn(16, 256, 14, 15, device="cuda", dtype=dtype)
        given = [x.clone().requires_grad_() for _ in range(2)]
        found, expected = compiled(given[0]), twin(given[1])
        found.backward(x)
        expected.backward(x)
        pairs = [(found, expected), (given[0].grad, given[1].grad)]
        pairs += zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
        pairs += [(a.grad, b.grad) for a, b in zip(model.parameters(), twin.parameters())]
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
