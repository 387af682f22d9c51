"""Guard programs at random: what the fast path says is what a full evaluation says, always.

Objects are made at random, a program that guards a random part of them, and then they are changed
and changed back.  After each step the dispatcher (fast path, block versions) must agree with
`program.slots` (every instruction, nothing remembered) about acceptance and about every slot.
"""

from __future__ import annotations

import collections
import gc
import operator
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from magjit import _C

KEYS = ("a", "b", "c", 1)
Undo = Callable[[], object]


class P:
    pass


class Q(P):
    pass


class S:
    __slots__ = ("__weakref__", "a", "b")


MEMBERS = {name: S.__dict__[name] for name in "ab"}
LEAVES = (int, float, str, bool, type(None))


def leaf(rng: random.Random) -> Any:
    big = int("123456789" + str(rng.randint(0, 1)))
    return rng.choice([0, 1, True, 1.5, "x", "y", None, 2**70, (1, "z"), big])


def make_function(value: Any, default: Any, keyword: Any) -> types.FunctionType:
    def f(x: Any = default, *, k: Any = keyword) -> Any:
        return value

    return f  # type: ignore[return-value]


def make(rng: random.Random, depth: int) -> Any:
    """A random object whose parts are random objects of less depth."""
    kind = rng.randint(0, 9) if depth > 0 else 9

    def part() -> Any:
        return make(rng, depth - 1)

    if kind <= 2:
        obj: Any = rng.choice([P, Q])()
        for name in "abc":
            if rng.random() < 0.8:
                setattr(obj, name, part())
        return obj
    if kind == 3:
        return [part() for _ in range(rng.randint(0, 3))]
    if kind == 4:
        return tuple(part() for _ in range(rng.randint(0, 3)))
    if kind == 5:
        make_dict = rng.choice([dict, dict, collections.OrderedDict])
        return make_dict((k, part()) for k in KEYS if rng.random() < 0.7)
    if kind == 6:
        obj = S()
        for name in "ab":
            if rng.random() < 0.8:
                setattr(obj, name, part())
        return obj
    if kind == 7:
        return make_function(part(), part(), part())
    if kind == 8:
        return {leaf(rng) for _ in range(rng.randint(0, 3))}
    return leaf(rng)


