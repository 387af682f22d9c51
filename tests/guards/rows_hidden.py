"""State that a program reads by unusual ways; a split is right, a stale value is not."""

from __future__ import annotations

import collections
import decimal
import functools
import itertools
import operator
import string
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import _tensor_str

from ..twin import Scene
from .table import RIGHT, new_table

ROWS = new_table()


class Box:
    """An object to put things into."""


def box(**fields: Any) -> Any:
    made = Box()
    made.__dict__.update(fields)
    return made


def hidden(
    name: str,
    make: Callable[[], Any],
    change: Callable[[Any], Any],
    read: Callable[[Any], Any],
) -> None:
    """A program that reads an outside object which changes between two calls."""

    def recipe() -> Scene:
        state = make()
        keep = [state]

        def program(x: torch.Tensor) -> Any:
            return x * read(keep[0])

        return Scene(program, change=lambda scene: change(state))

    ROWS.add(f"hidden {name}", recipe, after=RIGHT)


# --- classes and metaclasses ----------------------------------------------------------------


class Meta(type):
    scale = 2.0

    def __len__(cls) -> int:
        return cls.size  # type: ignore[attr-defined,no-any-return]

    def __getattr__(cls, name: str) -> Any:
        return cls.fallback  # type: ignore[attr-defined]

    def __contains__(cls, item: Any) -> bool:
        return item in cls.members  # type: ignore[attr-defined]

    def __iter__(cls) -> Any:
        return iter(cls.members)  # type: ignore[attr-defined]

    def __instancecheck__(cls, obj: Any) -> bool:
        return cls.answer  # type: ignore[attr-defined,no-any-return]


def a_class(**body: Any) -> Any:
    meta = types.new_class("OwnMeta", (Meta,))
    body = {"size": 2, "members": [1, 2], "answer": True, "fallback": 2.0, **body}
    return meta("Made", (), body)


def two_classes() -> Any:
    first = type("First", (), {"scale": 2.0, "__call__": lambda self: 2.0})
    second = type("Second", (), {"scale": 5.0, "__call__": lambda self: 5.0})
    return box(obj=first(), first=first, second=second)


