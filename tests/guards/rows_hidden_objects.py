"""What a program reads of texts, arrays, objects and settings by unusual ways."""

from __future__ import annotations

import array
import collections
import decimal
import functools
import string
import sys
import types
import weakref
from typing import Any

import numpy as np
import torch
from torch import _tensor_str

from ..twin import Scene
from .hidden import Box, Equal, add_hidden, box
from .table import RIGHT, new_table

ROWS = new_table()
hidden = functools.partial(add_hidden, ROWS)


# --- texts, bytes and arrays ---------------------------------------------------------------------


def format_of(b: Any) -> str:
    return "{0.a}".format(b)


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
)
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
    lambda: array.array("d", [2.0]),
    lambda v: v.append(3.0),
    lambda v: len(v),
)


# --- objects -------------------------------------------------------------------------------------


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
    weakly,
    lambda b: b.keep.clear(),
    lambda b: 2.0 if b.ref() is None else 3.0,
)
hidden("weak dict", weak_dict, lambda b: b.keep.clear(), lambda b: 1 + len(b.d))
hidden("weak set", weak_set, lambda b: b.keep.clear(), lambda b: 1 + len(b.s))
hidden("weak proxy", weak_proxy, lambda b: setattr(b.keep, "v", 5.0), lambda b: b.proxy.v)
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
hidden("object by hash", hashed, lambda b: setattr(b, "v", 5), lambda b: hash(b))
hidden("object by a set", hashed, lambda b: setattr(b, "v", 5), lambda b: len({b, 2}))
hidden(
    "object as a dict key",
    hashed,
    lambda b: setattr(b, "v", 5),
    lambda b: {2: 2.0}.get(b, 3.0),
)
hidden("object by index", indexed, lambda b: setattr(b, "v", 2), lambda b: [2.0, 3.0, 4.0][b])
hidden("object by range", indexed, lambda b: setattr(b, "v", 5), lambda b: sum(range(b)))
hidden("object by int", indexed, lambda b: setattr(b, "v", 5), lambda b: int(b))
hidden(
    "object by slice",
    indexed,
    lambda b: setattr(b, "v", 2),
    lambda b: sum([2.0, 3.0, 4.0][b:]),
)
hidden("object in arithmetic", indexed, lambda b: setattr(b, "v", 5), lambda b: 1 + b)
hidden("object by round", indexed, lambda b: setattr(b, "v", 5), lambda b: round(b))
hidden(
    "object by max",
    lambda: box(a=[Equal(2.0), Equal(3.0)]),
    lambda b: setattr(b.a[0], "v", 5.0),
    lambda b: max(b.a).v,
)
hidden(
    "object by sort",
    lambda: box(a=[Equal(2.0), Equal(3.0)]),
    lambda b: setattr(b.a[0], "v", 5.0),
    lambda b: sorted(b.a)[0].v,
)
hidden("context manager", managed, lambda b: setattr(b, "v", 5.0), lambda b: entered(b))
hidden("iterable object", iterable, lambda b: b.v.append(5.0), lambda b: sum(b))
hidden(
    "object behind getattribute",
    guarded,
    lambda b: object.__setattr__(b, "v", 5.0),
    lambda b: b.anything,
)
hidden(
    "list subclass attribute",
    listlike,
    lambda v: setattr(v, "scale", 5.0),
    lambda v: v.scale,
)
hidden(
    "list subclass own len",
    listlike,
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


# --- settings ------------------------------------------------------------------------------------


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
