"""Steps in the place of a program whose rows are few and long."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch

from magjit_dvm import reference
from magjit_dvm.cuda.encode import Machine
from magjit_dvm.cuda.splitting import Step, steps_of
from magjit_dvm.instructions import DType
from magjit_dvm.program import ACROSS, Input, InputKind, Node, NodeKind, Program
from tests.dvm.checking import (
    cast,
    compute,
    load,
    output,
    reduce,
    require_results,
    scan,
    tensor,
)
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.long_rows import counted, largest, mean_square, normalized, softmaxed, weighed
from tests.dvm_cuda.test_encoder import values
from tests.dvm_cuda.test_left_to_aten import filled

F32, F16 = DType.F32, DType.F16


def sizes_of(program: Program, arguments: Sequence[Any]) -> dict[int, int]:
    """Of loops."""
    found: dict[int, int] = {}
    for given, value in zip(program.inputs, arguments, strict=True):
        for d, size in zip(given.dims, value.shape, strict=True):
            found[d] = max(found.get(d, 1), size)
    return found


def in_pieces(given: Input, value: torch.Tensor, loop: int, pieces: int) -> torch.Tensor:
    """A tensor whose first dimension is pieces of a loop, all the same where it has no such."""
    if loop not in given.dims:
        return value.expand(pieces, *value.shape)
    at = given.dims.index(loop)
    whole = value.unflatten(at, (pieces, -1))
    return whole.movedim(at, 0)


def run_steps(
    program: Program,
    steps: Sequence[Step],
    arguments: Sequence[Any],
    loop: int,
    pieces: int,
    each: int,
) -> list[torch.Tensor]:
    """What steps compute, each by the reference; one loop is divided into pieces of so many."""
    sizes, slots, results = sizes_of(program, arguments), dict[int, Any](), dict[int, Any]()
    reduced = next(node.dims for node in program.nodes if node.kind is NodeKind.REDUCE)
    rest = sizes[loop] - pieces * each

    def run(step: Step, first: int, count: int, parts: int, to: Sequence[int]) -> None:
        given = list[Any]()
        for source in step.sources:
            if source < 0:
                mask = -1 - source
                given.append(float(prod(size for d, size in sizes.items() if mask >> d & 1)))
            elif source >= len(arguments):
                given.append(slots[source])
            elif step.pieces and reduced & set(program.inputs[source].dims):
                one, value = program.inputs[source], arguments[source]
                if loop in one.dims:
                    value = value.narrow(one.dims.index(loop), first, count)
                given.append(in_pieces(one, value, loop, parts))
            else:
                given.append(arguments[source])
        made = reference.run(step.program, given)
        for number, result in zip(to, made, strict=True):
            (results if number < 0 else slots)[number] = result

    for step in steps:
        one = step.joined if rest and step.joined else step
        run(one, 0, pieces * each, pieces, one.results)
        if rest and step.pieces:
            run(one, pieces * each, rest, 1, one.left_over)
    return [results[-1 - k] for k in range(len(program.outputs))]


def kinds_of(step: Step) -> set[NodeKind]:
    return {node.kind for node in step.program.nodes}


CASES = {
    "a loss": (mean_square(F16), [(12, 50), (12, 50)], 2),
    "the largest": (largest(F32), [(12, 50)], 2),
    "a softmax": (softmaxed(F16), [(3, 8, 20)], 5),
    "a norm": (normalized(F16), [(3, 8, 20)], 5),
    "a norm of rows of one element": (normalized(F16), [(3, 1, 20)], 5),
    "by weights": (weighed(F16), [(12, 50), (12,)], 2),
    "a count": (counted(F16), [(600,), (600,)], 2),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_compute_what_the_program_does(name: str) -> None:
    program, shapes, count = CASES[name]
    given = zip(program.inputs, shapes, strict=True)
    arguments = [values(one.dtype, *shape) for one, shape in given]
    steps = steps_of(program)
    assert steps is not None and len(steps) == count
    assert [one.pieces for one in steps[:2]] == [True, False] and not steps[-1].pieces
    for step in steps:
        step.program.verify()
        assert (step.joined is None) != (NodeKind.REDUCE in kinds_of(step) and not step.pieces)
    wanted = reference.run(program, arguments)
    reduced = next(node.dims for node in program.nodes if node.kind is NodeKind.REDUCE)
    for loop in sorted(reduced):
        size = sizes_of(program, arguments)[loop]
        for each in {1, -(-size // 2), -(-size // 3), size}:
            found = run_steps(program, steps, arguments, loop, size // each, each)
            require_results(program, found, wanted, arguments, arguments)


def test_counts_are_held_by_32_bits() -> None:
    """Of an int64 that is loaded nobody knows that; what the whole has is known."""
    program, given = counted(F16), [values(F16, 1 << 18), values(DType.I64, 1 << 18)]
    assert check_encoders(program, given, Machine()) == "refused: a reduction of few long rows"
    steps = steps_of(program)
    assert steps is not None
    pieces, rows = steps
    arguments = [one.view(256, 1024) for one in given]
    assert check_encoders(pieces.program, arguments, Machine()) == "encoded"
    found = [torch.zeros(256), torch.zeros(256, dtype=torch.int32)]
    assert check_encoders(rows.program, found, Machine()) == "encoded"


def test_a_step_takes_what_it_needs() -> None:
    """Elements are computed again from what the call is given; rows are computed once."""
    steps = steps_of(softmaxed(F16))
    assert steps is not None
    first, largest_of, second, total, last = steps
    assert first.sources == (0,) and largest_of.sources == first.results
    assert set(second.sources) == set(last.sources) - set(total.results)
    assert last.results == (-1,)
    assert NodeKind.REDUCE not in kinds_of(last)
    assert sum(node.kind is NodeKind.LOAD for node in last.program.nodes) == 3


def unsplittable() -> dict[str, Program]:
    x = load(0, F32)
    row = reduce("sum", F32, 0, 0, 1)
    plain = tensor(F32, 0, 1)
    size = Input(InputKind.INT, DType.I64, (1,))
    return {
        "no reduction": Program(2, (plain,), (x, compute("neg", F32, 0)), (output(1, 0, 1),)),
        "places": Program(
            2,
            (plain,),
            (x, Node(NodeKind.IOTA, DType.I64, aux=1), cast(F32, 1), compute("mul", F32, 0, 2))
            + (reduce("sum", F32, 3, 0, 1),),
            (output(4),),
        ),
        "a running sum": Program(
            1,
            (tensor(F32, 0),),
            (x, scan("cumsum", F32, 0, 0), reduce("max", F32, 1, 0)),
            (output(2),),
        ),
        "a sum across rows": Program(
            2,
            (plain,),
            (x, Node(NodeKind.REDUCE, F32, (0,), "sum", aux=ACROSS, dims=frozenset({0}))),
            (output(1, 1),),
        ),
        "different reductions": Program(
            2, (plain,), (x, row, reduce("sum", F32, 0, 1)), (output(1), output(2, 0))
        ),
        "a size that a call says": Program(
            2,
            (plain, size),
            (x, Node(NodeKind.SCALAR, DType.I64, aux=1), cast(F32, 1), row)
            + (compute("div", F32, 3, 2),),
            (output(4),),
        ),
        "expanded along a part of what is reduced": Program(
            2,
            (tensor(F32, 0), plain),
            (x, Node(NodeKind.BROADCAST, F32, (0,), dims=frozenset({1})), load(1, F32))
            + (compute("mul", F32, 1, 2), reduce("sum", F32, 3, 0, 1)),
            (output(4),),
        ),
    }


@pytest.mark.parametrize("name", unsplittable())
def test_what_has_no_steps(name: str) -> None:
    program = unsplittable()[name]
    program.verify()
    assert steps_of(program) is None


def test_steps_have_words() -> None:
    """Both encoders make the same of them, or refuse for the same reason."""
    machine = Machine()
    x = filled(1 << 23)
    whole = x.view(1, -1)
    assert "few long rows" in check_encoders(mean_square(F16), [whole, whole], machine)
    steps = steps_of(mean_square(F16))
    assert steps is not None
    pieces = x.view(1024, 1, 8192)
    assert check_encoders(steps[0].program, [pieces, pieces], machine) == "encoded"
    between = torch.zeros(1024)
    assert check_encoders(steps[1].program, [between, float(1 << 23)], machine) == "encoded"