class Generator:
    """Writes a program that accepts the arguments as they are."""

    def __init__(self, rng: random.Random, args: list[Any]) -> None:
        self.rng = rng
        self.n = 0
        self.instrs: list[tuple[Any, ...]] = [("argc", len(args), ())]
        for i, arg in enumerate(args):
            slot = self.root(i, arg)
            self.guard(arg, slot, 3)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def emit(self, *instr: Any) -> None:
        self.instrs.append(instr)

    def fetch(self, op: str, *operands: Any) -> int:
        self.n += 1
        self.emit(op, self.n - 1, *operands)
        return self.n - 1

    def root(self, i: int, arg: Any) -> int:
        if self.chance(0.7):
            return self.fetch("arg", i)
        if self.chance(0.5):
            return self.fetch("const", arg)
        try:
            return self.fetch("weak", weakref.ref(arg))
        except TypeError:
            return self.fetch("arg", i)

    def guard(self, obj: Any, slot: int, depth: int) -> None:
        if type(obj) in LEAVES:
            if self.chance(0.8):
                self.emit("eq", slot, obj)
            return
        if self.chance(0.15):
            self.emit("is", slot, obj)
        if self.chance(0.7):
            self.emit("type_is", slot, type(obj))
        if depth < 0:
            return
        if isinstance(obj, P):
            self.entries(vars(obj), self.fetch("dict", slot), depth)
        elif isinstance(obj, (list, tuple)):
            self.items(obj, slot, depth)
        elif isinstance(obj, dict):
            self.entries(obj, slot, depth)
        elif isinstance(obj, S):
            self.members(obj, slot, depth)
        elif isinstance(obj, set):
            self.emit(
                *(("len", slot, len(obj)) if self.chance(0.5) else ("set_eq", slot, frozenset(obj)))
            )
        else:
            self.function(obj, slot, depth)

    def items(self, obj: Any, slot: int, depth: int) -> None:
        if self.chance(0.7):
            self.emit("len", slot, len(obj))
        for i, item in enumerate(obj):
            if self.chance(0.8):
                self.guard(item, self.fetch("index", slot, i), depth - 1)

    def members(self, obj: S, slot: int, depth: int) -> None:
        for name, member in MEMBERS.items():
            if hasattr(obj, name):
                self.guard(getattr(obj, name), self.fetch("slot", slot, member), depth - 1)
            else:
                self.emit("slot_empty", slot, member)

    def function(self, obj: types.FunctionType, slot: int, depth: int) -> None:
        assert obj.__closure__ is not None
        self.emit("func_code", slot, obj.__code__)
        self.guard(obj.__defaults__, self.fetch("func_defaults", slot), depth - 1)
        self.guard(obj.__kwdefaults__, self.fetch("func_kwdefaults", slot), depth - 1)
        cell = self.fetch("cell", self.fetch("closure", slot, 0))
        self.guard(obj.__closure__[0].cell_contents, cell, depth - 1)

    def entries(self, obj: dict[Any, Any], slot: int, depth: int) -> None:
        start = len(self.instrs)
        blocked = self.chance(0.8)
        if blocked:
            self.emit("dict_block", slot, 0)
        if self.chance(0.4):
            self.emit("keys", slot, tuple(obj))
        elif self.chance(0.4):
            self.emit("len", slot, len(obj))
        after = []
        for key in KEYS:
            if key not in obj:
                if self.chance(0.5):
                    self.emit("absent", slot, key)
            elif self.chance(0.9):
                value = obj[key]
                found = self.fetch("getitem", slot, key)
                if type(value) not in LEAVES:
                    after.append((value, found))
                elif self.chance(0.8):
                    self.emit("eq", found, value)
        if blocked:
            self.instrs[start] = ("dict_block", slot, len(self.instrs) - start - 1)
        for value, found in after:
            self.guard(value, found, depth - 1)


# -- changes -------------------------------------------------------------------------------------


def parts(obj: Any, out: list[Any]) -> None:
    """The mutable objects below and including `obj`."""
    if any(obj is seen for seen in out):
        return
    if isinstance(obj, (P, S, list, dict, set, types.FunctionType)):
        out.append(obj)
    below: Any = ()
    if isinstance(obj, P):
        below = vars(obj).values()
    elif isinstance(obj, (list, tuple)):
        below = obj
    elif isinstance(obj, dict):
        below = obj.values()
    elif isinstance(obj, S):
        below = [getattr(obj, name) for name in "ab" if hasattr(obj, name)]
    elif isinstance(obj, types.FunctionType):
        assert obj.__closure__ is not None
        below = (obj.__defaults__, obj.__kwdefaults__, obj.__closure__[0].cell_contents)
    for part in below:
        parts(part, out)


def change_instance(rng: random.Random, obj: P, value: Any) -> Undo:
    kind, old, cls = rng.random(), obj.__dict__, type(obj)
    content = dict(old)
    if kind < 0.2:
        obj.__class__ = rng.choice([P, Q])
    elif kind < 0.5:
        obj.__dict__ = dict(old)
    elif kind < 0.8:
        setattr(obj, rng.choice("abc"), value)
    elif kind < 0.9:
        obj.zzz = 1  # type: ignore[attr-defined]
    else:
        old.pop(rng.choice("abc"), None)

    def undo() -> None:
        obj.__class__ = cls
        obj.__dict__ = old
        if list(old.items()) != list(content.items()):
            old.clear()
            old.update(content)

    return undo


def change_dict(rng: random.Random, obj: dict[Any, Any], value: Any) -> Undo:
    kind, old = rng.random(), list(obj.items())
    if kind < 0.4:
        obj[rng.choice(KEYS)] = value
    elif kind < 0.6:
        obj["zzz"] = 1
    elif kind < 0.8:
        obj.pop(rng.choice(KEYS), None)
    elif old and isinstance(obj, collections.OrderedDict):
        obj.move_to_end(old[0][0])
    elif old:
        obj[old[0][0]] = obj.pop(old[0][0])

    def undo() -> None:
        obj.clear()
        obj.update(old)

    return undo


