"""The GPU's encoder in C++ makes what the one in Python makes, bit by bit, or refuses alike."""

from __future__ import annotations

import gc
import math
import random
import sys
from collections import Counter
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch

from magjit_dvm import vm
from magjit_dvm.cuda import native, words
from magjit_dvm.cuda.encode import encode
from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.instructions import DType
from magjit_dvm.program import Input, InputKind, Node, NodeKind, Program
from magjit_dvm.vm import NotEncodable
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.agreeing import check_encoders, memory, outcome
from tests.dvm_cuda.checking import BIG, SMALL
from tests.dvm_cuda.drawn_programs import NUMBERS, TAME, Drawer
from tests.dvm_cuda.test_encoder import layer_norm, softmax, values

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
U8, BOOL, I64 = DType.U8, DType.BOOL, DType.I64
GPU = astuple(BIG)
FEW = replace(BIG, multiprocessors=1)
"""A single block has many rows, and keeps what they share."""


def check_seeds(first: int, count: int, gradient: bool = False) -> Counter[str]:
    """What became of the programs of these seeds, for three machines each.

    None of every second one is left to the encoder in Python, but for how many elements there are
    where that is a number of more than 31 bits.
    """
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        program, arguments = Drawer(seed, (NUMBERS, TAME)[seed % 2], gradient).draw()
        elements = max(
            (one.numel() for one in arguments if isinstance(one, torch.Tensor)), default=1
        )
        may_be_left = seed % 2 == 0 or elements >= 1 << 31
        for machine in (BIG, SMALL, FEW):
            outcome = check_encoders(program, arguments, machine)
            assert outcome != "left" or may_be_left, program
            found[outcome] += 1
    return found


@pytest.mark.parametrize("part", range(6))
def test_drawn_programs(part: int) -> None:
    found = check_seeds(part * 250, 250)
    assert found["encoded"] > 280 and found["left"] < 75
    assert len(found) > 8, "several reasons"


def test_drawn_gradients() -> None:
    assert check_seeds(3000, 400, gradient=True)["encoded"] > 400


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(40))
def test_many_drawn_programs(part: int) -> None:
    check_seeds(10_000 + part * 2000, 2000)


def test_the_tables_are_known() -> None:
    """What is left to Python by form is left without a word: that it is not has to be asked."""
    assert native.as_lists(softmax()) is not None


def test_another_form_is_left_to_python() -> None:
    given = words.NUMBER, native._rows(), native.LIMITS
    for limits in ((words.FORM + 1, *native.LIMITS[1:]), (*native.LIMITS[:-1], 7)):
        with pytest.raises(ValueError, match="another form"):
            vm.cuda_words(*given[:2], limits, b"")
    fewer = {name: number for name, number in words.NUMBER.items() if name != "lt.b.u8"}
    with pytest.raises(ValueError, match=r"lt\.b\.u8"):
        vm.cuda_words(fewer, *given[1:], b"")
    with pytest.raises(ValueError, match="each instruction"):
        vm.cuda_words(given[0], given[1][1:], given[2], b"")
    assert check_encoders(softmax(), [values(F32, 3, 40)], BIG) == "encoded", "as it was"


def test_programs_that_are_left_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_READY", False)
    program = softmax()
    fused = DeviceFused(program, lambda x: "otherwise")
    assert fused.encode(GPU, torch.zeros(3, 4)) is None
    assert fused(torch.zeros(3, 4)) == "otherwise"
    monkeypatch.undo()
    wide = Node(NodeKind.CONSTANT, F32, number=1 << 63)
    nodes = (load(0, F32), wide, compute("add", F32, 0, 1))
    assert native.as_lists(Program(1, (tensor(F32, 0),), nodes, (output(2, 0),))) is None


# -- numbers --


def _added(node: Node, *inputs: Input) -> Program:
    """Bits of a number that is cast to a dtype, and that to what words compute in."""
    nodes = [load(0, F32), node]
    if node.dtype is not F32:
        nodes.append(cast(F32, 1))
    nodes.append(compute("add", F32, 0, len(nodes) - 1))
    return Program(1, (tensor(F32, 0), *inputs), tuple(nodes), (output(len(nodes) - 1, 0),))


@pytest.mark.parametrize("dtype", [F32, I32, I64, U8, BOOL], ids=lambda one: one.text)
def test_numbers(dtype: DType) -> None:
    x, left = values(F32, 40), 0
    for value in (*NUMBERS, True, -0.0, 2.0**31, -(2.0**31), 255.5, -1.5):
        constant = Node(NodeKind.CONSTANT, dtype, number=value)
        left += check_encoders(_added(constant), [x], BIG) == "left"
        kind = InputKind.FLOAT if isinstance(value, float) else InputKind.INT
        scalar = Node(NodeKind.SCALAR, dtype, aux=1)
        left += check_encoders(_added(scalar, Input(kind, dtype)), [x, value], BIG) == "left"
    # Floats beyond the ints are torch's to convert.
    assert left <= 16 and (left == 0) == (dtype in (F32, BOOL))


