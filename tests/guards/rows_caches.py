"""Functions that keep a cache, and objects that are equal only if they are one."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..twin import Call, Scene, call
from .hidden import box
from .table import HIT, RECAPTURED, RIGHT, new_table

ROWS = new_table()


def one() -> torch.Tensor:
    return torch.randn(4)


# --- functools.lru_cache ------------------------------------------------------------------------


def cached(settings: Any) -> Any:
    """A function that reads what it is given only when its cache has no result."""

    @functools.lru_cache
    def scaled(n: int) -> int:
        return n * int(settings.scale)

    return scaled


@ROWS.row(after=RECAPTURED)
def cache_cleared_since() -> Scene:
    settings = box(scale=2)
    scaled = cached(settings)

    def change(scene: Scene) -> None:
        settings.scale = 5
        scaled.cache_clear()

    return Scene(lambda x: x * scaled(3), change=change)


@ROWS.row(after=HIT, silent=True)
def cache_that_hides_a_change() -> Scene:
    settings = box(scale=2)
    scaled = cached(settings)
    return Scene(lambda x: x * scaled(3), change=lambda scene: setattr(settings, "scale", 5))


@ROWS.row(after=RECAPTURED)
def cache_that_has_dropped_the_result() -> Scene:
    settings = box(scale=2)

    @functools.lru_cache(maxsize=1)
    def scaled(n: int) -> int:
        return n * settings.scale

    def change(scene: Scene) -> None:
        settings.scale = 5
        scaled(4)

    return Scene(lambda x: x * scaled(3), change=change)


@ROWS.row(after=RECAPTURED)
def cache_of_another_function() -> Scene:
    holder = box(scaled=cached(box(scale=2)))

    def change(scene: Scene) -> None:
        holder.scaled = cached(box(scale=7))

    return Scene(lambda x: x * holder.scaled(3), change=change)


@ROWS.row(after=RIGHT)
def cache_made_in_the_program() -> Scene:
    settings = box(scale=2)

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * cached(settings)(3)

    return Scene(program, change=lambda scene: setattr(settings, "scale", 5))


@functools.lru_cache
def total(x: torch.Tensor) -> float:
    return float(x.sum())


@functools.lru_cache
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@functools.lru_cache
def field(thing: Any, *, name: str) -> Any:
    return getattr(thing, name)


@dataclasses.dataclass(frozen=True)
class Size:
    width: int
    height: int = 1


class Layer:
    """A part of a program that keeps a cache of its own."""

    def __init__(self, scale: int) -> None:
        self.scale = scale

    scaled: Any = functools.lru_cache(lambda self, n: n * self.scale)


def of_new_ones(read: Callable[[torch.Tensor], Any]) -> Scene:
    """Each call looks for what no cache can know; what changes is the size."""
    return Scene(
        read,
        args=lambda: call(one()),
        change=lambda s: setattr(s, "args", lambda: call(torch.randn(5))),
    )


@ROWS.row(after=RIGHT)
def cache_by_a_new_tensor() -> Scene:
    return of_new_ones(lambda x: x + total(x))


@ROWS.row(after=RIGHT)
def cache_of_tensors_by_a_new_tensor() -> Scene:
    return of_new_ones(lambda x: x + doubled(x))


@ROWS.row(after=RIGHT)
def cache_by_a_new_object() -> Scene:
    return of_new_ones(lambda x: x * field(Layer(len(x)), name="scale"))


@ROWS.row(after=RIGHT)
def cache_by_an_object_of_the_call() -> Scene:
    def args() -> Call:
        return call(one(), Layer(int(torch.randint(0, 9, ()))))

    def change(scene: Scene) -> None:
        scene.args = lambda: call(one(), Layer(10))

    return Scene(lambda x, layer: x * field(layer, name="scale"), args=args, change=change)


@ROWS.row(after=RECAPTURED)
def cache_by_an_equal_object() -> Scene:
    def program(x: torch.Tensor, size: Size) -> torch.Tensor:
        return x * field(size, name="width")

    return Scene(
        program,
        args=lambda: call(one(), Size(3)),
        change=lambda s: setattr(s, "args", lambda: call(one(), Size(4))),
    )


@ROWS.row(after=RECAPTURED)
def cache_by_a_tuple() -> Scene:
    def program(x: torch.Tensor, sizes: tuple[Any, ...]) -> torch.Tensor:
        return x * len(field(sizes, name="__class__").__name__) + sizes[1].width

    return Scene(
        program,
        args=lambda: call(one(), (2, Size(3))),
        change=lambda s: setattr(s, "args", lambda: call(one(), (2, Size(4)))),
    )


@ROWS.row(after=RECAPTURED)
def cache_by_a_part_of_the_program() -> Scene:
    holder = box(layer=Layer(2))

    def change(scene: Scene) -> None:
        holder.layer = Layer(7)

    return Scene(lambda x: x * holder.layer.scaled(3), change=change)


# --- objects that are equal if they are one ------------------------------------------------------


class Thing:
    """Equal to itself alone."""

    def method(self) -> None:
        pass


@dataclasses.dataclass
class Holder:
    thing: Any


def counted(a: Thing, b: Thing) -> int:
    found = {a: 0}
    found[b] = found.get(b, 0) + 2
    return len(found) + found[a]


SAME: dict[str, Callable[[Any, Any], Any]] = {
    "compared": lambda a, b: a == b,
    "compared by a function": operator.eq,
    "told apart by a function": operator.is_,
    "unequal": lambda a, b: a != b,
    "in a list": lambda a, b: a in [b],
    "in a tuple": lambda a, b: (1, a) == (1, b),
    "in lists": lambda a, b: [a] == [b],
    "in dicts": lambda a, b: {1: a} == {1: b},
    "in deques": lambda a, b: collections.deque([a]) == collections.deque([b]),
    "in dataclasses": lambda a, b: Holder(a) == Holder(b),
    "in a set": lambda a, b: len({a, b}),
    "in two sets": lambda a, b: len({a} & {b}),
    "in a frozen set": lambda a, b: len(frozenset([a, b])),
    "keys": counted,
    "keys in order": lambda a, b: len(dict.fromkeys([a, b])),
    "counted": lambda a, b: [a, b].count(a),
    "counted each": lambda a, b: len(collections.Counter([a, b])),
    "found": lambda a, b: [b, a].index(a),
    "grouped": lambda a, b: len(list(itertools.groupby([a, b]))),
    "methods": lambda a, b: a.method == b.method,
    "hashed": lambda a, b: hash(a) == hash(b),
    "weak references": lambda a, b: weakref.ref(a) is weakref.ref(b),
    "in a weak set": lambda a, b: len(weakref.WeakSet([a, b])),
    "copied": lambda a, b: len({id(one) for one in copy.copy([a, b])}),
    "copied deeply": lambda a, b: operator.is_(*copy.deepcopy([a, b])),
}


def two(make: Callable[[], Any], same: bool) -> Callable[[], Call]:
    def args() -> Call:
        first = make()
        return call(one(), first, first if same else make())

    return args


def scene_of_two(read: Callable[[Any, Any], Any], make: Callable[[], Any]) -> Scene:
    return Scene(
        lambda x, a, b: x + read(a, b),
        args=two(make, same=False),
        change=lambda s: setattr(s, "args", two(make, same=True)),
    )


for name, read in SAME.items():
    ROWS.add(f"one object {name}", functools.partial(scene_of_two, read, Thing), after=RIGHT)

OF_TENSORS = ("hashed", "weak references", "in a set", "keys", "copied", "copied deeply")
for name in OF_TENSORS:
    make = functools.partial(torch.zeros, 2)
    ROWS.add(f"one tensor {name}", functools.partial(scene_of_two, SAME[name], make), after=RIGHT)
