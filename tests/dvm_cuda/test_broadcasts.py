"""Operands that are the same along rows or columns: by words, and by their PTX."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.instructions import DType
from magjit_dvm.program import ONE as ONE_ELEMENT
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda import checking
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG
from tests.dvm_cuda.test_encoder import values

pytestmark = pytest.mark.usefixtures("way")

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
U8, BOOL, I64 = DType.U8, DType.BOOL, DType.I64
ONE = Machine(multiprocessors=1)
"""Of one block, so that small tensors have the R of large ones."""


def binary(dtype: DType, dims: tuple[tuple[int, ...], ...], rank: int) -> Program:
    """The sum (or what is there) of a tensor of all dimensions and of others."""
    nodes = [load(k, dtype) for k in range(len(dims))]
    of = {I64: I32, F16: F32, BF16: F32}.get(dtype, dtype)
    if of is not dtype:
        nodes += [cast(of, k) for k in range(len(dims))]
    op, first = "bitwise_or" if of is BOOL else "add", len(nodes) - len(dims)
    for k in range(1, len(dims)):
        nodes.append(compute(op, of, len(nodes) - 1 if k > 1 else first, first + k))
    if dtype in (F16, BF16):
        nodes.append(cast(dtype, len(nodes) - 1))
    inputs = tuple(tensor(dtype, *one) for one in dims)
    return Program(rank, inputs, tuple(nodes), (output(len(nodes) - 1, *range(rank)),))


def firsts(program: Program, given: list[torch.Tensor]) -> list[str]:
    """The words' first operators, once they have run."""
    image = checking.check_words(program, given, ONE)
    assert image is not None
    return [one.first for one in image.words]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I32, U8, BOOL, I64], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", [(5, 1024), (3, 1500), (4, 516), (2, 2052)])
def test_rows_and_columns(dtype: DType, shape: tuple[int, int]) -> None:
    """Runs that are as long as a slice, that end within one, and that are shorter."""
    x, row, column = values(dtype, *shape), values(dtype, shape[1]), values(dtype, shape[0])
    words = firsts(binary(dtype, ((0, 1), (1,), (0,)), 2), [x, row, column])
    for how in ("v", "b") if dtype is not I64 else ("e",):
        assert any(one.startswith(f"lt.{how}") for one in words)


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda one: one.text)
def test_a_column_of_a_larger_tensor(dtype: DType) -> None:
    """Where four elements side by side are the same, one of them is read: its place may be odd."""
    x, other = values(dtype, 3, 1200), values(dtype, 3, 1203)
    words = firsts(binary(dtype, ((0, 1), (0,)), 2), [x, other[:, 5]])
    assert any(one.startswith("lt.b") for one in words)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)
def test_rows_with_space_between_them(dtype: DType) -> None:
    """Aligned or not, and in reverse order of memory."""
    x, other = values(dtype, 4, 1100), values(dtype, 4, 1232)
    program = binary(dtype, ((0, 1), (0, 1)), 2)
    for first, word in ((0, "lt.v"), (8, "lt.v"), (3, "lt.e")):
        words = firsts(program, [x, other[:, first : first + 1100]])
        assert any(one.startswith(word) for one in words)


@pytest.mark.parametrize("dtype", [F32, F16, U8], ids=lambda one: one.text)
@pytest.mark.parametrize("missing", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_three_dimensions(dtype: DType, missing: tuple[int, ...]) -> None:
    sizes = (2, 3, 1028)
    x = values(dtype, *sizes)
    there = tuple(d for d in range(3) if d not in missing)
    other = values(dtype, *(sizes[d] for d in there))
    firsts(binary(dtype, ((0, 1, 2), there), 3), [x, other])


@pytest.mark.parametrize("cols", [1, 3, 127, 1023, 1025])
def test_rows_that_are_no_multiple_of_four(cols: int) -> None:
    x, row, column = values(F16, 4, cols), values(F16, cols), values(F16, 4)
    firsts(binary(F16, ((0, 1), (1,), (0,)), 2), [x, row, column])
    firsts(binary(F16, ((0, 1), (1,)), 2), [values(F16, 5, cols)[1:], values(F16, cols + 1)[1:]])


def test_special_numbers_stay_in_their_rows() -> None:
    x, row, column = values(F16, 3, 1032), values(F16, 1032), values(F16, 3)
    x[0, 5], row[1031], column[1] = float("nan"), float("inf"), float("-inf")
    firsts(binary(F16, ((0, 1), (1,), (0,)), 2), [x, row, column])


@pytest.mark.parametrize("shape", [(0, 1024), (3, 0), (1, 1024), (1, 1)])
def test_few_or_no_rows(shape: tuple[int, int]) -> None:
    x, row, column = values(F32, *shape), values(F32, shape[1]), values(F32, shape[0])
    program = binary(F32, ((0, 1), (1,), (0,)), 2)
    image = checking.check_words(program, [x, row, column], ONE)
    assert (image is None) is (0 in shape)


@pytest.mark.parametrize("dtype", [F32, I32, I64], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", [(4, 4), (9, 100), (3, 2000), (130, 7)])
def test_columns_that_a_call_has_expanded(dtype: DType, shape: tuple[int, int]) -> None:
    """A tensor for each row, but not for the program: it is no input of rows, as ``(0,)`` is."""
    nodes = [load(0, F32), load(1, dtype), *([] if dtype is F32 else [cast(F32, 1)])]
    nodes += [compute("mul", F32, 0, len(nodes) - 1), reduce("sum", F32, len(nodes), 1)]
    made = output(len(nodes) - 1, 0, ONE_ELEMENT), output(len(nodes) - 2, 0, 1)
    expanded = Program(2, (tensor(F32, 0, 1), tensor(dtype, 0, 1)), tuple(nodes), made)
    of_rows = Program(2, (tensor(F32, 0, 1), tensor(dtype, 0)), tuple(nodes), made)
    x, column = values(F32, *shape), values(dtype, shape[0])
    for program, given in (
        (expanded, [x, column.unsqueeze(1).expand(shape)]),
        (of_rows, [x, column]),
    ):
        assert check_encoders(program, given, BIG) == "encoded"
        image = checking.check_words(program, given)
        assert image is not None and image.row_inputs == (program is of_rows)
