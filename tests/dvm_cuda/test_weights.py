"""Vectors that all rows share: kept in shared memory where a block has many rows."""

from __future__ import annotations

import random

import pytest
import torch

from magjit_dvm.cuda.encode import Machine, encode
from magjit_dvm.cuda.words import NO_WORD, Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.drawn_programs import BLOCK
from tests.dvm_cuda.test_encoder import layer_norm, values
from tests.dvm_cuda.test_row_words import words_of

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16
ONE = Machine(multiprocessors=1)
"""A single block, which soon has many rows."""
TIGHT = Machine(multiprocessors=1, shared_bytes=60000)


def scaled(dtype: DType, *operators: str) -> Program:
    """Rows by their sums, then operators with a vector each."""
    inputs = tensor(dtype, 0, 1), *[tensor(dtype, 1)] * len(operators)
    nodes = [load(0, dtype), cast(F32, 0), reduce("sum", F32, 1, 1), compute("mul", F32, 1, 2)]
    for number, operator in enumerate(operators):
        before = len(nodes) - 1
        nodes += [load(number + 1, dtype), cast(F32, before + 1)]
        nodes.append(compute(operator, F32, before, before + 2))
    nodes.append(cast(dtype, len(nodes) - 1))
    return Program(2, inputs, tuple(nodes), (output(len(nodes) - 1, 0, 1),))


def run(program: Program, rows: int, cols: int, machine: Machine = ONE) -> Image:
    dtype = program.inputs[0].dtype
    vectors = [values(dtype, cols) for _ in program.inputs[1:]]
    image = check_words(program, [values(dtype, rows, cols), *vectors], machine)
    assert image is not None
    return image


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("cols", [8, 100, 256, 768, 1024, 2048, 5000])
def test_layer_norms(cols: int, dtype: DType) -> None:
    image = run(layer_norm(dtype), 650 if cols < 512 else 150, cols)
    assert image.prologue != NO_WORD and image.weights == 2
    assert words_of(image).count("w.affine") == 1 and "lt.w" not in words_of(image)
    assert image.stages >= 2 and image.group == -(-cols // image.slice)


@pytest.mark.parametrize("operator", ["mul", "add", "sub", "div", "maximum"])
def test_one_vector(operator: str) -> None:
    image = run(scaled(F16, operator), 100, 516)
    assert image.weights == 1 and words_of(image).count("lt.w") == 1


def test_the_same_vector_is_kept_once() -> None:
    program = scaled(F16, "mul", "add", "mul", "sub")
    x, first, other = values(F16, 100, 512), values(F16, 512), values(F16, 512)
    image = check_words(program, [x, first, other, first, other], ONE)
    # An argument each: that two are one tensor is not in the words.
    assert image is not None and image.weights == 4
    assert [name for name in words_of(image) if name in ("w.affine", "lt.w")] == [
        "w.affine",
        "lt.w",
        "lt.w",
    ]
    nodes = (*scaled(F16, "mul").nodes[:-1], compute("add", F32, 6, 5), cast(F16, 7))
    again = Program(2, scaled(F16, "mul").inputs, nodes, (output(8, 0, 1),))
    image = run(again, 100, 512)
    assert image.weights == 1 and "w.affine" in words_of(image)


def test_parts_of_a_vector() -> None:
    whole = values(F16, 2048)
    image = check_words(layer_norm(F16), [values(F16, 100, 1024), whole[:1024], whole[1024:]], ONE)
    assert image is not None and image.weights == 2


@pytest.mark.parametrize(
    ("program", "rows", "cols", "machine"),
    [
        (layer_norm(F16), 20, 1024, ONE),  # few rows: a prologue would not pay
        (scaled(F16, *["mul"] * 5), 100, 512, ONE),  # too many vectors
        (layer_norm(F32), 60, 4096, TIGHT),  # no room
        (layer_norm(F32), 30, 70000, ONE),  # rows that come in chunks
    ],
    ids=["few rows", "many vectors", "no room", "chunks"],
)
def test_vectors_that_are_not_kept(
    program: Program, rows: int, cols: int, machine: Machine
) -> None:
    image = run(program, rows, cols, machine)
    assert image.prologue == NO_WORD and image.weights == 0
    assert not {"lt.w", "w.affine"} & set(words_of(image))


def drawn(chosen: random.Random) -> tuple[Program, list[torch.Tensor]]:
    """Rows, by a sum or not, and vectors of several dtypes, aligned or not."""
    names = ("mul", "add", "mul", "add", "sub", "div", "minimum")
    dtypes = [chosen.choice((F32, F16, BF16)) for _ in range(chosen.randint(2, 6))]
    cols = chosen.choice((4, 8, 64, 100, 512, 516, 1024, 1025, 4096, 9000))
    inputs = [tensor(dtypes[0], 0, 1), *(tensor(one, 1) for one in dtypes[1:])]
    given = [BLOCK.view(dtypes[0].torch)[: cols * 400].view(400, cols)]
    nodes = [load(0, dtypes[0]), cast(F32, 0), reduce("sum", F32, 1, 1), compute("mul", F32, 1, 2)]
    for number, dtype in enumerate(dtypes[1:], 1):
        first = chosen.choice((0, 0, 0, 8, 1))
        given.append(BLOCK.view(dtype.torch)[first : first + cols])
        before = len(nodes) - 1
        nodes += [load(number, dtype), cast(F32, before + 1)]
        operands = [before, before + 2]
        if chosen.random() < 0.2:
            operands.reverse()
        if chosen.random() < 0.2:  # an operand that has to wait
            operands[1 - operands.index(before)] = 1
        nodes.append(compute(chosen.choice(names), F32, *operands))
    nodes.append(cast(dtypes[0], len(nodes) - 1))
    program = Program(2, tuple(inputs), tuple(nodes), (output(len(nodes) - 1, 0, 1),))
    return program, given


def test_drawn_programs_by_both_encoders() -> None:
    kept = merged = 0
    for seed in range(1500):
        program, given = drawn(random.Random(seed))
        for machine in (ONE, TIGHT):
            assert check_encoders(program, given, machine) == "encoded"
        image = encode(program, given, ONE).image
        assert image is not None
        kept += image.weights > 0
        merged += "w.affine" in words_of(image)
    assert kept > 600 and merged > 30


@pytest.mark.parametrize("cols", [512, 1024, 2048, 4096, 8192, 16384])
def test_a_whole_gpu_has_room(cols: int) -> None:
    """Tensors that are only encoded: nobody touches their memory."""
    x, vectors = BLOCK.view(torch.float16)[: 1 << 26].view(-1, cols), [values(F16, cols)] * 2
    image = encode(layer_norm(F16), [x, *vectors], Machine()).image
    assert image is not None and image.weights == 2 and image.stages >= 2
    assert check_encoders(layer_norm(F16), [x, *vectors], Machine()) == "encoded"
