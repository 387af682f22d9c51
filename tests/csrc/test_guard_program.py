"""Guard programs: where objects come from, blocks, and programs that are refused."""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from magjit import _C
from tests.csrc.guard_helpers import (
    ARG,
    Hostile,
    Instr,
    Plain,
    Slotted,
    Str,
    fetched,
    on_arg,
    program,
)

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


def test_malformed_programs_leak_nothing() -> None:
    def allocated() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    def rounds(n: int) -> None:
        for _ in range(n):
            for instrs, _message in MALFORMED:
                with pytest.raises(ValueError, match="instruction"):
                    _C.GuardProgram(instrs, 12)

    rounds(5)
    before = allocated()
    rounds(50)
    assert allocated() - before < 100


def test_predicates_run_python_with_every_slot_held() -> None:
    holder = Plain()
    answers = [True]

    def predicate(item: object, whole: object) -> object:
        assert whole is holder
        holder.__dict__.clear()
        gc.collect()
        return answers[0]

    guards = program(
        ARG,
        ("dict", 1, 0),
        ("dict_block", 1, 1),
        ("getitem", 2, 1, "item"),
        ("index", 3, 2, 0),
        ("predicate", (2, 0), predicate),
        ("predicate", (3,), lambda part: part.kept == 1),
    )
    call = _C.Dispatcher(lambda a, k: "miss", [_C.Record(guards, lambda *a: a, (2, 3))])
    for _ in range(5):
        part = Plain()
        part.kept = 1
        holder.item = [part]
        del part
        out = call(holder)
        assert out[0][0] is out[1] and out[1].kept == 1
    holder.item = [Plain()]
    assert call(holder) == "miss", "an exception is a failed guard"
    holder.item = [1]
    answers[0] = False
    assert guards.explain((holder,)) == 5 and call(holder) == "miss"
    with pytest.raises(ValueError, match=r"2 \(is\): only predicates"):
        program(ARG, ("predicate", (0,), bool), ("is", 0, 1))


def test_context_variables() -> None:
    var: contextvars.ContextVar[object] = contextvars.ContextVar("var", default=5)
    value, unset = on_arg(("context_value", 1, 0), ("eq", 1, 7)), on_arg(("context_unset", 0))
    assert unset(var) and not value(var)
    token = var.set(7)
    assert value(var) and not unset(var)
    var.reset(token)
    assert unset(var)
    contextvars.copy_context().run(lambda: (var.set(7), value(var)))
    assert unset(var) and not unset(1) and not value(1)


def test_order_of_keywords() -> None:
    guards = program(("argc", 0, ("x", "y")), ("kwarg_order", ("x", "y")))
    assert guards.check((), {"x": 1, "y": 2}) and not guards.check((), {"y": 1, "x": 2})