def test_numbers_are_rounded_as_torch_rounds() -> None:
    made = random.Random(0)
    drawn = [math.ldexp(made.uniform(-2, 2), made.randrange(-30, 20)) for _ in range(400)]
    drawn += [sign + k * 2.0**-at for k in range(9) for at in (8, 9, 11, 12) for sign in (1, -1)]
    drawn += [65504.0, 65519.9, 65520.0, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 2049.0]
    x = values(F32, 40)
    for dtype in (F16, BF16):
        for value in drawn:
            nodes = (
                load(0, F32),
                Node(NodeKind.SCALAR, F32, aux=1),
                cast(dtype, 1),
                cast(F32, 2),
                compute("mul", F32, 0, 3),
            )
            inputs = tensor(F32, 0), Input(InputKind.FLOAT, F32)
            program = Program(1, inputs, nodes, (output(4, 0),))
            assert check_encoders(program, [x, value], BIG) == "encoded"


# -- shapes --


def test_places_within_sixteen_bytes() -> None:
    for dtype in (F32, F16, U8, I64):
        nodes = (load(0, dtype), cast(F32, 0), compute("neg", F32, 1))
        if dtype is F32:
            nodes = (load(0, F32), compute("neg", F32, 0), compute("abs", F32, 1))
        program = Program(2, (tensor(dtype, 0, 1),), nodes, (output(2, 0, 1), output(2, 1, 0)))
        whole = torch.zeros(9000, dtype=dtype.torch)
        for begin in range(17):
            for width in (1, 31, 32, 33, 128):
                x = whole[begin : begin + 64 * width].view(64, width)
                for one in (x, x.t(), x[:, ::3], x[::2, 1:], x[:0], x[:, :0]):
                    assert check_encoders(program, [one], BIG) == "encoded"


def test_elements_that_are_not_aligned() -> None:
    x = torch.from_numpy(np.zeros(401, np.uint8)[1:].view(np.float32))
    program = Program(1, (tensor(F32, 0),), (load(0, F32), compute("neg", F32, 0)), (output(1, 0),))
    assert check_encoders(program, [x], BIG) == "refused: an element that is not aligned"


def test_rows_of_all_lengths() -> None:
    for dtype in (F32, F16):
        whole = torch.zeros(1 << 20, dtype=dtype.torch)
        for cols in (1, 2, 3, 4, 100, 128, 255, 256, 257, 1000, 4096, 7000, 30_000, 262_144):
            for rows in (1, 2, 3, 5, 300):
                if rows * cols <= whole.numel():
                    x = whole[: rows * cols].view(rows, cols)
                    for machine in (BIG, SMALL):
                        check_encoders(softmax(dtype), [x], machine)
                        check_encoders(layer_norm(dtype), [x, x[0], x[0]], machine)


def test_limits() -> None:
    def outcome_of(nodes: list[Node], x: torch.Tensor, out: int = -1) -> str:
        result = output(len(nodes) - 1, *((0, 1) if out < 0 else (0,)))
        program = Program(2, (tensor(F32, 0, 1),), tuple(nodes), (result,))
        return check_encoders(program, [x], SMALL)

    x = values(F32, 20, 30)
    squares = [load(0, F32), *(compute("mul", F32, k, k) for k in range(120))]
    assert outcome_of(squares, x) == "refused: too many words"
    long = torch.zeros(64, 31001)
    passes = [load(0, F32)]
    for _ in range(6):
        top = len(passes) - 1
        passes.append(reduce("max", F32, top, 1))
        passes.append(compute("sub", F32, top, top + 1))
    assert outcome_of(passes, long) == "refused: too many passes over long rows"
    sums = [load(0, F32)]
    sums += [compute("add", F32, k, 0) for k in range(17)]
    sums += [reduce("sum", F32, k, 1) for k in range(1, 18)]
    total = len(sums)
    sums.append(compute("add", F32, total - 1, total - 2))
    for k in range(3, 18):
        sums.append(compute("add", F32, len(sums) - 1, total - k))
    assert outcome_of(sums, long, out=0) == "refused: too many reductions"
    chain = [load(0, F32), compute("neg", F32, 0)]
    huge = torch.zeros(1).expand(1 << 30, 1 << 26)
    assert outcome_of(chain, huge) == "refused: too many tiles"
    wide = torch.zeros(1, 1).expand(1 << 20, 1 << 12)
    assert outcome_of(chain, wide) == "refused: a view of more than 31 bits"
    assert outcome_of(chain, torch.zeros(1).expand(1 << 40, 1 << 22)) != "left"


