"""Kinds of values and containers, read from a module attribute and from an argument."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..twin import Scene, call
from .table import RECAPTURED, RIGHT, new_table

ROWS = new_table()


class Color(enum.Enum):
    RED = 2
    BLUE = 3


class Level(enum.IntEnum):
    LOW = 2
    HIGH = 3


@dataclasses.dataclass
class Options:
    scale: float = 2.0
    other: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0


class Named(str):
    tag = 0


class Plain:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("other", "scale")

    def __init__(self) -> None:
        self.scale, self.other = 2.0, 1.0


class Equal:
    """Says that it equals everything: a guard that trusted `==` would be wrong."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Node:
    def __init__(self, scale: float, after: Node | None = None) -> None:
        self.scale, self.after = scale, after


class Items(collections.UserDict):  # type: ignore[type-arg]
    pass


class MyList(list):  # type: ignore[type-arg]
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


Point = collections.namedtuple("Point", "a b")


class Holder(torch.nn.Module):
    """Multiplies by what `read` makes of its value."""

    def __init__(self, value: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.value, self.read = value, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.read(self.value) + 1


def value(v: Any) -> Any:
    return v


def by_type(v: Any) -> float:
    """Tells apart values that are equal but of other types."""
    return {bool: 2.0, int: 3.0, float: 4.0}.get(type(v), 5.0)


def text(v: Any) -> float:
    return 2.0 if v == "on" else 3.0


def in_order(items: Any) -> float:
    total = 0.0
    for position, item in enumerate(items):
        total += (position + 1) * item
    return total


def values_in_order(mapping: Any) -> float:
    return in_order(mapping.values())


def sign(v: float) -> str | float:
    return -1.0 if str(v).startswith("-") else 1.0


# name -> (initial value, value that replaces it, how the program reads it)
REPLACED: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], Any]]] = {
    "int": (lambda: 2, lambda: 3, value),
    "float": (lambda: 2.0, lambda: 2.5, value),
    "str": (lambda: "on", lambda: "off", text),
    "str subclass": (lambda: Named("on"), lambda: Named("off"), text),
    "bytes": (lambda: b"ab", lambda: b"cd", lambda v: v[0]),
    "bytearray": (lambda: bytearray(b"ab"), lambda: bytearray(b"cd"), lambda v: v[0]),
    "bool": (lambda: True, lambda: False, lambda v: 2 if v else 3),
    "none": (lambda: None, lambda: 3, lambda v: 2 if v is None else v),
    "ellipsis": (lambda: ..., lambda: 3, lambda v: 2 if v is ... else v),
    "complex": (lambda: 1 + 2j, lambda: 1 - 2j, value),
    "big int": (lambda: 2**70, lambda: 2**70 + 1, lambda v: float(v % 1000)),
    "minus zero": (lambda: 0.0, lambda: -0.0, sign),
    "nan": (lambda: float("nan"), lambda: 1.0, lambda v: 2.0 if v != v else v),
    "equal int and float": (lambda: 1, lambda: 1.0, by_type),
    "equal int and bool": (lambda: 1, lambda: True, by_type),
    "tuple": (lambda: (1, 2), lambda: (1, 3), sum),
    "equal tuple and list": (
        lambda: (1, 2),
        lambda: [1, 2],
        lambda v: 2 if type(v) is tuple else 3,
    ),
    "namedtuple": (lambda: Point(1, 2), lambda: Point(1, 3), lambda v: v.a + v.b),
    "frozenset": (lambda: frozenset({1, 2}), lambda: frozenset({1, 3}), sum),
    "enum": (lambda: Color.RED, lambda: Color.BLUE, lambda v: v.value),
    "int enum": (lambda: Level.LOW, lambda: Level.HIGH, lambda v: int(v)),
    "slice": (lambda: slice(0, 2), lambda: slice(0, 3), lambda v: float(v.stop)),
    "range": (lambda: range(3), lambda: range(4), sum),
    "torch size": (lambda: torch.Size([2, 3]), lambda: torch.Size([2, 4]), lambda v: v.numel()),
    "dtype": (lambda: torch.float32, lambda: torch.float64, lambda v: torch.ones(1, dtype=v)),
    "device": (lambda: torch.device("cpu"), lambda: torch.device("meta"), lambda v: len(v.type)),
    "numpy scalar": (lambda: np.float32(2), lambda: np.float32(3), lambda v: float(v)),
    "numpy integer": (lambda: np.int64(2), lambda: np.int64(3), lambda v: v.item()),
    "frozen dataclass": (lambda: Frozen(2.0), lambda: Frozen(3.0), lambda v: v.scale),
    "object that equals all": (lambda: Equal(2.0), lambda: Equal(3.0), lambda v: v.scale),
    "function": (lambda: len, lambda: sum, lambda v: v([1, 2, 3])),
    "class": (lambda: Frozen, lambda: Options, lambda v: len(v.__name__)),
    "partial": (
        lambda: functools.partial(max, 2),
        lambda: functools.partial(max, 9),
        lambda v: v(3),
    ),
    "object behind a proxy": (
        lambda: types.MappingProxyType({"a": 2}),
        lambda: types.MappingProxyType({"a": 3}),
        lambda v: v["a"],
    ),
}