def set_of(owner: str, name: str, value: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> None:
        setattr(getattr(state, owner) if owner else state, name, value)

    return change


def replace_class(state: Any) -> None:
    state.obj.__class__ = state.second


hidden("class by __class__", two_classes, replace_class, lambda b: b.obj.__class__.scale)
hidden("class name by type", two_classes, replace_class, lambda b: len(type(b.obj).__name__))
hidden("class by isinstance", two_classes, replace_class, lambda b: 1 + isinstance(b.obj, b.first))
hidden("class by is", two_classes, replace_class, lambda b: 1 + (type(b.obj) is b.first))
hidden("class by call", two_classes, replace_class, lambda b: b.obj())
hidden(
    "name of a class",
    two_classes,
    set_of("first", "__name__", "X"),
    lambda b: len(b.first.__name__),
)
hidden(
    "qualname of a class",
    two_classes,
    set_of("first", "__qualname__", "X"),
    lambda b: len(b.first.__qualname__),
)
hidden(
    "module of a class",
    two_classes,
    set_of("first", "__module__", "X"),
    lambda b: len(b.first.__module__),
)
hidden(
    "doc of a class",
    two_classes,
    set_of("first", "__doc__", "X"),
    lambda b: len(b.first.__doc__ or ""),
)
hidden(
    "repr of a class",
    two_classes,
    set_of("first", "__qualname__", "X"),
    lambda b: len(repr(b.first)),
)
hidden(
    "format of a class",
    two_classes,
    set_of("first", "__qualname__", "X"),
    lambda b: len(f"{b.first}"),
)
hidden("metaclass len", a_class, set_of("", "size", 5), lambda c: len(c))
hidden("metaclass truth", a_class, set_of("", "size", 0), lambda c: 2.0 if c else 3.0)
hidden("metaclass getattr", a_class, set_of("", "fallback", 5.0), lambda c: c.anything)
hidden("metaclass contains", a_class, lambda c: c.members.append(3), lambda c: 1 + (3 in c))
hidden("metaclass iter", a_class, lambda c: c.members.append(3), lambda c: sum(c))
hidden("metaclass attribute", a_class, lambda c: setattr(type(c), "scale", 5.0), lambda c: c.scale)
hidden("metaclass attribute shadowed", a_class, set_of("", "scale", 5.0), lambda c: c.scale)
hidden(
    "metaclass instancecheck", a_class, set_of("", "answer", False), lambda c: 1 + isinstance(3, c)
)
hidden(
    "class by vars", two_classes, set_of("first", "scale", 7.0), lambda b: vars(b.first)["scale"]
)
hidden(
    "class by __dict__",
    two_classes,
    set_of("first", "scale", 7.0),
    lambda b: b.first.__dict__["scale"],
)
hidden(
    "bases replaced",
    lambda: inherited(),
    lambda b: setattr(b.leaf, "__bases__", (b.other,)),
    lambda b: b.leaf().scale,
)
hidden(
    "bases replaced, issubclass",
    lambda: inherited(),
    lambda b: setattr(b.leaf, "__bases__", (b.other,)),
    lambda b: 1 + issubclass(b.leaf, b.root),
)
hidden(
    "bases replaced, super",
    lambda: inherited(),
    lambda b: setattr(b.leaf, "__bases__", (b.other,)),
    lambda b: super(b.leaf, b.leaf()).scale,
)
hidden(
    "subclasses of a class",
    lambda: inherited(),
    lambda b: b.made.append(type("More", (b.root,), {})),
    lambda b: len(b.root.__subclasses__()),
)
hidden(
    "abstract class registered",
    lambda: abstract(),
    lambda b: b.cls.register(b.other),
    lambda b: 1 + isinstance(b.obj, b.cls),
)
hidden(
    "annotations of a class",
    lambda: type("C", (), {"__annotations__": {"a": int}}),
    lambda c: c.__annotations__.update(b=int),
    lambda c: len(c.__annotations__),
)
hidden(
    "slots of a class",
    lambda: slotted(),
    lambda s: setattr(s, "a", 5.0),
    lambda s: type(s).a.__get__(s),
)
hidden(
    "property function by fget",
    lambda: propertied(),
    lambda b: setattr(b, "scale_", 5.0),
    lambda b: type(b).scale.fget(b),
)
hidden(
    "property by __get__",
    lambda: propertied(),
    lambda b: setattr(b, "scale_", 5.0),
    lambda b: type(b).scale.__get__(b),
)
hidden(
    "descriptor with state",
    lambda: described(),
    lambda b: setattr(type(b).__dict__["scale"], "value", 5.0),
    lambda b: b.scale,
)
hidden(
    "function rebound by __get__",
    lambda: propertied(),
    lambda b: setattr(b, "scale_", 5.0),
    lambda b: type(b).method.__get__(b)(),
)
hidden(
    "cached property",
    lambda: cached(),
    lambda b: b.__dict__.__setitem__("scale", 5.0),
    lambda b: b.scale,
)
hidden(
    "cached property dropped",
    lambda: cached(),
    lambda b: (b.__dict__.pop("scale", None), b.__dict__.__setitem__("value", 5.0)),
    lambda b: b.scale,
)


def inherited() -> Any:
    root = type("Root", (), {"scale": 2.0})
    other = type("Other", (), {"scale": 5.0})
    middle = type("Middle", (root,), {})
    return box(root=root, other=other, leaf=type("Leaf", (middle,), {}), made=[])


def abstract() -> Any:
    import abc

    other = type("Other", (), {})
    return box(cls=abc.ABCMeta("Abstract", (), {}), other=other, obj=other())


def slotted() -> Any:
    made = type("Slotted", (), {"__slots__": ("a",)})()
    made.a = 2.0
    return made


def propertied() -> Any:
    body = {"scale": property(lambda self: self.scale_), "method": lambda self: self.scale_}
    made = type("Propertied", (), body)()
    made.scale_ = 2.0
    return made


class Constant:
    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, obj: Any, cls: Any = None) -> Any:
        return self.value


def described() -> Any:
    return type("Described", (), {"scale": Constant()})()


def cached() -> Any:
    prop = functools.cached_property(lambda self: self.value)
    cls = type("Cached", (), {"scale": prop})
    prop.__set_name__(cls, "scale")
    made = cls()
    made.value = 2.0
    return made


# --- functions ------------------------------------------------------------------------------


def a_function() -> Any:
    value = 2.0

    def read(a: Any = 2.0, *, b: Any = 3.0) -> Any:
        return a * b * value

    read.scale = 2.0  # type: ignore[attr-defined]
    return read


def set_cell(f: Any) -> None:
    f.__closure__[0].cell_contents = 5.0


def shared_cell() -> Any:
    count = 2.0

    def get() -> Any:
        return count

    def put(value: Any) -> None:
        nonlocal count
        count = value

    return box(get=get, put=put)


