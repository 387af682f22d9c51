"""Fused operators that do not depend on one another, run in one call."""

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import magjit
from magjit_dvm import vm
from magjit_dvm.backend import schedules
from magjit_dvm.stacking import MOST, Stack
from tests.dvm.checking import SMALL, machine


def stacks_of(function: Callable[..., object], *arguments: object) -> tuple[object, list[int]]:
    """A compiled function after two calls, and how many operators each of its stacks has."""
    before = set(schedules())
    compiled = magjit.compile(function, backend="dvm")
    with torch.no_grad():
        compiled(*arguments)
        compiled(*arguments)
    (schedule,) = set(schedules()) - before
    return compiled, [len(one.groups) for one in schedule._steps if isinstance(one, Stack)]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def apart(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x.exp() + 1, torch.softmax(y, -1), z * 2 - 1, z.amax(0)


SHAPES = {
    "alike": ((40, 50), (30, 70), (20, 10)),
    "one large": ((3, 5), (400, 512), (7, 2)),
    "a long reduction": ((3, 5), (1, 300000), (7, 2)),
    "nothing in one": ((0, 4), (5, 6), (9, 1)),
    "one element": ((1, 1), (1, 1), (1, 1)),
    "all large": ((300, 301), (256, 512), (511, 257)),
}


@pytest.mark.parametrize("settings", [None, SMALL, (1 << 16, 8192, 16)])
@pytest.mark.parametrize("shapes", list(SHAPES))
def test_results(shapes: str, settings: tuple[int, ...] | None, threads: int) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape) for shape in SHAPES[shapes]]
    with machine(settings):
        compiled, stacks = stacks_of(apart, *given)
        assert len(stacks) == 1 and stacks[0] >= 2
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), apart(*given))
            fresh = [torch.randn_like(one) for one in given]
            torch.testing.assert_close(compiled(*fresh), apart(*fresh))


def test_what_depends_is_not_stacked() -> None:
    def through_a_view(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        summed = x.sum(0)
        return summed, y + summed.view(-1, 1)

    x, y = torch.randn(5, 7), torch.randn(7, 3)
    compiled, stacks = stacks_of(through_a_view, x, y)
    assert stacks == []
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, y), through_a_view(x, y))


def test_stacks_have_an_end() -> None:
    def many(*given: Tensor) -> list[Tensor]:
        return [one.tanh() * number for number, one in enumerate(given)]

    given = [torch.randn(3, number) for number in range(2, 22)]
    compiled, stacks = stacks_of(many, *given)
    assert stacks == [MOST, MOST, 4]
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), many(*given))


def test_views_between_groups_move_out_of_the_way() -> None:
    def views(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        left = x * 2
        turned = left.t()
        right = y.t().contiguous() + 3
        return turned, right, right.view(-1)

    x, y = torch.randn(4, 5), torch.randn(6, 7)
    compiled, stacks = stacks_of(views, x, y)
    assert stacks == [2]
    with torch.no_grad():
        for mine, theirs in zip(compiled(x, y), views(x, y), strict=True):
            torch.testing.assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_a_whole_is_read_after_its_last_part(threads: int) -> None:
    def joined(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        whole = torch.cat([x.softmax(1), y.t() + 1, z * 2])
        return whole, whole.sum(1), z.exp(), whole[1:].amax(0), y.abs()

    given = [torch.randn(30, 8), torch.randn(8, 5), torch.randn(900, 8)]
    compiled, stacks = stacks_of(joined, *given)
    assert stacks
    for _ in range(20):
        fresh = [torch.randn_like(one) for one in given]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*fresh), joined(*fresh))


def test_errors_are_those_of_their_operator() -> None:
    def looked_up(table: Tensor, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.embedding(at, table) * 2, x + 1

    table, x = torch.randn(10, 4), torch.randn(3)
    compiled, stacks = stacks_of(looked_up, table, torch.tensor([1, 2]), x)
    assert stacks == [2]
    with torch.no_grad(), pytest.raises(IndexError, match="index out of range"):
        compiled(table, torch.tensor([1, 10]), x)
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(table, torch.tensor([0, 9]), x), looked_up(table, torch.tensor([0, 9]), x)
        )


def members() -> tuple[tuple[object, ...], list[Tensor]]:
    """Two fused operators and their arguments."""
    seen: list[tuple[object, ...]] = []
    given = [torch.randn(3, 4), torch.randn(5)]
    compiled, stacks = stacks_of(lambda x, y: (x + 1, y * 2), *given)
    assert stacks == [2]
    vm.observe(seen)
    try:
        with torch.no_grad():
            compiled(*given)
    finally:
        vm.observe(None)
    # Whoever observes sees each operator with its own arguments.
    assert [len(one) for one in seen] == [2, 2]
    return tuple(one[0] for one in seen), given


def test_arguments_of_the_call() -> None:
    operators, (x, y) = members()
    with torch.no_grad():
        torch.testing.assert_close(vm.run_stacked(operators, x, y), (x + 1, y * 2))
        # Where one has no bytecode, each is called by itself.
        wide = x.to(torch.complex64)
        torch.testing.assert_close(vm.run_stacked(operators, wide, y), (wide + 1, y * 2))
    for wrong in ((operators, x), (operators, x, y, y), ([], x), ((len,), x), (operators * 5, x)):
        with pytest.raises(TypeError):
            vm.run_stacked(*wrong)
    assert vm.run_stacked(()) == ()


def test_no_references_are_kept() -> None:
    operators, (x, y) = members()
    gc.collect()
    before = [sys.getrefcount(one) for one in (*operators, x, y, operators)]
    for _ in range(100):
        results = vm.run_stacked(operators, x, y)
        vm.run_stacked(operators, x.to(torch.complex64), y)
        with pytest.raises(TypeError):
            vm.run_stacked(operators, x)
        assert [sys.getrefcount(one) for one in results] == [3, 3]
    assert [sys.getrefcount(one) for one in (*operators, x, y, operators)] == before