def change_list(rng: random.Random, obj: list[Any], value: Any) -> Undo:
    old = list(obj)
    if obj and rng.random() < 0.3:
        obj[rng.randrange(len(obj))] = value
    elif obj and rng.random() < 0.5:
        obj.pop()
    else:
        obj.append(value)
    return lambda: obj.__setitem__(slice(None), old)


def change_slotted(rng: random.Random, obj: S, value: Any) -> Undo:
    name = rng.choice("ab")
    had, old = hasattr(obj, name), getattr(obj, name, None)
    if had and rng.random() < 0.3:
        delattr(obj, name)
    else:
        setattr(obj, name, value)
    if had:
        return lambda: setattr(obj, name, old)
    return lambda: hasattr(obj, name) and delattr(obj, name)


def change_set(rng: random.Random, obj: set[Any], value: Any) -> Undo:
    old = set(obj)
    if obj and rng.random() < 0.5:
        obj.pop()
    else:
        obj.add(leaf(rng))

    def undo() -> None:
        obj.clear()
        obj.update(old)

    return undo


def change_function(rng: random.Random, obj: Any, value: Any) -> Undo:
    cell = obj.__closure__[0]
    old = obj.__defaults__, obj.__kwdefaults__, obj.__code__, cell.cell_contents
    kind = rng.randrange(4)
    if kind == 0:
        obj.__defaults__ = (value,)
    elif kind == 1:
        obj.__kwdefaults__ = {"k": value}
    elif kind == 2:
        obj.__code__ = obj.__code__.replace(co_name="g")
    else:
        cell.cell_contents = value

    def undo() -> None:
        obj.__defaults__, obj.__kwdefaults__, obj.__code__, cell.cell_contents = old

    return undo


CHANGES: list[tuple[type, Callable[..., Undo]]] = [
    (P, change_instance),
    (dict, change_dict),
    (list, change_list),
    (S, change_slotted),
    (set, change_set),
    (types.FunctionType, change_function),
]


def change(rng: random.Random, args: list[Any]) -> Undo:
    found: list[Any] = []
    for arg in args:
        parts(arg, found)
    if not found or rng.random() < 0.1:
        i = rng.randrange(len(args))
        old = args[i]
        args[i] = make(rng, 3)
        if isinstance(old, P):
            args[i] = type(old)()
            args[i].__dict__.update(vars(old))
        return lambda: args.__setitem__(i, old)
    obj = rng.choice(found)
    function = next(f for cls, f in CHANGES if isinstance(obj, cls))
    return function(rng, obj, make(rng, 1))


# -- the test ------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", range(0, 100, 20))
def test_the_fast_path_agrees_with_a_full_evaluation(start: int) -> None:
    seen: collections.Counter[bool] = collections.Counter()
    for seed in range(start, start + 20):
        rng = random.Random(seed)
        args = [make(rng, 4) for _ in range(rng.randint(1, 3))]
        code = Generator(rng, args)
        guards = _C.GuardProgram(code.instrs, code.n)
        assert guards.explain(tuple(args)) is None
        call = _C.Dispatcher(
            lambda a, k: None, [_C.Record(guards, lambda *a: a, tuple(range(code.n)))]
        )

        def agree(
            call: Any = call,
            slots: Callable[..., Any] = guards.slots,
            args: list[Any] = args,
            seed: int = seed,
        ) -> None:
            expected, found = slots(tuple(args)), call(*args)
            assert (expected is None) is (found is None), seed
            if expected is not None:
                assert all(map(operator.is_, expected, found)), seed
            seen[expected is not None] += 1

        for _ in range(30):
            for _ in range(rng.randint(1, 3)):
                agree()
            undo = change(rng, args)
            agree()
            if rng.random() < 0.2:
                gc.collect(0)
            if rng.random() < 0.8:
                undo()
            agree()
    assert seen[True] > 300 and seen[False] > 300, seen
