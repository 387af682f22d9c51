"""Operands on a GPU that are broadcast, or lie across the results: kernels and the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magjit
import magjit_dvm
from magjit_dvm.disassembler import observed, text_of
from magjit_dvm.instructions import DType
from tests.dvm_cuda.test_broadcasts import binary
from tests.dvm_cuda.test_encoder import log_softmax, values
from tests.dvm_cuda.test_squares import transposed
from tests.dvm_gpu.test_gpu import check_gpu

pytestmark = pytest.mark.gpu

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
OTHERS = (F32, F16, BF16, I32, DType.U8, DType.BOOL, DType.I64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BOTH = ((0, 1), (0, 1))


def named(dtype: DType) -> str:
    return dtype.text


@pytest.mark.parametrize("dtype", OTHERS, ids=named)
@pytest.mark.parametrize(
    "shape", [(700, 1024), (301, 4100), (5000, 516), (64, 70004), (900, 1023), (3, 4)]
)
def test_rows_and_columns(dtype: DType, shape: tuple[int, int]) -> None:
    x, row, column = values(dtype, *shape), values(dtype, shape[1]), values(dtype, shape[0])
    check_gpu(binary(dtype, ((0, 1), (1,), (0,)), 2), [x, row, column])
    check_gpu(binary(dtype, ((0, 1), (1,)), 2), [x, values(dtype, shape[1] + 8)[8:]])
    check_gpu(binary(dtype, ((0, 1), (0,)), 2), [x, values(dtype, shape[0], 3)[:, 1]])


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I32], ids=named)
@pytest.mark.parametrize("shape", [(256, 256), (1984, 1088), (64, 8192), (8192, 64), (1000, 1000)])
def test_transposed(dtype: DType, shape: tuple[int, int]) -> None:
    x, y = values(dtype, *shape), transposed(dtype, *shape)
    for given in ([x, y], [y, x]):
        check_gpu(binary(dtype, BOTH, 2), given)
    whole = values(dtype, shape[1], shape[0] + 16)
    for first in (0, 8, 1):
        check_gpu(binary(dtype, BOTH, 2), [x, whole[:, first : first + shape[0]].t()])


@pytest.mark.parametrize("dtype", [F32, F16], ids=named)
def test_batches_of_transposed(dtype: DType) -> None:
    shape = (7, 320, 448)
    program = binary(dtype, ((0, 1, 2), (0, 1, 2), (2,), (1,)), 3)
    given = [values(dtype, *shape), transposed(dtype, *shape), values(dtype, 448)]
    check_gpu(program, [*given, values(dtype, 320)])


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=named)
@pytest.mark.parametrize("shape", [(700, 512), (600, 1024), (300, 4095), (200, 16384), (40, 70001)])
def test_log_softmax(dtype: DType, shape: tuple[int, int]) -> None:
    x = values(dtype, *shape) * 8
    x[1], x[2, 5], x[3, 6] = 2.0, float("-inf"), float("nan")
    check_gpu(log_softmax(dtype), [x])


def kinds(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What is added to a square matrix."""
    n, like = len(x), {"dtype": x.dtype, "device": x.device}
    return {
        "row": torch.randn(n, **like),
        "column": torch.randn(n, 1, **like),
        "transposed": torch.randn(n, n, **like).t(),
        "number": torch.randn((), **like),
    }


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [2048, 3008, 3004, 3001])
def test_single_operators(dtype: torch.dtype, n: int) -> None:
    """Taken from ATen where sizes suit, left to it otherwise: eager's results, bit by bit."""
    x = torch.randn(n, n, dtype=dtype, device="cuda")

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    for other in kinds(x).values():
        compiled: Any = magjit.compile(add, backend="dvm")
        for _ in range(3):
            assert torch.equal(compiled(x, other), x + other)
            assert compiled(x, other).stride() == (x + other).stride()


