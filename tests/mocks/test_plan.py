"""The printed plan and the generated code, what a replay costs, and what it keeps alive."""

from __future__ import annotations

import collections
import dis
import gc
import linecache
import sys
import traceback
import types
import weakref

import pytest

from magjit.mocks import (
    AttrWrite,
    Call,
    GlobalWrite,
    ItemWrite,
    ListState,
    build_plan,
    emit,
    verify,
)
from magjit.mocks.ir import Const, Let, MockPlan, Out, Ref, Seq, Slot
from tests.mocks import things
from tests.mocks.world import FakeResolver, Replay, tensors

PLAN = """\
graph outputs: %0, %2
build:
    v1: list = []
    v2: Plain = object.__new__(Plain)
    v0: dict = {'ring': v1, 'obj': v2, 'out': %2}
    list.extend(v1, (%0, v1))
    v2.a0 = v1
    v2.a1 = #1
    v4: tuple = (v2, None)
effects:
    #0.last = v4
    #1.append(%2)
return v0"""

SOURCE = """\
def finish(outs, s1, s0):
    o1 = outs[1]
    v1 = []
    v2 = object___new(Plain)
    list_extend(v1, (outs[0], v1))
    v2.a0 = v1
    v2.a1 = s1
    s0.last = (v2, None)
    list_append(s1, o1)
    return {'ring': v1, 'obj': v2, 'out': o1}
"""


def example():
    made, target, log = tensors(), things.Plain(), [1]
    ring = [made[0]]
    ring.append(ring)
    obj = things.Plain(ring, log)
    writes = [
        AttrWrite(target, "last", (obj, None), "instance_dict"),
        ListState(log, [1], [1, made[2]]),
    ]
    result = {"ring": ring, "obj": obj, "out": made[2]}
    return Replay(result, writes, outside=[target, log], made=made)


def test_printed_plan():
    assert str(example().plan) == PLAN.replace("#1.append(%2)", "list.append(#1, %2)")


def test_generated_source():
    assert example().source == SOURCE


@pytest.mark.parametrize(
    ("make", "finish", "outputs"),
    [
        (lambda t: t[1], 0, (1,)),
        (lambda t: (t[2], t[0]), None, (2, 0)),
        (lambda t: (t[2],), None, (2,)),
    ],
)
def test_short_forms(make, finish, outputs):
    made = tensors()
    found = emit(build_plan(make(made), [], FakeResolver(tensors=made)))
    assert found.finish == finish and found.outputs == outputs and found.slots == ()


@pytest.mark.parametrize(
    "make",
    [
        lambda t: None,
        lambda t: [t[0], t[1]],
        lambda t: (t[0], t[0]),
        lambda t: (t[0], 1),
        lambda t: (),
        lambda t: things.Point(t[0], t[1]),
    ],
)
def test_no_short_form(make):
    made = tensors()
    assert callable(emit(build_plan(make(made), [], FakeResolver(tensors=made))).finish)


def test_a_short_form_has_no_effects():
    made, target = tensors(), things.Plain()
    writes = [AttrWrite(target, "x", 1, "instance_dict")]
    assert callable(Replay(made[0], writes, outside=[target], made=made).finish)


def same_code(finish, by_hand):
    def code(f):
        names = [(i.opname, i.argrepr) for i in dis.get_instructions(f)]
        return [x for x in names if x[0] not in ("RESUME", "NOP", "CACHE")]

    return code(finish) == code(by_hand)


def test_as_fast_as_code_written_by_hand():
    made = tensors()

    def by_hand(outs):
        return {"a": outs[0], "b": outs[1]}

    replay = Replay({"a": made[0], "b": made[1]}, made=made)
    assert same_code(replay.finish, by_hand)

    def nested(outs, s0):
        return [(outs[0], {"k": [outs[1], s0]}), 5, "text", (1, 2)]

    outside = [1]
    replay = Replay(
        [(made[0], {"k": [made[1], outside]}), 5, "text", (1, 2)], outside=[outside], made=made
    )
    assert same_code(replay.finish, nested)


