"""What a program reads of functions, and of what is called like one, by unusual ways."""

from __future__ import annotations

import functools
import operator
from typing import Any

from .hidden import add_hidden, box, set_of
from .table import new_table

ROWS = new_table()
hidden = functools.partial(add_hidden, ROWS)


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


def with_mutable_default() -> Any:
    def read(a: Any = [2.0]) -> Any:
        return sum(a)

    return read


def box_with_method() -> Any:
    items = [2.0]
    return box(items=items, method=items.count)


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
    with_mutable_default,
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
    box_with_method,
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
