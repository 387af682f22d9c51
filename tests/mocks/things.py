"""Classes of many makes, for objects that leave a run."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import typing
import weakref

import torch

T = typing.TypeVar("T")


class Forbidden(Exception):
    """Raised by code that a replay must not run."""


class Plain:
    def __init__(self, *args):
        for i, value in enumerate(args):
            setattr(self, f"a{i}", value)


class Slotted:
    __slots__ = ("x", "__hidden", "unset")

    def __init__(self, x, y):
        self.x, self.__hidden = x, y


class SlottedChild(Slotted):
    __slots__ = ("z", "x")

    def __init__(self, x, y, z):
        super().__init__(x, y)
        Slotted.x.__set__(self, "base")
        self.z, self.x = z, x


class SlotsAndDict(Slotted):
    pass


@dataclasses.dataclass
class Data:
    a: object
    b: object = None
    c: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: object
    b: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    a: object
    b: object = None


@dataclasses.dataclass
class PostInit:
    a: object
    scale: dataclasses.InitVar[float] = 2.0

    def __post_init__(self, scale):
        self.scaled = (self.a, scale)


class Guarded:
    """Every hook that Python offers, armed once the object is made."""

    armed = False

    def __init__(self, x):
        self.x = x

    def __setattr__(self, name, value):
        if Guarded.armed:
            raise Forbidden(name)
        object.__setattr__(self, name, value)

    def __getattribute__(self, name):
        if Guarded.armed:
            raise Forbidden(name)
        return object.__getattribute__(self, name)

    def __reduce_ex__(self, protocol):
        raise Forbidden

    def __getstate__(self):
        raise Forbidden


class WithProperty:
    def __init__(self, x):
        self._x = x
        self.__dict__["shadowed"] = x

    @property
    def x(self):
        return self._x

    @property
    def shadowed(self):
        return 0

    @shadowed.setter
    def shadowed(self, value):
        raise Forbidden


class ByValue:
    def __init__(self, key):
        self.key = key

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return isinstance(other, ByValue) and self.key == other.key

    def __repr__(self):
        return f"ByValue({self.key!r})"


class Point(typing.NamedTuple):
    x: object
    y: object = None


class PointWithDict(Point):
    def length(self):
        return 0


class LoudList(list):
    def append(self, item):
        raise Forbidden

    def __iter__(self):
        raise Forbidden

    def __len__(self):
        return 0

    def __setitem__(self, key, value):
        raise Forbidden

    extend = __delitem__ = __getitem__ = __setitem__


class LoudDict(dict):
    def __setitem__(self, key, value):
        raise Forbidden

    def __getitem__(self, key):
        raise Forbidden

    def __iter__(self):
        raise Forbidden

    def update(self, *args):
        raise Forbidden

    keys = items = values = pop = __delitem__ = __getitem__


class LoudOrdered(collections.OrderedDict):
    def __getitem__(self, key):
        raise Forbidden

    pop = __delitem__ = __getitem__


class Output(collections.OrderedDict):
    """As transformers' ModelOutput: items and attributes hold the same."""

    def __init__(self, **items):
        super().__init__()
        for name, value in items.items():
            self[name] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


class LoudSet(set):
    def add(self, item):
        raise Forbidden

    update = __iter__ = difference_update = add


class TaggedFrozenSet(frozenset):
    tag = None


class TaggedTuple(tuple):
    pass


class Count(int):
    pass


class Name(str):
    def __str__(self):
        raise Forbidden


class Ratio(float):
    __slots__ = ("source",)


class Blob(bytes):
    pass


class Offset(int):
    def __new__(cls, base, offset):
        self = super().__new__(cls, base + offset)
        self.offset = offset
        return self


class Pair(frozenset):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class Task(functools.partial):
    def __new__(cls, name, func, *args):
        self = super().__new__(cls, func, *args)
        self.name = name
        return self


class Buffer(bytearray):
    def __init__(self, size, fill):
        super().__init__(fill * size)
        self.size = size


class Options(types.SimpleNamespace):
    def __init__(self, first, second):
        super().__init__(first=first, second=second)


class Color(enum.Enum):
    RED = 1


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Box(typing.Generic[T]):
    def __init__(self, item: T):
        self.item = item


class Ref(weakref.ref):
    __slots__ = ("label",)


class ShapeError(ValueError):
    def __init__(self, shape, hint):
        super().__init__("bad shape")
        self.shape, self.hint = shape, hint


class Meta(type):
    def __call__(cls, *args):
        return super().__call__(*args)


class Registered(metaclass=Meta):
    def __init__(self, x):
        self.x = x

    def method(self):
        return self.x

    @classmethod
    def make(cls):
        return cls(1)


class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.inner = torch.nn.ReLU()
        self.scale = scale
        self.register_buffer("buffer", scale)
