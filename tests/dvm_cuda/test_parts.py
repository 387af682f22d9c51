"""Parts of larger tensors: written by four elements where these are side by side and aligned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.forms import FLAT, form_of
from magjit_dvm.cuda.simulate_memory import ImageError
from magjit_dvm.cuda.words import Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import INDEXED, Input, InputKind, Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda import checking
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.test_encoder import values

both_ways = pytest.mark.usefixtures("way")

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
U8, BOOL, I64 = DType.U8, DType.BOOL, DType.I64
ONE = Machine(multiprocessors=1)
"""Of one block, so that small tensors have the R of large ones."""
NUMBER = Input(InputKind.INT, I64)


def doubled(dtype: DType, rank: int = 2, along: int = 1, rows: bool = False) -> Program:
    """A tensor (doubled, if it has numbers; or less its rows' sums) into a part of another."""
    loops = tuple(INDEXED if k == along else k for k in range(rank))
    dims = range(rank)
    nodes = [load(0, dtype)]
    of = {F16: F32, BF16: F32, I64: I32}.get(dtype, dtype)
    if of is not dtype:
        nodes.append(cast(of, 0))
    if rows:
        nodes.append(reduce("sum", of, len(nodes) - 1, rank - 1))
        nodes.append(compute("sub", of, len(nodes) - 2, len(nodes) - 1))
    elif of in (F32, I32):
        nodes.append(compute("add", of, len(nodes) - 1, len(nodes) - 1))
    if of is not dtype:
        nodes.append(cast(dtype, len(nodes) - 1))
    part = replace(output(len(nodes) - 1, *dims), along=along, whole=1, offset=2)
    inputs = tensor(dtype, *dims), tensor(dtype, *loops), NUMBER
    return Program(rank, inputs, tuple(nodes), (part,))


def image_of(
    program: Program, shape: tuple[int, ...], along: int = 1, more: int = 16, at: int = 8
) -> Image:
    """What writes a part, so many elements from its whole's beginning, once it has run."""
    dtype = program.inputs[0].dtype
    size = [n + more * (k == along) for k, n in enumerate(shape)]
    given = [values(dtype, *shape), values(dtype, *size, seed=1), at]
    assert check_encoders(program, given, ONE) == "encoded"
    image = checking.check_words(program, given, ONE)
    assert image is not None
    return image


def by_four(image: Image) -> bool:
    """Whether the image stores by a descriptor, and then so."""
    (store,) = (one for one in image.words if one.first.startswith("st."))
    assert store.first.startswith("st.e.") and store.y in (0, 1)
    return store.y == 1


@both_ways
@pytest.mark.parametrize("dtype", [F32, F16, BF16, I32, U8, BOOL, I64], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", [(5, 1024), (3, 1500), (40, 36), (2, 2052), (3, 4)])
def test_columns_of_a_larger_tensor(dtype: DType, shape: tuple[int, int]) -> None:
    """Runs that are as long as a slice, that end within one, and that are shorter."""
    image = image_of(doubled(dtype), shape)
    assert by_four(image) is (dtype is not I64)
    assert form_of(image) == FLAT or dtype is I64


@both_ways
@pytest.mark.parametrize("dtype", [F32, F16, U8], ids=lambda one: one.text)
@pytest.mark.parametrize("change", ["columns", "place", "whole"])
def test_what_is_not_aligned(dtype: DType, change: str) -> None:
    """One column more, one that the part begins later by, one that its whole has more."""
    cols, at, more = 1100 + (change == "columns"), 8 + (change == "place"), 16 + (change != "place")
    assert not by_four(image_of(doubled(dtype), (4, cols), more=more, at=at))


@both_ways
@pytest.mark.parametrize("along", [0, 1, 2])
@pytest.mark.parametrize("shape", [(2, 3, 1028), (3, 5, 12)])
def test_channels_of_a_larger_image(along: int, shape: tuple[int, int, int]) -> None:
    image = image_of(doubled(F16, 3, along), shape, along)
    store = image.words[-2]
    # Along the outermost dimension nothing lies between elements.
    assert store.first == ("st.g.f16" if along == 0 else "st.e.f16") and store.y == (along > 0)


@both_ways
@pytest.mark.parametrize("dtype", [F32, F16], ids=lambda one: one.text)
@pytest.mark.parametrize("shape", [(5, 1024), (9, 516), (3, 40), (4, 1023)])
def test_rows(dtype: DType, shape: tuple[int, int]) -> None:
    """Less their sums: rows by one warp and by several."""
    assert by_four(image_of(doubled(dtype, rows=True), shape)) is (shape[1] % 4 == 0)


def test_a_part_that_is_said_to_be_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the simulator says so."""
    monkeypatch.setattr("magjit_dvm.cuda.rows.RowEncoder.in_fours", lambda *_: True)
    monkeypatch.setattr(checking, "check_encoders", lambda *_: "encoded")
    program = doubled(F16)
    with pytest.raises(ImageError, match="four elements"):
        checking.check_words(program, [values(F16, 4, 1100), values(F16, 4, 1116), 9], ONE)
