"""The order of kernels in which least memory is in use at once."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from magjit_triton.codegen.ordering import Use, lowering_peak, peak


class Unit:
    """Makes one tensor out of others."""

    def __init__(self, name: str, count: int, *reads: Unit, **flags: bool) -> None:
        self.name, self.sources = name, reads
        self.use = Use({name: count}, frozenset(one.name for one in reads), **flags)


def ordered(units: list[Unit], kept: tuple[str, ...] = ()) -> list[Unit]:
    before: dict[int, set[int]] = {}
    for one in units:
        direct = {id(source) for source in one.sources}
        before[id(one)] = direct.union(*(before[source] for source in direct))
    return lowering_peak(units, lambda one: one.use, before, frozenset(kept))


def names(units: list[Unit]) -> str:
    return " ".join(one.name for one in units)


def attention(**flags: bool) -> list[Unit]:
    """The query waits while keys and values are multiplied, unless it is made later."""
    parts = Unit("parts", 12, movable=False)
    q = Unit("q", 4, parts, **flags)
    k, v = Unit("k", 4, parts), Unit("v", 4, parts)
    kv = Unit("kv", 1, k, v, movable=False)
    return [parts, q, k, v, kv, Unit("out", 4, kv, q, movable=False)]


def test_what_waits_is_made_later() -> None:
    units = attention()
    found = ordered(units, ("out",))
    assert names(found) == "parts k v kv q out"
    assert peak([one.use for one in units]) == (24, 3)
    assert peak([one.use for one in found])[0] == 21


def test_nothing_to_order() -> None:
    assert ordered([]) == []


def test_what_may_not_move_stays() -> None:
    units = attention(movable=False)
    assert names(ordered(units)) == names(units)


def test_nothing_passes_what_changes_inputs() -> None:
    units = attention()
    units.insert(5, Unit("update", 0, movable=False, writes=True))
    assert names(ordered(units)) == "parts k v kv q update out"


def test_what_keeps_more_alive_stays() -> None:
    large = Unit("large", 10, movable=False)
    small = Unit("small", 1, large)
    other = Unit("other", 10, movable=False)
    units = [large, small, other, Unit("out", 1, other, small, movable=False)]
    assert names(ordered(units)) == "large small other out"


@st.composite
def programs(draw: st.DrawFn) -> list[Unit]:
    units: list[Unit] = []
    for number in range(draw(st.integers(1, 6))):
        sources = draw(st.sets(st.sampled_from(units), max_size=3)) if units else set()
        movable = draw(st.booleans())
        units.append(Unit(str(number), draw(st.integers(0, 9)), *sources, movable=movable))
    return units


@given(programs())
def test_the_order_is_legal_and_no_worse(units: list[Unit]) -> None:
    found = ordered(units)
    assert set(found) == set(units)
    for number, one in enumerate(found):
        assert set(one.sources) <= set(found[:number])
    fixed = [one for one in units if not one.use.movable]
    assert [one for one in found if not one.use.movable] == fixed
    most = peak([one.use for one in found])[0]
    assert most <= peak([one.use for one in units])[0]
    assert most >= min(peak([one.use for one in other])[0] for other in permutations(units))
