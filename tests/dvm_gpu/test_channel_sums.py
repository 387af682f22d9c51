"""Batch norms in training whose channels lie side by side: sums by kernels of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit_dvm import channel_sums
from magjit_dvm.channel_sums import ChannelGradients, ChannelMoments
from magjit_dvm.cuda.channel_sums import Gradients, Moments

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

HALF = {"rtol": 4e-3, "atol": 4e-3}
CLOSE = {torch.float16: HALF, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}
SHAPES = [
    *((2, 64, 7, 9), (8, 24, 33, 31), (32, 256, 14, 14), (4, 1280, 7, 7), (16, 2048, 7, 7)),
    *((3, 8, 100, 101), (5000, 520), (2, 16, 5, 6, 7), (1, 40, 1, 1), (64, 64, 56, 56)),
]


def images(*shape: int, dtype: torch.dtype, apart: float = 3.0, least: float = 0.1) -> torch.Tensor:
    """Channels have means and deviations of their own, of these at least."""
    around = [1, shape[1], *[1] * (len(shape) - 2)]
    x = torch.randn(shape, device="cuda") * (torch.rand(around, device="cuda") + least)
    x = (x + apart * torch.randn(around, device="cuda")).to(dtype)
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    return x.contiguous(memory_format=order or torch.contiguous_format)


def required(found: Any, wanted: Any, relative: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        scale = other.double().abs().max().item() + 1e-6
        error = (one.double() - other.double()).abs().max().item()
        assert error <= relative * scale, (error, scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_as_aten(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy, y = (images(*shape, dtype=dtype) for _ in range(3))
    dy = dy / 64  # so that float16 has the sums
    channels = shape[1]
    weight, bias, *running = (torch.rand(channels, device="cuda") + 0.5 for _ in range(4))
    for affine in ((weight, bias), (None, None), (weight.to(dtype), bias.half())):
        new = [one.clone() for one in running]
        made = Moments()(x, *affine, tuple(running), tuple(new), 0.1, 1e-3)
        assert made is not None, "a kernel"
        mean, root, scale, *wanted_new, shift = channel_sums._moments(
            x.double(), *affine, *running, 0.1, 1e-3
        )
        required(made, (mean, root, scale, shift), 1e-4)
        if x.numel() > channels:
            required(new, wanted_new, 1e-4)
        again = Moments()(x, *affine, tuple(running), tuple(new), 0.1, 1e-3)
        assert again is not None
        assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
        for given in (None, y):
            found = Gradients()(dy, given, x, affine[0], mean, root)
            assert found is not None, "a kernel"
            # As of this dtype, whose shift is another for 16 bits.
            wanted = channel_sums._gradients(dy, given, x, affine[0], mean, root)
            required(found, wanted, 6e-3 if found[0].dtype != torch.float32 else 5e-4)


def test_means_that_are_far_from_0() -> None:
    """A deviation of a thousandth of the mean, and channels that are all the same."""
    torch.manual_seed(0)
    x = torch.randn(64, 32, 28, 28, device="cuda") + 1000
    x[:, 3] = 7.25
    x[:, 5, 0, 0] = 0  # what a thread may begin with
    x = x.contiguous(memory_format=torch.channels_last)
    made = Moments()(x, None, None, (None, None), (None, None), 0.1, 1e-5)
    assert made is not None
    wide = x.double()
    mean, var = wide.mean((0, 2, 3)), wide.var((0, 2, 3), correction=0)
    torch.testing.assert_close(made[0].double(), mean, rtol=2e-7, atol=0)
    torch.testing.assert_close(made[1].double(), (var + 1e-5).rsqrt(), rtol=1e-4, atol=0)


class Block(nn.Module):
    def __init__(self, channels: int, affine: bool, tracks: bool, relu: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, affine=affine, track_running_stats=tracks)
        self.relu = relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.relu(x) if self.relu else torch.sigmoid(x)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("affine", "tracks", "relu"),
    [(True, True, False), (False, False, False), (True, False, False), (True, True, True)],
)
def test_norms_as_in_eager_mode(
    dtype: torch.dtype, affine: bool, tracks: bool, relu: bool, mode: str | None
) -> None:
    torch.manual_seed(0)
    model = Block(96, affine, tracks, relu).cuda().train()
    twin = copy.deepcopy(model)
    compiled = magjit.compile(model, backend="dvm", mode=mode)
    close = CLOSE.get(dtype, {"rtol": 1e-4, "atol": 2e-5})
    for _ in range(3):
        x = images(16, 96, 14, 15, dtype=dtype, apart=1.0, least=0.5)
        dy = images(16, 96, 14, 15, dtype=dtype, apart=0.1, least=0.5)
        given = [x.clone().requires_grad_() for _ in range(2)]
        found, expected = compiled(given[0]), twin(given[1])
        torch.testing.assert_close(found, expected, **close)
        assert found.stride() == expected.stride()
        # Where ReLUs begin, a last bit decides: neither has a gradient there.
        dy = torch.where(expected.abs() < 1e-2, 0, dy) if relu else dy
        found.backward(dy)
        expected.backward(dy)
        torch.testing.assert_close(given[0].grad, given[1].grad, **close)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        scale = other.grad.abs().max().item()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=5e-3 * scale)
        assert one.grad.untyped_storage().nbytes() == one.numel() * one.itemsize
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_by_aten_until_kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Moments, "__call__", lambda *given: None)
    monkeypatch.setattr(Gradients, "__call__", lambda *given: None)
    x, dy = (images(8, 64, 20, 20, dtype=torch.float16) for _ in range(2))
    weight, bias, *running = (torch.rand(64, device="cuda") for _ in range(4))
    before = [one.clone() for one in running]
    found = ChannelMoments(in_place=True)(x, weight, bias, *running, 0.1, 1e-5)
    assert found[3] is running[0] and found[4] is running[1]
    wanted = channel_sums._moments(x, weight, bias, *before, 0.1, 1e-5)
    required(found, wanted, 1e-6)
    gradients = ChannelGradients()(dy, None, x, weight, wanted[0], wanted[1])
    required(gradients, channel_sums._gradients(dy, None, x, weight, *wanted[:2]), 1e-6)


def test_many_streams() -> None:
    """Each has parts of its own."""
    torch.manual_seed(0)
    given = [images(16, 64, 28, 28, dtype=torch.float16, apart=k + 1.0) for k in range(4)]
    none = None, None
    wanted = [Moments()(x, None, None, none, none, 0.1, 1e-5) for x in given]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in given], list[Any]()
    for _ in range(20):
        for stream, x in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(Moments()(x, None, None, none, none, 0.1, 1e-5))
    torch.cuda.synchronize()
    for k, made in enumerate(found):
        assert all(torch.equal(one, other) for one, other in zip(made, wanted[k % 4], strict=True))
