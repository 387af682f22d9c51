"""Operands that lie in memory across the results: squares of up to 32 x 32 elements."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, tensor
from tests.dvm_cuda import checking
from tests.dvm_cuda.test_broadcasts import binary
from tests.dvm_cuda.test_encoder import values

pytestmark = pytest.mark.usefixtures("way")

F32, F16, BF16, I32, U8 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.U8
FEW = Machine(multiprocessors=3)
WORDS = {F32: "32", I32: "32", F16: "f16", BF16: "bf16"}


def transposed(dtype: DType, *shape: int, seed: int = 1) -> torch.Tensor:
    """Of a shape whose last two dimensions lie in memory the other way round."""
    turned = (*shape[:-2], shape[-1], shape[-2])
    return values(dtype, *turned, seed=seed).transpose(-1, -2)


def run(program: Program, given: list[torch.Tensor]) -> tuple[Image, list[str]]:
    """The image, and its loads and stores."""
    image = checking.check_words(program, given, FEW)
    assert image is not None
    names = [one.first for one in image.words]
    return image, [one for one in names if one.startswith(("lt.", "la.", "st."))]


SUM = ((0, 1), (0, 1))


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I32], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", [(256, 256), (64, 1024), (1088, 96), (192, 384)])
def test_sums(dtype: DType, shape: tuple[int, int]) -> None:
    what = WORDS[dtype]
    wanted = [f"lt.n.{what}", f"lt.t.{what}", f"st.n.{what}"]
    image, names = run(binary(dtype, SUM, 2), [values(dtype, *shape), transposed(dtype, *shape)])
    assert sorted(names) == wanted and image.each == (16 if what == "32" else 32)
    _, names = run(binary(dtype, SUM, 2), [transposed(dtype, *shape), values(dtype, *shape)])
    assert sorted(names) == wanted


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda one: one.text)
def test_a_result_that_lies_as_the_second_operand(dtype: DType) -> None:
    x, y = values(dtype, 192, 384), transposed(dtype, 192, 384)
    program = binary(dtype, SUM, 2)
    turned = output(program.outputs[0].node, 0, 1, order=(1, 0))
    _, names = run(Program(2, program.inputs, program.nodes, (turned,)), [x, y])
    assert sum(one.startswith("lt.t.") for one in names) == 1


@pytest.mark.parametrize("size", [(255, 320), (320, 240), (264, 264), (257, 257)])
def test_other_sizes_come_element_by_element(size: tuple[int, int]) -> None:
    x, y = values(F16, *size), transposed(F16, *size)
    _, names = run(binary(F16, SUM, 2), [x, y])
    assert "lt.e.f16" in names and not any(one.startswith("lt.t") for one in names)


def test_few_elements_come_element_by_element() -> None:
    _, names = run(binary(F16, SUM, 2), [values(F16, 64, 128), transposed(F16, 64, 128)])
    assert "lt.e.f16" in names


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda one: one.text)
@pytest.mark.parametrize("first", [0, 8, 1])
def test_offsets(dtype: DType, first: int) -> None:
    """A part whose columns begin at 16 bytes is read as a whole is, another by elements."""
    x, whole = values(dtype, 192, 384), values(dtype, 384, 192 + 16)
    y = whole[:, first : first + 192].t()
    _, names = run(binary(dtype, SUM, 2), [x, y])
    assert any(one.startswith("lt.e" if first == 1 else "lt.t") for one in names)
    part = values(dtype, 192, 384 + 16)[:, first : first + 384]
    _, names = run(binary(dtype, SUM, 2), [part, transposed(dtype, 192, 384)])
    assert any(one.startswith("lt.t") for one in names)
    assert any(one.startswith("lt.e" if first == 1 else "lt.n") for one in names)


@pytest.mark.parametrize("odd", [4, 3])
def test_columns_with_space_between_them(odd: int) -> None:
    """Of 16-bit elements, columns are 16 bytes apart, or 8, or less."""
    whole = values(F16, 384, 192 + odd)
    _, names = run(binary(F16, SUM, 2), [values(F16, 192, 384), whole[:, :192].t()])
    assert "lt.e.f16" in names


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=lambda one: one.text)
def test_with_a_row_a_column_and_a_number(dtype: DType) -> None:
    shape = (192, 384)
    dims = ((0, 1), (0, 1), (1,), (0,), ())
    given = [values(dtype, *shape), transposed(dtype, *shape)]
    given += [values(dtype, 384, seed=2), values(dtype, 192, seed=3), values(dtype, seed=4)]
    _, names = run(binary(dtype, dims, 2), given)
    assert {one[:4] for one in names} >= {"lt.n", "lt.t", "st.n"}


def test_two_transposed_operands_and_several_results() -> None:
    """Of several dtypes: R is that of the widest."""
    nodes = (
        load(0, F16),
        cast(F32, 0),
        load(1, F32),
        compute("mul", F32, 1, 2),
        load(2, F16),
        cast(F32, 4),
        compute("sub", F32, 3, 5),
        cast(BF16, 6),
    )
    inputs = (tensor(F16, 0, 1), tensor(F32, 0, 1), tensor(F16, 0, 1))
    program = Program(2, inputs, nodes, (output(7, 0, 1), output(3, 0, 1)))
    given = [values(F16, 256, 256), transposed(F32, 256, 256), transposed(F16, 256, 256, seed=3)]
    image, names = run(program, given)
    assert image.each == 16 and names.count("lt.t.f16") == 1 and "lt.t.32" in names


@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda one: one.text)
def test_more_dimensions(dtype: DType) -> None:
    shape = (3, 128, 192)
    program = binary(dtype, ((0, 1, 2), (0, 1, 2)), 3)
    run(program, [values(dtype, *shape), transposed(dtype, *shape)])
    # The outermost dimension of the results is the innermost of the operand.
    turned = values(dtype, 5, 128, 128).permute(2, 0, 1)
    _, names = run(program, [values(dtype, 128, 5, 128), turned])
    assert any(one.startswith("lt.t") for one in names)
    # One matrix for all of the first dimension.
    program = binary(dtype, ((0, 1, 2), (1, 2)), 3)
    _, names = run(program, [values(dtype, *shape), transposed(dtype, *shape[1:])])
    assert any(one.startswith("lt.t") for one in names)


def test_eight_bits_come_element_by_element() -> None:
    shape = (192, 384)
    _, names = run(binary(U8, SUM, 2), [values(U8, *shape), transposed(U8, *shape)])
    assert "lt.e.u8" in names


def test_second_operands_are_asked_for_ahead() -> None:
    x, y = values(F16, 192, 384), transposed(F16, 192, 384)
    for given, word in (([x, y], "pf.t"), ([y, x], "pf.n")):
        image, _ = run(binary(F16, SUM, 2), given)
        assert image.words[0].first == word


def test_special_numbers_stay_where_they_are() -> None:
    x, y = values(F16, 192, 384), transposed(F16, 192, 384)
    x[3, 5], y[191, 0], y[0, 383], y[100] = (float(n) for n in ("nan", "inf", "-inf", "nan"))
    run(binary(F16, SUM, 2), [x, y])


def test_one_row_or_none() -> None:
    for shape in ((1, 65536), (0, 64), (64, 0)):
        given = [values(F32, *shape), transposed(F32, *shape)]
        image = checking.check_words(binary(F32, SUM, 2), given, FEW)
        assert (image is None) is (0 in shape)