@pytest.mark.parametrize("what", ["row", "column", "transposed"])
def test_single_operators_of_any_size(what: str) -> None:
    """Ours where the example's sizes suit, and then at all sizes."""

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    compiled: Any = magjit.compile(add, backend="dvm", dynamic=True)
    for n in (2048, 3008, 3004, 3001, 64):
        x = torch.randn(n, n, dtype=torch.float16, device="cuda")
        other = kinds(x)[what]
        for _ in range(2):
            assert torch.equal(compiled(x, other), x + other)
    assert magjit.stats(compiled).captures == 1
    with observed() as seen:
        compiled(x, other)
    ((fused, *arguments),) = seen
    assert "kernel mj_dvm_" in text_of(fused, arguments)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("n", [1024, 1028, 1022])
def test_single_operators_of_parts(dtype: torch.dtype, n: int) -> None:
    """Some of a matrix's columns: ours where they are aligned, bit by bit as in eager mode."""
    x, y, _ = torch.randn(4160, 3 * n, dtype=dtype, device="cuda").chunk(3, -1)
    whole, row = torch.randn_like(x, memory_format=torch.contiguous_format), x[5]
    heads = torch.randn(65, 64, n, dtype=dtype, device="cuda").transpose(0, 1)

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    for one, other in ((x, y), (whole, y), (y, row), (whole.view(64, 65, n), heads)):
        compiled: Any = magjit.compile(add, backend="dvm")
        for _ in range(3):
            assert torch.equal(compiled(one, other), one + other)
        assert compiled(one, other).stride() == (one + other).stride()

    def rectified(x: torch.Tensor) -> torch.Tensor:
        return x.relu()

    compiled = magjit.compile(rectified, backend="dvm")
    for _ in range(3):
        assert torch.equal(compiled(y), y.relu())
    with observed() as seen:
        assert compiled(y).stride() == y.relu().stride()
    assert len(seen) == (n % 4 == 0)


def test_words_are_shown() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) * 2

    x = torch.randn(700, 512, device="cuda")
    assert "row.f.max" in magjit_dvm.disassemble(magjit.compile(function, backend="dvm"), x)


def test_masks_of_all_heads() -> None:
    scores = torch.randn(4, 16, 512, 512, dtype=torch.float16, device="cuda")
    mask = torch.rand(4, 1, 512, 512, device="cuda") > 0.3

    def masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(mask, -65504.0)

    compiled: Any = magjit.compile(masked, backend="dvm")
    for _ in range(3):
        assert torch.equal(compiled(scores, mask), masked(scores, mask))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("shape", "along"),
    [((64, 1024), 1), ((300, 36), 1), ((7, 516), 1), ((8, 20, 64, 64), 1), ((5, 6, 7, 24), 2)],
)
def test_parts_of_a_larger_tensor(dtype: torch.dtype, shape: tuple[int, ...], along: int) -> None:
    """Each by four elements, or not: as the first of them has 4, 5 or 8 elements along it."""

    def joined(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([one + one for one in parts], along)

    for first in (4, 5, 8):
        sizes = [[m if k == along else n for k, n in enumerate(shape)] for m in (first, 12)]
        given = [torch.randint(0, 90, one).to(dtype).cuda() for one in (*sizes, list(shape))]
        compiled = magjit.compile(joined, backend="dvm", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(compiled(*given), joined(*given), rtol=0, atol=0)


def test_results_in_slices_of_a_buffer() -> None:
    def write(buffer: torch.Tensor, x: torch.Tensor, first: int) -> None:
        buffer[:, first : first + x.shape[1]] = x * 2

    for first in (0, 8, 3):
        x = torch.randn(500, 1024, device="cuda", dtype=torch.float16)
        ours, theirs = (torch.zeros(500, 2000, device="cuda", dtype=torch.float16) for _ in "ab")
        magjit.compile(write, backend="dvm", fullgraph=True)(ours, x, first)
        write(theirs, x, first)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
