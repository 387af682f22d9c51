"""What is read of an object that the run has changed elsewhere is compared all the same."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit

from ..twin import differ


class State:
    """The outside world."""

    def __init__(self) -> None:
        self.items: list[Any] = [1.0, 2.0, 3.0]
        self.table: dict[str, Any] = {"a": 1.5, "b": 2}
        self.members = {1, 2}
        self.steps, self.last = 2, 0
        self.queue = collections.deque([1.0, 2.0, 3.0])
        self.ordered: dict[str, Any] = collections.OrderedDict(a=1, b=2)
        self.empty: list[Any] = []
        self.missing: dict[str, int] = collections.defaultdict(int, a=2)
        self.counter = collections.Counter(a=2)


Rows = dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]]
ROWS: Rows = {}


def row(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A program, and how the world changes between the first call and the second."""

    def add(program: Any) -> Any:
        ROWS[program.__name__.replace("_", " ")] = program, change
        return program

    return add


@row(lambda s: s.items.__setitem__(1, 5.0))
def another_item_of_a_list(x: Any, s: Any) -> Any:
    s.items[0] = x
    return x * s.items[1]


@row(lambda s: s.items.append(3))
def length_of_a_list(x: Any, s: Any) -> Any:
    s.items[0] = x
    return x * len(s.items)


@row(lambda s: s.table.__setitem__("z", 3))
def length_of_a_dict(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * len(s.table)


@row(lambda s: s.table.__setitem__("z", 3))
def keys_of_a_dict(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * len(list(s.table.keys())), list(s.table)


@row(lambda s: s.table.__setitem__("b", 7))
def another_item_of_a_dict(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * s.table.get("b", 1)


@row(lambda s: s.table.pop("b"))
def an_item_that_goes(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * s.table.get("b", 1)


@row(lambda s: s.table.__setitem__("q", 7))
def an_item_that_comes(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * s.table.get("q", 1)


@row(lambda s: s.table.__setitem__("q", 7))
def a_key_that_comes(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * (2 if "q" in s.table else 3)


@row(lambda s: s.table.__setitem__("q", 7))
def a_key_that_must_not_be_there(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * (2 if "q" not in s.table else 3)


@row(lambda s: s.table.pop("b"))
def a_key_that_goes_behind_a_deletion(x: Any, s: Any) -> Any:
    s.table["a"] = x
    del s.table["a"]
    s.table["a"] = 2.0
    return x * (2 if "b" in s.table else 3)


@row(lambda s: s.members.add(9))
def member_of_a_set(x: Any, s: Any) -> Any:
    s.members.add(1)
    return x * (2 if 9 in s.members else 3)


@row(lambda s: s.items.__setitem__(1, 5.0))
def item_of_a_list_that_grows(x: Any, s: Any) -> Any:
    s.items.append(2.0)
    return x * s.items[1]


@row(lambda s: s.items.__setitem__(1, 5.0))
def member_of_a_list(x: Any, s: Any) -> Any:
    s.items[0] = 2.5
    return x * (2 if 5.0 in s.items else 3)


@row(lambda s: setattr(s, "steps", 5))
def another_attribute(x: Any, s: Any) -> Any:
    s.last = x
    return x * s.steps


@row(lambda s: delattr(s, "steps"))
def an_attribute_that_goes(x: Any, s: Any) -> Any:
    s.last = x
    return x * (2 if hasattr(s, "steps") else 3)


@row(lambda s: setattr(s, "other", 5))
def an_attribute_that_comes(x: Any, s: Any) -> Any:
    s.last = x
    return x * (2 if hasattr(s, "other") else 3)


@row(lambda s: s.queue.__setitem__(1, 5.0))
def another_item_of_a_deque(x: Any, s: Any) -> Any:
    s.queue[0] = 2.5
    return x * s.queue[1]


@row(lambda s: s.items.__setitem__(-1, 5.0))
def last_item_of_a_list(x: Any, s: Any) -> Any:
    s.items[0] = x
    return x * s.items[-1]


@row(lambda s: s.items.__setitem__(1, 5.0))
def part_of_a_list(x: Any, s: Any) -> Any:
    s.items[0] = 1.0
    return x * sum(s.items[1:])


@row(lambda s: s.items.__setitem__(1, 5.0))
def loop_over_a_list(x: Any, s: Any) -> Any:
    s.items[0] = 1.0
    return [x * v for v in s.items]


@row(lambda s: s.table.update(b=9))
def loop_over_a_dict(x: Any, s: Any) -> Any:
    s.table["a"] = 1.0
    return [(k, x * v) for k, v in s.table.items()]


@row(lambda s: s.ordered.move_to_end("a"))
def order_of_a_dict(x: Any, s: Any) -> Any:
    s.ordered["c"] = x
    return list(s.ordered)


@row(lambda s: s.items.append(0.0))
def another_list_that_is_empty(x: Any, s: Any) -> Any:
    s.items[0] = 1.0
    return x * (2 if s.empty else 3)


@row(lambda s: s.empty.append(0.0))
def another_list_that_is_not_empty(x: Any, s: Any) -> Any:
    s.items[0] = 1.0
    return x * (2 if s.empty else 3)


@row(lambda s: s.table.clear())
def truth_of_a_dict(x: Any, s: Any) -> Any:
    s.table["a"] = 1.0
    del s.table["a"]
    return x * (2 if s.table else 3)


@row(lambda s: s.missing.__setitem__("q", 4))
def item_of_a_defaultdict(x: Any, s: Any) -> Any:
    s.missing["a"] = 1
    return x * s.missing["q"]


@row(lambda s: s.counter.__setitem__("q", 4))
def item_of_a_counter(x: Any, s: Any) -> Any:
    s.counter["a"] = 1
    return x * s.counter["q"]


@row(lambda s: s.counter.__setitem__("q", 4))
def key_of_a_counter(x: Any, s: Any) -> Any:
    s.counter["a"] = 1
    return x * (2 if "q" in s.counter else 3)


@row(lambda s: s.table.pop("b"))
def a_key_that_goes(x: Any, s: Any) -> Any:
    s.table["a"] = x
    return x * (2 if "b" in s.table else 3)


@row(lambda s: s.table.pop("b"))
def a_key_that_the_run_sets(x: Any, s: Any) -> Any:
    s.table["b"] = 1.0
    return x * (2 if "b" in s.table else 3)


def outcome(program: Any, state: State) -> Any:
    try:
        result, raised = program(torch.ones(3), state), None
    except AttributeError as error:
        result, raised = None, str(error)
    return {"result": result, "raised": raised, "state": vars(state)}


@pytest.mark.parametrize("name", ROWS)
def test_a_read_behind_a_write(name: str) -> None:
    program, change = ROWS[name]
    compiled = magjit.compile(program, backend="eager")
    worlds = State(), State()
    for call in range(4):
        if call == 1:
            for world in worlds:
                change(world)
        found = differ(outcome(program, worlds[0]), outcome(compiled, worlds[1]))
        assert found is None, f"call {call}: {found}"
    assert magjit.stats(compiled).eager_calls == 0
