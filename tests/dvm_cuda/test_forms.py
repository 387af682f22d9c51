"""Which kernel runs a program: one that has all of its words, and as little else as there is."""

from __future__ import annotations

from typing import Any

import pytest

from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.forms import (
    ADDING,
    ALONE,
    BATCHED,
    CHUNKED,
    FLAT,
    FORMS,
    GRADIENTS,
    LANES,
    NORMS,
    READ_ONCE,
    SQUARES,
    STACKED,
    SUMMING,
    WHOLE,
    form_of,
    has_case,
    kernel_name,
    own_tables,
)
from magjit_dvm.cuda.interpreter import source
from magjit_dvm.cuda.warps import each_of, most_threads
from magjit_dvm.cuda.words import OPCODES
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import BIG, SMALL, check_words
from tests.dvm_cuda.test_broadcasts import binary
from tests.dvm_cuda.test_encoder import layer_norm, softmax, values
from tests.dvm_cuda.test_squares import transposed
from tests.dvm_cuda.test_sums import FEW, alone

F16, F32 = DType.F16, DType.F32


def unary(name: str) -> Program:
    nodes = load(0, F16), cast(F32, 0), compute(name, F32, 1), cast(F16, 2)
    return Program(1, (tensor(F16, 0),), nodes, (output(3, 0),))


def added(*shapes: tuple[int, ...]) -> tuple[Program, list[Any]]:
    """Two tensors of these shapes; what has no dimension is broadcast along it."""
    first, second = (tuple(d for d, n in enumerate(one) if n > 1) for one in shapes)
    given = [values(F16, *(n for n in one if n > 1)) for one in shapes]
    return binary(F16, (first, second), 2), given


@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("name", ["neg", "exp", "gelu", "relu"])
def test_no_rows(name: str, offset: int) -> None:
    """Also from an odd element on."""
    image = check_words(unary(name), [values(F16, 5000 + offset)[offset:]], SMALL)
    assert image is not None and form_of(image) == FLAT and image.each in each_of(FLAT)


def test_two_operands() -> None:
    for shapes in (((40, 512), (40, 512)), ((40, 512), (1, 512)), ((40, 512), (40, 1))):
        image = check_words(*added(*shapes), SMALL)
        assert image is not None and form_of(image) == FLAT
    square = [values(F16, 256, 256), transposed(F16, 256, 256)]
    image = check_words(binary(F16, ((0, 1), (0, 1)), 2), square, Machine(3))
    assert image is not None and form_of(image) == SQUARES


@pytest.mark.parametrize(("across", "warps"), [(544, 19), (96, 15)])
def test_squares_have_more_warps(across: int, warps: int) -> None:
    """Where a block has several tiles: else a launch may be one of a stack."""
    given = [values(F16, 704, across), transposed(F16, 704, across)]
    image = check_words(binary(F16, ((0, 1), (0, 1)), 2), given, Machine(1))
    assert image is not None and form_of(image) == SQUARES
    assert (image.each, image.warps) == (32, warps)
    assert image.threads <= most_threads(32, SQUARES if warps == 19 else STACKED)


def test_squares_of_functions_of_another_table() -> None:
    nodes = (
        *(load(0, F32), load(1, F32), compute("add", F32, 0, 1)),
        compute("asin", F32, 2),
    )
    program = Program(2, (tensor(F32, 0, 1),) * 2, nodes, (output(3, 0, 1),))
    given = [values(F32, 512, 512), transposed(F32, 512, 512)]
    image = check_words(program, given, Machine(1))
    assert image is not None and form_of(image) == ALONE
    assert image.threads <= most_threads(image.each, ALONE)


def test_rows() -> None:
    for program, given in ((softmax(F16), (30, 700)), (softmax(F32), (2, 4096))):
        image = check_words(program, [values(program.inputs[0].dtype, *given)], SMALL)
        assert image is not None and form_of(image) == NORMS and image.chunks == 1
    weights = [values(F16, 1024), values(F16, 1024)]
    image = check_words(layer_norm(F16), [values(F16, 64, 1024), *weights], Machine(3))
    assert image is not None and form_of(image) == NORMS


