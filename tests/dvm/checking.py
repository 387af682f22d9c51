"""One program, three ways: the machine in C++, the reference over nodes, the one over bytecode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from magjit_dvm import reference, vm
from magjit_dvm.instructions import DType
from magjit_dvm.program import ONE, Input, InputKind, Node, NodeKind, Output, Program

SMALL = (4096, 4096, 1, 1024)
MEDIUM = (16384, 4096, 64, 4096)
_BYTECODE_ELEMENTS = 3000


@contextmanager
def machine(settings: tuple[int, ...] | None) -> Iterator[None]:
    """Local bytes, step bytes, grain, cached bytes of the machine; None leaves it as it is."""
    if settings is None:
        yield
        return
    before = vm.machine(*settings)
    try:
        yield
    finally:
        vm.machine(*before)


def in_turn(
    settings: Iterable[str], cases: Iterable[Sequence[Any]], ids: Iterable[str]
) -> list[Any]:
    """Each case on a machine of each kind: one after the other in turn, the others slow."""
    kinds = list(settings)
    return [
        pytest.param(
            *case,
            kind,
            id=f"{name}-{kind}",
            marks=[] if kind == kinds[number % len(kinds)] else pytest.mark.slow,
        )
        for number, (case, name) in enumerate(zip(cases, ids, strict=True))
        for kind in kinds
    ]


def tensor(dtype: DType, *dims: int) -> Input:
    return Input(InputKind.TENSOR, dtype, dims)


def load(number: int, dtype: DType) -> Node:
    return Node(NodeKind.LOAD, dtype, aux=number)


def compute(op: str, dtype: DType, *args: int) -> Node:
    return Node(NodeKind.COMPUTE, dtype, args, op)


def reduce(op: str, dtype: DType, arg: int, *dims: int) -> Node:
    return Node(NodeKind.REDUCE, dtype, (arg,), op, dims=frozenset(dims))


def scan(op: str, dtype: DType, arg: int, dim: int) -> Node:
    return Node(NodeKind.SCAN, dtype, (arg,), op, dims=frozenset({dim}))


def cast(to: DType, arg: int) -> Node:
    return Node(NodeKind.CAST, to, (arg,))


def output(node: int, *dims: int, order: Sequence[int] | None = None) -> Output:
    return Output(node, dims, tuple(range(len(dims)) if order is None else order))


def fresh(like: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout, full of bytes that no result has by chance."""
    made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    torch.empty(0, dtype=torch.uint8).set_(made.untyped_storage()).fill_(0xA5)
    return made


def places(
    program: Program, wholes: Sequence[torch.Tensor], arguments: Sequence[Any]
) -> list[torch.Tensor]:
    """Where each output of the bytecode goes: a result, or a part of one or of an argument."""
    given, found = iter(wholes), list[torch.Tensor]()
    whole_of: dict[int, torch.Tensor] = {}
    for number, one in enumerate(program.outputs):
        if one.allocated:
            whole_of[number] = next(given)
        whole = whole_of.get(one.into if one.into >= 0 else number)
        if one.whole >= 0:
            whole = arguments[one.whole]
        assert whole is not None
        if one.offset >= 0:
            size = _size_along(program, one, arguments)
            whole = whole.narrow(one.along, arguments[one.offset], size)
        elif one.parts > 1:
            size = whole.shape[one.along] // one.parts
            whole = whole.narrow(one.along, one.part * size, size) if size else whole
        found.append(whole)
    return found


def _size_along(program: Program, one: Output, arguments: Sequence[Any]) -> int:
    """The size of a part along the dimension that its whole has parts along."""
    loop, sizes = one.dims[one.along], {1}
    for given, value in zip(program.inputs, arguments, strict=True):
        for k, dim in enumerate(given.dims):
            if dim == loop and loop != ONE:
                sizes.add(value.shape[k] if isinstance(value, torch.Tensor) else value)
    return max(sizes) if len(sizes) < 3 and 0 not in sizes else 0


