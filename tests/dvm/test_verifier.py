"""What the verifier accepts stays within its memory; what is malformed is refused by name."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from magjit_dvm import vm
from magjit_dvm.instructions import DType
from magjit_dvm.program import (
    INDEXED,
    MAX_NODES,
    MAX_OUTPUTS,
    ONE,
    Input,
    InputKind,
    Node,
    NodeKind,
    Output,
    Program,
)
from magjit_dvm.reference import BytecodeError, run_bytecode
from tests.dvm.checking import (
    SMALL,
    cast,
    compute,
    extent,
    fresh,
    load,
    machine,
    output,
    places,
    reduce,
    results_of,
    scan,
    tensor,
)
from tests.dvm.images import Image, decode, mutated

F32, F64, F16, I64, BOOL = DType.F32, DType.F64, DType.F16, DType.I64, DType.BOOL


# -- valid programs --


def elementwise() -> tuple[Program, list[Any]]:
    nodes = (load(0, F32), load(1, F32), compute("add", F32, 0, 1), compute("exp", F32, 2))
    program = Program(2, (tensor(F32, 0, 1), tensor(F32, 1)), nodes, (output(3, 0, 1),))
    return program, [torch.randn(7, 40), torch.randn(40)]


def flat() -> tuple[Program, list[Any]]:
    program, _ = elementwise()
    return program, [torch.randn(5, 30).t()[:, :5], torch.randn(5)]


def strided() -> tuple[Program, list[Any]]:
    nodes = (load(0, F16), cast(F32, 0), compute("neg", F32, 1), cast(F16, 2))
    program = Program(3, (tensor(F16, 0, 1, 2),), nodes, (output(3, 0, 1, 2, order=(2, 0, 1)),))
    return program, [torch.randn(3, 80, 10).half()[:, ::2].permute(0, 2, 1)]


def softmax(axis: int) -> tuple[Program, list[Any]]:
    nodes = (
        load(0, F32),
        reduce("max", F32, 0, axis),
        compute("sub", F32, 0, 1),
        compute("exp", F32, 2),
        reduce("sum", F32, 3, axis),
        compute("div", F32, 3, 4),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(5, 0, 1), output(4, 1 - axis)))
    return program, [torch.randn(6, 50)]


def moments() -> tuple[Program, list[Any]]:
    nodes = (
        load(0, F32),
        reduce("sum", F32, 0, 1),
        Node(NodeKind.NUMEL, F32, dims=frozenset({1})),
        compute("div", F32, 1, 2),
        compute("sub", F32, 0, 3),
        compute("mul", F32, 4, 4),
        reduce("sum", F32, 5, 1),
    )
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(4, 0, 1), output(6, 0)))
    return program, [torch.randn(6, 50)]


def middle() -> tuple[Program, list[Any]]:
    nodes = (
        load(0, F64),
        load(1, F64),
        compute("mul", F64, 0, 1),
        reduce("sum", F64, 2, 0, 2),
        compute("sub", F64, 2, 3),
    )
    inputs = (tensor(F64, 0, 1, 2), tensor(F64, 1))
    program = Program(3, inputs, nodes, (output(4, 0, 1, 2), output(3, 1)))
    return program, [torch.randn(3, 4, 5).double(), torch.randn(4).double()]


def lookup() -> tuple[Program, list[Any]]:
    nodes = (
        load(0, I64),
        Node(NodeKind.INDEX, F32, (0,), aux=1),
        load(2, BOOL),
        Node(NodeKind.CONSTANT, F32, number=0.5),
        compute("select", F32, 2, 1, 3),
    )
    inputs = (tensor(I64, 0), tensor(F32, INDEXED, 1), tensor(BOOL, 0, 1))
    program = Program(2, inputs, nodes, (output(4, 0, 1),))
    return program, [torch.tensor([2, 0, 1]), torch.randn(3, 40), torch.randn(3, 40) > 0]


def positions() -> tuple[Program, list[Any]]:
    nodes = (load(0, I64), Node(NodeKind.IOTA, I64, aux=1), compute("mul", I64, 0, 1))
    program = Program(3, (tensor(I64, 0, 1, 2),), nodes, (output(2, 0, 1, 2),))
    return program, [torch.arange(2 * 3 * 40).reshape(2, 3, 40)]


def running(axis: int) -> tuple[Program, list[Any]]:
    nodes = (load(0, F32), scan("cumsum", F32, 0, axis), reduce("max", F32, 1, axis))
    nodes = (*nodes, compute("sub", F32, 1, 2), scan("cumprod", F32, 3, axis))
    program = Program(2, (tensor(F32, 0, 1),), nodes, (output(4, 0, 1), output(2, 1 - axis)))
    return program, [torch.randn(6, 50)]


def parts() -> tuple[Program, list[Any]]:
    nodes = (load(0, F32), compute("neg", F32, 0), Node(NodeKind.IOTA, I64, aux=1), cast(F32, 2))
    nodes = (*nodes, compute("add", F32, 1, 3))
    outputs = (output(0, 0, 1), output(4, 0, 1), output(1, 0, 1))
    outputs = tuple(
        replace(one, into=0 if k else -1, along=1, part=k, parts=3) for k, one in enumerate(outputs)
    )
    return Program(2, (tensor(F32, 0, 1),), nodes, outputs), [torch.randn(5, 40)]


PROGRAMS: dict[str, Callable[[], tuple[Program, list[Any]]]] = {
    "elementwise": elementwise,
    "flat": flat,
    "strided": strided,
    "softmax of rows": lambda: softmax(1),
    "softmax of columns": lambda: softmax(0),
    "moments": moments,
    "middle": middle,
    "lookup": lookup,
    "positions": positions,
    "parts": parts,
    "running sums of rows": lambda: running(1),
    "running sums of columns": lambda: running(0),
}


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_valid_programs_pass(name: str) -> None:
    program, arguments = PROGRAMS[name]()
    for settings in (None, SMALL):
        with machine(settings):
            encoded = program.compiled().encode(*arguments)
            results = results_of(program, arguments)
        extents = [extent(one) for one in (*arguments, *places(program, results, arguments))]
        assert vm.verify(encoded["image"], extents) is None
        image = encoded.pop("image")
        del encoded["ahead"], encoded["streams"]  # how it is run, not what
        # The mutations below, and their interpretation, know the layout.
        assert decode(image) == encoded


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_less_memory_is_refused(name: str) -> None:
    """Each argument with one byte less at either end, where the program reaches so far."""
    program, arguments = PROGRAMS[name]()
    encoded = program.compiled().encode(*arguments)
    results = results_of(program, arguments)
    given = [*arguments, *places(program, results, arguments)]
    exact = []
    for one in given:
        last = sum((n - 1) * stride for n, stride in zip(one.shape, one.stride(), strict=True))
        exact.append((0, (last + 1) * one.element_size()))
    assert vm.verify(encoded["image"], exact) is None
    for number, (low, high) in enumerate(exact):
        if name == "lookup" and number == 1:
            continue  # rows of the table are checked when it is read
        for less in ((low, high - 1), (low + 1, high)):
            extents = [*exact[:number], less, *exact[number + 1 :]]
            message = vm.verify(encoded["image"], extents)
            assert message == "an address outside of its argument"
    assert vm.verify(encoded["image"], exact[:-1]) is not None
    assert vm.verify(encoded["image"][:-8], exact) is not None


# -- mutations --

_LARGEST, _STEPS = 4000, 1000


def judge(program: Program, image: bytes, arguments: list[Any], results: list[torch.Tensor]) -> str:
    """``rejected``, ``in bounds``, ``large`` to interpret, or what an accepted program did."""
    given = [*arguments, *places(program, results, arguments)]
    extents = [extent(one) for one in given]
    if vm.verify(image, extents) is not None:
        return "rejected"
    encoded = decode(image)
    inner = torch.Size(encoded["outer"][encoded["n_outer"] :]).numel()
    elements = encoded["tiles"] * encoded["tile_rows"] * encoded["tile_cols"] * inner
    steps = sum(elements // (rows * cols) for *_, rows, cols in encoded["phases"])
    if elements > _LARGEST or steps > _STEPS:
        return "large"
    try:
        outputs = places(program, [fresh(one) for one in results], arguments)
        run_bytecode(encoded, arguments, outputs, extents, initialised=False)
    except IndexError:
        return "in bounds"
    except BytecodeError as error:
        return str(error)
    except RuntimeError as error:
        assert str(error) == "ZeroDivisionError", error
    return "in bounds"


def run_mutations(seed: int, count: int) -> None:
    """Print what becomes of ``count`` mutations of each program; run in a process of its own."""
    for name, make in PROGRAMS.items():
        program, arguments = make()
        chosen = random.Random(seed)
        with machine(SMALL if seed % 2 else None):
            image = program.compiled().encode(*arguments)["image"]
        results = list(results_of(program, arguments))
        for number in range(count):
            outcome = judge(program, mutated(image, chosen), arguments, results)
            print(f"{name} {number}: {outcome}", flush=True)


def _check_mutations(seed: int, count: int) -> None:
    call = f"from tests.dvm.test_verifier import run_mutations; run_mutations({seed}, {count})"
    found = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", call],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"crashed after {lines[-1:]}: {done.stderr[-800:]}"
    assert len(lines) == count * len(PROGRAMS)
    outcomes = [line.split(": ", 1)[1] for line in lines]
    fine = ("rejected", "in bounds", "large")
    wrong = [line for line, outcome in zip(lines, outcomes, strict=True) if outcome not in fine]
    assert not wrong, f"{len(wrong)} accepted: {wrong[:5]}"
    assert outcomes.count("rejected") > count and outcomes.count("in bounds") > count


@pytest.mark.parametrize(("seed", "count"), [(0, 40), pytest.param(1, 80, marks=pytest.mark.slow)])
def test_mutations(seed: int, count: int) -> None:
    _check_mutations(seed, count)


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100, 112))
def test_many_mutations(seed: int) -> None:
    _check_mutations(seed, 400)


# -- malformed programs --

BASE = Program(
    2,
    (tensor(F32, 0, 1), tensor(F32, 1)),
    (load(0, F32), load(1, F32), compute("add", F32, 0, 1), reduce("sum", F32, 2, 1)),
    (output(2, 0, 1), output(3, 0)),
)


def _nodes(*nodes: Node) -> Program:
    return replace(BASE, nodes=(load(0, F32), load(1, F32), *nodes), outputs=(output(2, 0, 1),))


def _outputs(*outputs: Output) -> Program:
    return replace(BASE, outputs=outputs)


def _part(node: int, part: int, parts: int) -> Output:
    into = 0 if part else -1
    return replace(output(node, 0, 1), into=into, along=1, part=part, parts=parts)


def _placed(first: Output | None = None, **changes: Any) -> Program:
    """A part that is written into an input; input 3 is its place."""
    ints = Input(InputKind.INT, I64), Input(InputKind.INT, I64, (0,))
    inputs = (*BASE.inputs, tensor(F32, 0, INDEXED), *ints)
    part = replace(output(2, 0, 1), along=1, whole=2, offset=3)
    outputs = (replace(part, **changes),) if first is None else (first, replace(part, **changes))
    return replace(BASE, inputs=inputs, nodes=(*BASE.nodes, cast(F64, 2)), outputs=outputs)


MALFORMED: dict[str, Program] = {
    "too many dimensions": replace(BASE, rank=9),
    "a negative rank": replace(BASE, rank=-1),
    "no nodes": replace(BASE, nodes=(), outputs=()),
    "no outputs": _outputs(),
    "too many nodes": _nodes(*(compute("neg", F32, 0) for _ in range(MAX_NODES))),
    "too many outputs": _outputs(*(output(2, 0, 1) for _ in range(MAX_OUTPUTS + 1))),
    "too many inputs": replace(BASE, inputs=(tensor(F32, 0, 1), *(tensor(F32, 1),) * 80)),
    "an input has a dimension twice": replace(BASE, inputs=(tensor(F32, 0, 0), tensor(F32, 1))),
    "an input's dimension is not there": replace(BASE, inputs=(tensor(F32, 0, 5), tensor(F32))),
    "an input of nine dimensions": replace(BASE, inputs=(tensor(F32, *[ONE] * 9), tensor(F32, 1))),
    "an unknown kind of dimension": replace(BASE, inputs=(tensor(F32, 0, -3), tensor(F32, 1))),
    "an operand that comes later": _nodes(compute("add", F32, 0, 3), compute("neg", F32, 0)),
    "its own operand": _nodes(compute("neg", F32, 2)),
    "an operand that is not there": _nodes(compute("neg", F32, 70)),
    "an operand that wraps around": _nodes(compute("neg", F32, 65536)),
    "a negative operand": _nodes(compute("neg", F32, -7)),
    "an operand too few": _nodes(compute("add", F32, 0)),
    "an operand too many": _nodes(compute("neg", F32, 0, 1)),
    "an instruction that moves": _nodes(compute("load", F32, 0)),
    "an instruction that reduces": _nodes(compute("sum", F32, 0)),
    "a cast as an instruction": _nodes(compute("cast", F64, 0)),
    "an instruction that its dtype lacks": _nodes(compute("bitwise_and", F32, 0, 1)),
    "operands of two dtypes": _nodes(cast(F64, 0), compute("add", F64, 2, 1)),
    "a result of another dtype": _nodes(compute("add", F64, 0, 1)),
    "a comparison that is not bool": _nodes(compute("lt", F32, 0, 1)),
    "a condition that is not bool": _nodes(compute("select", F32, 0, 0, 1)),
    "branches of two dtypes": _nodes(
        compute("lt", BOOL, 0, 1), cast(F64, 0), compute("select", F32, 2, 0, 3)
    ),
    "a reduction that none is": _nodes(
        Node(NodeKind.REDUCE, F32, (0,), "add", dims=frozenset({1}))
    ),
    "a reduction of another dtype": _nodes(reduce("sum", F64, 0, 1)),
    "a reduction that its dtype lacks": _nodes(cast(BOOL, 0), reduce("sum", BOOL, 2, 1)),
    "a reduction over no dimension of the group": _nodes(reduce("sum", F32, 0, 5)),
    "a mask beyond 32 bits": _nodes(reduce("sum", F32, 0, 40)),
    "a load of an input that is not there": _nodes(load(7, F32)),
    "a load of a negative input": _nodes(load(-1, F32)),
    "a load of another dtype": _nodes(load(0, F64)),
    "a number loaded as a tensor": replace(
        BASE, inputs=(tensor(F32, 0, 1), Input(InputKind.INT, I64))
    ),
    "a tensor taken as a number": _nodes(Node(NodeKind.SCALAR, F32, aux=0)),
    "positions along no dimension": _nodes(Node(NodeKind.IOTA, I64, aux=2)),
    "positions that are floats": _nodes(Node(NodeKind.IOTA, F32, aux=1)),
    "a look-up without an indexed dimension": _nodes(
        Node(NodeKind.IOTA, I64, aux=0), Node(NodeKind.INDEX, F32, (2,), aux=0)
    ),
    "a look-up at floats": replace(
        BASE,
        inputs=(tensor(F32, 0, 1), tensor(F32, INDEXED, 1)),
        nodes=(load(0, F32), Node(NodeKind.INDEX, F32, (0,), aux=1)),
        outputs=(output(1, 0, 1),),
    ),
    "a load of a table": replace(BASE, inputs=(tensor(F32, 0, INDEXED), tensor(F32, 1))),
    "a broadcast of another dtype": _nodes(Node(NodeKind.BROADCAST, F64, (0,))),
    "a half as a constant": _nodes(Node(NodeKind.CONSTANT, F16, number=1.5)),
    "an output of no node": _outputs(output(9, 0, 1)),
    "an output of a negative node": _outputs(output(-1, 0, 1)),
    "an output that wraps around": _outputs(output(65538, 0, 1)),
    "an output has a dimension twice": _outputs(output(2, 0, 0)),
    "an output's dimension is not there": _outputs(output(2, 0, 4)),
    "an indexed output": _outputs(output(2, 0, INDEXED)),
    "an order that names a dimension twice": _outputs(output(2, 0, 1, order=(0, 0))),
    "an order of another length": _outputs(output(2, 0, 1, order=(0,))),
    "an order beyond the dimensions": _outputs(output(2, 0, 1, order=(0, 2))),
    "a whole without its parts": _outputs(_part(2, 0, 2)),
    "a part without a whole": _outputs(replace(output(2, 0, 1), into=5)),
    "a part of itself": _outputs(replace(_part(2, 1, 2), into=0)),
    "a part of a part": _outputs(_part(2, 0, 2), _part(2, 1, 2), replace(_part(2, 1, 2), into=1)),
    "a part twice": _outputs(_part(2, 0, 3), _part(2, 1, 3), _part(2, 1, 3)),
    "a part beyond the whole": _outputs(_part(2, 0, 2), _part(2, 2, 2)),
    "a part of another shape": _outputs(
        _part(2, 0, 2), replace(_part(2, 1, 2), dims=(1, 0), order=(0, 1))
    ),
    "parts along no dimension": _outputs(
        replace(_part(2, 0, 2), along=-1), replace(_part(2, 1, 2), along=-1)
    ),
    "parts along a dimension that is not there": _outputs(
        replace(_part(2, 0, 2), along=2), replace(_part(2, 1, 2), along=2)
    ),
    **{
        f"a placed part with {name}": _placed(**changes)
        for name, changes in {
            "no dimension": {"along": -1},
            "a dimension that is not there": {"along": 2},
            "two wholes": {"total": 3},
            "no whole": {"whole": -1},
            "an offset that is a tensor": {"offset": 0},
            "an offset that is a size": {"offset": 4},
            "an offset that is not there": {"offset": 7},
            "a whole that is read": {"whole": 0},
            "a whole that is an int": {"whole": 3},
            "a whole that is not there": {"whole": 7},
            "a whole of another order": {"dims": (1, 0)},
            "a whole of another dtype": {"node": 4},
            "a total that is a tensor": {"whole": -1, "total": 2},
            "a total that is not there": {"whole": -1, "total": 63},
            "itself as the whole": {"whole": -1, "into": 0},
            "equal parts": {"parts": 2},
        }.items()
    },
    "a placed part in an ordinary result": _placed(whole=-1, into=0, first=output(2, 0, 1)),
    "a placed part in a whole of another order": _placed(
        whole=-1,
        into=0,
        first=replace(output(2, 0, 1, order=(1, 0)), along=1, total=3, offset=3),
    ),
    "a part of equal size in a placed whole": _outputs(
        replace(_placed().outputs[0], whole=-1, total=3), replace(_part(2, 1, 2))
    ),
    "a whole without an offset": _outputs(replace(output(2, 0, 1), whole=1)),
    "a float as a size": replace(BASE, inputs=(*BASE.inputs, Input(InputKind.FLOAT, F64, (1,)))),
    "an int as two sizes": replace(BASE, inputs=(*BASE.inputs, Input(InputKind.INT, I64, (0, 1)))),
    "an int as the size of nothing": replace(
        BASE, inputs=(*BASE.inputs, Input(InputKind.INT, I64, (ONE,)))
    ),
}


@pytest.mark.parametrize("name", list(MALFORMED))
def test_malformed_programs(name: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        MALFORMED[name].verify()


def test_arguments_that_do_not_fit() -> None:
    """What cannot be encoded is said, or left to the fallback."""
    x, row = torch.randn(3, 5), torch.randn(5)
    wrong: list[tuple[Any, ...]] = [
        (x,),
        (x, row, row),
        (x, torch.randn(4)),
        (x.double(), row),
        (x[0], row),
        (x.tolist(), row),
        (x, 1.0),
        (x.to("meta"), row),
        (x.to_sparse(), row),
        (torch.nn.Parameter(x).to_sparse(), row),
    ]
    compiled = BASE.compiled()
    for arguments in wrong:
        with pytest.raises(vm.NotEncodable):
            compiled(*arguments)
        with pytest.raises(vm.NotEncodable):
            compiled.encode(*arguments)
    other = BASE.compiled(lambda *given: len(given))
    assert [other(*arguments) for arguments in wrong] == [len(one) for one in wrong]
    with pytest.raises(TypeError):
        compiled(x, b=row)
    compiled(torch.nn.Parameter(x), row)


def test_settings_of_the_machine() -> None:
    for settings in (
        (100, 4096, 1),
        (4096, 100, 1),
        (4096, 4096, 0),
        (1 << 40, 4096, 1),
        (4096, 4096, 1, 0),
    ):
        with pytest.raises(ValueError):
            vm.machine(*settings)
    before = vm.machine()
    assert vm.machine(*before) == before


def test_the_image_ends_where_the_code_does() -> None:
    program, arguments = elementwise()
    import ctypes

    assert len(program.compiled().encode(*arguments)["image"]) == ctypes.sizeof(Image)