hidden(
    "function default by __defaults__",
    a_function,
    set_of("", "__defaults__", (5.0,)),
    lambda f: f.__defaults__[0],
)
hidden("function default", a_function, set_of("", "__defaults__", (5.0,)), lambda f: f())
hidden(
    "function keyword default", a_function, lambda f: f.__kwdefaults__.update(b=7.0), lambda f: f()
)
hidden(
    "function keyword default read",
    a_function,
    lambda f: f.__kwdefaults__.update(b=7.0),
    lambda f: f.__kwdefaults__["b"],
)
hidden(
    "function cell by __closure__", a_function, set_cell, lambda f: f.__closure__[0].cell_contents
)
hidden("function cell", a_function, set_cell, lambda f: f())
hidden(
    "function code",
    a_function,
    lambda f: setattr(f, "__code__", f.__code__.replace(co_name="longer_name")),
    lambda f: len(f.__code__.co_name),
)
hidden(
    "function name", a_function, set_of("", "__name__", "longer_name"), lambda f: len(f.__name__)
)
hidden(
    "function attribute by __dict__",
    a_function,
    set_of("", "scale", 5.0),
    lambda f: f.__dict__["scale"],
)
hidden(
    "function attribute by getattr",
    a_function,
    set_of("", "scale", 5.0),
    lambda f: getattr(f, "scale", 1.0),
)
hidden(
    "function attribute by hasattr",
    a_function,
    lambda f: delattr(f, "scale"),
    lambda f: 1 + hasattr(f, "scale"),
)
hidden(
    "function wrapped",
    a_function,
    set_of("", "__wrapped__", 1),
    lambda f: 1 + hasattr(f, "__wrapped__"),
)
hidden("cell shared by two functions", shared_cell, lambda b: b.put(5.0), lambda b: b.get())
hidden(
    "mutable default",
    lambda: with_mutable_default(),
    lambda f: f.__defaults__[0].append(3.0),
    lambda f: f(),
)
hidden(
    "partial keywords",
    lambda: functools.partial(dict, a=2.0),
    lambda p: p.keywords.update(a=5.0),
    lambda p: p()["a"],
)
hidden(
    "partial arguments read",
    lambda: functools.partial(max, [2.0]),
    lambda p: p.args[0].append(5.0),
    lambda p: max(p.args[0]),
)
hidden(
    "partial called with a list",
    lambda: functools.partial(max, [2.0]),
    lambda p: p.args[0].append(5.0),
    lambda p: p(),
)
hidden(
    "partial attribute",
    lambda: functools.partial(max),
    lambda p: setattr(p, "scale", 5.0),
    lambda p: getattr(p, "scale", 2.0),
)
hidden(
    "bound method of a list",
    lambda: box_with_method(),
    lambda b: b.items.append(2.0),
    lambda b: b.method(2.0),
)
hidden(
    "map over an outside list", lambda: [2.0], lambda v: v.append(5.0), lambda v: sum(map(float, v))
)
hidden(
    "sorted with a key",
    lambda: [2.0, 5.0],
    lambda v: v.append(-5.0),
    lambda v: sorted(v, key=lambda i: i)[0],
)
hidden(
    "reduce",
    lambda: [2.0, 5.0],
    lambda v: v.append(-5.0),
    lambda v: functools.reduce(operator.mul, v),
)
hidden("star arguments", lambda: [2.0, 5.0], lambda v: v.append(9.0), lambda v: max(*v))
hidden(
    "double star", lambda: {"a": 2.0}, lambda v: v.update(b=9.0), lambda v: sum(dict(**v).values())
)
hidden("star in a display", lambda: [2.0, 5.0], lambda v: v.append(9.0), lambda v: sum([*v, 1.0]))
hidden(
    "itemgetter",
    lambda: box(get=operator.itemgetter("a"), d={"a": 2.0}),
    lambda b: b.d.update(a=5.0),
    lambda b: b.get(b.d),
)
hidden(
    "attrgetter of a path",
    lambda: box(get=operator.attrgetter("a.b"), a=box(b=2.0)),
    lambda b: setattr(b.a, "b", 5.0),
    lambda b: b.get(b),
)
hidden(
    "getter replaced",
    lambda: box(get=operator.attrgetter("a"), a=2.0, c=5.0),
    lambda b: setattr(b, "get", operator.attrgetter("c")),
    lambda b: b.get(b),
)
hidden(
    "methodcaller",
    lambda: box(call=operator.methodcaller("pop", "a", 2.0), d={}),
    lambda b: b.d.update(a=5.0),
    lambda b: b.call(b.d),
)
hidden(
    "methodcaller of a list",
    lambda: box(call=operator.methodcaller("index", 5.0), d=[2.0, 5.0]),
    lambda b: b.d.insert(0, 1.0),
    lambda b: 1 + b.call(b.d),
)


