"""Side effects on Python objects that outlive the call."""

from __future__ import annotations

import functools
import os
import sys
import types
import weakref
from typing import Any

import torch

from ..twin import Scene, call, isolated
from .table import new_table

ROWS = new_table()

LAST: Any = None
COUNT = 0


def by_global(x: torch.Tensor) -> torch.Tensor:
    global LAST
    LAST = x * 2
    return x + 1


def by_global_count(x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return x + COUNT


def by_global_deleted(x: torch.Tensor) -> torch.Tensor:
    global LAST
    LAST = 1
    del LAST
    return x + 1


@ROWS.row()
def global_set() -> Scene:
    program = isolated(by_global)
    return Scene(program, state=lambda: program.__globals__["LAST"])


@ROWS.row(replays=False)
def global_counts() -> Scene:
    program = isolated(by_global_count)
    return Scene(program, state=lambda: program.__globals__["COUNT"])


@ROWS.row(replays=False)
def global_deleted() -> Scene:
    program = isolated(by_global_deleted)
    return Scene(program, state=lambda: "LAST" in program.__globals__)


@ROWS.row()
def nonlocal_cell_set() -> Scene:
    last = None

    def program(x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        last = x * 2
        return x + 1

    return Scene(program, state=lambda: last)


@ROWS.row(replays=False)
def nonlocal_cell_counts() -> Scene:
    count = 0

    def program(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x + count

    return Scene(program, state=lambda: count)


@ROWS.row()
def argument_list_and_dict_changed() -> Scene:
    def program(items: list[Any], table: dict[str, Any]) -> torch.Tensor:
        items.append(items[0] * 2)
        table["x"] = items[-1]
        return table["x"] + 1

    return Scene(program, args=lambda: call([torch.randn(3)], {}))


@ROWS.row(replays=False)
def mutable_default_grows() -> Scene:
    def program(x: torch.Tensor, seen: list[Any] = []) -> Any:
        seen.append(x + 1)
        return seen, len(seen)

    return Scene(program, state=lambda: program.__defaults__)


@ROWS.row()
def function_attribute_set() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        program.last = x * 2  # type: ignore[attr-defined]
        return x + 1

    return Scene(program, state=lambda: program.last)  # type: ignore[attr-defined]


@ROWS.row()
def property_setter() -> Scene:
    class Owner:
        hidden: Any = None

        @property
        def value(self) -> Any:
            return self.hidden

        @value.setter
        def value(self, new: Any) -> None:
            self.hidden = [new]

    owner = Owner()

    def program(x: torch.Tensor) -> torch.Tensor:
        owner.value = x * 2
        return owner.value[0] + 1

    return Scene(program, state=lambda: owner)


@ROWS.row()
def setattr_override() -> Scene:
    class Owner:
        def __setattr__(self, name: str, new: Any) -> None:
            object.__setattr__(self, f"_{name}", new)

    owner = Owner()

    def program(x: torch.Tensor) -> torch.Tensor:
        owner.value = x * 2  # type: ignore[attr-defined]
        return x + 1

    return Scene(program, state=lambda: owner)


@ROWS.row()
def setitem_of_a_user_class() -> Scene:
    class Owner:
        def __init__(self) -> None:
            self.kept: dict[Any, Any] = {}

        def __setitem__(self, key: Any, new: Any) -> None:
            self.kept[key] = new

        def __delitem__(self, key: Any) -> None:
            self.kept[key] = None

    owner = Owner()

    def program(x: torch.Tensor) -> torch.Tensor:
        owner["a"] = x * 2
        owner["b"] = x
        del owner["b"]
        return x + 1

    return Scene(program, state=lambda: owner)


@ROWS.row()
def descriptor_set() -> Scene:
    class Descriptor:
        def __set__(self, owner: Any, new: Any) -> None:
            owner.__dict__["seen"] = (new, new)

        def __get__(self, owner: Any, kind: Any) -> Any:
            return owner.__dict__["seen"][0]

    class Owner:
        value = Descriptor()

    owner = Owner()

    def program(x: torch.Tensor) -> torch.Tensor:
        owner.value = x * 2
        return owner.value + 1

    return Scene(program, state=lambda: vars(owner))


@ROWS.row()
def slots_member_set() -> Scene:
    class Owner:
        __slots__ = ("other", "value")

    owner = Owner()

    def program(x: torch.Tensor) -> torch.Tensor:
        owner.value = x * 2
        return x + 1

    return Scene(program, state=lambda: owner)


@ROWS.row()
def inplace_operator_of_a_user_class() -> Scene:
    class Owner:
        def __init__(self) -> None:
            self.kept: Any = None

        def __iadd__(self, other: Any) -> Any:
            self.kept = other
            return self

    owner = Owner()
    box = types.SimpleNamespace(owner=owner)

    def program(x: torch.Tensor) -> torch.Tensor:
        box.owner += x * 2
        return x + 1

    return Scene(program, state=lambda: (box, owner))


@ROWS.row()
def attribute_of_an_object_reached_only_by_a_closure() -> Scene:
    def hidden() -> Any:
        secret = types.SimpleNamespace(value=None)

        def program(x: torch.Tensor) -> torch.Tensor:
            secret.value = x * 2
            return x + 1

        return program

    program = hidden()
    return Scene(program, state=lambda: program.__closure__)


@ROWS.row()
def object_linked_into_an_old_one_and_returned() -> Scene:
    chain = types.SimpleNamespace(after=None, value=0)

    def program(x: torch.Tensor) -> Any:
        made = types.SimpleNamespace(after=chain, value=x * 2)
        chain.after = made
        return made

    return Scene(program, state=lambda: chain)


@ROWS.row()
def dict_key_order() -> Scene:
    table = {"a": 1, "b": 2, "c": 3}

    def program(x: torch.Tensor) -> torch.Tensor:
        table["a"] = table.pop("a")
        table["x"] = x * 2
        table["b"] = table.pop("b")
        return x + 1

    return Scene(program, state=lambda: table, args=lambda: call(torch.randn(3)))


@ROWS.row()
def weak_reference_stored() -> Scene:
    class Target:
        a = 2

    target, box = Target(), types.SimpleNamespace(ref=None)

    def program(x: torch.Tensor) -> torch.Tensor:
        box.ref = weakref.ref(target)
        return x * box.ref().a

    return Scene(program, state=lambda: (target, box))


@ROWS.row()
def old_object_dropped() -> Scene:
    """What the program lets go of must really be gone after a replay, too."""

    class Big:
        pass

    box = types.SimpleNamespace(big=Big())
    refs: list[Any] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        box.big = None
        return x + 1

    def args() -> Any:
        box.big = Big()
        refs.append(weakref.ref(box.big))
        return call(torch.randn(3))

    return Scene(program, args=args, state=lambda: [ref() is None for ref in refs])


@ROWS.row()
def environment_variable_set() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        os.environ["MAGJIT_TEST_WRITTEN"] = "1"
        return x + 1

    def args() -> Any:
        os.environ.pop("MAGJIT_TEST_WRITTEN", None)
        return call(torch.randn(3))

    return Scene(program, args=args, state=lambda: os.environ.pop("MAGJIT_TEST_WRITTEN", None))


@ROWS.row()
def module_attribute_of_sys_modules_set() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        sys.modules[__name__].__dict__["WRITTEN"] = 3
        return x + 1

    return Scene(program, state=lambda: globals().pop("WRITTEN", None))


@ROWS.row()
def method_put_on_an_object() -> Scene:
    class Owner:
        def value(self) -> int:
            return 1

    owner = Owner()

    def program(x: torch.Tensor) -> torch.Tensor:
        owner.value = lambda: 2  # type: ignore[method-assign]
        return x * owner.value()

    return Scene(program, state=lambda: owner)


@ROWS.row(split=True)
def iterator_of_the_world_advanced() -> Scene:
    import itertools

    ids = itertools.count()

    def program(x: torch.Tensor) -> torch.Tensor:
        return x + next(ids)

    return Scene(program, state=lambda: ids)


@ROWS.row(replays=False, split=True)
def cache_of_results_filled() -> Scene:
    calls = []

    @functools.lru_cache
    def expensive(n: int) -> int:
        calls.append(n)
        return n * 2

    return Scene(lambda x: x * expensive(3), state=lambda: (calls, expensive.cache_info()))


@ROWS.row(replays=False)
def own_cache_filled_on_the_first_call() -> Scene:
    cache: dict[Any, Any] = {}

    def program(x: torch.Tensor) -> torch.Tensor:
        if "mask" not in cache:
            cache["mask"] = torch.ones(3, 4).tril()
        return x * cache["mask"]

    return Scene(program, state=lambda: cache)
