"""Loops of kernels: which are tiled in two dimensions."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_triton.codegen.compiler import plan_kernels
from magjit_triton.codegen.kernel import Kernel

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def kernel_of(function, *arguments: Tensor) -> Kernel:
    (kernel,) = plan_kernels(make_fx(function, tracing_mode="fake")(*arguments), devices=("cpu",))
    return kernel


def axes(kernel: Kernel) -> str:
    return " ".join(axis.name for axis in kernel.nest.axes)


def turned(x: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() * 2]


def weighed(x: Tensor) -> list[Tensor]:
    """Heads in one dimension, in another order than they are read in."""
    whole = (x[:, :, :-1] / x[:, :, -1:]).reshape(x.shape[0], -1, x.shape[-1])
    return [whole.transpose(1, 2).contiguous()]


def split(x: Tensor) -> list[Tensor]:
    """Read and written along the same dimension, which is cut into heads."""
    heads = x.view(x.shape[0], x.shape[1], 4, -1).transpose(1, 2)
    return [heads.contiguous() * 2]


@pytest.mark.parametrize(
    ("function", "shape", "tiled"),
    [
        (turned, (8, 128, 96), True),
        (weighed, (8, 4, 33, 1024), True),
        (split, (8, 100, 128), False),
    ],
)
def test_what_is_read_across_what_is_written_has_tiles(
    function, shape: tuple[int, ...], *, tiled: bool
) -> None:
    kernel = kernel_of(function, torch.randn(shape))
    assert axes(kernel) == ("p q" if tiled else "p")
    if tiled:
        assert (kernel.blocks.p, kernel.blocks.inner) == (32, 64)


def normalised(x: Tensor, w: Tensor, b: Tensor, m: Tensor) -> list[Tensor]:
    mean = x.mean((0, 2), keepdim=True)
    return [(x - mean) * w[:, None] + b[:, None], m * 0.9 + mean.view(-1) * 0.1]


def test_rows_with_numbers_of_their_own_are_read_along_rows() -> None:
    """A lane that adds up thousands of numbers alone is as inexact as it is slow."""
    numbers = [torch.randn(64) for _ in range(3)]
    kernel = kernel_of(normalised, torch.randn(4, 64, 9000), *numbers)
    assert axes(kernel) == "p r"
    assert (kernel.blocks.p, kernel.blocks.inner) == (1, 2048)


def test_columns_are_read_across_rows() -> None:
    kernel = kernel_of(lambda x: [x.sum(0)], torch.randn(900, 640))
    assert (kernel.blocks.p, kernel.blocks.inner) == (64, 32)