def with_mutable_default() -> Any:
    def read(a: Any = [2.0]) -> Any:  # noqa: B006
        return sum(a)

    return read


def box_with_method() -> Any:
    items = [2.0]
    return box(items=items, method=items.count)


# --- containers -----------------------------------------------------------------------------

hidden("dict view held", lambda: viewed(), lambda b: b.d.update(b=5.0), lambda b: len(b.view))
hidden("dict view iterated", lambda: viewed(), lambda b: b.d.update(a=5.0), lambda b: sum(b.view))
hidden(
    "dict view membership",
    lambda: viewed(),
    lambda b: b.d.update(b=9.0),
    lambda b: 1 + (9.0 in b.view),
)
hidden(
    "keys view held", lambda: keyed(), lambda b: b.d.update(b=5.0), lambda b: 1 + ("b" in b.view)
)
hidden(
    "keys view in a set operation",
    lambda: keyed(),
    lambda b: b.d.update(b=5.0),
    lambda b: len(b.view & {"a", "b"}),
)
hidden(
    "dict view as list", lambda: viewed(), lambda b: b.d.update(b=5.0), lambda b: len(list(b.view))
)
hidden("mappingproxy", lambda: proxied(), lambda b: b.d.update(a=5.0), lambda b: b.proxy["a"])
hidden(
    "mappingproxy get", lambda: proxied(), lambda b: b.d.update(a=5.0), lambda b: b.proxy.get("a")
)
hidden("mappingproxy len", lambda: proxied(), lambda b: b.d.update(b=5.0), lambda b: len(b.proxy))
hidden(
    "mappingproxy values",
    lambda: proxied(),
    lambda b: b.d.update(b=5.0),
    lambda b: sum(b.proxy.values()),
)
hidden(
    "mappingproxy contains",
    lambda: proxied(),
    lambda b: b.d.update(b=5.0),
    lambda b: 1 + ("b" in b.proxy),
)
hidden(
    "mappingproxy iterated",
    lambda: proxied(),
    lambda b: b.d.update(b=5.0),
    lambda b: len([k for k in b.proxy]),
)
hidden(
    "mappingproxy in **", lambda: proxied(), lambda b: b.d.update(b=5.0), lambda b: len({**b.proxy})
)
hidden(
    "mappingproxy compared",
    lambda: proxied(),
    lambda b: b.d.update(b=5.0),
    lambda b: 1 + (b.proxy == {"a": 2.0}),
)
hidden(
    "generator held", lambda: (float(i) for i in range(2, 99)), lambda g: next(g), lambda g: next(g)
)
hidden(
    "iterator held",
    lambda: iter([2.0, 3.0, 4.0, 5.0, 6.0, 7.0]),
    lambda g: next(g),
    lambda g: next(g),
)
hidden(
    "iterator in a for loop",
    lambda: box(i=iter(range(2, 99))),
    lambda b: next(b.i),
    lambda b: [v for v, _ in zip(b.i, [0])][0],
)
hidden("count held", lambda: itertools.count(2), lambda g: next(g), lambda g: next(g))
hidden(
    "iterator length hint",
    lambda: iter([2.0] * 9),
    lambda g: next(g),
    lambda g: operator.length_hint(g),
)
hidden("repr of an iterator", lambda: itertools.count(9), lambda g: next(g), lambda g: len(repr(g)))
hidden("slice of a list", lambda: [1.0, 2.0], lambda v: v.append(5.0), lambda v: sum(v[1:]))
hidden("negative index", lambda: [1.0, 2.0], lambda v: v.append(5.0), lambda v: v[-1])
hidden(
    "deque index", lambda: collections.deque([1.0, 2.0], 2), lambda v: v.append(5.0), lambda v: v[0]
)
hidden(
    "deque maxlen",
    lambda: box(d=collections.deque([1.0], 2)),
    lambda b: setattr(b, "d", collections.deque([1.0], 3)),
    lambda b: b.d.maxlen,
)
hidden(
    "deque rotated",
    lambda: collections.deque([1.0, 2.0, 3.0]),
    lambda v: v.rotate(),
    lambda v: next(iter(v)),
)
hidden(
    "counter missing",
    lambda: collections.Counter("aa"),
    lambda v: v.update("b"),
    lambda v: 1 + v["b"],
)
hidden(
    "counter most common",
    lambda: collections.Counter("aab"),
    lambda v: v.update("bbb"),
    lambda v: v.most_common(1)[0][1],
)
hidden(
    "chain map",
    lambda: collections.ChainMap({}, {"a": 2.0}),
    lambda v: v.maps[0].update(a=5.0),
    lambda v: v["a"],
)
hidden(
    "ordered dict moved",
    lambda: collections.OrderedDict(a=2.0, b=3.0),
    lambda v: v.move_to_end("a"),
    lambda v: next(iter(v.values())),
)
hidden(
    "ordered dict order in equality",
    lambda: collections.OrderedDict(a=2.0, b=3.0),
    lambda v: v.move_to_end("a"),
    lambda v: 1 + (v == collections.OrderedDict(a=2.0, b=3.0)),
)
hidden(
    "defaultdict factory",
    lambda: collections.defaultdict(lambda: 2.0),
    lambda v: (setattr(v, "default_factory", lambda: 5.0), v.clear()),
    lambda v: v["a"],
)
hidden(
    "defaultdict missing called",
    lambda: collections.defaultdict(lambda: 2.0),
    lambda v: setattr(v, "default_factory", lambda: 5.0),
    lambda v: v.__missing__("a"),
)
hidden("user missing", lambda: missing(), lambda v: setattr(v, "scale", 5.0), lambda v: v["x"])
hidden("set of objects", lambda: set_of_objects(), lambda b: b.s.add(b.second), lambda b: len(b.s))
hidden(
    "set of objects membership",
    lambda: set_of_objects(),
    lambda b: b.s.add(b.second),
    lambda b: 1 + (b.second in b.s),
)
hidden(
    "set of objects iterated",
    lambda: set_of_objects(),
    lambda b: b.s.add(b.second),
    lambda b: sum(o.v for o in b.s),
)
hidden(
    "member of a set of objects",
    lambda: set_of_objects(),
    lambda b: setattr(b.first, "v", 7.0),
    lambda b: sum(o.v for o in b.s),
)
hidden(
    "dict keyed by objects",
    lambda: keyed_by_objects(),
    lambda b: b.d.update({b.second: 5.0}),
    lambda b: b.d.get(b.second, 2.0),
)
hidden(
    "dict keyed by objects with eq",
    lambda: keyed_by_equal(),
    lambda b: setattr(b.key, "v", 5),
    lambda b: b.d.get(b.probe, 2.0),
)
hidden(
    "list of lists compared",
    lambda: [[1.0], [2.0]],
    lambda v: v[0].append(2.0),
    lambda v: 1 + (v == [[1.0], [2.0]]),
)
hidden(
    "list of objects compared",
    lambda: compared(),
    lambda b: setattr(b.a[0], "v", 5.0),
    lambda b: 1 + (b.a == b.b),
)
hidden(
    "tuple with a list",
    lambda: box(t=([2.0], 1.0)),
    lambda b: b.t[0].append(3.0),
    lambda b: sum(b.t[0]),
)
hidden(
    "tuple with a list by repr",
    lambda: box(t=([2.0], 1.0)),
    lambda b: b.t[0].append(3.0),
    lambda b: len(repr(b.t)),
)
hidden(
    "list in a set operation",
    lambda: [1, 2],
    lambda v: v.append(3),
    lambda v: len({1, 2, 3}.intersection(v)),
)
hidden("list by in", lambda: [1, 2], lambda v: v.append(3), lambda v: 1 + (3 in v))
hidden("list by count", lambda: [1, 2], lambda v: v.append(2), lambda v: v.count(2))
hidden("list times", lambda: [1, 2], lambda v: v.append(2), lambda v: len(v * 2))
hidden("list added", lambda: [1, 2], lambda v: v.append(2), lambda v: len([0] + v))
hidden(
    "list in zip",
    lambda: [1, 2],
    lambda v: v.append(2),
    lambda v: len(list(zip(v, v, strict=True))),
)
hidden("list reversed", lambda: [1, 2], lambda v: v.append(3), lambda v: next(reversed(v)))
hidden(
    "list in enumerate",
    lambda: [1, 2],
    lambda v: v.append(3),
    lambda v: sum(i for i, _ in enumerate(v)),
)
hidden("list unpacked", lambda: [1, 2], lambda v: v.append(3), lambda v: unpacked(v))
hidden("list in match", lambda: [1, 2], lambda v: v.append(3), lambda v: matched(v))
hidden("dict in match", lambda: {"kind": 1.0}, lambda v: v.update(kind=2.0), lambda v: matched(v))
hidden("object in match", lambda: Point(), lambda v: setattr(v, "a", 5.0), lambda v: matched(v))
hidden(
    "string of parts",
    lambda: box(parts=["a", "b"]),
    lambda b: b.parts.append("c"),
    lambda b: len("".join(b.parts)),
)
hidden(
    "percent format",
    lambda: box(d={"a": 2.0}),
    lambda b: b.d.update(a=25.25),
    lambda b: len("%(a)s" % b.d),
)
hidden(
    "format map",
    lambda: box(d={"a": 2.0}),
    lambda b: b.d.update(a=25.25),
    lambda b: len("{a}".format_map(b.d)),
)
hidden(
    "format of an attribute",
    lambda: box(a=2.0),
    lambda b: setattr(b, "a", 25.25),
    lambda b: len(format_of(b)),
)
hidden(
    "format of an item",
    lambda: {"a": 2.0},
    lambda b: b.update(a=25.25),
    lambda b: len("{0[a]}".format(b)),
)  # noqa: UP032
hidden(
    "template",
    lambda: box(d={"a": 2.0}),
    lambda b: b.d.update(a=25.25),
    lambda b: len(string.Template("$a").substitute(b.d)),
)
hidden("bytearray", lambda: bytearray(b"ab"), lambda v: v.append(3), lambda v: len(v))
hidden("bytearray item", lambda: bytearray(b"ab"), lambda v: v.__setitem__(0, 9), lambda v: v[0])
hidden(
    "memoryview",
    lambda: memoryview(bytearray(b"ab")),
    lambda v: v.__setitem__(0, 9),
    lambda v: v[0],
)
hidden(
    "numpy array item",
    lambda: np.array([2.0, 3.0]),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: float(v[0]),
)
hidden(
    "numpy array sum",
    lambda: np.array([2.0, 3.0]),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: float(v.sum()),
)
hidden(
    "numpy array to tensor",
    lambda: np.array([2.0, 3.0, 4.0, 5.0]),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: torch.tensor(v),
)
hidden(
    "numpy array from_numpy",
    lambda: np.array([2.0, 3.0, 4.0, 5.0]),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: torch.from_numpy(v),
)
hidden(
    "numpy array as_tensor",
    lambda: np.array([2.0, 3.0, 4.0, 5.0]),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: torch.as_tensor(v),
)
hidden(
    "numpy array in arithmetic",
    lambda: np.array(2.0),
    lambda v: v.__setitem__((), 9.0),
    lambda v: float(v + 1),
)
hidden(
    "numpy array truth",
    lambda: np.array(2.0),
    lambda v: v.__setitem__((), 0.0),
    lambda v: 2 if v else 3,
)
hidden(
    "numpy array compared",
    lambda: np.array([2.0, 3.0]),
    lambda v: v.__setitem__(0, 9.0),
    lambda v: 1 + bool((v == 2.0).any()),
)
hidden(
    "array module",
    lambda: __import__("array").array("d", [2.0]),
    lambda v: v.append(3.0),
    lambda v: len(v),
)
hidden(
    "simple namespace",
    lambda: types.SimpleNamespace(a=2.0),
    lambda v: setattr(v, "a", 5.0),
    lambda v: v.a,
)
hidden(
    "simple namespace compared",
    lambda: types.SimpleNamespace(a=2.0),
    lambda v: setattr(v, "a", 5.0),
    lambda v: 1 + (v == types.SimpleNamespace(a=2.0)),
)
hidden(
    "simple namespace by repr",
    lambda: types.SimpleNamespace(a=2.0),
    lambda v: setattr(v, "a", 25.25),
    lambda v: len(repr(v)),
)
hidden(
    "weakref dead",
    lambda: weakly(),
    lambda b: b.keep.clear(),
    lambda b: 2.0 if b.ref() is None else 3.0,
)
hidden("weak dict", lambda: weak_dict(), lambda b: b.keep.clear(), lambda b: 1 + len(b.d))
hidden("weak set", lambda: weak_set(), lambda b: b.keep.clear(), lambda b: 1 + len(b.s))
hidden("weak proxy", lambda: weak_proxy(), lambda b: setattr(b.keep, "v", 5.0), lambda b: b.proxy.v)
hidden(
    "exception held",
    lambda: box(e=ValueError(2.0)),
    lambda b: setattr(b.e, "args", (5.0,)),
    lambda b: b.e.args[0],
)
hidden(
    "exception text",
    lambda: box(e=ValueError(2.0)),
    lambda b: setattr(b.e, "args", (25.25,)),
    lambda b: len(str(b.e)),
)
hidden(
    "exception cause",
    lambda: box(e=ValueError(2.0)),
    lambda b: setattr(b.e, "__cause__", KeyError()),
    lambda b: 1 + (b.e.__cause__ is None),
)
hidden("object by vars", lambda: box(a=2.0), lambda b: setattr(b, "a", 5.0), lambda b: vars(b)["a"])
hidden(
    "object by __dict__ values",
    lambda: box(a=2.0),
    lambda b: setattr(b, "b", 5.0),
    lambda b: sum(b.__dict__.values()),
)
hidden(
    "object dict replaced",
    lambda: box(a=2.0),
    lambda b: setattr(b, "__dict__", {"a": 5.0}),
    lambda b: b.a,
)
hidden("object by dir", lambda: box(a=2.0), lambda b: setattr(b, "b", 5.0), lambda b: len(dir(b)))
hidden("object by hash", lambda: hashed(), lambda b: setattr(b, "v", 5), lambda b: hash(b))
hidden("object by a set", lambda: hashed(), lambda b: setattr(b, "v", 5), lambda b: len({b, 2}))
hidden(
    "object as a dict key",
    lambda: hashed(),
    lambda b: setattr(b, "v", 5),
    lambda b: {2: 2.0}.get(b, 3.0),
)
hidden(
    "object by index", lambda: indexed(), lambda b: setattr(b, "v", 2), lambda b: [2.0, 3.0, 4.0][b]
)
hidden("object by range", lambda: indexed(), lambda b: setattr(b, "v", 5), lambda b: sum(range(b)))
hidden("object by int", lambda: indexed(), lambda b: setattr(b, "v", 5), lambda b: int(b))
hidden(
    "object by slice",
    lambda: indexed(),
    lambda b: setattr(b, "v", 2),
    lambda b: sum([2.0, 3.0, 4.0][b:]),
)
hidden("object in arithmetic", lambda: indexed(), lambda b: setattr(b, "v", 5), lambda b: 1 + b)
hidden("object by round", lambda: indexed(), lambda b: setattr(b, "v", 5), lambda b: round(b))
hidden(
    "object by max",
    lambda: box(a=[ordered(2.0), ordered(3.0)]),
    lambda b: setattr(b.a[0], "v", 5.0),
    lambda b: max(b.a).v,
)
hidden(
    "object by sort",
    lambda: box(a=[ordered(2.0), ordered(3.0)]),
    lambda b: setattr(b.a[0], "v", 5.0),
    lambda b: sorted(b.a)[0].v,
)
hidden("context manager", lambda: managed(), lambda b: setattr(b, "v", 5.0), lambda b: entered(b))
hidden("iterable object", lambda: iterable(), lambda b: b.v.append(5.0), lambda b: sum(b))
hidden(
    "object behind getattribute",
    lambda: guarded(),
    lambda b: object.__setattr__(b, "v", 5.0),
    lambda b: b.anything,
)
hidden(
    "list subclass attribute",
    lambda: listlike(),
    lambda v: setattr(v, "scale", 5.0),
    lambda v: v.scale,
)
hidden(
    "list subclass own len",
    lambda: listlike(),
    lambda v: setattr(v, "scale", 5.0),
    lambda v: len(v),
)
hidden("user list", lambda: collections.UserList([2.0]), lambda v: v.append(5.0), lambda v: sum(v))
hidden(
    "user dict", lambda: collections.UserDict(a=2.0), lambda v: v.update(a=5.0), lambda v: v["a"]
)
hidden(
    "user string",
    lambda: collections.UserString("ab"),
    lambda v: setattr(v, "data", "abc"),
    lambda v: len(v),
)
hidden("size of an object", lambda: [1], lambda v: v.extend(range(99)), lambda v: sys.getsizeof(v))