def apart(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """The arguments, but for wholes that the program writes: fresh ones instead."""
    written = {one.whole for one in program.outputs}
    return [fresh(one) if k in written else one for k, one in enumerate(arguments)]


def extent(value: Any) -> tuple[int, int]:
    """Bytes below and above an argument's address that belong to it."""
    if not isinstance(value, torch.Tensor):
        return 0, 0
    low = -value.storage_offset() * value.element_size()
    return low, low + value.untyped_storage().nbytes()


def same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Where elements are equal, NaN included."""
    return (left == right) | ((left != left) & (right != right))


def require_close(
    got: torch.Tensor, wanted: torch.Tensor, what: str, tolerance: float = 0.0
) -> None:
    """Equal metadata; equal elements, or ``tolerance`` apart relative to the largest (or 1)."""
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype}, not {wanted.dtype}"
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, not {tuple(wanted.shape)}"
    assert got.stride() == wanted.stride() or got.numel() <= 1, f"{what}: strides {got.stride()}"
    fine = same(got, wanted)
    if tolerance and got.dtype.is_floating_point:
        wide, other = got.double(), wanted.double()
        finite = other[other.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        fine |= (wide - other).abs() <= tolerance * (other.abs() + max(largest, 1.0))
    if not bool(fine.all()):
        at = int((~fine).flatten().nonzero()[0])
        left, right = got.flatten()[at].item(), wanted.flatten()[at].item()
        raise AssertionError(f"{what}: {left!r}, not {right!r}, at {at} of {tuple(got.shape)}")


def require_results(
    program: Program,
    results: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    ours: Sequence[Any],
    theirs: Sequence[Any],
) -> None:
    """Results of calls with these arguments are alike wherever the program writes.

    What else a whole has is another program's to write: the memory may hold anything.
    """
    assert [one.shape for one in results] == [one.shape for one in wanted]
    assert [one.stride() for one in results if one.numel() > 1] == [
        one.stride() for one in wanted if one.numel() > 1
    ]
    pairs = zip(places(program, results, ours), places(program, wanted, theirs), strict=True)
    for number, (got, other) in enumerate(pairs):
        require_close(got, other, f"output {number}", tolerance_of(program))


def results_of(program: Program, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """What the machine computes; there is no fallback.

    The bytecode of the third call is that of the second, and computes the same.
    """
    fused, others = program.compiled(), apart(program, arguments)
    first, _, third = (fused(*given) for given in (arguments, others, others))
    results, again = (one if isinstance(one, tuple) else (one,) for one in (first, third))
    assert fused.kept() <= 1
    pairs = zip(places(program, results, arguments), places(program, again, others), strict=True)
    for number, (one, other) in enumerate(pairs):
        assert bool(same(one, other).all()), f"output {number} of the third call"
    return results


_LOOSE = {
    torch.float32: 1e-5,
    torch.float64: 1e-13,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def tolerance_of(program: Program) -> float:
    """Of the coarsest dtype that the program computes in or rounds to."""
    return max(_LOOSE.get(node.dtype.torch, 0.0) for node in program.nodes)


def check_program(
    program: Program,
    arguments: Sequence[Any],
    *,
    exact: bool = False,
    bytecode: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Run a program in all three ways and compare; the results of the machine."""
    before = [one.clone() if isinstance(one, torch.Tensor) else one for one in arguments]
    ours, theirs = apart(program, arguments), apart(program, arguments)
    results = results_of(program, ours)
    for one, copy in zip(arguments, before, strict=True):
        assert not isinstance(one, torch.Tensor) or bool(same(one, copy).all()), "an input changed"
    wanted = reference.run(program, theirs)
    assert [one.shape for one in results] == [one.shape for one in wanted]
    tolerance = 0.0 if exact else tolerance_of(program)
    pairs = zip(places(program, results, ours), places(program, wanted, theirs), strict=True)
    for number, (got, other) in enumerate(pairs):
        require_close(got, other, f"output {number}", tolerance)
    if bytecode:
        check_bytecode(program, ours, results)
    return results


def check_bytecode(
    program: Program, arguments: Sequence[Any], results: Sequence[torch.Tensor]
) -> None:
    """The bytecode for these arguments is verified, and means the same in Python."""
    encoded = program.compiled().encode(*arguments)
    if "empty" in encoded:
        assert any(one.numel() == 0 for one in places(program, results, arguments))
        return
    extents = [extent(one) for one in (*arguments, *places(program, results, arguments))]
    assert vm.verify(encoded["image"], extents) is None
    if encoded["elements"] > _BYTECODE_ELEMENTS:
        return
    made, other_arguments = [fresh(one) for one in results], apart(program, arguments)
    into = places(program, made, other_arguments)
    reference.run_bytecode(encoded, other_arguments, into)
    pairs = zip(into, places(program, results, arguments), strict=True)
    for number, (got, other) in enumerate(pairs):
        require_close(got, other, f"bytecode's output {number}", tolerance_of(program))