def test_verify_finds_what_is_wrong():
    def plan(**changes):
        fields = {"lines": (), "effects": (), "result": Const(1), "outputs": (), "slots": ()}
        return MockPlan(**{**fields, "types": {0: "list"}, **changes})

    verify(plan())
    let = Let(0, Seq("list", (Out(1),)))
    verify(plan(lines=(let,), result=Ref(0), outputs=(1,)))
    for broken in (
        plan(result=Ref(0)),
        plan(lines=(let,)),
        plan(lines=(let, let), outputs=(1,)),
        plan(result=Slot(1)),
        plan(slots=(1,)),
        plan(outputs=(1, 1), result=Out(1)),
        plan(lines=(Let(7, Const(1)),)),
    ):
        with pytest.raises(AssertionError):
            verify(broken)


def test_names_in_generated_code():
    odd = type("outs", (), {})
    keyword = type("class", (), {})
    twins = [type("Twin", (), {})() for _ in range(2)]
    value = [odd(), keyword(), *twins, {"s0": 1, "v0": 2}, type("é", (), {})()]
    made = Replay(value)()
    assert [type(x) for x in made] == [type(x) for x in value]


def test_tracebacks_show_the_mock():
    target = things.Plain()
    replay = Replay(None, [Call(explode, ([1],)), AttrWrite(target, "x", 1)], outside=[target])
    try:
        replay((), [target])
    except ZeroDivisionError:
        text = traceback.format_exc()
    assert "explode([1])" in text and "<magjit mock" in text


def explode(items):
    raise ZeroDivisionError


def test_the_generated_source_is_forgotten_with_the_function():
    replay = Replay([[1]])
    filename = replay.finish.__code__.co_filename
    assert filename in linecache.cache and linecache.getline(filename, 1).startswith("def finish")
    linecache.checkcache()
    assert filename in linecache.cache
    del replay
    gc.collect()
    assert filename not in linecache.cache


def test_nothing_of_the_run_stays_alive():
    def capture():
        made = tensors()
        obj = things.Plain(made[0], [things.Data(1)], collections.deque([1]))
        obj.bound = types.MethodType(things.Registered.method, things.Registered(1))
        obj.function = lambda: obj
        obj.c_method = [].append
        watched = [weakref.ref(x) for x in (obj, obj.a1[0], obj.a2, obj.function, made[0])]
        return Replay(obj, made=made), watched

    replay, watched = capture()
    gc.collect()
    assert [r() for r in watched] == [None] * 5
    first = replay(tensors())
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_replays_do_not_grow():
    made = tensors()
    replay = Replay({"a": things.Plain(made[0]), "b": [made[1]]}, made=made)
    for _ in range(10):
        replay(made)
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(1000):
        replay(made)
    gc.collect()
    assert sys.getallocatedblocks() - before < 50


def test_captures_do_not_grow():
    def capture():
        Replay({"a": things.Data([1]), "f": lambda: 1})()

    for _ in range(20):
        capture()
    gc.collect()
    before = len(gc.get_objects()), len(linecache.cache)
    for _ in range(100):
        capture()
    gc.collect()
    assert len(gc.get_objects()) - before[0] < 50 and len(linecache.cache) == before[1]


def test_a_class_that_is_gone_leaves_no_layout():
    cls = type("Gone", (), {})
    Replay(cls())()
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


def test_globals_have_a_readable_name():
    names = {"__name__": "some.module"}
    replay = Replay(None, [GlobalWrite(names, "x", 1)])
    assert "globals_of_some_module['x'] = 1" in replay.source
    replay()
    assert names["x"] == 1


def test_many_effects_on_one_dict():
    d = {}
    writes = [ItemWrite(d, f"k{i}", i) for i in range(2000)]
    Replay(None, writes, outside=[d])((), [d])
    assert list(d.values()) == list(range(2000))