def put(d: Any, key: Any, item: Any) -> None:
    d[key] = item


def rotate(d: Any) -> None:
    """Same keys and values, other order."""
    first = next(iter(d))
    d[first] = d.pop(first)


def two(kind: Any) -> Callable[[], Any]:
    return lambda: kind({"a": 2, "b": 3})


# name -> (value, change that matters, change that must not, how the program reads it)
MUTATED: dict[str, tuple[Any, Any, Any, Callable[[Any], Any]]] = {
    "list length": (lambda: [1, 2], lambda v: v.append(3), None, lambda v: len(v)),
    "list truth": (lambda: [0], lambda v: v.clear(), lambda v: v.append(1), None),
    "list item": (lambda: [1, 2], lambda v: put(v, 1, 5), lambda v: put(v, 0, 5), lambda v: v[1]),
    "list order": (lambda: [1, 2], lambda v: v.reverse(), None, in_order),
    "list membership": (lambda: [1, 2], lambda v: put(v, 0, 7), None, lambda v: 2 + (7 in v)),
    "list slice": (lambda: [1, 2, 3], lambda v: put(v, 1, 9), None, lambda v: sum(v[:2])),
    "list subclass": (lambda: MyList([1, 2]), lambda v: put(v, 1, 9), None, sum),
    "nested list": (lambda: [[1], [2]], lambda v: v[1].append(7), None, lambda v: sum(map(sum, v))),
    "dict value": (two(dict), lambda v: put(v, "a", 9), lambda v: put(v, "b", 9), lambda v: v["a"]),
    "dict get with default": (
        two(dict),
        lambda v: put(v, "c", 9),
        lambda v: put(v, "d", 9),
        lambda v: v.get("c", 2),
    ),
    "dict membership": (
        two(dict),
        lambda v: put(v, "c", 9),
        lambda v: put(v, "d", 1),
        lambda v: 3 if "c" in v else 2,
    ),
    "dict key added": (two(dict), lambda v: put(v, "c", 9), None, lambda v: sum(v.values())),
    "dict key removed": (two(dict), lambda v: v.pop("a"), None, lambda v: len(v)),
    "dict order": (two(dict), rotate, None, values_in_order),
    "dict of lists": (
        lambda: {"a": [1], "b": [2]},
        lambda v: v["a"].append(4),
        lambda v: v["b"].append(4),
        lambda v: sum(v["a"]),
    ),
    "dict subclass": (
        two(MyDict),
        lambda v: put(v, "a", 9),
        lambda v: put(v, "b", 9),
        lambda v: v["a"],
    ),
    "ordered dict order": (
        two(collections.OrderedDict),
        lambda v: v.move_to_end("a"),
        None,
        values_in_order,
    ),
    "default dict": (
        lambda: collections.defaultdict(int, a=2),
        lambda v: put(v, "a", 9),
        lambda v: put(v, "z", 9),
        lambda v: v["a"],
    ),
    "counter": (
        lambda: collections.Counter("aab"),
        lambda v: v.update("a"),
        None,
        lambda v: v["a"] + v["zz"],
    ),
    "user dict": (two(Items), lambda v: put(v, "a", 9), lambda v: put(v, "b", 9), lambda v: v["a"]),
    "chain map": (
        lambda: collections.ChainMap({}, {"a": 2}),
        lambda v: put(v, "a", 9),
        None,
        lambda v: v["a"],
    ),
    "set contents": (lambda: {1, 2}, lambda v: v.add(4), None, sum),
    "set membership": (
        lambda: {1, 2},
        lambda v: v.add(4),
        lambda v: None,
        lambda v: 3 if 4 in v else 2,
    ),
    "deque": (lambda: collections.deque([1, 2]), lambda v: v.rotate(), None, in_order),
    "deque maxlen": (
        lambda: Plain(q=collections.deque([1], 4)),
        lambda v: put(vars(v), "q", collections.deque([1], 5)),
        None,
        lambda v: v.q.maxlen,
    ),
    "dataclass field": (
        Options,
        lambda v: put(vars(v), "scale", 3.0),
        lambda v: put(vars(v), "other", 3.0),
        lambda v: v.scale,
    ),
    "object attribute": (
        lambda: Plain(a=2, b=3),
        lambda v: setattr(v, "a", 9),
        lambda v: setattr(v, "b", 9),
        lambda v: v.a,
    ),
    "object attribute added": (
        lambda: Plain(a=2),
        lambda v: setattr(v, "c", 9),
        lambda v: setattr(v, "d", 9),
        lambda v: getattr(v, "c", 2),
    ),
    "object attribute removed": (
        lambda: Plain(a=2, b=1),
        lambda v: delattr(v, "a"),
        lambda v: delattr(v, "b"),
        lambda v: 2 + hasattr(v, "a"),
    ),
    "vars of an object": (
        lambda: Plain(a=2),
        lambda v: setattr(v, "c", 9),
        None,
        lambda v: sum(vars(v).values()),
    ),
    "slots member": (
        Slotted,
        lambda v: setattr(v, "scale", 3.0),
        lambda v: setattr(v, "other", 3.0),
        lambda v: v.scale,
    ),
    "slots member deleted": (
        Slotted,
        lambda v: delattr(v, "scale"),
        lambda v: delattr(v, "other"),
        lambda v: getattr(v, "scale", 7.0),
    ),
    "linked objects": (
        lambda: Node(1.0, Node(2.0, Node(3.0))),
        lambda v: setattr(v.after.after, "scale", 9.0),
        lambda v: setattr(v.after, "scale", 9.0),
        lambda v: v.after.after.scale,
    ),
    "numpy array contents": (
        lambda: np.ones(4, np.float32),
        lambda v: put(v, 1, 5.0),
        None,
        lambda v: torch.tensor(v) + v.sum(),
    ),
    "list that indexes a tensor": (
        lambda: [1, 0],
        lambda v: put(v, 0, 3),
        None,
        lambda v: torch.arange(4.0)[v].sum() + torch.eye(4)[:, v].sum(1)[1],
    ),
    "array that indexes a tensor": (
        lambda: np.array([1, 0]),
        lambda v: put(v, 0, 3),
        None,
        lambda v: torch.arange(4.0)[v].sum() + torch.eye(4)[:, v].sum(1)[1],
    ),
    "simple namespace": (
        lambda: types.SimpleNamespace(a=2, b=1),
        lambda v: setattr(v, "a", 9),
        lambda v: setattr(v, "b", 9),
        lambda v: v.a,
    ),
    "str tag of a str subclass": (
        lambda: Named("on"),
        lambda v: setattr(v, "tag", 9),
        None,
        lambda v: v.tag + 2,
    ),
}
MAY_SPLIT = {"object behind a proxy", "object that equals all"}


