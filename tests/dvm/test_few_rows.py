"""Linear layers of few rows: the machine's own kernels beside torch in double precision."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

import magjit
from magjit_dvm import vm
from magjit_dvm.backend import schedules

CALLED: list[Any] = []


@pytest.fixture(autouse=True)
def torch_is_watched() -> Any:
    """`CALLED` gets the arguments of what torch computes."""

    def watched(*args: Any) -> torch.Tensor:
        CALLED.append(args)
        return functional.linear(*args)

    CALLED.clear()
    vm._vm.linear_by(watched)
    yield
    vm._vm.linear_by(functional.linear)


def close(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> None:
    made = vm.linear(x, w, bias)
    exact = functional.linear(x.double(), w.double(), None if bias is None else bias.double())
    assert made.dtype == torch.float32 and made.is_contiguous()
    torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-5 * w.shape[1] ** 0.5)


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize("depth", [16, 17, 31, 48, 100, 256])
def test_products_of_few_rows(rows: int, depth: int) -> None:
    torch.manual_seed(rows * depth)
    for width in (1, 2, 5, 16, 33):
        x, w = torch.randn(rows, depth), torch.randn(width, depth)
        close(x, w, None)
        close(x, w, torch.randn(width))
    kernels = vm.level() != "x86-64"
    assert bool(CALLED) is not (kernels and (rows <= 8 or vm.level() == "x86-64-v4"))


@pytest.mark.skipif(vm.level() == "x86-64", reason="no kernels for it")
def test_rows_that_lie_apart() -> None:
    w, bias = torch.randn(40, 64), torch.randn(40)
    whole = torch.randn(4, 6, 64)
    for x in (whole[:, -1], whole[1], whole[:2, :2], whole[:1], torch.randn(5, 90)[:, 3:67]):
        if x.dim() == 3 and x.shape[0] > 1:
            continue
        close(x, w, bias)
    close(torch.randn(2, 3, 1, 64), w, bias)
    close(torch.randn(3, 64), torch.randn(40, 100)[:, 7:71], bias)
    close(torch.randn(4, 64).expand(1, 4, 64), w, bias)
    close(whole[0, 0], w, bias)
    close(whole[2, 3][None, None], w, None)
    assert not CALLED


def odd_operands() -> list[tuple[Any, ...]]:
    x, w, bias = torch.randn(3, 32), torch.randn(8, 32), torch.randn(8)
    return [
        (torch.randn(17, 32), w, bias),
        (torch.randn(0, 32), w, bias),
        (torch.randn(4, 6, 32)[:2, :2], w, bias),
        (torch.randn(1, 32).expand(4, 32), w, bias),
        (torch.randn(32, 3).t(), w, bias),
        (x, torch.randn(32, 8).t(), bias),
        (x, torch.randn(32), None),
        (x, w[:0], bias[:0]),
        (x, w, bias[:1].expand(8)),
        (x[:, :8], w[:, :8], bias),
        (x.double(), w.double(), bias.double()),
        (x.half(), w.half(), bias.half()),
        (torch._neg_view(x), w, bias),
        (x, torch._neg_view(w), bias),
        (x, w, torch._neg_view(bias)),
        (x.to_sparse(), w.t().contiguous().t(), None),
    ]


@pytest.mark.parametrize("given", odd_operands(), ids=range(16))
def test_anything_else_is_torchs(given: tuple[Any, ...]) -> None:
    try:
        expected = functional.linear(*given)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            vm.linear(*given)
    else:
        torch.testing.assert_close(vm.linear(*given), expected, rtol=0, atol=0)
    assert len(CALLED) == 1


@pytest.mark.parametrize("given", [(), (1,), (1, 2), (torch.ones(2, 32), None)], ids=range(4))
def test_wrong_arguments_are_refused(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        vm.linear(*given)
    with pytest.raises((TypeError, RuntimeError)):
        vm.linear(torch.ones(2, 32), torch.ones(4, 16))


def test_special_values() -> None:
    x, w = torch.randn(3, 40), torch.randn(6, 40)
    x[0, 39], x[1, 3], w[2, 38] = float("inf"), float("nan"), float("-inf")
    made, expected = vm.linear(x, w, None), functional.linear(x, w)
    assert torch.equal(made.isnan(), expected.isnan()) and torch.equal(
        made.isinf(), expected.isinf()
    )


def test_several_threads_compute_the_same() -> None:
    before = torch.get_num_threads()
    x, w, bias = torch.randn(4, 512), torch.randn(1003, 512), torch.randn(1003)
    try:
        torch.set_num_threads(1)
        one = vm.linear(x, w, bias)
        torch.set_num_threads(3)
        assert torch.equal(vm.linear(x, w, bias), one)
    finally:
        torch.set_num_threads(before)


def test_schedules_call_it_where_rows_may_be_few() -> None:
    layer = torch.nn.Linear(32, 8)
    for rows, own in ((4, True), (1, True), (40, False)):
        before = set(schedules())
        compiled = magjit.compile(lambda x: layer(x).relu(), backend="dvm")
        x = torch.randn(rows, 32)
        with torch.no_grad():
            compiled(x)
            torch.testing.assert_close(compiled(x), layer(x).relu())
        (made,) = set(schedules()) - before
        assert (vm.linear in made._globals.values()) is own


@pytest.mark.parametrize("level", [pytest.param("1", marks=pytest.mark.slow), "3", "4"])
def test_every_level_agrees(level: str) -> None:
    program = (
        "import torch; from magjit_dvm import vm; torch.manual_seed(0)\n"
        "for rows in range(2, 17):\n"
        "    x, w, b = torch.randn(rows, 75), torch.randn(21, 75), torch.randn(21)\n"
        "    exact = torch.nn.functional.linear(x.double(), w.double(), b.double())\n"
        "    torch.testing.assert_close(vm.linear(x, w, b).double(), exact, rtol=1e-5, atol=1e-4)\n"
    )
    environment = {**os.environ, "MAGJIT_DVM_LEVEL": level}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=120)
