"""Writes to the attributes and containers of an outside object."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..twin import Scene
from .table import new_table

ROWS = new_table()


class Box:
    """An outside object with everything that a program may write to."""

    total = 0

    def __init__(self) -> None:
        self.value: Any = None
        self.items: list[Any] = [torch.ones(2)]
        self.table: dict[Any, Any] = {"a": 1, "b": 2}
        self.names: set[Any] = {"a"}
        self.queue: collections.deque[Any] = collections.deque([0], maxlen=3)
        self.counts: collections.Counter[str] = collections.Counter("a")
        self.groups: collections.defaultdict[str, list[Any]] = collections.defaultdict(list)
        self.ordered = collections.OrderedDict(a=1, b=2, c=3)
        self.array = bytearray(b"abc")


def put(container: Any, key: Any, value: Any) -> Any:
    container[key] = value


def delete(container: Any, key: Any) -> None:
    del container[key]


def set_slice(items: list[Any], x: torch.Tensor) -> None:
    items[:] = [x, 2]


def extend(items: list[Any], x: torch.Tensor) -> None:
    items += [x, x]


def deleted_again(box: Box) -> None:
    box.value = 3
    del box.value
    box.value = 4


def written_twice(box: Box, x: torch.Tensor) -> None:
    box.value = x
    box.value = [x]


def swapped(box: Box) -> None:
    box.items, box.table = box.table, box.items  # type: ignore[assignment]


def walrus_chain(box: Box, x: torch.Tensor) -> None:
    box.first = box.second = y = x + 5  # type: ignore[attr-defined]
    box.items[0] = y


def cross_linked(box: Box, x: torch.Tensor) -> None:
    made = Box()
    made.value, box.value = box, made
    made.items.append(x * 3)


# name -> what the program does to the box; `x` is the call's tensor plus one
WRITES: dict[str, Callable[[Box, torch.Tensor], Any]] = {
    "attribute set to a tensor": lambda b, x: setattr(b, "value", x),
    "attribute set to the same tensor twice": lambda b, x: setattr(b, "value", [x, x]),
    "attribute set to a constant": lambda b, x: setattr(b, "value", 3),
    "attribute written twice": written_twice,
    "attribute added": lambda b, x: setattr(b, "added", x),
    "attribute deleted and set": lambda b, x: deleted_again(b),
    "attributes chained": walrus_chain,
    "attributes cross linked": cross_linked,
    "attribute through vars": lambda b, x: vars(b).update(value=x),
    "attribute through object setattr": lambda b, x: object.__setattr__(b, "value", x),
    "attribute set to the box itself": lambda b, x: setattr(b, "value", b),
    "attribute set to a closure": lambda b, x: setattr(b, "value", lambda: x),
    "attribute set to a bound method": lambda b, x: setattr(b, "value", b.items.append),
    "class attribute": lambda b, x: setattr(type(b), "total", x),
    "list append": lambda b, x: b.items.append(x),
    "list item": lambda b, x: put(b.items, 0, x),
    "list negative item": lambda b, x: put(b.items, -1, x),
    "list slice": lambda b, x: set_slice(b.items, x),
    "list plus equals": lambda b, x: extend(b.items, x),
    "list insert": lambda b, x: b.items.insert(0, x),
    "list pop after append": lambda b, x: (b.items.append(x), b.items.pop()),
    "list clear and fill": lambda b, x: (b.items.clear(), b.items.extend([x, 1])),
    "list reverse": lambda b, x: (put(b.items, slice(None), [x, 1, 2]), b.items.reverse()),
    "list sort": lambda b, x: (put(b.items, slice(None), [3, 1, 2]), b.items.sort()),
    "dict new value": lambda b, x: put(b.table, "a", x),
    "dict new key": lambda b, x: put(b.table, "c", x),
    "dict update": lambda b, x: b.table.update(b=x, d=x),
    "dict merge": lambda b, x: b.table.__ior__({"z": x}),
    "dict deleted and put back": lambda b, x: (delete(b.table, "a"), put(b.table, "a", x)),
    "dict pop and put": lambda b, x: (b.table.pop("b"), put(b.table, "b", x)),
    "dict setdefault": lambda b, x: b.table.setdefault("new", x),
    "dict clear and fill": lambda b, x: (b.table.clear(), b.table.update(q=x)),
    "dict popitem": lambda b, x: (put(b.table, "last", x), b.table.popitem()),
    "dict tensor key": lambda b, x: b.table.clear() or put(b.table, ("k", 1), {"deep": x}),
    "set add and discard": lambda b, x: (b.names.add("b"), b.names.discard("a")),
    "set update": lambda b, x: b.names.update({"p", "q"}),
    "set cleared and filled": lambda b, x: (b.names.clear(), b.names.update({"p", len(b.names)})),
    "set members exchanged": lambda b, x: b.names.symmetric_difference_update({"a", "b"}),
    "deque append": lambda b, x: b.queue.append(x),
    "deque append left": lambda b, x: b.queue.appendleft(x),
    "deque rotate": lambda b, x: (b.queue.extend([x, 1, 2]), b.queue.rotate(1)),
    "default dict": lambda b, x: b.groups["a"].append(x),
    "ordered dict moved": lambda b, x: b.ordered.move_to_end("a"),
    "ordered dict value": lambda b, x: put(b.ordered, "b", x),
    "bytearray item": lambda b, x: put(b.array, 0, 65),
}


def writes(program: Callable[[Box, torch.Tensor], Any]) -> Scene:
    class FreshBox(Box):
        pass

    box = FreshBox()

    def run(x: torch.Tensor) -> Any:
        y = x + 1
        program(box, y)
        return y * 2, y

    return Scene(run, state=lambda: (box, FreshBox.__dict__.get("total")))


for row_name, write in WRITES.items():
    ROWS.add(f"writes {row_name}", functools.partial(writes, write))

# name -> a write whose next call reads what it wrote
COUNTERS: dict[str, Callable[[Box, torch.Tensor], Any]] = {
    "attribute counts": lambda b, x: setattr(b, "value", (b.value or 0) + 1),
    "class attribute counts": lambda b, x: setattr(type(b), "total", type(b).total + 1),
    "item counts": lambda b, x: put(b.table, "a", b.table["a"] + 1),
    "counter counts": lambda b, x: b.counts.update("ab"),
    "length counts": lambda b, x: b.items.append(len(b.items)),
    "dict grows": lambda b, x: put(b.table, len(b.table), x),
    "attribute accumulates tensors": lambda b, x: setattr(
        b, "value", x if b.value is None else b.value + x
    ),
    "list pops until empty": lambda b, x: b.items.pop() if b.items else b.items.append(x),
    "attribute deleted when there": lambda b, x: (
        delattr(b, "there") if hasattr(b, "there") else setattr(b, "there", 1)
    ),
    "attributes swapped": lambda b, x: swapped(b),
}

for row_name, write in COUNTERS.items():
    ROWS.add(f"reads and {row_name}", functools.partial(writes, write), replays=False)