def replaced_attribute(before: Any, after: Any, read: Any) -> Scene:
    return Scene(Holder(before(), read), change=lambda s: setattr(s.fn, "value", after()))


def replaced_argument(before: Any, after: Any, read: Any) -> Scene:
    def program(x: torch.Tensor, v: Any) -> torch.Tensor:
        return x * read(v) + 1

    def change(scene: Scene) -> None:
        scene.args = lambda: call(torch.randn(4), after())

    return Scene(program, args=lambda: call(torch.randn(4), before()), change=change)


def mutated_attribute(make: Any, change: Any, unrelated: Any, read: Any) -> Scene:
    read = read or (lambda v: 2 if v else 3)
    scene = Scene(Holder(make(), read), args=lambda: call(torch.randn(4)))
    scene.change = lambda s: drop(change(s.fn.value))
    if unrelated:
        scene.unrelated = lambda s: drop(unrelated(s.fn.value))
    return scene


def mutated_argument(make: Any, change: Any, unrelated: Any, read: Any) -> Scene:
    read = read or (lambda v: 2 if v else 3)
    kept = make()

    def program(x: torch.Tensor, v: Any) -> torch.Tensor:
        return x * read(v) + 1

    scene = Scene(program, args=lambda: call(torch.randn(4), kept))
    scene.change = lambda s: drop(change(kept))
    if unrelated:
        scene.unrelated = lambda s: drop(unrelated(kept))
    return scene


