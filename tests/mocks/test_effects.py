"""Every kind of change of outside objects: a replay leaves what eager leaves, order included."""

from __future__ import annotations

import collections
import sys

import pytest

from magjit.mocks import (
    DELETED,
    AttrWrite,
    DictState,
    GlobalWrite,
    ItemWrite,
    ListState,
)
from magjit.mocks.writes import final_writes
from tests.mocks import rows_containers, rows_writes, things
from tests.mocks.effects import ROWS, abc, objects, plain, t_key, three
from tests.mocks.world import Alike, Replay, shared_objects, tensors

assert rows_writes and rows_containers  # they fill ROWS


def replayed(outside, run):
    made, world, log = tensors(), outside(), []
    recorded = run(made, log, *world)
    return Replay(recorded, log, outside=world, made=made), (recorded, world)


@pytest.mark.parametrize("name", ROWS)
def test_effect(name):
    outside, run, again = ROWS[name]
    replay, before = replayed(outside, run)
    there, here = outside(), outside()
    for _ in range(2 if again and replay_is_repeatable(name) else 1):
        made = tensors()
        twin = [t.clone() for t in made]
        expected = run(made, [], *there)
        twin += [t.clone() for t in made[len(twin) :]]
        found = replay(twin, here)
        alike = Alike()
        assert alike.differ([expected, there], [found, here]) is None
    alike = Alike()
    assert alike.differ([expected, there], [found, here]) is None
    assert not [x for x in shared_objects(alike) if x is not t_key]
    alike = Alike()
    alike.differ(list(before), [found, here])
    assert not [x for x in shared_objects(alike) if x is not t_key]


# What these do depends on what the container held, which the guard of a record pins.
DEPENDS_ON_STATE = {
    *("list_insert", "list_slice_replaced", "list_reverse", "dict_rotated_with_unknown_values"),
    *("deque_rotate", "item_writes_before_and_after_c_code", "ordered_dict_move_to_end"),
    *("typed_array", "append_to_a_list_subclass", "byte_array", "counter", "swap"),
}


def replay_is_repeatable(name):
    return name not in DEPENDS_ON_STATE


def test_there_are_many_rows():
    assert len(ROWS) >= 60


def test_appends_do_not_depend_on_what_is_there():
    run = ROWS["list_append_to_unknown_objects"][1]
    replay, _ = replayed(lambda: [objects()], run)
    longer = [*objects(), 4, 5]
    values = tensors()
    replay(values, [longer])
    assert len(longer) == 6 and longer[-1][0] is values[0]
    replay, _ = replayed(*ROWS["full_deque_append"][:2])
    full = collections.deque([5, 6], maxlen=2)
    replay(values, [full])
    assert list(full) == [6, values[0]]


def test_the_least_is_written():
    obj, d, items = plain(), abc(), three()
    writes = [
        AttrWrite(obj, "x", 1, "instance_dict"),
        AttrWrite(obj, "x", 2, "instance_dict"),
        ItemWrite(obj.__dict__, "x", 3),
        DictState(d, abc(), {**abc(), "b": 5}),
        DictState(d, abc(), {**abc(), "b": 5}),
        ItemWrite(d, "a", 9),
        ListState(items, [1, 2, 3], [1, 5, 3]),
        AttrWrite(obj, "gone", 1, "instance_dict"),
        AttrWrite(obj, "gone", DELETED, "instance_dict"),
    ]
    replay = Replay(None, writes, outside=[obj, d, items])
    assert replay.source == (
        "def finish(outs, s0, s1, s2):\n"
        "    s0.x = 3\n"
        "    s1['b'] = 5\n"
        "    s2[1] = 5\n"
        "    dict_pop(s0.__dict__, 'gone', None)\n"
        "    return None\n"
    )


def test_final_writes_keep_the_first_position_and_the_last_value():
    d = {}
    writes = final_writes(
        [ItemWrite(d, "a", 1), ItemWrite(d, "b", 2), ItemWrite(d, "a", 3), ItemWrite(d, True, 4)]
        + [ItemWrite(d, 1, 5), ItemWrite(d, "b", DELETED), ItemWrite(d, "b", 6)]
    )
    assert [(w.key, w.value) for w in writes] == [("a", 3), (True, 5), ("b", DELETED), ("b", 6)]


def test_a_write_to_a_class_or_a_module_needs_no_slot():
    writes = [
        AttrWrite(things.Plain, "shared", [1]),
        GlobalWrite(sys.modules[__name__].__dict__, "WRITTEN", 5),
    ]
    replay = Replay(None, writes)
    assert replay.slots == ()
    try:
        replay()
        assert things.Plain.shared == [1] and WRITTEN == 5  # noqa: F821
    finally:
        del things.Plain.shared, globals()["WRITTEN"]


def test_effects_come_after_what_they_overwrite_was_read():
    first, second = things.Plain(1), things.Plain(2)
    items = [first, second]
    state = ListState(items, [first, second], [second, first])
    replay = Replay([first], [state], outside=[items])
    fresh = [things.Plain(3), things.Plain(4)]
    a, b = fresh
    assert replay((), [fresh])[0] is a
    assert fresh[0] is b and fresh[1] is a
