"""Every operation of a guard program: when it holds, when it fails, and the odd cases."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from magjit import _C

Instr = tuple[Any, ...]
ARG = ("arg", 0, 0)


def program(*instrs: Instr, slots: int = 12) -> _C.GuardProgram:
    return _C.GuardProgram(list(instrs), slots)


def on_arg(*instrs: Instr) -> Callable[[object], bool]:
    """A check of one argument, which is in slot 0; full and quick evaluation must agree."""
    guards = program(ARG, *instrs)

    def check(value: object) -> bool:
        answer = guards.check((value,))
        assert answer is guards.check((value,)), "second check differs"
        assert answer is (guards.explain((value,)) is None)
        return answer

    return check


def fetched(value: object, *instrs: Instr) -> Any:
    """What slot 1 holds after fetching from `value` in slot 0; KeyError if the fetch fails."""
    slots = program(ARG, *instrs).slots((value,))
    if slots is None:
        raise KeyError
    return slots[1]


class Hostile:
    """Any user code that runs is a failure."""

    def __init__(self, hash_value: int = 1) -> None:
        self.hash_value = hash_value
        self.armed = False

    def __eq__(self, other: object) -> bool:
        assert not self.armed, "__eq__ ran"
        return self is other

    def __hash__(self) -> int:
        assert not self.armed, "__hash__ ran"
        return self.hash_value


class Plain:
    attribute = 1

    def method(self) -> None: ...


class Slotted:
    __slots__ = ("full", "__weakref__")
    full: object


class Str(str):
    def __eq__(self, other: object) -> bool:
        raise AssertionError("__eq__ ran")

    __hash__ = str.__hash__


# -- roots ---------------------------------------------------------------------------------------


def test_argc_counts_positional_arguments_and_names() -> None:
    guards = program(("argc", 1, ("x", "y")), ("kwarg", 0, "y"), ("is", 0, None))
    assert guards.check((1,), {"x": 2, "y": None})
    assert guards.check((1,), {"y": None, "x": 2})
    assert guards.check((1,), {"".join(("y", "")): None, "x": 2})
    assert guards.explain((1,), {"x": None, "y": 2}) == 2
    for args, kwargs in [
        ((), {"x": 2, "y": None}),
        ((1, 2), {"x": 2, "y": None}),
        ((1,), {"x": 2}),
        ((1,), {"x": 2, "z": None}),
        ((1,), {"x": 2, "y": None, "z": 3}),
        ((1,), None),
    ]:
        assert guards.explain(args, kwargs) == 0
        assert not guards.check(args, kwargs)


def test_missing_arguments() -> None:
    assert program(("arg", 0, 2)).explain((1, 2)) == 0
    assert program(("kwarg", 0, "x")).explain((1,), {"y": 1}) == 0
    assert program(("kwarg", 0, "x")).explain((1,)) == 0


def test_const_is_held_and_weak_is_not() -> None:
    held, seen = Plain(), Plain()
    alive = weakref.ref(held)
    guards = program(("const", 0, held), ("weak", 1, weakref.ref(seen)), ("distinct", 0, (1,)))
    assert guards.check(())
    assert guards.slots(())[:2] == [held, seen]
    del held
    gc.collect()
    assert alive() is not None and guards.check(())
    del seen
    assert guards.explain(()) == 1 and not guards.check(())
    del guards
    assert alive() is None


# -- fetches -------------------------------------------------------------------------------------


def test_dict_is_the_instance_dict() -> None:
    assert fetched(spaced := types.SimpleNamespace(a=1), ("dict", 1, 0)) is spaced.__dict__
    for make in (Plain, type("Sub", (dict,), {}), Exception):
        obj = make()
        value = fetched(obj, ("dict", 1, 0))
        assert value is obj.__dict__
        obj.__dict__ = {"a": 1}  # another dict at the next check
        assert fetched(obj, ("dict", 1, 0)) is obj.__dict__
    assert fetched(types, ("dict", 1, 0)) is types.__dict__
    assert fetched(types, ("module_dict", 1, 0)) is types.__dict__
    for value in (1, "a", object(), Slotted()):
        with pytest.raises(KeyError):
            fetched(value, ("dict", 1, 0))
    with pytest.raises(KeyError):
        fetched(1, ("module_dict", 1, 0))


def test_dict_of_an_object_whose_attributes_have_no_dict_yet() -> None:
    obj = Plain()
    obj.a, obj.b = 1, 2
    guards = program(ARG, ("dict", 1, 0), ("getitem", 2, 1, "b"), ("eq", 2, 2))
    assert guards.check((obj,)) and guards.check((obj,))
    assert (obj.a, obj.b) == (1, 2)
    obj.b = 3
    assert guards.explain((obj,)) == 3
    assert obj.__dict__ == {"a": 1, "b": 3}


def test_dict_replaced_between_checks() -> None:
    obj = Plain()
    obj.a = 1
    guards = program(
        ARG, ("dict", 1, 0), ("dict_block", 1, 2), ("getitem", 2, 1, "a"), ("eq", 2, 1)
    )
    assert guards.check((obj,)) and guards.check((obj,))
    obj.__dict__ = {"a": 2}
    assert guards.explain((obj,)) == 4 and not guards.check((obj,))
    obj.__dict__ = {"a": 1}
    assert guards.check((obj,))
    obj.__dict__ = {}
    assert guards.explain((obj,)) == 3


def test_getitem_and_absent() -> None:
    for key, other in [("k", "j"), (1, 2), ((1, "x"), (1, "y")), (None, False), (1.5, 2.5)]:
        here = on_arg(("getitem", 1, 0, key))
        gone = on_arg(("absent", 0, key))
        assert here({key: 0}) and not gone({key: 0})
        assert not here({other: 0}) and gone({other: 0})
        assert not here({}) and gone({})
        assert here(collections.OrderedDict({key: 0})) and here(
            collections.defaultdict(int, {key: 0})
        )
        for no_dict in (1, [key], {key}):
            assert not here(no_dict) and not gone(no_dict)


def test_getitem_of_large_and_thinned_dicts() -> None:
    for size in (3, 200, 70_000):
        mixed: dict[Any, int] = {i: i for i in range(size)} | {"x": -1}
        for i in range(0, size, 3):
            del mixed[i]
        assert fetched(mixed, ("getitem", 1, 0, size - (2 if size % 3 == 1 else 1))) >= 0
        assert fetched(mixed, ("getitem", 1, 0, "x")) == -1
        with pytest.raises(KeyError):
            fetched(mixed, ("getitem", 1, 0, 0))
        assert on_arg(("absent", 0, 0))(mixed)


def test_look_up_never_runs_user_code() -> None:
    key, twin, other = Hostile(), Hostile(), Hostile(2)
    by_key = {key: "found"}
    by_twin = {twin: "another"}
    here, gone = on_arg(("getitem", 1, 0, key)), on_arg(("absent", 0, key))
    of_one = on_arg(("getitem", 1, 0, 1))
    hostile_hash = {Hostile(hash(1)): 0}
    strings = {Str("k"): 1}
    for h in (key, twin, other, *hostile_hash):
        h.armed = True
    assert here(by_key) and not gone(by_key)
    assert not here(by_twin) and not gone(by_twin), "only __eq__ could tell"
    assert not of_one(hostile_hash)
    assert not on_arg(("getitem", 1, 0, "k"))(strings)
    assert not on_arg(("absent", 0, "k"))(strings)
    for h in (key, twin, other, *hostile_hash):
        h.armed = False


def test_keys_that_dict_takes_for_equal() -> None:
    for recorded, stored in [(1, True), (1, 1.0), (0.0, -0.0)]:
        check = on_arg(("getitem", 1, 0, recorded))
        assert check({recorded: 0})
        assert not check({stored: 0})
        assert not on_arg(("absent", 0, recorded))({stored: 0})


def test_index() -> None:
    check = on_arg(("index", 1, 0, 1), ("is", 1, None))
    sub_list = type("L", (list,), {"__getitem__": None})
    pair = collections.namedtuple("pair", "a b")
    for make in (list, tuple, sub_list, collections.deque):
        assert check(make((0, None)))
        assert not check(make((None, 0)))
        assert not check(make((None,)))
    assert check(pair(0, None))
    assert not check("ab") and not check({0: 0, 1: None})


def test_odict_key_follows_the_order_that_iteration_has() -> None:
    first = on_arg(("odict_key", 1, 0, 0), ("eq", 1, "a"))
    assert (
        first({"a": 1, "b": 2}) and not first({"b": 2, "a": 1}) and not first({}) and not first([])
    )
    od = collections.OrderedDict(a=1, b=2)
    assert first(od)
    od.move_to_end("a")
    assert not first(od)
    assert on_arg(("odict_key", 1, 0, 1), ("eq", 1, "a"))(od)
    assert not on_arg(("odict_key", 1, 0, 2))(od)


def test_cells_and_functions() -> None:
    def outer(value: object, fill: bool) -> types.FunctionType:
        if fill:
            seen = value
        return lambda a, b=2, *, c=3: seen

    full, empty = outer(7, True), outer(7, False)
    assert fetched(full, ("closure", 2, 0, 0), ("cell", 1, 2)) == 7
    assert on_arg(("closure", 1, 0, 0), ("cell_empty", 1))(empty)
    assert not on_arg(("closure", 1, 0, 0), ("cell_empty", 1))(full)
    assert not on_arg(("closure", 1, 0, 0), ("cell", 2, 1))(empty)
    assert not on_arg(("closure", 1, 0, 1))(full)
    assert not on_arg(("closure", 1, 0, 0))(test_index)
    assert fetched(full, ("func_globals", 1, 0)) is globals()
    assert fetched(full, ("func_defaults", 1, 0)) == (2,)
    assert fetched(full, ("func_kwdefaults", 1, 0)) == {"c": 3}
    assert fetched(test_index, ("func_defaults", 1, 0)) is None
    code = on_arg(("func_code", 0, full.__code__))
    assert code(full) and code(empty) and not code(test_index) and not code(print)
    for op in ("func_globals", "func_defaults", "func_kwdefaults", "cell", "closure"):
        with pytest.raises(KeyError):
            fetched(1, (op, 1, 0, 0) if op == "closure" else (op, 1, 0))


def test_methods_types_and_weak_references() -> None:
    obj = Plain()
    assert fetched(obj.method, ("method_func", 1, 0)) is Plain.method
    assert fetched(obj.method, ("method_self", 1, 0)) is obj
    assert fetched([].append, ("method_self", 1, 0)) == []
    assert fetched(obj, ("type", 1, 0)) is Plain
    assert fetched(Plain, ("tp_attr", 1, 0, "attribute")) == 1
    assert fetched(weakref.ref(obj), ("weakref_call", 1, 0)) is obj
    for instr in [
        ("method_func", 1, 0),
        ("method_self", 1, 0),
        ("weakref_call", 1, 0),
        ("tp_attr", 1, 0, "attribute"),
    ]:
        with pytest.raises(KeyError):
            fetched(obj, instr)
    with pytest.raises(KeyError):
        fetched(Plain, ("tp_attr", 1, 0, "missing"))
    dead = weakref.ref(Plain())
    with pytest.raises(KeyError):
        fetched(dead, ("weakref_call", 1, 0))


def test_slots() -> None:
    obj = Slotted()
    member = Slotted.__dict__["full"]
    full, empty = on_arg(("slot", 1, 0, member)), on_arg(("slot_empty", 0, member))
    assert empty(obj) and not full(obj)
    obj.full = 1
    assert full(obj) and not empty(obj)
    assert fetched(obj, ("slot", 1, 0, member)) == 1
    assert not full(Plain()) and not empty(Plain())


def test_getattr_c_holds_what_it_makes() -> None:
    bound = collections.deque(maxlen=5)
    maxlen = collections.deque.__dict__["maxlen"]
    assert fetched(bound, ("getattr_c", 1, 0, maxlen)) == 5
    func = functools.partial.__dict__["func"]
    assert fetched(functools.partial(len), ("getattr_c", 1, 0, func)) is len
    check = on_arg(("getattr_c", 1, 0, maxlen), ("eq", 1, 5))
    assert check(bound) and not check(collections.deque()) and not check([])
    start = range.__dict__["start"]
    big = range(10**30, 10**31)
    guards = program(ARG, ("getattr_c", 1, 0, start), ("eq", 1, 10**30))
    count = sys.getrefcount(big.start)
    for _ in range(100):
        assert guards.check((big,))
    after = sys.getrefcount(big.start)
    assert after == count


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
    for other in ({True, "a", None, 2.5}, {1, "a", None}, {1, "a", None, 2.5, 3}, {1, Str("a"), None, 2.5},
                  {1.0, "a", None, 2.5}, [1, "a", None, 2.5], set()):  # fmt: skip
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


# -- blocks --------------------------------------------------------------------------------------


def block(*instrs: Instr) -> tuple[Instr, ...]:
    return (ARG, ("dict_block", 0, len(instrs)), *instrs)


def test_block_sees_every_change_of_its_dict() -> None:
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda d: d.__setitem__("a", 2),
        lambda d: d.pop("a"),
        lambda d: d.__delitem__("a"),
        lambda d: d.update(a=2),
        lambda d: d.clear(),
        lambda d: d.__ior__({"a": 2}),
        lambda d: [d.popitem() for _ in range(2)],
    ]
    for change in changes:
        for make in (dict, collections.OrderedDict, type("D", (dict,), {})):
            d = make(a=1, b=2)
            guards = program(*block(("getitem", 1, 0, "a"), ("eq", 1, 1), ("absent", 0, "z")))
            assert guards.check((d,)) and guards.check((d,))
            change(d)
            assert not guards.check((d,)) and not guards.check((d,)), change
            d.update(a=1)
            assert guards.check((d,)) and guards.slots((d,))[1] == 1
            d.setdefault("z", 3)
            assert guards.explain((d,)) == 4 and not guards.check((d,))


def test_block_sees_stores_of_hot_code() -> None:
    """The interpreter's specialised stores must show in the version."""

    class Hot:
        def __init__(self) -> None:
            self.x = 0

        def store(self, value: int) -> None:
            self.x = value

    obj = Hot()
    instance = program(
        ARG, ("dict", 1, 0), ("dict_block", 1, 2), ("getitem", 2, 1, "x"), ("eq", 2, 0)
    )
    d = {"x": 0}
    plain = program(*block(("getitem", 1, 0, "x"), ("eq", 1, 0)))
    for i in range(300):
        obj.store(0)
        d["x"] = 0
        assert instance.check((obj,)) and plain.check((d,))
        obj.store(i + 1)
        d["x"] = i + 1
        assert not instance.check((obj,)) and not plain.check((d,))


