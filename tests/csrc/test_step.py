"""Steps between two regions: what C does of them, and what it leaves to Python."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from magjit._C import Step

PYTHON, TEST, NEXT = range(3)


def kind_of(value: Any) -> str:
    return type(value).__name__


def way_of(value: Any) -> str:
    return repr(value[1] if value else value)


class Point:
    """Stands in for a cut point: notes what it is asked, and raises what it is told."""

    def __init__(self, **ways: tuple[Callable[..., Any] | None, tuple[int, ...]]) -> None:
        self.ways = ways
        self.asked: list[Any] = []

    def find_way(self, _: Any, offset: int, count: int) -> Any:
        self.asked.append((offset, count))
        return self.ways[f"at_{offset}"]

    def perform(self, held: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
        self.asked.append((held, operands))
        return 10, tuple(operands)

    def follow(self, offset: int, left: tuple[Any, ...]) -> Any:
        iterator, value = left
        return 30, (iterator, *reversed(list(value)))

    def raising(self, error: BaseException, held: tuple[Any, ...]) -> Any:
        return type(error), held


def made(point: Point, kind: int, held: int, **further: Any) -> Step:
    return Step(point, point.find_way, kind, held, 10, 20, **further)


def together(*values: Any) -> tuple[Any, ...]:
    return values


@pytest.mark.parametrize("jumps_if", [False, True])
@pytest.mark.parametrize("operand", [0, 3, [], "x"])
def test_a_test_goes_where_it_says(operand: Any, jumps_if: bool) -> None:
    point = Point(at_10=(together, (1, 0)), at_20=(together, (0, 0, 2)))
    step = made(point, TEST, 3, jumps_if=jumps_if)
    jumps = bool(operand) is jumps_if
    expected = ("a", "a", "c") if jumps else ("b", "a")
    for _ in range(2):
        assert step.drive(("a", "b", "c", operand)) == expected
    assert point.asked == [(20 if jumps else 10, 0)], "a way is asked for once"
    assert step.done == 2
    step.forget()
    assert step.drive(("a", "b", "c", operand)) == expected and len(point.asked) == 2


def test_a_test_that_raises_goes_on_raising() -> None:
    class Odd:
        def __bool__(self) -> bool:
            raise KeyError("odd")

    assert made(Point(), TEST, 1).drive(("a", Odd())) == (KeyError, ("a",))


def test_a_loop_ends_and_a_long_one_needs_no_stack() -> None:
    count = 0

    def body(total: int, iterator: Any, value: int) -> Any:
        nonlocal count
        count += 1
        return step((total + value, iterator))

    point = Point(at_10=(body, (0,)), at_20=(None, (0,)))
    step = made(point, NEXT, 1)
    assert step.drive((0, iter(range(100_000)))) == sum(range(100_000))
    assert count == 100_000 and step.done == 100_001


@pytest.mark.parametrize("pair", [(1, 2), [1, 2], "ab", {1: 0, 2: 0}, iter((1, 2))], ids=kind_of)
def test_what_a_loop_gives_is_taken_apart(pair: Any) -> None:
    point = Point(at_30=(together, (0,)))
    step = made(point, NEXT, 1, unpacks=2, unpacked=30)
    iterator = iter([pair])
    first, second = "ab" if pair == "ab" else (1, 2)
    assert step.drive(("held", iterator)) == ("held", iterator, second, first)


def test_an_iterator_that_raises_goes_on_raising() -> None:
    def fails() -> Any:
        yield 1
        raise OSError

    iterator = fails()
    next(iterator)
    assert made(Point(), NEXT, 1).drive(("a", iterator)) == (OSError, ("a",))


def test_anything_else_is_pythons() -> None:
    point = Point(at_10=(together, (0,)))
    assert made(point, PYTHON, 1).drive(("a", "b", "c")) == ("a", "b", "c")
    assert point.asked == [(("a",), ("b", "c")), (10, 2)]
    assert made(point, NEXT, 1).drive(("a", 5)) == ("a", 5), "5 is no iterator"


def test_a_result_is_the_last_value() -> None:
    assert made(Point(at_10=(None, ())), PYTHON, 1).drive(("a", "b")) == "b"


@pytest.mark.parametrize(
    "way", [(None, ()), (together, (7,)), (together, (-1,)), (together, None), None], ids=way_of
)
def test_a_wrong_way_is_refused(way: Any) -> None:
    with pytest.raises((IndexError, TypeError, SystemError)):
        made(Point(at_20=way), TEST, 1).drive(("a", False))


def test_values_have_to_be_a_tuple_of_all() -> None:
    step = made(Point(), TEST, 2)
    for values in (["a", "b", "c"], ("a",), None):
        with pytest.raises(TypeError):
            step.drive(values)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            step(values)  # type: ignore[arg-type]


def test_nothing_is_kept_that_the_next_region_does_not_get() -> None:
    class Value:
        pass

    def region(kept: Value) -> Any:
        return dead() is None

    held = [Value(), Value()]
    dead = weakref.ref(held[1])
    point = Point(at_20=(region, (0,)))
    first, second = made(point, TEST, 2), made(point, TEST, 2)

    def gives() -> Any:
        return second((*held, False)), held.clear()

    enter = Point(at_20=(lambda: gives()[0], ()))
    assert first is not second
    assert made(enter, TEST, 0).drive((False,)) is True


def test_references_are_balanced() -> None:
    value, point = object(), Point(at_20=(together, (0,)), at_30=(together, (0, 0)))
    test, loop = made(point, TEST, 1), made(point, NEXT, 1, unpacks=2, unpacked=30)
    pair = (value, value)
    calls: list[Callable[[], Any]] = [
        lambda: test.drive((value, False)),
        lambda: loop.drive((value, iter([pair]))),
        lambda: loop.drive((value, iter([[value, value]]))),
        lambda: loop.drive((value, iter([{value: 0, 1: 0}]))),
        lambda: test((value, False)),
    ]
    for call in calls:
        call()
        before = sys.getrefcount(value)
        for _ in range(50):
            call()
        assert sys.getrefcount(value) == before


def test_a_cycle_through_a_step_is_collected() -> None:
    point = Point(at_20=(together, (0,)))
    step = made(point, TEST, 1)
    point.ways["step"] = (step, ())
    step.drive((1, False))
    gone = weakref.ref(step)
    del step, point
    gc.collect()
    assert gone() is None
