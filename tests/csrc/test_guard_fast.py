"""Guard programs: the fast path, and what a program holds and leaves behind."""

from __future__ import annotations

import collections
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from magjit import _C
from tests.csrc.guard_helpers import (
    ARG,
    Instr,
    Plain,
    Slotted,
    program,
)

FETCHES = (
    "arg const weak dict getitem index cell closure func_defaults slot method_func method_self "
    "weakref_call type tp_attr getattr_c"
).split()


def rest(guards: _C.GuardProgram) -> list[int]:
    assert guards.fast is not None
    return list(guards.fast[3])


def record_of(*instrs: Instr) -> tuple[_C.GuardProgram, Callable[..., Any]]:
    """A program, and a function that gives the slots of an accepted call, else None."""
    slots = 1 + max(i[1] for i in instrs if i[0] in FETCHES)
    guards = program(*instrs, slots=slots)
    record = _C.Record(guards, lambda *a: a, tuple(range(slots)))
    return guards, _C.Dispatcher(lambda a, k: None, [record])


# -- the fast path -------------------------------------------------------------------------------


def test_everything_that_stays_is_words() -> None:
    def function(a: int = 1, *, b: int = 2) -> object:
        return obj

    obj = Plain()
    obj.items = [1, (2, 3)]
    obj.slotted = Slotted()
    obj.slotted.full = obj
    obj.call = function
    obj.names = collections.OrderedDict(x=1, y=2)
    obj.bound = obj.method
    obj.ref = weakref.ref(obj)
    guards, call = record_of(
        ("argc", 1, ()),
        ARG,
        ("type_is", 0, Plain),
        ("dict", 1, 0),
        ("dict_block", 1, 8),
        ("getitem", 2, 1, "items"),
        ("getitem", 3, 1, "slotted"),
        ("getitem", 4, 1, "call"),
        ("getitem", 5, 1, "names"),
        ("getitem", 6, 1, "bound"),
        ("getitem", 7, 1, "ref"),
        ("len", 1, 6),
        ("absent", 1, "other"),
        ("len", 2, 2),
        ("index", 8, 2, 1),
        ("index", 9, 8, 0),
        ("slot", 10, 3, Slotted.__dict__["full"]),
        ("same", 10, 0),
        ("func_code", 4, function.__code__),
        ("func_defaults", 11, 4),
        ("closure", 12, 4, 0),
        ("cell", 13, 12),
        ("is", 13, obj),
        ("dict_block", 5, 1),
        ("keys", 5, ("x", "y")),
        ("method_self", 14, 6),
        ("method_func", 15, 6),
        ("weakref_call", 16, 7),
        ("distinct", 16, (2, 3, 4)),
        ("tp_names", Plain, (("attribute", 1),)),
        ("type", 17, 0),
        ("tp_attr", 18, 17, "attribute"),
        ("weak", 19, weakref.ref(obj)),
    )
    for _ in range(3):
        assert call(obj) is not None
    assert rest(guards) == []
    assert guards.fast[0] == 1
    changes: list[tuple[Callable[[], object], Callable[[], object]]] = [
        (lambda: obj.items.append(1), lambda: obj.items.pop()),
        (lambda: obj.items.__setitem__(1, []), lambda: obj.items.__setitem__(1, (2, 3))),
        (lambda: setattr(obj.slotted, "full", 1), lambda: setattr(obj.slotted, "full", obj)),
        (lambda: obj.names.move_to_end("x"), lambda: obj.names.move_to_end("y")),
        (lambda: setattr(obj, "other", 1), lambda: delattr(obj, "other")),
        (lambda: setattr(Plain, "attribute", 2), lambda: setattr(Plain, "attribute", 1)),
        (lambda: setattr(obj, "__class__", Other), lambda: setattr(obj, "__class__", Plain)),
        (
            lambda: setattr(function, "__code__", function.__code__.replace(co_name="g")),
            lambda: setattr(function, "__code__", code),
        ),
    ]
    code = function.__code__
    for change, undo in changes:
        change()
        assert call(obj) is None and guards.explain((obj,)) is not None
        undo()
        assert call(obj) is not None and call(obj) is not None
    assert call(Plain()) is None and call(obj, 1) is None and call() is None
    assert call(obj) is not None