def test_block_keeps_its_slots_while_it_is_skipped() -> None:
    value = [0]
    d = {"a": value, "b": 1}
    guards = program(
        *block(("getitem", 1, 0, "a"), ("getitem", 2, 0, "b"), ("eq", 2, 1)), ("len", 1, 1)
    )
    record = _C.Record(guards, lambda *a: a, (1, 2))
    call = _C.Dispatcher(lambda a, k: "miss", [record])
    for _ in range(3):
        assert call(d) == (value, 1) and call(d)[0] is value
    value.append(1)
    assert call(d) == "miss"
    value.pop()
    other = {"a": [5], "b": 1}
    assert call(other) == ([5], 1) and call(d)[0] is value and call(other) == ([5], 1)


def test_block_with_order_on_an_ordered_dict() -> None:
    od = collections.OrderedDict(a=1, b=2)
    guards = program(*block(("keys", 0, ("a", "b"))))
    assert guards.check((od,)) and guards.check((od,))
    od.move_to_end("a")
    assert not guards.check((od,)), "the dict below has no new version"


def test_block_of_something_else() -> None:
    assert program(*block(("absent", 0, "a"))).explain(([],)) == 1


# -- malformed programs --------------------------------------------------------------------------

MALFORMED: list[tuple[list[Any], str]] = [
    ([1], "0 "),
    ([()], "0 "),
    ([("nonsense",)], "0 .*unknown"),
    ([("arg", 0)], "0 .arg.*operands"),
    ([("arg", 0, -1)], "0 .arg"),
    ([("arg", 0, 2**40)], "0 .arg"),
    ([("arg", 12, 0)], "0 .arg.*slot out of range"),
    ([("arg", -1, 0)], "0 .arg.*slot out of range"),
    ([("arg", True, 0)], "0 .arg"),
    ([ARG, ARG], "1 .arg.*written twice"),
    ([ARG, ("dict", 1, 2)], "1 .dict.*before it is written"),
    ([ARG, ("type_is", 0, 1)], "1 .type_is.*type"),
    ([ARG, ("getitem", 1, 0, [])], "1 .getitem.*unhashable"),
    ([ARG, ("keys", 0, ["a"])], "1 .keys.*tuple"),
    ([ARG, ("set_eq", 0, {1})], "1 .set_eq.*frozenset"),
    ([ARG, ("slot", 1, 0, 1)], "1 .slot.*member"),
    ([ARG, ("slot", 1, 0, range.__dict__["__len__"])], "1 .slot.*member"),
    ([ARG, ("getattr_c", 1, 0, property())], "1 .getattr_c"),
    ([ARG, ("weak", 1, 5)], "1 .weak"),
    ([ARG, ("func_code", 0, 5)], "1 .func_code"),
    ([ARG, ("tp_attr", 1, 0, 5)], "1 .tp_attr.*str"),
    ([("tp_names", int, [("a", 1)])], "0 .tp_names"),
    ([("tp_names", int, (("a",),))], "0 .tp_names"),
    ([ARG, ("distinct", 0, 5)], "1 .distinct"),
    ([ARG, ("distinct", 0, (4,))], "1 .distinct"),
    ([("argc", 0, (1,))], "0 .argc"),
    ([ARG, ("dict_block", 0, 2), ("len", 0, 1)], "1 .dict_block.*past the end"),
    ([ARG, ("dict_block", 0, 1), ("dict", 1, 0)], "2 .dict.*not allowed"),
    ([ARG, ("dict_block", 0, 1), ("type_is", 0, Plain)], "2 .type_is.*class"),
    ([ARG, ("arg", 1, 1), ("dict_block", 0, 1), ("eq", 1, 1)], "3 .eq.*outside"),
    ([ARG, ("arg", 1, 1), ("dict_block", 0, 1), ("len", 1, 1)], "3 .len"),
]