def viewed() -> Any:
    d = {"a": 2.0}
    return box(d=d, view=d.values())


def keyed() -> Any:
    d = {"a": 2.0}
    return box(d=d, view=d.keys())


def proxied() -> Any:
    d = {"a": 2.0}
    return box(d=d, proxy=types.MappingProxyType(d))


def missing() -> Any:
    cls = type("Missing", (dict,), {"__missing__": lambda self, key: self.scale})
    made = cls()
    made.scale = 2.0
    return made


hidden(
    "default factory of a copy",
    lambda: collections.defaultdict(lambda: 2.0),
    set_of("", "default_factory", lambda: 5.0),
    lambda d: d.copy()["a"],
)
hidden(
    "class that becomes callable",
    lambda: type("Made", (), {}),
    set_of("", "__call__", lambda self: 5.0),
    lambda cls: 5.0 if callable(cls()) else 2.0,
)
hidden(
    "length of a copied deque",
    lambda: box(d=collections.deque([2.0, 3.0], maxlen=2)),
    set_of("", "d", collections.deque([2.0, 3.0], maxlen=3)),
    lambda b: len(b.d.copy() + b.d),
)


@ROWS.row(after=RIGHT)
def hidden_context_of_decimals() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * float(decimal.Decimal(1) / decimal.Decimal(3))

    return Scene(program, change=lambda s: decimal.localcontext(decimal.Context(prec=2)))


