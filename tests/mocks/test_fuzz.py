"""Random object graphs with sharing and cycles, and random changes of containers."""

from __future__ import annotations

import collections
import functools
import types

from hypothesis import given, settings
from hypothesis import strategies as st

from magjit.mocks import DELETED, DequeState, DictState, ItemWrite, ListState, SetState
from tests.mocks import things
from tests.mocks.world import Alike, Replay, shared_objects, tensors

# A program is a list of (kind, indices of earlier objects); it is run once for each world.
MAKERS = {
    "list": lambda p: list(p),
    "tuple": lambda p: tuple(p),
    "dict": lambda p: dict(zip("abcdef", p, strict=False)),
    "keyed": lambda p: {things.ByValue((i, "k")): x for i, x in enumerate(p)},
    "object keys": lambda p: {things.Plain(): x for x in p},
    "set": lambda p: {things.ByValue(i) for i in range(len(p))},
    "frozenset": lambda p: frozenset(things.ByValue((i, "f")) for i in range(len(p))),
    "deque": lambda p: collections.deque(p, maxlen=7),
    "ordered": lambda p: collections.OrderedDict(zip("fedcba", p, strict=False)),
    "default": lambda p: collections.defaultdict(list, zip("xyz", p, strict=False)),
    "plain": lambda p: things.Plain(*p),
    "slots": lambda p: things.Slotted([*p, None][0], [*p, 1][-1]),
    "frozen": lambda p: things.Frozen([*p, 0][0], tuple(p)),
    "point": lambda p: things.Point([*p, 0][0]),
    "loud list": lambda p: things.LoudList(p),
    "loud dict": lambda p: things.LoudDict(zip("abc", p, strict=False)),
    "output": lambda p: things.Output(**dict(zip("abc", p, strict=False))),
    "closure": lambda p: lambda: p,
    "cell": lambda p: types.CellType(*p[:1]),
    "partial": lambda p: functools.partial(print, *p),
    "method": lambda p: types.MethodType(things.Registered.method, (p, *p)),
    "namespace": lambda p: types.SimpleNamespace(**dict(zip("abc", p, strict=False))),
    "slice": lambda p: slice(*[*p, None, None, None][:3]),
    "user list": lambda p: collections.UserList(p),
    "view": lambda p: dict(zip("abc", p, strict=False)).values(),
    "iterator": lambda p: iter(list(p)),
    "error": lambda p: things.ShapeError(tuple(p), "hint"),
    "atom": lambda p: (len(p), "text", 1.5),
}


def link(a, b):
    """Make an object refer to another, which may close a cycle."""
    match a:
        case list():
            list.append(a, b)
        case collections.OrderedDict():
            collections.OrderedDict.__setitem__(a, "link", b)
        case dict():
            dict.__setitem__(a, "link", b)
        case collections.deque():
            a.append(b)
        case things.Plain() | things.Frozen() | types.SimpleNamespace() | things.ShapeError():
            a.__dict__["link"] = b
        case things.Slotted():
            a.unset = b
        case types.CellType():
            a.cell_contents = b
        case collections.UserList():
            a.data.append(b)
        case types.FunctionType():
            a.link = b


indices = st.integers(0, 1000)
programs = st.tuples(
    st.lists(st.tuples(st.sampled_from(sorted(MAKERS)), st.lists(indices, max_size=4)), min_size=1),
    st.lists(st.tuples(indices, indices), max_size=12),
    st.lists(indices, min_size=1, max_size=4),
)


def outside_objects():
    return [[1], {"a": 1}, things.Plain()]


def interpret(program, made, outside):
    makers, links, results = program
    pool = [*made, *outside, None, 7]
    first = len(pool)
    for kind, parts in makers:
        pool.append(MAKERS[kind]([pool[i % len(pool)] for i in parts]))
    for i, j in links:
        link(pool[first + i % (len(pool) - first)], pool[j % len(pool)])
    found = [pool[-1 - i % len(pool)] for i in results]
    return found[0] if len(found) == 1 else found