@pytest.mark.parametrize(("instrs", "message"), MALFORMED)
def test_malformed_programs(instrs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"instruction {message}"):
        _C.GuardProgram(instrs, 12)


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="n_slots"):
        _C.GuardProgram([], -1)
    with pytest.raises(TypeError):
        _C.GuardProgram(5, 0)
    guards = program()
    for args in [(), ([],), ((), []), ((), {}, 1)]:
        with pytest.raises(TypeError):
            guards.check(*args)


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
    counts, before = [sys.getrefcount(o) for o in objects], allocated()
    rounds(50_000)
    assert [sys.getrefcount(o) for o in objects] == counts
    assert allocated() - before < 50


def test_malformed_programs_leak_nothing(allocated: Callable[[], int]) -> None:
    def rounds(n: int) -> None:
        for _ in range(n):
            for instrs, _message in MALFORMED:
                with pytest.raises(ValueError, match="instruction"):
                    _C.GuardProgram(instrs, 12)

    rounds(5)
    before = allocated()
    rounds(50)
    assert allocated() - before < 100


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
    """A weak proxy of nothing in particular: `sorted` calls a key function, which calls the program."""
    results: list[object] = []

    class Back:
        def __index__(self) -> int:
            results.append(guards.slots((1,)) is None)
            results.append(guards.check((1,)))
            return 3

    guards = program(ARG, ("pyeq", 0, "0x3", hex))
    assert guards.check((Back(),))
    assert results == [True, False]