class Other(Plain):
    pass


def test_stores_to_the_dict_that_change_nothing_else() -> None:
    """Such a store at every call, as of a last result, costs one block and no new fast path."""
    obj = Plain()
    obj.a, obj.out = [1], None
    guards, call = record_of(
        ARG, ("dict", 1, 0), ("dict_block", 1, 1), ("getitem", 2, 1, "a"), ("len", 2, 1)
    )
    call(obj), call(obj)
    before = guards.fast
    for i in range(10):
        obj.out = i
        assert call(obj)[2] is obj.a
    assert guards.fast == before and rest(guards) == []


def test_what_changes_every_time_leaves_the_fast_path() -> None:
    obj = Plain()
    guards, call = record_of(
        ARG,
        ("arg", 5, 1),
        ("len", 5, 1),
        ("index", 6, 5, 0),
        ("dict", 1, 0),
        ("dict_block", 1, 3),
        ("getitem", 2, 1, "fresh"),
        ("getitem", 3, 1, "kept"),
        ("getitem", 4, 1, "number"),
        ("len", 2, 1),
        ("index", 7, 2, 0),
        ("eq", 4, 10**6),
        ("is", 7, None),
    )
    obj.kept = [0]
    for _ in range(20):
        obj.fresh, obj.number, argument = [None], int("1000000"), [Plain()]
        slots = call(obj, argument)
        assert slots[2] is obj.fresh and slots[3] is obj.kept and slots[6] is argument[0]
        assert slots[4] is obj.number
    assert rest(guards) == [1, 2, 3, 6, 8, 9, 10, 11, 12]
    obj.fresh = [None, None]
    assert call(obj, [1]) is None
    obj.fresh = [1]
    assert call(obj, [1]) is None
    obj.fresh = [None]
    assert call(obj, [1, 2]) is None and call(obj, [1])[2] is obj.fresh
    obj.number = 5
    assert call(obj, [1]) is None


def test_objects_of_one_record_in_turn() -> None:
    """Guards without an identity accept any such object; the slots are those of the call."""
    objects = []
    for i in range(5):
        obj = Plain()
        obj.part, obj.n = [i], 7
        objects.append(obj)
    guards, call = record_of(
        ARG,
        ("type_is", 0, Plain),
        ("dict", 1, 0),
        ("dict_block", 1, 3),
        ("getitem", 2, 1, "part"),
        ("getitem", 3, 1, "n"),
        ("eq", 3, 7),
        ("index", 4, 2, 0),
    )
    for order in (objects, objects[::-1], [objects[0]] * 3, objects * 3):
        for obj in order:
            slots = call(obj)
            assert slots[0] is obj and slots[2] is obj.part and slots[4] is obj.part[0]
    objects[2].n = 8
    assert [call(o) is None for o in objects] == [False, False, True, False, False]


def test_another_object_at_the_same_address() -> None:
    """What is known of an address holds for the object that was there, and no other."""

    class Node:
        __slots__ = ("value",)

        def __init__(self, value: object) -> None:
            self.value = value

    member = Node.__dict__["value"]
    holder: list[Any] = [Node([1])]
    guards, call = record_of(
        ARG, ("len", 0, 1), ("index", 1, 0, 0), ("slot", 2, 1, member), ("len", 2, 1),
        ("index", 3, 2, 0), ("eq", 3, 1),
    )  # fmt: skip
    for _ in range(4):
        assert call(holder) is not None
    for content in ([2], [1, 1], (1,), {1: 1}, "1", [1]):
        holder[0] = None
        holder[0] = Node(content)  # most likely where the one before was
        expected = isinstance(content, (list, tuple)) and list(content) == [1]
        for _ in range(3):
            assert (call(holder) is not None) is expected
            assert (guards.explain((holder,)) is None) is expected


