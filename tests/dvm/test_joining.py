"""``cat`` and ``stack`` of unequal parts: whatever computes a part writes it to its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
import magjit_dvm
from magjit_dvm.backend import schedules
from magjit_dvm.instructions import DTYPES, DType
from magjit_dvm.program import INDEXED, ONE, Input, InputKind, Program
from magjit_dvm.schedule import Schedule
from magjit_dvm.stacking import Stack
from magjit_dvm.vm import NotEncodable
from tests.dvm.checking import check_program, compute, load, machine, output, reduce, tensor
from tests.dvm.test_instructions import SETTINGS, contiguous, sliced, transposed

aten = torch.ops.aten
F32 = DType.F32
NUMBER = Input(InputKind.INT, DType.I64)


def exact(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return (torch.randint(-8, 9, shape, generator=made) / 4).to(dtype)


# -- programs --


@pytest.fixture(params=list(SETTINGS))
def settings(request: pytest.FixtureRequest) -> Iterator[None]:
    with machine(SETTINGS[request.param]):
        yield


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda one: one.text)
def test_into_an_argument(dtype: DType, along: int, settings: None) -> None:
    """The part is written, what lies around it is not."""
    loops = tuple(INDEXED if k == along else k for k in range(2))
    part = replace(output(0, 0, 1), along=along, whole=1, offset=2)
    inputs = (tensor(dtype, 0, 1), tensor(dtype, *loops), NUMBER)
    program = Program(2, inputs, (load(0, dtype),), (part,))
    for shape in ((3, 40), (40, 3), (1, 65), (65, 1), (3, 3000), (0, 5)):
        for layout in (contiguous, transposed, sliced):
            given = layout(dtype, shape, 1)
            size = [n + 7 if k == along else n for k, n in enumerate(shape)]
            whole = layout(dtype, size, 2)
            check_program(program, [given, whole, 4], exact=True)
            before = whole.clone()
            assert program.compiled()(given, whole, 4) == ()
            before.narrow(along, 4, shape[along]).copy_(given)
            torch.testing.assert_close(whole, before, rtol=0, atol=0)


def test_several_parts_of_a_result(settings: None) -> None:
    """Of one size and of none, beside another result; a reduction of rows is a column."""
    nodes = (load(0, F32), compute("neg", F32, 0), reduce("sum", F32, 1, 1))
    first = replace(output(1, 0, 1, order=(1, 0)), along=1, total=1, offset=2)
    second = replace(output(2, 0, ONE, order=(1, 0)), along=1, into=1, offset=3)
    inputs = (tensor(F32, 0, 1), NUMBER, NUMBER, NUMBER)
    outputs = (output(2, 0), first, second, output(0, 0, 1))
    program = Program(2, inputs, nodes, outputs)
    for shape in ((3, 40), (40, 3), (1, 65), (300, 7)):
        x = exact(*shape)
        for at in (0, shape[1]):
            given = (x, shape[1] + 1, 1 - min(at, 1), at * 1)
            _, whole, _ = check_program(program, given, exact=True)
            column = -x.sum(1, keepdim=True)
            wanted = [-x, column] if at else [column, -x]
            torch.testing.assert_close(whole, torch.cat(wanted, 1))
            assert whole.stride() == (1, shape[0])


def test_places_that_are_not_there() -> None:
    part = replace(output(0, 0, 1), along=1, whole=1, offset=2)
    inputs = (tensor(F32, 0, 1), tensor(F32, 0, INDEXED), NUMBER)
    program = Program(2, inputs, (load(0, F32),), (part,)).compiled()
    x = exact(3, 5)
    for whole, at in (
        (exact(3, 9), 5),
        (exact(3, 9), -1),
        (exact(3, 4), 0),
        (exact(2, 9), 0),
        (exact(1, 9), 0),
        (exact(3, 9), 1 << 62),
        (exact(3, 9, dtype=torch.float64), 0),
    ):
        with pytest.raises(NotEncodable):
            program(x, whole, at)
    program(x, exact(3, 9), 4)
    part = replace(part, whole=-1, total=1)
    program = Program(2, (inputs[0], NUMBER, NUMBER), (load(0, F32),), (part,)).compiled()
    for total, at in ((4, 0), (9, 5), (9, -1), (-1, 0)):
        with pytest.raises(NotEncodable):
            program(x, total, at)
    assert program(x, 9, 4).shape == (3, 9)


def test_by_panels() -> None:
    """A panel knows its place in the whole along a loop that is cut, and along one that is not."""
    w, x, y = exact(300, 64), exact(4000, 64), exact(4000, 50)
    for axis, other in ((1, y), (0, exact(7, 300))):

        def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Any:
            return torch.cat([y, F.linear(x, w).relu()], axis)  # noqa: B023

        with machine((1 << 14, 4096, 64, 1024)):
            made = checked(program, (x, w, other))
            assert "panels_" in made.source


# -- graphs --


def checked(
    program: Callable[..., Any],
    given: tuple[Any, ...],
    others: tuple[tuple[Any, ...], ...] = (),
    dynamic: bool | None = None,
    left: tuple[Any, ...] = (),
) -> Schedule:
    """Compile, compare, and return what runs; ATen has no ``cat`` but what ``left`` names."""
    before = set(schedules())
    compiled = magjit.compile(program, backend="dvm", dynamic=dynamic)
    with torch.no_grad():
        for arguments in (given, given, *others):
            results, wanted = compiled(*arguments), program(*arguments)
            single = isinstance(wanted, torch.Tensor)
            for got, expected in zip(
                [results] if single else results, [wanted] if single else wanted, strict=True
            ):
                torch.testing.assert_close(got, expected, equal_nan=True)
                assert got.stride() == expected.stride()
    (made,) = set(schedules()) - before
    steps = [one.target for one in made.fusion.steps if isinstance(one, torch.fx.Node)]
    assert [one for one in steps if one in JOINING] == list(left), made.source
    if dynamic:
        assert magjit.stats(compiled).captures == 1
    return made


JOINING = (aten.cat.default, aten.stack.default)
X, Y, Z = exact(4, 6), exact(4, 3), exact(4, 1)
IMAGE = exact(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same, column after column: what ATen copies element by element."""
    return x.t().contiguous().t()


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "from outside": (lambda x, y, z: torch.cat([x, y, z], 1), (turned(X), turned(Y), turned(Z))),
    "from groups": (lambda x, y, z: torch.cat([x * 2, y.exp(), z + 1], -1), (X, Y, Z)),
    "read again": (
        lambda x, y: (torch.cat([x * 2, y + 1], 1) * 3, (x * 2) @ x.t(), y + 1),
        (X, Y),
    ),
    "of one group": (lambda x: torch.cat([x + 1, (x + 1).sum(1, keepdim=True)], 1), (X,)),
    "twice the same": (lambda x, y: torch.cat([x * 2, y + 1, x * 2], 1), (X, Y)),
    "in two wholes": (
        lambda x, y: (torch.cat([x * 2, y], 1), torch.cat([y, x * 2], -1)),
        (X, Y),
    ),
    "in one another": (
        lambda x, y: torch.cat([torch.cat([x * 2, y], 1).relu(), torch.cat([x, y], 1)], 0) + 1,
        (turned(X), turned(Y)),
    ),
    "in one another, directly": (
        lambda x, y, z: torch.cat([torch.cat([x * 2, y], 1), z.neg()], 1),
        (X, Y, Z),
    ),
    "of equal parts": (
        lambda x, z: torch.cat([torch.cat([x * 2, x + 1], 1), z.neg()], 1),
        (X, Z),
    ),
    "transposed": (lambda x, y: torch.cat([(x * 2).t(), y.t()[:, :2]], 1), (X, X)),
    "views of groups": (
        lambda x, y: torch.cat([(x * 2)[:, None].transpose(0, 1), y.neg()[None]], -1),
        (X, Y),
    ),
    "a view that is read again": (
        lambda x, y: (torch.cat([(x * 2).t(), y.neg().t()], 0), (x * 2).t() @ x),
        (X, Y),
    ),
    "promoted": (
        lambda x, y, z: torch.cat([x * 2, y.half() + 1, z.double(), z.long()], 1),
        (X, Y, Z),
    ),
    "of half": (lambda x, y: torch.cat([x.half() * 2, y.half()], 1), (X, Y)),
    "of half and ints": (lambda x, y: torch.cat([x.half(), y.long()], 1), (X, Y)),
    "of empty parts": (
        lambda x, y: torch.cat([torch.zeros(0), x * 2, y[:, :0], y + 1, torch.zeros(4, 0)], 1),
        (X, Y),
    ),
    "of rows that are empty": (lambda x, y: torch.cat([x[:0] * 2, y[:0] + 1], 1), (X, Y)),
    "channels last": (lambda x, y: torch.cat([x.relu(), y[:, :2]], 1), (IMAGE, IMAGE)),
    "expanded": (lambda x, y: torch.cat([x[:1].expand(4, -1), y * 2], 1), (Y, X)),
    "stacked, of several dtypes": (lambda x: torch.stack([x * 2, x.double(), x], 1), (X,)),
    "stacked, transposed": (lambda x, y: torch.stack([x.t().exp(), y * 2], -1), (X, exact(6, 4))),
    "numbers, stacked": (lambda x: torch.stack([x.sum(), x.amax().double()]), (X,)),
    "of one dimension": (lambda x, y: torch.cat([x[0] * 2, y[0].neg(), x.sum(1)]), (X, Y)),
    "bools": (lambda x, y: torch.cat([x > 0, y < 0], 1), (X, Y)),
    "bytes": (lambda x, y: torch.cat([x.to(torch.uint8), y > 0], 1), (X.abs(), Y)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_graphs(name: str) -> None:
    program, given = CASES[name]
    checked(program, given)


def test_producers_write_into_the_whole() -> None:
    """There is one operator for each part, and none for the whole."""
    made = checked(lambda x, y: torch.cat([x * 2, y.exp()], 1), (X, Y))
    assert len(made.fusion.groups) == 2
    assert all("empty" not in line for line in made.source.splitlines())
    made = checked(lambda x, y: torch.cat([x.exp().t(), y.neg().t()], 0), (X, Y))
    assert len(made.fusion.groups) == 2
    assert not any(isinstance(one, torch.fx.Node) and one.op == "call_function"
                   for one in made.fusion.steps)  # fmt: skip


def test_parts_that_nobody_computes() -> None:
    """ATen copies whole rows at once; where it cannot, or there is much to copy, the VM does."""
    cat, stack = torch.ops.aten.cat.default, torch.ops.aten.stack.default
    rows, other = exact(40, 30), exact(40, 7)
    checked(lambda x, y: torch.cat([x, y], 1), (rows, other), left=(cat,))
    checked(lambda x, y: torch.cat([x, y]).exp(), (rows, rows), left=(cat,))
    checked(lambda x, y: torch.cat([x[:, 5:], y[:, 1:]], 1) + 1, (rows, other), left=(cat,))
    checked(lambda x, y: torch.stack([x, y, x], 1), (rows, rows), left=(stack,))
    checked(lambda x, y: torch.cat([x, y], 1), (rows, other), dynamic=True, left=(cat,))
    for program, given in (
        (lambda x, y: torch.stack([x, y], 2), (rows, rows)),
        (lambda x, y: torch.cat([x.t(), y.t()]), (rows, other)),
        (lambda x, y: torch.cat([x, y * 2], 1), (rows, other)),
        (lambda x, y: torch.cat([x, y], 1), (exact(1100, 1000), exact(1100, 1001))),
    ):
        assert checked(program, given).fusion.groups


def test_stacks_do_not_read_what_they_write() -> None:
    """Several may write parts of a whole at once; who reads it comes after."""
    stacks = 0
    for program, given in CASES.values():
        for step in checked(lambda *args: _read(program(*args)), given)._steps:  # noqa: B023
            if not isinstance(step, Stack):
                continue
            stacks += 1
            for one, other in itertools.permutations(step.groups, 2):
                assert not set(one.outputs) & set(other.operands)
                assert not set(one.written) & (set(other.operands) - set(other.written))
    assert stacks > 5


def _read(results: Any) -> Any:
    results = (results,) if isinstance(results, torch.Tensor) else results
    return tuple(r for one in results for r in (one, one.double() + 1))


def test_other_sizes() -> None:
    """Each call finds where parts begin."""

    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return torch.cat([x * 2, y.softmax(1), z, x + 1], 1) * 2, torch.cat([x, x.exp(), z], 1)

    def of(rows: int, *columns: int) -> tuple[Any, ...]:
        return tuple(exact(rows, n) for n in columns)

    others = (of(4, 5, 6, 7), of(8, 2, 9, 3), of(3, 30, 2, 11), of(2, 70, 70, 70))
    checked(program, of(5, 6, 7, 9), others, dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_training(dynamic: bool) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.cat([x.tanh(), y, x.exp()], 1).sin() * 2).sum()

    compiled = magjit.compile(program, backend="dvm", dynamic=dynamic)
    for rows in (4, 4, 7):
        given = [exact(rows, n).requires_grad_() for n in (6, 3)]
        twins = [one.detach().clone().requires_grad_() for one in given]
        compiled(*given).backward()
        program(*twins).backward()
        for one, twin in zip(given, twins, strict=True):
            torch.testing.assert_close(one.grad, twin.grad)


def test_writes_stay_in_order() -> None:
    """A part that is written afterwards, and a whole that is."""

    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        whole = torch.cat([x, y * 2], 1)
        x.add_(1)
        whole[:, :2].mul_(3)
        return whole, torch.cat([x, y], 1)

    compiled = magjit.compile(program, backend="dvm")
    with torch.no_grad():
        for _ in range(3):
            (x, y), (a, b) = (X.clone(), Y.clone()), (X.clone(), Y.clone())
            for got, wanted in zip(compiled(x, y), program(a, b), strict=True):
                torch.testing.assert_close(got, wanted)
            torch.testing.assert_close(x, a)


def test_an_operator_that_raises() -> None:
    """Where a group runs operator by operator, parts are stored all the same."""

    def program(table: torch.Tensor, at: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.embedding(at, table) * 2, y + 1], 1)

    made = checked(program, (X, torch.tensor([0, 3, 1]), exact(3, 2)))
    compiled = magjit.compile(program, backend="dvm")
    with torch.no_grad():
        compiled(X, torch.tensor([0, 3, 1]), exact(3, 2))
        with pytest.raises(IndexError):
            compiled(X, torch.tensor([0, 4, 1]), exact(3, 2))
    for group in made.fusion.groups:
        assert group.program is not None


