"""Quotients, remainders, sums and running sums on a GPU, beside the reference and eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit
from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import compute, load, output, tensor
from tests.dvm_cuda import test_whole_numbers as words
from tests.dvm_gpu.test_gpu import check_image

pytestmark = pytest.mark.gpu

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
SHAPES = (*words.SHAPES, (300, 512), (7, 8192))

DIVISIONS = [one for one in words.BY if one[2:] in words.DIVIDE]

CASES: list[Callable[[], Any]] = [
    *(lambda name=name: words.test_words(name, "") for name in DIVISIONS),
    *(lambda op=op: words.test_positions_divide(op, "") for op in words.DIVIDE),
    *(lambda op=op: words.test_the_largest_of_int64(op, "") for op in ("max", "min")),
    *(
        lambda shape=shape, dtype=dtype: words.test_counts(shape, dtype, "")
        for shape in (*SHAPES, (1, 40_000))
        for dtype in (DType.BOOL, DType.U8)
    ),
    *(
        lambda shape=shape, dtype=dtype: words.test_running_sums(shape, dtype, "")
        for shape in SHAPES
        for dtype in (F32, F16, BF16, DType.BOOL, DType.U8)
    ),
    *(lambda shape=shape: words.test_running_products(shape, "") for shape in SHAPES),
    lambda: words.test_running_sums_of_columns(""),
    lambda: words.test_running_sums_are_used_further(""),
    lambda: words.test_positions_shift("shift_left"),
    lambda: words.test_positions_shift("shift_right"),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_kernels(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the simulator runs elsewhere; images are those that it has."""
    monkeypatch.setattr(words, "check_words", check_image)
    CASES[number]()


@pytest.mark.parametrize("name", ["fmod", "remainder", "floor_div"])
def test_floats_are_eagers(name: str) -> None:
    """To the bit, of all exponents."""
    left, right = (torch.from_numpy(one).cuda() for one in words.pairs_of_floats())
    if name == "floor_div":
        wanted = torch.div(left, right, rounding_mode="floor")
    else:
        wanted = getattr(torch, name)(left, right)
    program = Program(
        1,
        (tensor(F32, 0), tensor(F32, 0)),
        (load(0, F32), load(1, F32), compute(name, F32, 0, 1)),
        (output(2, 0),),
    )
    found = DeviceFused(program)(left, right)
    assert words.equal(found.cpu().numpy(), wanted.cpu().numpy())


def blocks(x: torch.Tensor) -> torch.Tensor:
    """Scales of blocks of sixteen columns, by their numbers."""
    at = torch.arange(x.shape[-1], device=x.device)
    return x * (at // 16 + 1) + at % 16


def wrapped(x: torch.Tensor) -> torch.Tensor:
    """Angles within a turn, and how many turns there were."""
    turn = 6.25
    return torch.remainder(x, turn) * 2 + torch.floor_divide(x, turn)


def counted(x: torch.Tensor) -> torch.Tensor:
    """How much is above 0, beside what is."""
    above = x > 0
    return x.relu() * above.sum(-1, keepdim=True)


def nucleus(x: torch.Tensor) -> torch.Tensor:
    """What is kept of sorted probabilities."""
    share = x.float().softmax(-1)
    return share.masked_fill(share.cumsum(-1) - share > 0.9, 0).to(x.dtype)


def places(x: torch.Tensor) -> torch.Tensor:
    """Positions of what is not padding."""
    there = x > -1
    return (there.cumsum(-1) - 1).masked_fill(~there, 1) * 2.0 + x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [blocks, wrapped, counted, nucleus, places])
def test_programs_are_eagers(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    compiled = magjit.compile(function, backend="dvm", dynamic=True, fullgraph=True)
    for shape in ((3, 100), (3, 100), (5, 257), (64, 1024)):
        x = torch.randn(shape, device="cuda").to(dtype)
        bound = 1e-5 if dtype is torch.float32 else 4e-3 if dtype is torch.float16 else 3e-2
        wanted, found = function(x), compiled(x)
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * 10)
