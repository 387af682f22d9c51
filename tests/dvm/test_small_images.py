"""Convolutions of small images: the machine's own kernels beside torch in double precision."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import magjit
from magjit_dvm import vm
from magjit_dvm.backend import schedules

CALLED: list[Any] = []


@pytest.fixture(autouse=True)
def torch_is_watched() -> Any:
    """`CALLED` gets the arguments of what torch computes."""

    def watched(*args: Any) -> torch.Tensor:
        CALLED.append(args)
        return torch.convolution(*args)

    CALLED.clear()
    vm._vm.convolution_by(watched)
    yield
    vm._vm.convolution_by(torch.convolution)


def arguments(x: Any, w: Any, bias: Any, padding: tuple[int, int] = (0, 0)) -> tuple[Any, ...]:
    return (x, w, bias, [1, 1], list(padding), [1, 1], False, [0, 0], 1)


def close(*args: Any) -> None:
    made = vm.convolution(*args)
    exact = torch.convolution(*(a.double() if isinstance(a, torch.Tensor) else a for a in args))
    assert made.is_contiguous()
    torch.testing.assert_close(made.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(vm.level() == "x86-64", reason="no kernels for it")
@pytest.mark.parametrize("kernel", [(3, 3), (1, 3), (5, 2), (7, 7), (2, 1)])
@pytest.mark.parametrize("size", [(16, 16), (13, 15), (9, 33), (10, 30), (21, 14)])
def test_convolutions_of_small_images(kernel: tuple[int, int], size: tuple[int, int]) -> None:
    torch.manual_seed(sum(kernel) * sum(size))
    for images, channels, outputs in ((1, 1, 1), (2, 3, 5), (1, 8, 4), (3, 2, 7)):
        x, w = torch.randn(images, channels, *size), torch.randn(outputs, channels, *kernel)
        same = (kernel[0] // 2, kernel[1] // 2)
        close(*arguments(x, w, torch.randn(outputs), same))
        close(*arguments(x, w, None, (kernel[0] - 1, kernel[1] - 1)))
        close(*arguments(x, w, None))
    taken = len(CALLED)
    assert taken < 12, "most of them are the machine's"


@pytest.mark.skipif(vm.level() == "x86-64", reason="no kernels for it")
def test_frames_are_clean_at_every_call() -> None:
    """The memory of frames is kept: what another image left there is not read."""
    w, bias = torch.randn(4, 3, 3, 3), torch.randn(4)
    for size in (32, 16, 31, 25):
        close(*arguments(torch.randn(1, 3, size, size), w, bias, (1, 1)))
        vm.convolution(*arguments(torch.full((2, 3, 32, 32), torch.inf), w, bias, (1, 1)))
    assert not CALLED


def odd() -> list[tuple[Any, ...]]:
    x, w, bias = torch.randn(1, 4, 16, 16), torch.randn(6, 4, 3, 3), torch.randn(6)
    last = torch.channels_last
    return [
        (x, w, bias, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        (x, w, bias, [1, 1], [2, 2], [2, 2], False, [0, 0], 1),
        (x, w[:, :2].contiguous(), bias, [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
        (x, torch.randn(4, 6, 3, 3), bias, [1, 1], [1, 1], [1, 1], True, [0, 0], 1),
        (x, w, bias, [1, 1], [3, 3], [1, 1], False, [0, 0], 1),
        (x, w, bias, [1], [1], [1], False, [0], 1),
        arguments(x.contiguous(memory_format=last), w, bias),
        arguments(x, w.contiguous(memory_format=last), bias),
        arguments(x.double(), w.double(), bias.double()),
        arguments(torch._neg_view(x), w, bias),
        arguments(x, torch._neg_view(w), bias),
        arguments(x[:, :, ::2], w, bias),
        arguments(x[0], w, bias),
        arguments(torch.randn(0, 4, 16, 16), w, bias),
        arguments(torch.randn(1, 4, 16, 3), w, bias),
        arguments(x, torch.randn(6, 4, 1, 1), bias),
        arguments(x, torch.randn(6, 5, 3, 3), bias),
        arguments(x, w, bias[:3]),
        arguments(x[:, :, :2, :2], w, bias),
        arguments(torch.randn(1, 64, 40, 40), torch.randn(64, 64, 3, 3), None),
    ]


@pytest.mark.parametrize("given", odd(), ids=range(20))
def test_anything_else_is_torchs(given: tuple[Any, ...]) -> None:
    try:
        expected = torch.convolution(*given)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            vm.convolution(*given)
    else:
        made = vm.convolution(*given)
        torch.testing.assert_close(made, expected, rtol=0, atol=0)
        assert made.stride() == expected.stride()
    assert len(CALLED) == 1


@pytest.mark.parametrize("given", [(), (1,), (None,) * 9, (1,) * 9], ids=range(4))
def test_wrong_arguments_are_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        vm.convolution(*given)


def test_several_threads_compute_the_same() -> None:
    before = torch.get_num_threads()
    given = arguments(torch.randn(3, 16, 16, 16), torch.randn(30, 16, 3, 3), None, (1, 1))
    try:
        torch.set_num_threads(1)
        one = vm.convolution(*given)
        torch.set_num_threads(3)
        assert torch.equal(vm.convolution(*given), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"padding": 1}, True),
        ({}, True),
        ({"stride": 2}, False),
        ({"dilation": 2}, False),
        ({"groups": 2}, False),
    ],
    ids=str,
)
def test_schedules_call_it_where_images_may_be_small(options: dict[str, Any], own: bool) -> None:
    layer = torch.nn.Conv2d(4, 6, 3, **options).eval()
    before = set(schedules())
    compiled = magjit.compile(lambda x: layer(x).relu() * 2, backend="dvm")
    for size in (16, 16, 20, 24, 60):
        x = torch.randn(2, 4, size, size)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), layer(x).relu() * 2)
    made = set(schedules()) - before
    assert any(vm.convolution in one._globals.values() for one in made) is own


def test_gradients() -> None:
    layer = torch.nn.Conv2d(4, 6, 3, padding=1)
    compiled = magjit.compile(lambda x: layer(x).relu(), backend="dvm")
    for _ in range(2):
        x = torch.randn(2, 4, 16, 16, requires_grad=True)
        expected = torch.autograd.grad(layer(x).relu().sum(), [x, *layer.parameters()])
        found = torch.autograd.grad(compiled(x).sum(), [x, *layer.parameters()])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [pytest.param("1", marks=pytest.mark.slow), "3", "4"])
def test_every_level_agrees(level: str) -> None:
    program = (
        "import torch; from magjit_dvm import vm; torch.manual_seed(0)\n"
        "for size in (9, 15, 16, 23, 30):\n"
        "    x, w, b = torch.randn(2, 5, size, size), torch.randn(7, 5, 3, 3), torch.randn(7)\n"
        "    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)\n"
        "    exact = torch.convolution(x.double(), w.double(), b.double(), *rest)\n"
        "    made = vm.convolution(x, w, b, *rest).double()\n"
        "    torch.testing.assert_close(made, exact, rtol=1e-5, atol=1e-4)\n"
    )
    environment = {**os.environ, "MAGJIT_DVM_LEVEL": level}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