@ROWS.row(after=RIGHT)
def hidden_settings_of_texts_of_tensors() -> Scene:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * len(str(torch.ones(1) / 3))

    return Scene(program, change=lambda s: _tensor_str.printoptions(precision=2))


def set_of_objects() -> Any:
    first, second = box(v=2.0), box(v=3.0)
    return box(s={first}, first=first, second=second)


def keyed_by_objects() -> Any:
    first, second = Box(), Box()
    return box(d={first: 2.0}, first=first, second=second)


class Equal:
    def __init__(self, v: Any) -> None:
        self.v = v

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and self.v == other.v

    def __hash__(self) -> int:
        return 1

    def __lt__(self, other: Any) -> bool:
        return bool(self.v < other.v)


def ordered(v: Any) -> Any:
    return Equal(v)


def keyed_by_equal() -> Any:
    key = Equal(2)
    return box(d={key: 3.0}, key=key, probe=Equal(2))


def compared() -> Any:
    return box(a=[Equal(1.0)], b=[Equal(1.0)])


def unpacked(v: Any) -> Any:
    _first, *rest = v
    return len(rest)


class Point:
    __match_args__ = ("a",)

    def __init__(self) -> None:
        self.a = 2.0


def matched(v: Any) -> Any:
    match v:
        case [_, _]:
            return 2.0
        case {"kind": 1.0}:
            return 3.0
        case Point(2.0):
            return 4.0
    return 5.0