# -- arguments --


class Other(torch.Tensor):
    """Not a plain tensor."""


def test_arguments_that_have_no_words() -> None:
    inputs = tensor(F32, 0), Input(InputKind.INT, F32), tensor(F32, 0)
    nodes = (load(0, F32), Node(NodeKind.SCALAR, F32, aux=1), load(2, F32))
    nodes += (compute("add", F32, 0, 1), compute("add", F32, 3, 2))
    fused = DeviceFused(Program(1, inputs, nodes, (output(4, 0),)))
    x, elsewhere = torch.zeros(3), "refused: not a plain tensor on a GPU"
    imaginary = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()
    other = "refused: a tensor whose memory means something else"
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((x, 2.0, x), "refused: not a number"),
        ((x, "2", x), "refused: not a number"),
        ((None, 2, x), elsewhere),
        ((x.as_subclass(Other), 2, x), elsewhere),
        ((torch.zeros(3, device="meta"), 2, x), elsewhere),
        ((imaginary, 2, x), other),
        ((x, 2, torch.zeros(3).to_sparse()), other),
        ((x, 2, x.double()), "refused: a tensor of another dtype or rank"),
        ((x, 2, x.view(3, 1)), "refused: a tensor of another dtype or rank"),
        ((x, 2, torch.zeros(4)), "refused: sizes do not agree"),
    ]
    for arguments, reason in cases:
        assert outcome(fused.encode, GPU, *arguments) == reason
    assert fused.encode(GPU, x, torch.nn.Parameter(x)) is None, "too few"
    assert fused.encode(GPU, x, 1 << 70, x) is None, "more than 64 bits"
    assert fused.encode(GPU, torch.nn.Parameter(x), True, x) is not None


def test_a_call_of_the_cpu_goes_elsewhere() -> None:
    nodes = (load(0, F32), compute("neg", F32, 0))
    program = Program(1, (tensor(F32, 0),), nodes, (output(1, 0),))
    with pytest.raises(NotEncodable, match="not a plain tensor on a GPU"):
        DeviceFused(program)(torch.ones(3))
    fused = DeviceFused(program, lambda *given: given)
    x = torch.ones(3)
    assert fused(x) == (x,) and fused.program is program
    with pytest.raises(TypeError, match="keywords"):
        fused(x, other=x)


# -- what a call leaves behind --


def test_new_shapes_leave_nothing_behind() -> None:
    programs = [DeviceFused(one) for one in (softmax(F32), layer_norm(F16), layer_norm(F32))]
    whole, half = torch.zeros(1 << 18), torch.zeros(1 << 18, dtype=torch.float16)

    def encode_all(rows: int) -> None:
        for cols in range(1, 251):
            x, y = (one[: rows * cols].view(rows, cols) for one in (whole, half))
            programs[0].encode(GPU, x)
            programs[1].encode(GPU, y, y[0], y[0])
            outcome(programs[2].encode, GPU, x, y[0], y[0])  # of another dtype

    for rows in range(1, 12):  # until the heap that other tests have left is as it will be
        encode_all(rows)
    gc.collect()
    objects, references, resident = len(gc.get_objects()), sys.getrefcount(whole), memory()
    for rows in range(12, 52):
        encode_all(rows)
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    assert sys.getrefcount(whole) == references
    assert memory() - resident < 1 << 20


def test_encoding_is_timed_when_asked() -> None:
    fused, x = DeviceFused(softmax()), values(F32, 7, 9)
    vm.timing(True)
    fused.encode(GPU, x)
    fused.encode(GPU, x)
    taken = vm.timing(False)
    assert len(taken) == 2 and all(0 < one < 10**9 for one in taken)
    fused.encode(GPU, x)
    assert vm.timing(False) == []


def test_operators_are_collected() -> None:
    made = DeviceFused(softmax())
    made.fallback_of_its_own = made  # type: ignore[attr-defined]
    gc.collect()  # what other tests have left
    before = sum(type(one) is DeviceFused for one in gc.get_objects())
    del made
    gc.collect()
    assert sum(type(one) is DeviceFused for one in gc.get_objects()) == before - 1


def test_the_reference_takes_what_is_left() -> None:
    """A number that torch has to convert: C++ leaves the call, and Python has words for it."""
    node = Node(NodeKind.CONSTANT, I32, number=3e9)
    program, x = _added(node), values(F32, 5)
    assert DeviceFused(program).encode(GPU, x) is None
    assert encode(program, [x], BIG).image is not None
