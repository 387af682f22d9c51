"""What a program reads of containers by unusual ways."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import types
from typing import Any

from .hidden import Box, Equal, add_hidden, box, set_of
from .table import new_table

ROWS = new_table()
hidden = functools.partial(add_hidden, ROWS)


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


def set_of_objects() -> Any:
    first, second = box(v=2.0), box(v=3.0)
    return box(s={first}, first=first, second=second)


def keyed_by_objects() -> Any:
    first, second = Box(), Box()
    return box(d={first: 2.0}, first=first, second=second)


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


hidden("dict view held", viewed, lambda b: b.d.update(b=5.0), lambda b: len(b.view))
hidden("dict view iterated", viewed, lambda b: b.d.update(a=5.0), lambda b: sum(b.view))
hidden(
    "dict view membership",
    viewed,
    lambda b: b.d.update(b=9.0),
    lambda b: 1 + (9.0 in b.view),
)
hidden("keys view held", keyed, lambda b: b.d.update(b=5.0), lambda b: 1 + ("b" in b.view))
hidden(
    "keys view in a set operation",
    keyed,
    lambda b: b.d.update(b=5.0),
    lambda b: len(b.view & {"a", "b"}),
)
hidden("dict view as list", viewed, lambda b: b.d.update(b=5.0), lambda b: len(list(b.view)))
hidden("mappingproxy", proxied, lambda b: b.d.update(a=5.0), lambda b: b.proxy["a"])
hidden("mappingproxy get", proxied, lambda b: b.d.update(a=5.0), lambda b: b.proxy.get("a"))
hidden("mappingproxy len", proxied, lambda b: b.d.update(b=5.0), lambda b: len(b.proxy))
hidden(
    "mappingproxy values",
    proxied,
    lambda b: b.d.update(b=5.0),
    lambda b: sum(b.proxy.values()),
)
hidden(
    "mappingproxy contains",
    proxied,
    lambda b: b.d.update(b=5.0),
    lambda b: 1 + ("b" in b.proxy),
)
hidden(
    "mappingproxy iterated",
    proxied,
    lambda b: b.d.update(b=5.0),
    lambda b: len([k for k in b.proxy]),
)
hidden("mappingproxy in **", proxied, lambda b: b.d.update(b=5.0), lambda b: len({**b.proxy}))
hidden(
    "mappingproxy compared",
    proxied,
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
hidden("user missing", missing, lambda v: setattr(v, "scale", 5.0), lambda v: v["x"])
hidden("set of objects", set_of_objects, lambda b: b.s.add(b.second), lambda b: len(b.s))
hidden(
    "set of objects membership",
    set_of_objects,
    lambda b: b.s.add(b.second),
    lambda b: 1 + (b.second in b.s),
)
hidden(
    "set of objects iterated",
    set_of_objects,
    lambda b: b.s.add(b.second),
    lambda b: sum(o.v for o in b.s),
)
hidden(
    "member of a set of objects",
    set_of_objects,
    lambda b: setattr(b.first, "v", 7.0),
    lambda b: sum(o.v for o in b.s),
)
hidden(
    "dict keyed by objects",
    keyed_by_objects,
    lambda b: b.d.update({b.second: 5.0}),
    lambda b: b.d.get(b.second, 2.0),
)
hidden(
    "dict keyed by objects with eq",
    keyed_by_equal,
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
    compared,
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
hidden("object in match", Point, lambda v: setattr(v, "a", 5.0), lambda v: matched(v))
hidden(
    "default factory of a copy",
    lambda: collections.defaultdict(lambda: 2.0),
    set_of("", "default_factory", lambda: 5.0),
    lambda d: d.copy()["a"],
)
hidden(
    "length of a copied deque",
    lambda: box(d=collections.deque([2.0, 3.0], maxlen=2)),
    set_of("", "d", collections.deque([2.0, 3.0], maxlen=3)),
    lambda b: len(b.d.copy() + b.d),
)
