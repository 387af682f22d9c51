"""Guard programs: comparisons, each when it holds, when it fails, and the odd cases."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import pytest

from magjit import _C
from tests.csrc.guard_helpers import (
    ARG,
    Hostile,
    Plain,
    Str,
    on_arg,
    program,
)

# -- checks --------------------------------------------------------------------------------------

NAN = float("nan")
VALUES = [
    0, 1, -1, 2**70, -(2**70), True, False, None, ..., NotImplemented, 0.0, -0.0, 1.0, NAN,
    float("inf"), 0j, -0j, complex(0.0, -0.0), 1j, "", "a", "\xe4", "\u1234", "\ud800", b"", b"a",
    (), (1,), (True,), (1, ("a", None)), range(3), range(0, 3, 2), range(0), range(1, 1), slice(3),
    slice(1, 3), slice(0, 3), int, "A" * 300, b"A" * 300,
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(VALUES)), ids=lambda i: repr(VALUES[i])[:20])
def test_eq_is_exact_type_and_exact_value(index: int) -> None:
    check = on_arg(("eq", 0, VALUES[index]))
    for j, value in enumerate(VALUES):
        assert check(value) is (j == index), value


def test_eq_of_equal_but_other_objects() -> None:
    for make in [
        lambda: int("1" * 30),
        lambda: float("1.25"),
        lambda: complex("1+2j"),
        lambda: "".join(["ab", "cd"]),
        lambda: b"".join([b"ab", b"cd"]),
        lambda: tuple([1, "".join(["x", "y"])]),
        lambda: range(int("1000"), int("2000")),
        lambda: slice(int("1000"), None, None),
        lambda: -float("nan"),
    ]:
        assert on_arg(("eq", 0, make()))(make())


def test_eq_of_subclasses_and_unknown_types() -> None:
    assert not on_arg(("eq", 0, "a"))(Str("a"))
    assert not on_arg(("eq", 0, 1))(type("I", (int,), {})(1))
    assert not on_arg(("eq", 0, (1,)))(type("T", (tuple,), {})((1,)))
    obj = [1]
    assert on_arg(("eq", 0, obj))(obj), "the same object"
    assert not on_arg(("eq", 0, obj))([1])
    deep_a: Any = ()
    deep_b: Any = ()
    for _ in range(100):
        deep_a, deep_b = (deep_a, 1), (deep_b, 1)
    assert not on_arg(("eq", 0, deep_a))(deep_b), "too deep to be worth it"


def test_identity_and_type() -> None:
    a, b = Plain(), Plain()
    assert on_arg(("is", 0, a))(a) and not on_arg(("is", 0, a))(b)
    assert on_arg(("is_not", 0, a))(b) and not on_arg(("is_not", 0, a))(a)
    check = on_arg(("type_is", 0, Plain))
    assert check(a) and not check(type("Sub", (Plain,), {})()) and not check(1)
    a.__class__ = type("Other", (Plain,), {})
    assert not check(a)
    assert on_arg(("type_is", 0, bool))(True) and not on_arg(("type_is", 0, int))(True)
    two = program(ARG, ("arg", 1, 1), ("same", 0, 1))
    assert two.check((a, a)) and not two.check((a, b))
    apart = program(ARG, ("arg", 1, 1), ("arg", 2, 2), ("distinct", 0, [1, 2]))
    assert apart.check((a, b, b)) and not apart.check((a, b, a)) and not apart.check((a, a, b))


def test_freed_object_at_the_same_address_is_another_one() -> None:
    guards = program(ARG, ("weak", 1, weakref.ref(first := Plain())), ("same", 0, 1))
    assert guards.check((first,))
    address = id(first)
    del first
    reborn = next((o for o in (Plain() for _ in range(1000)) if id(o) == address), Plain())
    assert not guards.check((reborn,))


def test_len() -> None:
    check = on_arg(("len", 0, 2))
    containers = [list, tuple, set, frozenset, collections.deque, dict.fromkeys,
                  collections.OrderedDict.fromkeys, type("S", (set,), {}),
                  type("L", (list,), {"__len__": lambda self: 7})]  # fmt: skip
    for make in containers:
        assert check(make((1, 2))) and not check(make((1,))) and not check(make(()))
    for value in ("ab", b"ab", 2, range(2), None):
        assert not check(value)


def test_keys() -> None:
    check = on_arg(("keys", 0, ("a", 1, None)))
    assert check({"a": 0, 1: 0, None: 0})
    assert check(collections.OrderedDict({"a": 0, 1: 0, None: 0}))
    for other in (
        {1: 0, "a": 0, None: 0},
        {"a": 0, 1: 0},
        {"a": 0, 1: 0, None: 0, 2: 0},
        {"a": 0, True: 0, None: 0},
        {Str("a"): 0, 1: 0, None: 0},
        ["a", 1, None],
    ):
        assert not check(other)
    assert on_arg(("keys", 0, ()))({}) and not on_arg(("keys", 0, ()))({1: 1})
    od = collections.OrderedDict(a=1, b=2)
    ordered = on_arg(("keys", 0, ("a", "b")))
    assert ordered(od)
    od.move_to_end("a")
    assert not ordered(od)
    od.move_to_end("b")
    assert ordered(od)
    del od["a"]
    od["a"] = 1
    assert not ordered(od)


def test_set_eq() -> None:
    check = on_arg(("set_eq", 0, frozenset([1, "a", None, 2.5])))
    assert check({1, "a", None, 2.5}) and check(frozenset([2.5, None, "a", 1]))
    others: list[object] = [
        {True, "a", None, 2.5},
        {1.0, "a", None, 2.5},
        {1, "a", None},
        {1, "a", None, 2.5, 3},
        {1, Str("a"), None, 2.5},
        [1, "a", None, 2.5],
        set(),
    ]
    for other in others:
        assert not check(other)
    assert on_arg(("set_eq", 0, frozenset()))(set())
    thinned = set(range(1000))
    for i in range(3, 1000):
        thinned.discard(i)
    assert on_arg(("set_eq", 0, frozenset([0, 1, 2])))(thinned)
    hostile = Hostile(hash("a"))
    bad = {hostile}
    one = on_arg(("set_eq", 0, frozenset(["a"])))
    hostile.armed = True
    assert not one(bad)
    hostile.armed = False


def test_tp_names() -> None:
    class Base:
        a = 1

    class Sub(Base):
        b = 2

    guards = program(("tp_names", Sub, (("a", 1), ("b", 2), ("c", _C.NULL))))
    by_slot = program(ARG, ("tp_names", 0, (("a", 1), ("c", _C.NULL))))
    assert guards.check(()) and guards.check(()) and by_slot.check((Sub,))
    assert not by_slot.check((1,)) and not by_slot.check((int,))
    Sub.unrelated = 3
    assert guards.check(()) and by_slot.check((Sub,))
    Base.c = 1
    assert guards.explain(()) == 0 and not guards.check(()) and not by_slot.check((Sub,))
    del Base.c
    assert guards.check(()) and by_slot.check((Sub,))
    Base.a = 5
    assert not guards.check(())
    Base.a = 1
    assert guards.check(())
    Sub.__bases__ = (type("Empty", (), {}),)
    assert not guards.check(()) and not by_slot.check((Sub,))


def test_pyeq_calls_a_c_function() -> None:
    check = on_arg(("pyeq", 0, b"\x01\x00", memoryview.tobytes))
    assert check(memoryview(b"\x01\x00")) and not check(memoryview(b"\x01\x01"))
    assert not check(1), "an exception is a failed guard"
    with pytest.raises(ValueError, match=r"instruction 1 \(pyeq\)"):
        program(ARG, ("pyeq", 0, 1, lambda x: 1))