def format_of(b: Any) -> str:
    return "{0.a}".format(b)  # noqa: UP032


def weakly() -> Any:
    obj = Box()
    return box(keep=[obj], ref=weakref.ref(obj))


def weak_dict() -> Any:
    obj = Box()
    made = weakref.WeakValueDictionary(a=obj)
    return box(keep=[obj], d=made)


def weak_set() -> Any:
    obj = Box()
    return box(keep=[obj], s=weakref.WeakSet([obj]))


def weak_proxy() -> Any:
    obj = box(v=2.0)
    return box(keep=obj, proxy=weakref.proxy(obj))


def hashed() -> Any:
    cls = type("Hashed", (), {"__hash__": lambda self: self.v, "__eq__": lambda a, b: a.v == b})
    made = cls()
    made.v = 2
    return made


def indexed() -> Any:
    body = {name: (lambda self, *args: self.v) for name in ("__index__", "__int__", "__round__")}
    made = type("Indexed", (), {**body, "__radd__": lambda self, other: self.v + other})()
    made.v = 1
    return made


def managed() -> Any:
    body = {"__enter__": lambda self: self.v, "__exit__": lambda self, *rest: None}
    made = type("Managed", (), body)()
    made.v = 2.0
    return made


def entered(b: Any) -> Any:
    with b as v:
        return v


def iterable() -> Any:
    made = type("Iterable", (), {"__iter__": lambda self: iter(self.v)})()
    made.v = [2.0]
    return made


def guarded() -> Any:
    def look(self: Any, name: str) -> Any:
        return object.__getattribute__(self, "v")

    made = type("Guarded", (), {"__getattribute__": look})()
    object.__setattr__(made, "v", 2.0)
    return made


def listlike() -> Any:
    made = type("Listlike", (list,), {"__len__": lambda self: int(self.scale)})([1.0])
    made.scale = 2.0
    return made
