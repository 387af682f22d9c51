"""The table of changes of outside objects, and the ways to make one and log it."""

from __future__ import annotations

import collections

from magjit.mocks import (
    DELETED,
    AttrWrite,
    ContainerState,
    DequeState,
    DictState,
    ItemWrite,
    ListState,
    SetState,
)
from tests.mocks import things

ROWS = {}


def row(*outside, again=True, inner=lambda *objects: []):
    """A recipe: (tensors, log, *outside) -> result; it changes the outside and logs its writes.

    ``outside`` are callables that make the outside objects; ``inner`` finds further ones inside of
    them; ``again``: it may run twice.
    """

    def register(run):
        ROWS[run.__name__.strip("_")] = (lambda: make_world(outside, inner), run, again)
        return run

    return register


def make_world(outside, inner):
    objects = [make() for make in outside]
    return objects + inner(*objects)


def set_attr(log, target, name, value, via="instance_dict"):
    log.append(AttrWrite(target, name, value, via))
    if value is DELETED:
        object.__delattr__(target, name)
    else:
        object.__setattr__(target, name, value)


def set_item(log, target, key, value):
    log.append(ItemWrite(target, key, value))
    native = list if isinstance(target, list) else dict
    if isinstance(target, collections.OrderedDict):
        native = collections.OrderedDict
    if value is DELETED:
        native.__delitem__(target, key)
    else:
        native.__setitem__(target, key, value)


class changed:
    """Logs the state of a container around C code that changes it."""

    def __init__(self, log, target):
        self.log, self.target = log, target
        self.native, self.state = next(
            (native, state)
            for native, state in (
                (list, ListState),
                (dict, DictState),
                (set, SetState),
                (collections.deque, DequeState),
                (object, ContainerState),
            )
            if isinstance(target, native)
        )

    def copy(self):
        if self.native is dict:
            keys = list(
                collections.OrderedDict.__iter__(self.target)
                if isinstance(self.target, collections.OrderedDict)
                else dict.__iter__(self.target)
            )
            return {k: dict.__getitem__(self.target, k) for k in keys}
        if self.native is object:
            return type(self.target)(self.target)
        items = self.native.__iter__(self.target)
        return set(items) if self.native is set else list(items)

    def __enter__(self):
        self.initial = self.copy()

    def __exit__(self, *exc):
        self.log.append(self.state(self.target, self.initial, self.copy()))


def three():
    return [1, 2, 3]


def objects():
    return [things.Plain(0), things.Plain(1), things.Plain(2)]


def abc():
    return {"a": 1, "b": 2, "c": 3}


def ordered():
    return collections.OrderedDict(abc())


def plain():
    return things.Plain("old", "other")


# A key and value that every world shares.
t_key = object()