def test_operator_by_operator() -> None:
    """The same by ATen alone, for arguments that have no bytecode."""
    for program, given in CASES.values():
        made = checked(program, given)
        for fused, one in made.programs():
            made._globals[fused] = one.fallback
        made._globals["run_stacked"] = _stacked_by_aten
        with torch.no_grad():
            found, wanted = made.call(*given[: made.call.__code__.co_argcount]), program(*given)
        for got, one in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
            torch.testing.assert_close(got, one)
            assert got.stride() == one.stride()


def _stacked_by_aten(members: tuple[Any, ...], *arguments: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    given = iter(arguments)
    for one in members:
        made = one.fallback(*(next(given) for _ in one.source.inputs))
        found += made if isinstance(made, tuple) else (made,)
    return tuple(found)


def test_wholes_of_the_same_parts() -> None:
    """Each part goes into its own whole, where two have the same dimensions."""

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, given = y.exp(), x.exp()
        a, b = given.sin(), given.cos()
        return torch.cat([first, a, b]), torch.cat([first, b, a])

    compiled = magjit.compile(program, backend="dvm")
    for _ in range(3):
        given = exact(6, 5), exact(9, 5)
        torch.testing.assert_close(compiled(*given), program(*given))


def test_lazily() -> None:
    """One fused graph serves all sizes of a structure: offsets are found at each run."""
    for sizes in ((4, 6, 3), (5, 7, 2), (6, 11, 3), (4, 2, 9)):
        rows, *columns = sizes
        x, y = (exact(rows, n) for n in columns)
        with torch.no_grad(), magjit_dvm.lazy() as stats:
            whole = torch.cat([x * 2, y.exp(), x + 1], 1)
            result = (whole + 1).relu()
        torch.testing.assert_close(result, (torch.cat([x * 2, y.exp(), x + 1], 1) + 1).relu())
        torch.testing.assert_close(whole, torch.cat([x * 2, y.exp(), x + 1], 1))
    assert stats.compiled == 0