def drop(result: Any) -> None:
    """A change returns nothing: what it returns is not a context manager of later calls."""


def fill() -> None:
    kinds = [
        ("attribute", REPLACED, replaced_attribute),
        ("argument", REPLACED, replaced_argument),
        ("attribute", MUTATED, mutated_attribute),
        ("argument", MUTATED, mutated_argument),
    ]
    for place, table, recipe in kinds:
        for name, entry in table.items():
            after = RIGHT if name in MAY_SPLIT else RECAPTURED
            ROWS.add(f"{place} {name}", functools.partial(recipe, *entry), after=after)


fill()


@ROWS.row()
def weakref_target() -> Scene:
    targets = [Plain(a=2), Plain(a=5)]
    holder = Plain(ref=weakref.ref(targets[0]))

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * holder.ref().a

    return Scene(
        program,
        change=lambda s: setattr(targets[0], "a", 3),
        unrelated=lambda s: setattr(targets[1], "a", 3),
    )


@ROWS.row()
def weakref_dead() -> Scene:
    targets = [Plain(a=2)]
    ref = weakref.ref(targets[0])

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if ref() is None else 3)

    return Scene(program, change=lambda s: targets.clear())


@ROWS.row()
def identity_of_two_objects() -> Scene:
    first, second = Plain(), Plain()
    pair = [first, first]

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if pair[0] is pair[1] else 3)

    return Scene(program, change=lambda s: put(pair, 1, second))


@ROWS.row()
def same_nested_object_on_two_paths() -> Scene:
    shared, apart = [1.0], [1.0]
    left, right = Plain(items=shared), Plain(items=shared)

    def program(x: torch.Tensor) -> torch.Tensor:
        left.items[0] = 5.0
        out = x * right.items[0]
        left.items[0] = 1.0
        return out

    return Scene(program, change=lambda s: setattr(right, "items", apart))


@ROWS.row()
def replaced_with_an_equal_twin_that_is_mutated_later() -> Scene:
    holder = Plain(items=[1, 2])

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * sum(holder.items)

    def change(scene: Scene) -> None:
        holder.items = [1, 2]
        holder.items.append(3)

    return Scene(program, change=change)
