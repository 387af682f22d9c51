"""Memory of captured programs: who uses it until when, and where it lies."""

from __future__ import annotations

import weakref
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magjit_triton.codegen.memory_plan import (
    Allocation,
    Planned,
    Watched,
    is_worth_planning,
    planned,
    pool_bytes,
    with_memory,
)

CPU = torch.device("cpu")


def program(x):
    """As programs are written: memory by name, dropped after its last use."""
    a = __empty_strided((4, 64), (64, 1), dtype=torch.float32, device=device)  # noqa: F821
    torch.add(x, 1, out=a)
    b = product(a, a.t())  # noqa: F821
    view = a[1:]
    del a
    c = __empty_strided((3, 64), (64, 1), dtype=torch.float32, device=device)  # noqa: F821
    torch.mul(view, 2, out=c)
    del view
    d = __empty_strided((4, 64), (64, 1), dtype=torch.float32, device=device)  # noqa: F821
    torch.mm(b, x, out=d)
    del b
    return [c, d[2:]]


program.__globals__.update(__empty_strided=torch.empty_strided, product=torch.mm, device=CPU)
LIBRARY = {"product": torch.mm}


def watched(x: torch.Tensor) -> list[Allocation]:
    seen = Watched()
    results = with_memory(program, LIBRARY, seen)(x)
    found = seen.finish()
    del results
    return found


def test_a_run_is_watched() -> None:
    found = watched(torch.randn(4, 64))
    assert [(one.begin, one.end, one.count) for one in found] == [
        (0, 3, 1024),  # its view is used when the third is asked for
        (1, 4, 64),
        (2, None, 768),
        (3, None, 1024),
    ]
    assert found[1].strides == (4, 1)


def test_results_in_planned_memory_are_the_same_and_their_own() -> None:
    x = torch.randn(4, 64)
    found = watched(x)
    first = Planned(found, stream=0)
    assert first.block is not None
    assert first.block.numel() == 1024 + 64
    first.block.fill_(255)
    results = with_memory(program, LIBRARY, first)(x)
    other = torch.randn(4, 64)
    second = Planned(found, stream=0)
    assert second.block is first.block
    others = with_memory(program, LIBRARY, second)(other)
    for given_, made in ((x, results), (other, others)):
        for one, wanted in zip(made, program(given_), strict=True):
            torch.testing.assert_close(one, wanted, rtol=0, atol=0)


def test_a_block_goes_with_its_last_user() -> None:
    found = watched(torch.randn(4, 64))
    large = Planned(found, stream=7)
    small = Planned(found[:1], stream=7)
    assert small.block is large.block
    assert Planned(found, stream=8).block is not large.block
    block = weakref.ref(large.block)
    del large
    assert block() is small.block
    del small
    assert block() is None


def test_a_run_that_deviates_is_refused() -> None:
    x = torch.randn(4, 64)
    found = watched(x)
    with pytest.raises(RuntimeError, match="planned"):
        with_memory(program, LIBRARY, Planned(found[:2], stream=0))(x)
    found[0].dtype = torch.float64
    with pytest.raises(RuntimeError, match=r"memory for \(4, 64\)"):
        with_memory(program, LIBRARY, Planned(found, stream=0))(x)


uses = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 12) | st.none()), min_size=1, max_size=40
)


def allocation(count: int, begin: int, end: int | None, *, movable: bool = True) -> Allocation:
    return Allocation((count,), (1,), torch.uint8, CPU, count, begin, end, movable)


def test_results_of_the_library_stay_where_they_are() -> None:
    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x * 2

    seen = Watched()
    first, second = seen.calling(split, None)(torch.ones(4))
    made = seen.empty_strided((4,), (1,), dtype=torch.float32, device=CPU)
    del first, made
    found = seen.finish()
    assert [(one.movable, one.end) for one in found] == [(False, 3), (False, None), (True, 3)]
    memory = Planned(found, stream=0)
    torch.testing.assert_close(memory.calling(split, None)(torch.ones(4))[1], second)
    assert memory.empty_strided((4,), (1,), dtype=torch.float32, device=CPU).shape == (4,)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("allocations", "pool", "worth"),
    [
        ([], 0, False),
        ([allocation(3 * MIB, 0, 2), allocation(3 * MIB, 1, None)], 20 * MIB, True),
        ([allocation(1000, 0, 2), allocation(3 * MIB, 1, None)], 22 * MIB, True),
        # Its segment is there in any case, and has room for all.
        ([allocation(3 * MIB, 0, 2, movable=False), allocation(6 * MIB, 1, 3)], 20 * MIB, False),
        ([allocation(30 * MIB, 0, 1), allocation(30 * MIB, 1, 2)], 30 * MIB, False),
        ([allocation(30 * MIB, 0, 2), allocation(30 * MIB, 1, 3)], 60 * MIB, False),
    ],
)
def test_a_pool_keeps_whole_segments(
    allocations: list[Allocation], pool: int, *, worth: bool
) -> None:
    assert pool_bytes(allocations) == pool
    assert is_worth_planning(allocations) is worth


@given(uses)
def test_what_is_used_at_once_does_not_overlap(given_uses: list[tuple[int, int | None]]) -> None:
    found = [
        allocation(count, k, None if own is None else k + 1 + own)
        for k, (count, own) in enumerate(given_uses)
    ]
    offsets, total = planned(found)
    assert set(offsets) == {one for one in found if one.end is not None and one.count}
    for one, place in offsets.items():
        assert place % 512 == 0
        assert place + one.count <= total
    for one, other in combinations(offsets, 2):
        if one.begin < other.end and other.begin < one.end:
            below, above = sorted((one, other), key=offsets.__getitem__)
            assert offsets[below] + below.count <= offsets[above]
    most = max(
        sum(one.count for one in offsets if one.begin <= k < one.end) for k in range(len(found))
    )
    assert most <= total <= sum(-(-one.count // 512) * 512 for one in offsets)