@settings(max_examples=400, deadline=None)
@given(programs)
def test_object_graphs(program):
    made, outside = tensors(2), outside_objects()
    recorded = interpret(program, made, outside)
    replay = Replay(recorded, outside=outside, made=made)
    made, there = tensors(2), outside_objects()
    expected = interpret(program, made, there)
    alike = Alike()
    for obj in (*made, *there):
        alike.there[id(obj)], alike.back[id(obj)] = obj, obj
    found = replay(made, there)
    assert alike.differ(expected, found) is None
    assert not shared_objects(alike)
    alike = Alike()
    alike.differ(recorded, found)
    assert not shared_objects(alike)


values = st.sampled_from(range(4)) | st.sampled_from(["x", None]) | st.integers(10, 13)
lists = st.lists(values, max_size=6)


def world_values(outside):
    """Values 10 to 13 stand for objects that no node tells of."""
    return lambda x: outside[x - 10] if isinstance(x, int) and x >= 10 else x


def replayed_state(kind, before, after, make, read):
    """The contents of a container of a second world after the replay of a change, as numbers."""
    first, second = ([things.Plain(i) for i in range(4)] for _ in range(2))
    one, two = world_values(first), world_values(second)
    target = make(before, one)
    write = kind(target, read(make(before, one)), read(make(after, one)))
    twin = make(before, two)
    new = [x for x in after if x not in before]
    known = [one(x) for x in new if isinstance(x, int) and x >= 10]
    there = [two(x) for x in new if isinstance(x, int) and x >= 10]
    replay = Replay(None, [write], outside=[target, *known])
    replay((), [twin, *there])
    expected = make(after, two)
    assert read(twin) == read(expected)
    assert [id(x) for x in read(twin)] == [id(x) for x in read(expected)]
    if isinstance(twin, dict):
        assert list(twin.values()) == list(expected.values())


@settings(max_examples=300, deadline=None)
@given(lists, lists)
def test_list_changes(before, after):
    replayed_state(ListState, before, after, lambda items, of: [of(x) for x in items], list)


@settings(max_examples=300, deadline=None)
@given(lists, lists, st.integers(3, 7) | st.none())
def test_deque_changes(before, after, maxlen):
    replayed_state(
        DequeState,
        before[-maxlen:] if maxlen else before,
        after[-maxlen:] if maxlen else after,
        lambda items, of: collections.deque([of(x) for x in items], maxlen),
        list,
    )


@settings(max_examples=300, deadline=None)
@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
def test_set_changes(before, after):
    target, twin = set(before), set(before)
    Replay(None, [SetState(target, before, after)], outside=[target])((), [twin])
    assert twin == after


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), values), max_size=6),
    st.lists(st.tuples(st.sampled_from("abcdef"), values), max_size=6),
    st.sampled_from([dict, collections.OrderedDict, things.LoudOrdered]),
)
def test_dict_changes(before, after, cls):
    keep = [things.Plain(i) for i in range(4)]
    of = world_values(keep)
    initial, final = ({k: of(v) for k, v in items} for items in (before, after))
    target, twin = cls(initial), cls(initial)
    replay = Replay(None, [DictState(target, initial, final)], outside=[target, *keep])
    replay((), [twin, *keep])
    assert list(twin) == list(final)
    assert all(dict.__getitem__(twin, k) is v for k, v in final.items())


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 3)), max_size=4),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3) | st.none()), max_size=12),
    st.sampled_from([dict, collections.OrderedDict, things.LoudDict, things.LoudOrdered]),
)
def test_item_writes(before, changes, cls):
    native = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
    target, twin = cls(before), cls(before)
    writes = []
    for key, value in changes:
        if value is not None:
            native.__setitem__(target, key, [value])
            writes.append(ItemWrite(target, key, dict.get(target, key)))
        elif dict.__contains__(target, key):
            native.__delitem__(target, key)
            writes.append(ItemWrite(target, key, DELETED))
    Replay(None, writes, outside=[target])((), [twin])
    assert list(native.items(twin)) == list(native.items(target))
