"""What cannot be made again is refused by a typed error that names the way to it."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
import types

import numpy as np
import pytest
import torch

from magjit.errors import MagJITError, Unrebuildable
from magjit.mocks import AttrWrite, CellWrite, ContainerState, ItemWrite, ListState, SetState
from tests.mocks import things
from tests.mocks.world import Replay, tensors


def generator():
    yield 1


async def coroutine():
    return 1


async def async_generator():
    yield 1


def closed(coro):
    coro.close()
    return coro


def local_class():
    class Local:
        def __init__(self):
            self.x = 1

    return Local


class ReducedByPython(np.ndarray):
    pass


REFUSED = {
    "generator": generator,
    "generator expression": lambda: (x for x in [1]),
    "coroutine": lambda: closed(coroutine()),
    "asynchronous generator": async_generator,
    "frame": sys._getframe,
    "file": lambda: open(__file__),  # noqa: SIM115
    "socket": socket.socket,
    "lock": threading.Lock,
    "reentrant lock": threading.RLock,
    "condition": threading.Condition,
    "event": threading.Event,
    "thread-local": threading.local,
    "torch generator": torch.Generator,
    "unknown tensor": lambda: torch.ones(1),
    "parameter made in the run": lambda: torch.nn.Linear(1, 1),
    "autograd node": lambda: (torch.ones(1, requires_grad=True) * 2).grad_fn,
    "storage": lambda: torch.ones(1).untyped_storage(),
    "dead weak reference": lambda: __import__("weakref").ref(things.Plain()),
    "weak proxy": lambda: __import__("weakref").proxy(things.Plain),
    "set iterator": lambda: iter({1, 2}),
    "array of objects": lambda: np.array([[], {}], dtype=object),
    "array over a tensor": lambda: torch.ones(3).numpy(),
    "array of a subclass": lambda: np.ones(2).view(ReducedByPython),
    "memory view": lambda: memoryview(b"abc"),
    "regular expression match": lambda: re.match("a", "a"),
    "event loop": lambda: asyncio.Queue()._loop if False else asyncio.new_event_loop(),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    obj = REFUSED[name]()
    try:
        with pytest.raises(Unrebuildable) as caught:
            Replay({"a": [things.Plain(obj)]})
    finally:
        if hasattr(obj, "close"):
            obj.close()
    error = caught.value
    assert isinstance(error, MagJITError)
    assert error.path.startswith("result['a'][0].a0")
    assert error.path in error.reason and len(error.reason) < 300


def test_a_class_made_in_the_run_and_its_instances():
    cls = local_class()
    for value in (cls, cls(), [cls().__class__]):
        with pytest.raises(Unrebuildable, match="Local"):
            Replay(value, created=[cls])
    assert type(Replay(cls())()) is cls  # it existed before the run
    module = types.ModuleType("made")
    with pytest.raises(Unrebuildable, match="module"):
        Replay(module, created=[module])


def test_a_function_with_globals_made_in_the_run():
    names: dict = {}
    exec("def f(): return 1", names)
    with pytest.raises(Unrebuildable, match="globals"):
        Replay(names["f"], created=[names["f"], names])


def test_a_cycle_through_constructors():
    class Slotless(tuple):
        pass

    held = []
    found = frozenset({things.Plain(held)})
    held.append(found)
    assert len(Replay(found)()) == 1  # a list on the cycle is made empty first
    ring = iter([1])
    items: list = [ring]
    pair = (slice(items, 1), 2)
    items.append(pair)
    made = Replay(pair)()
    assert made[0].start[1] is made


def test_paths():
    target = things.Plain()
    cell = types.CellType()

    def capture():
        return lock

    lock = threading.Lock()
    cases = [
        ({"a": [things.Data(1, lock)]}, (), "result['a'][0].b"),
        (capture, (), "result.<lock>"),
        ((1, {2: {"x": lock}}), (), "result[1][2]['x']"),
        (None, [AttrWrite(target, "x", [lock])], "Plain.x[0]"),
        (None, [ItemWrite(target.__dict__, "k", lock)], "dict['k']"),
        (None, [CellWrite(cell, lock)], "variable"),
    ]
    for result, writes, path in cases:
        with pytest.raises(Unrebuildable) as caught:
            Replay(result, writes, outside=[target, target.__dict__, cell])
        assert caught.value.path == path
        assert str(caught.value).startswith(path)


def test_a_remedy_is_given_where_there_is_one():
    with pytest.raises(Unrebuildable) as caught:
        Replay(generator())
    assert "way out: return a list of its items" in str(caught.value)


def test_changes_that_cannot_be_redone():
    lost = things.Plain()
    found = {lost}
    with pytest.raises(Unrebuildable, match="set"):
        Replay(None, [SetState(found, {lost}, set())], outside=[found])
    target = things.Plain()
    with pytest.raises(Unrebuildable, match="Plain"):
        Replay(None, [ContainerState(target, 1, 2)], outside=[target])


def test_nothing_of_a_refused_object_runs():
    class Loud:
        def __reduce__(self):
            raise things.Forbidden

        def __getattr__(self, name):
            raise things.Forbidden

    obj = Loud()
    obj.lock = threading.Lock()
    with pytest.raises(Unrebuildable):
        Replay(obj)


def test_an_iterator_over_a_changed_outside_list():
    items = [1, 2]
    writes = [ListState(items, [1], [1, 2])]
    with pytest.raises(Unrebuildable, match="iterates"):
        Replay(reversed(items), writes, outside=[items])
    assert list(Replay(reversed(items), outside=[items])((), [[5, 6]])) == [6, 5]


def test_intermediate_tensors_are_no_outputs():
    made = tensors()
    replay = Replay({"a": made[2]}, made=made)
    assert replay.outputs == (2,)