@pytest.mark.parametrize(
    ("cols", "each", "warps"), [(768, 24, 15), (4096, 32, 12), (4608, 32, 15), (8192, 32, 16)]
)
def test_norms_have_more_warps(cols: int, each: int, warps: int) -> None:
    """Of wide rows, where a block has several tiles: else a launch may be one of a stack."""
    for rows in (warps * each * 32 // cols * 9, 3):
        (weight, bias), machine = [values(F16, cols) for _ in range(2)], Machine(2)
        image = check_words(layer_norm(F16), [values(F16, rows, cols), weight, bias], machine)
        assert image is not None and form_of(image) == NORMS and not image.scratch
        if rows > 3:
            assert (image.each, image.warps) == (each, warps) and image.draws
        else:
            assert image.threads <= most_threads(image.each, STACKED)


def test_rows_that_are_only_read_have_the_largest_R() -> None:
    nodes = load(0, F16), cast(F32, 0), compute("abs", F32, 1), reduce("max", F32, 2, 1)
    largest = Program(2, (tensor(F16, 0, 1),), nodes, (output(3, 0),))
    image = check_words(largest, [values(F16, 50, 8192)], Machine(2))
    assert image is not None and form_of(image) == NORMS and image.each == 64


def test_rows_in_chunks() -> None:
    image = check_words(softmax(F32), [values(F32, 2, 20_000)], SMALL)
    assert image is not None and image.chunks > 1 and form_of(image) == CHUNKED


def test_functions_of_another_table() -> None:
    """They are many: programs without rows that have one run in the kernel of all."""
    image = check_words(unary("asin"), [values(F16, 3000)], SMALL)
    assert image is not None and form_of(image) == ALONE
    nodes = (
        *(load(0, F32), compute("asin", F32, 0), reduce("sum", F32, 1, 1)),
        compute("sub", F32, 1, 2),
    )
    rows = Program(2, (tensor(F32, 0, 1),), nodes, (output(3, 0, 1),))
    image = check_words(rows, [values(F32, 4, 300)], SMALL)
    assert image is not None and form_of(image) == WHOLE


def test_sums_across_rows() -> None:
    image = check_words(alone(F16), [values(F16, 300, 512)], FEW)
    assert image is not None and image.sums and form_of(image) == SUMMING


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_has_what_its_programs_may_have(form: int) -> None:
    for each in each_of(form):
        has = {name for name in OPCODES if has_case(name, each, form)}
        if form == GRADIENTS:  # all but a prologue is compiled
            assert {"end", "save", "lt.c.bf16"} < has and not own_tables(form)
            continue
        batches, chunks = form in (BATCHED, READ_ONCE), form in (CHUNKED, READ_ONCE)
        small = (FLAT, SQUARES, ADDING, NORMS, CHUNKED, BATCHED, READ_ONCE, *LANES)
        assert {"end", "nop", "f.add", "la.s.f16"} <= has and "add.rows" not in has
        assert ("st.g.f16" in has) == (not batches) and ("by" in has) == (form not in small)
        assert ("row.f.sum" in has) == (form not in (FLAT, SQUARES) and not chunks)
        assert ("red.f.sum" in has) == (form in (ALONE, STACKED, SUMMING) or chunks)
        assert len(own_tables(form) & has) > 40


def test_names_tell_forms_apart() -> None:
    names = [kernel_name(each, form) for form in FORMS for each in each_of(form)]
    assert len(set(names)) == len(names)
    for form in FORMS:
        each = each_of(form)[0]
        assert f"{kernel_name(each, form)}(" in source(each=(each,), form=form)


def test_the_largest_R_of_several_tensors() -> None:
    """Of 16 bits an element: 32 of one tensor, 16 of several."""
    one = check_words(unary("neg"), [values(F16, 1 << 17)], Machine(2))
    two = check_words(*added((1 << 8, 1 << 9), (1 << 8, 1 << 9)), Machine(2))
    assert one is not None and two is not None
    assert (one.each, two.each) == (32, 16) and BIG.widest == 64