def test_a_freed_dict_at_the_same_address() -> None:
    obj = Plain()
    obj.d = {"k": 1}
    guards, call = record_of(
        ARG,
        ("dict", 1, 0),
        ("dict_block", 1, 1),
        ("getitem", 2, 1, "d"),
        ("dict_block", 2, 2),
        ("getitem", 3, 2, "k"),
        ("eq", 3, 1),
    )
    for i in range(50):
        obj.d = None
        obj.d = {"k": i % 3}
        assert (call(obj) is not None) is (i % 3 == 1)
        obj.d = None
        obj.d = [i] if i % 2 else collections.OrderedDict(k=i % 3)
        assert (call(obj) is not None) is (not i % 2 and i % 3 == 1)
    del obj.d
    assert call(obj) is None


def test_weak_references_in_the_fast_path() -> None:
    seen, obj = Plain(), Plain()
    guards, call = record_of(
        ARG, ("weak", 1, weakref.ref(seen)), ("type_is", 1, Plain), ("dict", 2, 0)
    )
    for _ in range(3):
        assert call(obj) is not None
    del seen
    gc.collect()
    assert call(obj) is None and guards.explain((obj,)) == 1


# -- life ----------------------------------------------------------------------------------------


def big_program(obj: object) -> _C.GuardProgram:
    return program(
        ARG,
        ("const", 1, obj),
        ("same", 0, 1),
        ("dict", 2, 0),
        ("dict_block", 2, 3),
        ("getitem", 3, 2, "a"),
        ("eq", 3, 1),
        ("keys", 2, ("a", "cycle")),
        ("tp_names", type(obj), (("method", Plain.method), ("zzz", _C.NULL))),
        ("getattr_c", 4, 0, Plain.__dict__["__dict__"]),
        ("pyeq", 3, 1, abs),
        ("is_not", 0, None),
    )


def test_garbage_collection_of_cycles() -> None:
    obj = Plain()
    obj.a = 1
    obj.cycle = big_program(obj)
    assert obj.cycle.check((obj,))
    alive = weakref.ref(obj)
    del obj
    gc.collect()
    assert alive() is None


@pytest.fixture
def allocated() -> Iterator[Callable[[], int]]:
    yield lambda: (gc.collect(), sys.getallocatedblocks())[1]


def test_a_hundred_thousand_checks_leak_nothing(allocated: Callable[[], int]) -> None:
    obj, other = Plain(), Plain()
    obj.a = other.a = 1
    obj.cycle = None
    guards = big_program(obj)
    objects = (obj, other, guards, Plain, abs)

    def rounds(n: int) -> None:
        for _ in range(n):
            assert guards.check((obj,))
            guards.check((other,))
            obj.a = 1

    rounds(1000)
    before, counts = allocated(), [sys.getrefcount(o) for o in objects]
    rounds(50_000)
    gc.collect()
    assert [sys.getrefcount(o) for o in objects] == counts
    assert allocated() - before < 50


def test_threads() -> None:
    objects = []
    for _ in range(4):
        obj = Plain()
        obj.a, obj.cycle = 1, None
        objects.append(obj)
    guards = program(
        ARG, ("dict", 1, 0), ("dict_block", 1, 2), ("getitem", 2, 1, "a"), ("eq", 2, 1)
    )
    wrong: list[str] = []

    def work(obj: Plain, other: object) -> None:
        for i in range(3000):
            if not guards.check((obj,)):
                wrong.append("missed")
            obj.a = 2
            if guards.check((obj,)):
                wrong.append("stale")
            obj.a = 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(o, None)) for o in objects]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_c_function_that_comes_back_gets_slots_of_its_own() -> None:
    """`hex` calls `__index__`, which is user code: a program that asks for it gets it."""
    results: list[object] = []

    class Back:
        def __index__(self) -> int:
            results.append(guards.slots((1,)) is None)
            results.append(guards.check((1,)))
            return 3

    guards = program(ARG, ("pyeq", 0, "0x3", hex))
    assert guards.check((Back(),))
    assert results == [True, False]
