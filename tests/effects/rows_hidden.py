"""Changes by unusual ways; a split is right, a change that is lost or made twice is not."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..twin import Scene, call
from .table import new_table

ROWS = new_table()


class Box:
    """An object to put things into."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def hidden(
    name: str,
    make: Callable[[], Any],
    do: Callable[[Any, torch.Tensor], Any],
    look: Callable[[Any], Any] = lambda state: state,
    **options: Any,
) -> None:
    """A program that changes an outside object; ``look`` says what is compared afterwards."""

    def recipe() -> Scene:
        keep = [make()]

        def program(x: torch.Tensor) -> Any:
            return do(keep[0], x)

        return Scene(program, state=lambda: look(keep[0]))

    ROWS.add(f"hidden {name}", recipe, split=True, **options)


def box(**fields: Any) -> Callable[[], Box]:
    """A recipe; callables are recipes of the fields."""
    return lambda: Box(**{k: v() if callable(v) else v for k, v in fields.items()})


# --- classes, modules, functions ------------------------------------------------------------


def a_class() -> Any:
    return type("Made", (), {"scale": 1.0, "items": [1.0]})


def an_instance() -> Any:
    return a_class()()


def slotted() -> Any:
    made = type("Slotted", (), {"__slots__": ("a", "b")})()
    made.a = 1.0
    return made


def propertied() -> Any:
    def put(self: Any, value: Any) -> None:
        self.kept = value

    def drop(self: Any) -> None:
        self.kept = None

    return type("Propertied", (), {"scale": property(lambda self: self.kept, put, drop)})()


def set_attribute(name: str, value: Any) -> Callable[[Any, torch.Tensor], Any]:
    def do(obj: Any, x: torch.Tensor) -> Any:
        setattr(obj, name, value)
        return x * 2

    return do


def attributes(obj: Any) -> Any:
    return {k: v for k, v in vars(obj).items() if not k.startswith("__")}


def counted(obj: Any, x: torch.Tensor) -> Any:
    obj.scale = obj.scale + 1
    return x * obj.scale


def each(*steps: Callable[[Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], Any]:
    def do(obj: Any, x: torch.Tensor) -> Any:
        for step in steps:
            step(obj, x)
        return x + 1

    return do


hidden("class attribute set", a_class, set_attribute("scale", 5.0), attributes)
hidden("class attribute counted", a_class, counted, attributes, replays=False)
hidden(
    "class attribute deleted",
    lambda: a_class(),
    each(lambda c, x: setattr(c, "b", 1), lambda c, x: delattr(c, "b")),
    attributes,
)
hidden(
    "class attribute set by type",
    an_instance,
    lambda o, x: (type.__setattr__(type(o), "scale", 3.0), x * 2)[1],
    lambda o: attributes(type(o)),
)
hidden(
    "class list grows", an_instance, lambda o, x: (o.items.append(2.0), x * 2)[1], lambda o: o.items
)
hidden(
    "class of an object replaced",
    box(o=an_instance, c=a_class),
    each(lambda b, x: setattr(b.o, "__class__", b.c)),
    lambda b: type(b.o) is b.c,
)
hidden(
    "dict of an object replaced",
    box(a=1.0),
    each(lambda b, x: setattr(b, "__dict__", {"z": x})),
    vars,
)
hidden("dict of an object updated", box(a=1.0), each(lambda b, x: b.__dict__.update(z=x)), vars)
hidden("dict of an object cleared", box(a=1.0), each(lambda b, x: b.__dict__.clear()), vars)
hidden(
    "vars of an object written", box(a=1.0), each(lambda b, x: vars(b).__setitem__("z", x)), vars
)
hidden(
    "member descriptor set", slotted, each(lambda s, x: type(s).a.__set__(s, 5.0)), lambda s: s.a
)
hidden(
    "member descriptor deleted",
    slotted,
    each(lambda s, x: setattr(s, "b", 1), lambda s, x: type(s).b.__delete__(s)),
    lambda s: hasattr(s, "b"),
)
hidden("property set by __set__", propertied, each(lambda s, x: type(s).scale.__set__(s, x)), vars)
hidden("property set by fset", propertied, each(lambda s, x: type(s).scale.fset(s, x)), vars)
hidden("property deleted", propertied, each(lambda s, x: s.__class__.scale.__delete__(s)), vars)
hidden("object setattr", propertied, each(lambda s, x: object.__setattr__(s, "z", x)), vars)
hidden(
    "object delattr",
    propertied,
    each(lambda s, x: setattr(s, "z", 1), lambda s, x: object.__delattr__(s, "z")),
    vars,
)
hidden(
    "function attribute",
    lambda: lambda: None,
    each(lambda f, x: setattr(f, "scale", x)),
    lambda f: f.__dict__,
)
hidden(
    "function attribute by dict",
    lambda: lambda: None,
    each(lambda f, x: f.__dict__.update(scale=x)),
    lambda f: f.__dict__,
)
hidden(
    "function defaults",
    lambda: lambda a=1: a,
    each(lambda f, x: setattr(f, "__defaults__", (5,))),
    lambda f: f(),
)
hidden(
    "function keyword defaults",
    lambda: keyword_default(),
    each(lambda f, x: f.__kwdefaults__.update(a=5)),
    lambda f: f(),
)
hidden(
    "function code",
    lambda: Box(f=lambda: 1, g=lambda: 2),
    each(lambda b, x: setattr(b.f, "__code__", b.g.__code__)),
    lambda b: b.f(),
)
hidden(
    "function name",
    lambda: lambda: None,
    each(lambda f, x: setattr(f, "__name__", "other")),
    lambda f: f.__name__,
)
hidden(
    "cell by cell_contents",
    lambda: closed(),
    each(lambda b, x: setattr(b.get.__closure__[0], "cell_contents", x)),
    lambda b: b.get(),
)
hidden("cell by another function", lambda: closed(), each(lambda b, x: b.put(x)), lambda b: b.get())
hidden(
    "cell written then read",
    lambda: closed(),
    lambda b, x: (b.put(3.0), x * b.get())[1],
    lambda b: b.get(),
)
hidden(
    "cell counted",
    lambda: closed(),
    lambda b, x: (b.put(b.get() + 1), x * b.get())[1],
    lambda b: b.get(),
    replays=False,
)
hidden(
    "module attribute set",
    lambda: types.ModuleType("m"),
    each(lambda m, x: setattr(m, "scale", x)),
    lambda m: m.scale,
)
hidden(
    "module attribute deleted",
    lambda: types.ModuleType("m"),
    each(lambda m, x: setattr(m, "scale", x), lambda m, x: delattr(m, "scale")),
    lambda m: hasattr(m, "scale"),
)
hidden(
    "sys.modules written",
    lambda: types.ModuleType("magjit_test_m"),
    each(lambda m, x: sys.modules.__setitem__("magjit_test_m", m)),
    lambda m: "magjit_test_m" in sys.modules,
)
hidden(
    "sys.path written",
    lambda: [],
    each(lambda m, x: sys.path.append("magjit_test"), lambda m, x: m.append(sys.path.pop())),
)
hidden(
    "partial attribute",
    lambda: functools.partial(max),
    each(lambda p, x: setattr(p, "scale", x)),
    lambda p: p.scale,
)
hidden(
    "partial keywords",
    lambda: functools.partial(max, a=1),
    each(lambda p, x: p.keywords.update(b=2)),
    lambda p: p.keywords,
)
hidden(
    "subclass made",
    a_class,
    lambda c, x: (type("Sub", (c,), {}), x * 2)[1],
    lambda c: len(gc.collect() and [] or c.__subclasses__()) * 0,
)
hidden(
    "subclass hook",
    lambda: with_hook(),
    lambda c, x: (type("Sub", (c,), {}), x * 2)[1],
    lambda c: c.seen,
)
hidden("set name hook", lambda: named(), lambda d, x: (type("Sub", (), {"a": d}), x * 2)[1], vars)
hidden(
    "metaclass counts classes",
    lambda: metaclass(),
    lambda m, x: (m("Made", (), {}), x * 2)[1],
    lambda m: m.seen,
)
hidden(
    "descriptor keeps state",
    lambda: Box(o=type("D", (), {"scale": Keeper()})()),
    each(lambda b, x: setattr(b.o, "scale", 7.0)),
    lambda b: vars(type(b.o).__dict__["scale"]),
)


def keyword_default() -> Any:
    def f(*, a: Any = 1) -> Any:
        return a

    return f


def closed() -> Any:
    value = 1.0

    def get() -> Any:
        return value

    def put(new: Any) -> None:
        nonlocal value
        value = new

    return Box(get=get, put=put)


def with_hook() -> Any:
    class Hooked:
        seen: list[str] = []

        def __init_subclass__(cls) -> None:
            Hooked.seen.append(cls.__name__)

    return Hooked


class Keeper:
    def __set__(self, obj: Any, value: Any) -> None:
        self.value = value

    def __get__(self, obj: Any, cls: Any = None) -> Any:
        return self


class Named:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __set_name__(self, owner: Any, name: str) -> None:
        self.names.append(name)


def named() -> Any:
    return Named()


def metaclass() -> Any:
    class Counting(type):
        seen = 0

        def __init__(cls, *args: Any) -> None:
            super().__init__(*args)
            Counting.seen += 1

    return Counting


# --- containers -----------------------------------------------------------------------------


def changes(name: str, make: Callable[[], Any], do: Callable[[Any, torch.Tensor], Any]) -> None:
    hidden(name, make, each(do))


def missing() -> Any:
    def fill(self: Any, key: Any) -> Any:
        self[key] = 5.0
        return 5.0

    return type("Missing", (dict,), {"__missing__": fill})()


changes(
    "defaultdict filled", lambda: collections.defaultdict(list), lambda d, x: d["a"].append(1.0)
)
changes(
    "defaultdict missing", lambda: collections.defaultdict(list), lambda d, x: d.__missing__("a")
)
changes(
    "defaultdict by getitem",
    lambda: collections.defaultdict(list),
    lambda d, x: operator.getitem(d, "a"),
)
changes(
    "defaultdict by itemgetter",
    lambda: collections.defaultdict(list),
    lambda d, x: operator.itemgetter("a")(d),
)
changes(
    "defaultdict by dunder", lambda: collections.defaultdict(list), lambda d, x: d.__getitem__("a")
)
changes(
    "defaultdict by map",
    lambda: collections.defaultdict(list),
    lambda d, x: list(map(d.__getitem__, "ab")),
)
changes(
    "defaultdict by format", lambda: collections.defaultdict(list), lambda d, x: "{0[a]}".format(d)
)  # noqa: UP032
changes("defaultdict by percent", lambda: collections.defaultdict(list), lambda d, x: "%(a)s" % d)
changes("user missing", missing, lambda d, x: d["a"])
changes("counter", collections.Counter, lambda d, x: d.update("ab"))
changes("counter subtract", collections.Counter, lambda d, x: d.subtract("ab"))
changes(
    "counter in place",
    collections.Counter,
    lambda d, x: operator.iadd(d, collections.Counter("ab")),
)
changes(
    "ordered dict moved", lambda: collections.OrderedDict(a=1, b=2), lambda d, x: d.move_to_end("a")
)
changes(
    "ordered dict popped",
    lambda: collections.OrderedDict(a=1, b=2),
    lambda d, x: d.update(dict([d.popitem(last=False)])),
)
changes("dict popitem", lambda: {"a": 1, "b": 2}, lambda d, x: d.update([d.popitem()]))
changes(
    "dict pop and back", lambda: {"a": 1, "b": 2}, lambda d, x: d.__setitem__("a", d.pop("a") + 1)
)
changes("dict or-equals", dict, lambda d, x: d.__ior__({"z": x}))
changes("dict by setitem of operator", dict, lambda d, x: operator.setitem(d, "z", x))
changes("dict by map", dict, lambda d, x: list(map(d.__setitem__, "ab", (1.0, 2.0))))
changes("list by map", list, lambda d, x: list(map(d.append, (1.0, 2.0))))
changes("list by comprehension", list, lambda d, x: [d.append(v) for v in (1.0, 2.0)])
changes("list by partial", lambda: collect_partial(), lambda b, x: b.add(3.0))
changes("list by bound method", lambda: bound_append(), lambda b, x: b.add(3.0))
changes("list by methodcaller", list, lambda d, x: operator.methodcaller("append", 3.0)(d))
changes(
    "list by sorted key",
    list,
    lambda d, x: (
        sorted((2, 1), key=d.append) if False else sorted((2, 1), key=lambda v: d.append(v) or v)
    ),
)
changes("list by key method", list, lambda d, x: max((2, 1), key=lambda v: (d.append(v), v)[1]))
changes("list by filter", list, lambda d, x: list(filter(d.append, (1.0, 2.0))))
changes("list by reduce", list, lambda d, x: functools.reduce(lambda a, b: d.append(b), (1.0, 2.0)))
changes(
    "list by callback of a C function",
    list,
    lambda d, x: list(itertools.starmap(d.insert, ((0, 1.0),))),
)
changes(
    "list by accumulate",
    list,
    lambda d, x: list(itertools.accumulate((1, 2), lambda a, b: d.append(b) or a)),
)
changes("list by slice", lambda: [1.0, 2.0], lambda d, x: d.__setitem__(slice(0, 1), [5.0, 6.0]))
changes("list sorted in place", lambda: [3.0, 1.0], lambda d, x: d.sort())
changes("list reversed in place", lambda: [3.0, 1.0], lambda d, x: d.reverse())
changes("list cleared and filled", lambda: [3.0, 1.0], lambda d, x: (d.clear(), d.append(x)))
changes("list by init", lambda: [3.0, 1.0], lambda d, x: d.__init__((5.0,)))
changes("list times in place", lambda: [3.0], lambda d, x: d.__imul__(2))
changes("list extended by itself", lambda: [3.0], lambda d, x: d.extend(d))
changes("list extended by a generator", lambda: [3.0], lambda d, x: d.extend(v for v in (1.0, x)))
changes("list appended to itself", list, lambda d, x: d.append(len(d)))
changes(
    "list grown while iterated", lambda: [1.0], lambda d, x: [d.append(v) for v in d if len(d) < 5]
)
changes("set", set, lambda d, x: d.add(1))
changes("set by operator", lambda: {1, 2}, lambda d, x: d.__isub__({2}))
changes("set popped", lambda: {1}, lambda d, x: d.add(d.pop() + 1))
changes("set of objects", box(s=set, o=object), lambda b, x: b.s.add(b.o))
changes("deque", lambda: collections.deque(maxlen=3), lambda d, x: d.append(x))
changes("deque rotated", lambda: collections.deque([1, 2, 3]), lambda d, x: d.rotate())
changes("deque popped", lambda: collections.deque([1, 2, 3]), lambda d, x: d.append(d.popleft()))
changes("bytearray", lambda: bytearray(b"a"), lambda d, x: d.extend(b"b"))
changes("bytearray item", lambda: bytearray(b"a"), lambda d, x: d.__setitem__(0, 7))
changes("bytearray in place", lambda: bytearray(b"a"), lambda d, x: operator.iadd(d, b"b"))
changes(
    "memoryview item", lambda: memoryview(bytearray(b"a")), lambda d, x: d.__setitem__(0, d[0] + 1)
)
changes("numpy item", lambda: np.zeros(3), lambda d, x: d.__setitem__(0, d[0] + 1))
changes("numpy in place", lambda: np.zeros(3), lambda d, x: operator.iadd(d, 1))
changes("numpy out", lambda: np.zeros(3), lambda d, x: np.add(d, 1, out=d))
changes("numpy fill", lambda: np.zeros(3), lambda d, x: d.fill(d[0] + 1))
changes("numpy sort", lambda: np.array([3.0, 1.0]), lambda d, x: d.sort())
changes("numpy by a tensor", lambda: np.zeros(3), lambda d, x: torch.from_numpy(d).add_(1))
changes("numpy copyto", lambda: np.zeros(3), lambda d, x: np.copyto(d, d + 1))
changes("array", lambda: __import__("array").array("d"), lambda d, x: d.append(1.0))
changes(
    "array item",
    lambda: __import__("array").array("d", [1.0]),
    lambda d, x: d.__setitem__(0, d[0] + 1),
)
changes("heap", lambda: [5, 6], lambda d, x: __import__("heapq").heappush(d, 1))
changes("heap popped", lambda: [1, 6, 7, 8, 9], lambda d, x: __import__("heapq").heappop(d))
changes("bisect", lambda: [5, 6], lambda d, x: __import__("bisect").insort(d, 1))
changes("user list", lambda: collections.UserList([1.0]), lambda d, x: d.append(x))
changes("user dict", lambda: collections.UserDict(a=1.0), lambda d, x: d.update(z=x))
changes("chain map", lambda: collections.ChainMap({}, {}), lambda d, x: d.__setitem__("z", x))
changes("iterator held", lambda: Box(i=iter(range(99))), lambda b, x: setattr(b, "last", next(b.i)))
changes("count held", lambda: Box(i=itertools.count()), lambda b, x: setattr(b, "last", next(b.i)))
changes(
    "iterator by zip",
    lambda: Box(i=iter(range(99))),
    lambda b, x: setattr(b, "last", list(zip([0], b.i))),
)
changes(
    "iterator by list of islice",
    lambda: Box(i=iter(range(99))),
    lambda b, x: setattr(b, "last", list(itertools.islice(b.i, 2))),
)
changes("iterator by in", lambda: Box(i=iter(range(99))), lambda b, x: setattr(b, "last", 5 in b.i))
changes("iterator by star", lambda: Box(i=iter(range(9))), lambda b, x: setattr(b, "last", [*b.i]))
changes(
    "iterator by unpacking",
    lambda: Box(i=iter(range(2))),
    lambda b, x: setattr(b, "last", unpack(b.i)),
)
changes("iterator by setstate", lambda: iter([1, 2, 3, 4]), lambda i, x: i.__setstate__(2))
changes(
    "iterator by tuple in a fresh list",
    lambda: Box(i=iter(range(99))),
    lambda b, x: setattr(
        b, "last", list(zip(*[b.i] * 2))[:1] if False else next(iter(zip(*[b.i] * 2)))
    ),
)
changes(
    "generator held",
    lambda: Box(i=(v for v in range(99))),
    lambda b, x: setattr(b, "last", next(b.i)),
)
changes(
    "generator sent",
    lambda: Box(i=echo(), last=None),
    lambda b, x: setattr(b, "last", b.i.send(None)),
)
changes("generator closed", lambda: Box(i=echo(), last=None), lambda b, x: b.i.close())
changes(
    "tee of an outside iterator",
    lambda: Box(i=iter(range(99))),
    lambda b, x: setattr(b, "last", next(itertools.tee(b.i)[0])),
)
changes("string stream", lambda: __import__("io").StringIO(), lambda d, x: d.write("a"))
changes(
    "random generator of its own",
    lambda: Box(r=random.Random(3), last=None),
    lambda b, x: setattr(b, "last", b.r.random()),
)
changes(
    "numpy generator of its own",
    lambda: Box(r=np.random.default_rng(3), last=None),
    lambda b, x: setattr(b, "last", float(b.r.random())),
)
changes("context variable", lambda: Box(last=None), lambda b, x: setattr(b, "last", x))
changes("simple namespace", lambda: types.SimpleNamespace(a=1), lambda n, x: setattr(n, "z", x))
changes(
    "simple namespace by dict",
    lambda: types.SimpleNamespace(a=1),
    lambda n, x: n.__dict__.update(z=x),
)
changes("exception notes", lambda: Box(e=ValueError()), lambda b, x: b.e.add_note("a"))
changes("exception args", lambda: Box(e=ValueError()), lambda b, x: setattr(b.e, "args", (1,)))
changes("exception raised again", lambda: Box(e=ValueError(), n=0), lambda b, x: raised(b))
changes("exception cause", lambda: Box(e=ValueError()), lambda b, x: caused(b))
changes(
    "weak dict",
    lambda: Box(d=weakref.WeakValueDictionary(), o=Box()),
    lambda b, x: b.d.__setitem__("a", b.o),
)
changes("object with del", lambda: Box(log=[]), lambda b, x: Dying(b.log) and None)
changes("object with del replaced", lambda: replaced_dying(), lambda b, x: setattr(b, "o", None))
changes(
    "weak reference callback",
    lambda: Box(log=[], r=None),
    lambda b, x: setattr(b, "r", None) or weak_callback(b),
)
changes("finalizer", lambda: Box(log=[]), lambda b, x: finalized(b) and None)


def collect_partial() -> Any:
    items: list[Any] = []
    return Box(items=items, add=functools.partial(items.append))


def bound_append() -> Any:
    items: list[Any] = []
    return Box(items=items, add=items.append)


def unpack(i: Any) -> Any:
    with contextlib.suppress(ValueError):
        a, b = i
        return a + b


def echo() -> Any:
    yield from range(9)


def raised(b: Any) -> None:
    try:
        raise b.e
    except ValueError as error:
        b.n = len(error.args)


def caused(b: Any) -> None:
    try:
        raise KeyError from b.e
    except KeyError as error:
        b.kept = error.__cause__ is b.e


class Dying:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __del__(self) -> None:
        self.log.append(len(self.log))


def replaced_dying() -> Any:
    log: list[Any] = []
    return Box(log=log, o=Dying(log))


def weak_callback(b: Any) -> None:
    obj = Box()
    b.r = weakref.ref(obj, lambda ref: b.log.append(1))


def finalized(b: Any) -> bool:
    obj = Box()
    weakref.finalize(obj, b.log.append, 1)
    return True


# --- tensors --------------------------------------------------------------------------------

KEPT = torch.arange(12.0).reshape(3, 4)


def tensors(name: str, do: Callable[[Any, torch.Tensor], Any], **options: Any) -> None:
    """Programs over a box with a tensor, a parameter and a list."""

    def make() -> Any:
        weight = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
        return Box(t=torch.arange(12.0).reshape(3, 4), w=weight, items=[], c=torch.zeros(3, 4))

    hidden(f"tensor {name}", make, lambda b, x: (do(b, x), x * 3), **options)


def then(result: Any, *done: Any) -> Any:
    return result


tensors("changed by data", lambda b, x: then(x * 2, b.t.data.add_(1)))
tensors("changed by detach", lambda b, x: then(x * 2, b.t.detach().add_(1)))
tensors("changed by a view", lambda b, x: then(x * b.t, b.t[0].add_(1)))
tensors("changed by a view of a view", lambda b, x: then(x * b.t, b.t.view(-1)[2:4].mul_(2)))
tensors("changed by numpy", lambda b, x: then(x * b.t, b.t.numpy().__setitem__((0, 0), 9.0)))
tensors("changed by the numpy alias of a fresh tensor", lambda b, x: numpy_alias(x))
tensors("changed by an item", lambda b, x: then(x * b.t, b.t.__setitem__(0, 9.0)))
tensors("changed by operator", lambda b, x: then(x * b.t, operator.iadd(b.t, 1)))
tensors("changed by out", lambda b, x: then(b.t * 2, torch.add(x, 1, out=b.t)))
tensors("changed by copy", lambda b, x: then(b.t * 2, b.t.copy_(x)))
tensors("changed by foreach", lambda b, x: then(b.t * 2, torch._foreach_add_([b.t], 1.0)))
tensors("changed twice around a read", lambda b, x: (b.t.add_(1), x * b.t, b.t.mul_(2))[1])
tensors("changed by init", lambda b, x: then(b.w * 2, torch.nn.init.ones_(b.w)))
tensors("changed without grad", lambda b, x: updated(b, x))
tensors("data assigned", lambda b, x: then(b.t * 2, setattr(b.t, "data", x * 3)))
tensors("data of a parameter assigned", lambda b, x: then(b.w * 2, setattr(b.w, "data", x * 3)))
tensors(
    "data assigned from its own", lambda b, x: then(b.w * 2, setattr(b.w, "data", b.w.data + 1))
)
tensors("requires grad", lambda b, x: then(b.t * 2, b.t.requires_grad_(True)))
tensors("requires grad assigned", lambda b, x: then(b.t * 2, setattr(b.t, "requires_grad", True)))
tensors(
    "attribute set",
    lambda b, x: then(b.t * 2, setattr(b.t, "note", 3)),
    look=lambda b: (b, vars(b.t)),
)
tensors(
    "attribute of a parameter",
    lambda b, x: then(b.w * 2, setattr(b.w, "note", x)),
    look=lambda b: (b, vars(b.w)),
)
tensors("grad assigned", lambda b, x: then(b.w * 2, setattr(b.w, "grad", x * 2)))
tensors("grad dropped", lambda b, x: then(b.w * 2, setattr(b.w, "grad", None)))
tensors("hook registered", lambda b, x: then(b.w * x, b.w.register_hook(lambda g: g * 2).remove()))
tensors("hook on a fresh tensor", lambda b, x: hooked(b, x), backward=True)
tensors("grad function hook", lambda b, x: node_hooked(b, x), backward=True)
tensors("saved tensor hooks", lambda b, x: saved_hooks(b, x), backward=True)
tensors("kept in a list", lambda b, x: then(x * 2, b.items.append(x + 1)))
tensors("kept view", lambda b, x: then(x * 2, b.items.append(b.t[0])))
tensors("kept view of a fresh tensor and its base", lambda b, x: kept_views(b, x))
tensors("kept alias by detach", lambda b, x: aliases(b, x))
tensors("kept alias changed later", lambda b, x: alias_changed(b, x))
tensors("kept argument", lambda b, x: then(x * 2, setattr(b, "t", x)))
tensors("kept view of an argument", lambda b, x: then(x * 2, setattr(b, "t", x[0])))
tensors("returned argument changed", lambda b, x: x.add_(1))
tensors("returned view of an argument", lambda b, x: x[1:])
tensors("returned outside tensor", lambda b, x: (b.t, x * 2))
tensors("returned view of an outside tensor", lambda b, x: b.t.t())
tensors("returned data of an outside tensor", lambda b, x: b.w.data)
tensors("returned detached parameter", lambda b, x: b.w.detach())
tensors(
    "returned same tensor by contiguous", lambda b, x: (b.t.contiguous(), x.float(), x.to(x.dtype))
)
tensors("returned expanded", lambda b, x: x[:, :1].expand(3, 4))
tensors("returned split", lambda b, x: torch.split(x, 2, dim=1))
tensors("returned constant", lambda b, x: torch.tensor([1.0, 2.0]))
tensors(
    "returned constant changed by the caller", lambda b, x: (torch.zeros(2).add_(1), torch.ones(3))
)
tensors("constant changed through a view", lambda b, x: constant_view(x))
tensors("constant changed by another tensor", lambda b, x: constant_changed(x))
tensors("constant read after a change by data", lambda b, x: constant_by_data(x))
tensors("constant read after out", lambda b, x: constant_by_out(x))
tensors("constant read after foreach", lambda b, x: constant_by_foreach(x))
tensors("constant expanded and changed", lambda b, x: constant_as_strided(x))
tensors(
    "constant of random numbers", lambda b, x: x * torch.rand(2).numpy().sum() if False else x * 2
)
tensors("constant drawn in place", lambda b, x: drawn(x))
tensors("constant list read", lambda b, x: x * torch.tensor([1.0, 2.0]).tolist()[1])
tensors("constant numpy read", lambda b, x: x * float(torch.tensor([1.0, 2.0]).numpy()[1]))
tensors("random in a branch", lambda b, x: x if torch.rand(()).item() < 2 else x * 2)
tensors("dropout order", lambda b, x: dropped(x))
tensors("random permutation", lambda b, x: x[:, torch.randperm(4)])
tensors("random like", lambda b, x: torch.rand_like(x) + torch.randn(3, 4))
tensors("bernoulli in place", lambda b, x: x.clone().bernoulli_(0.5))
tensors("function disabled", lambda b, x: disabled(b, x))
tensors("function subclass disabled", lambda b, x: subclass_disabled(b, x))
tensors("subclass made", lambda b, x: subclass_made(x))
tensors("parameter made", lambda b, x: torch.nn.Parameter(x * 2))
tensors("buffer made", lambda b, x: torch.nn.Buffer(x * 2))
tensors(
    "no grad left",
    lambda b, x: then(x * 2, torch.set_grad_enabled(False)),
    look=lambda b: restored(),
)
tensors("no grad kept by an outside guard", lambda b, x: nested_modes(x))
tensors("default dtype changed", lambda b, x: default_dtype(x))
tensors("autocast", lambda b, x: autocasted(b, x))
tensors("inference mode", lambda b, x: inference(x))
tensors("shape in place", lambda b, x: then(b.t * 2, b.t.unsqueeze_(0).squeeze_(0)))
tensors("transposed in place", lambda b, x: then(b.t * 2, b.t.t_().t_()))
tensors("swapped data", lambda b, x: swapped(b))
tensors("dict keyed by tensors", lambda b, x: {x: 1}[x] * x)
tensors("list compared with tensors", lambda b, x: x * (1 + (b.t in [b.t])))
tensors("version read", lambda b, x: x * b.t._version)
tensors("storage pointer", lambda b, x: x * (1 + (b.t.data_ptr() == b.t[0].data_ptr())))
tensors("truth of a fresh tensor", lambda b, x: x if (x * 0).sum() == 0 else x * 2)
tensors(
    "made by legacy constructor",
    lambda b, x: torch.Tensor([1.0, 2.0]) + torch.FloatTensor([1.0, 2.0]),
)
tensors("made of a list of tensors", lambda b, x: torch.tensor([b.t[0, 0], 2.0]))
tensors("made of numpy", lambda b, x: torch.as_tensor(np.ones((3, 4), np.float32)) * x)
tensors(
    "set aside by pickle", lambda b, x: __import__("pickle").loads(__import__("pickle").dumps(b.t))
)
tensors("out of a list argument", lambda b, x: torch.stack([b.t, x], out=torch.empty(0)))
tensors("autograd function", lambda b, x: Doubling.apply(x), backward=True)
tensors("autograd function with state", lambda b, x: Stateful.apply(x, b.items), backward=True)
tensors("autograd grad", lambda b, x: torch.autograd.grad((b.w * x).sum(), b.w)[0])
tensors("functional grad", lambda b, x: torch.func.grad(lambda v: (v * v).sum())(x))
tensors("vmap", lambda b, x: torch.vmap(lambda v: v * 2)(x))
tensors("where from a condition of data", lambda b, x: torch.where(x > 0, x, b.t))
tensors("nonzero shape", lambda b, x: x * torch.nonzero(b.t).shape[0])
tensors("parameter in a list mutated", lambda b, x: parameters_updated(b, x))
tensors("optimizer", lambda b, x: optimized(b, x))


def numpy_alias(x: torch.Tensor) -> Any:
    made = x.detach() * 2
    made.numpy()[0] = 9.0
    return made


def updated(b: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        b.w.add_(1)
    return x * b.w


def hooked(b: Any, x: torch.Tensor) -> Any:
    made = b.w * x
    made.register_hook(lambda g: g * 2)
    return made


def node_hooked(b: Any, x: torch.Tensor) -> Any:
    made = b.w * x
    made.grad_fn.register_hook(lambda gi, go: tuple(g * 2 if g is not None else g for g in gi))
    return made


def saved_hooks(b: Any, x: torch.Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1, lambda t: t):
        return b.w * b.w


def kept_views(b: Any, x: torch.Tensor) -> Any:
    base = x * 2
    b.items.append(base)
    b.items.append(base[0])
    return base.view(-1)


def aliases(b: Any, x: torch.Tensor) -> Any:
    base = x * 2
    b.items.append(base.detach())
    return base


def alias_changed(b: Any, x: torch.Tensor) -> Any:
    base = x * 2
    alias = base.detach()
    b.items.append(alias)
    base.add_(1)
    return base


def constant_view(x: torch.Tensor) -> Any:
    c = torch.tensor([1.0, 2.0])
    view = c[0:1]
    view.add_(x.sum())
    return x * c[0].item()


def constant_changed(x: torch.Tensor) -> Any:
    c = torch.tensor([1.0, 2.0])
    c[0] = x[0, 0]
    return x * float(c[0])


def constant_by_data(x: torch.Tensor) -> Any:
    c = torch.tensor([1.0, 2.0])
    c.data.add_(x.sum())
    return x * float(c[0])


def constant_by_out(x: torch.Tensor) -> Any:
    c = torch.zeros(3, 4)
    torch.add(x, 1, out=c)
    return x * float(c[0, 0])


def constant_by_foreach(x: torch.Tensor) -> Any:
    c = torch.zeros(3, 4)
    torch._foreach_add_([c], [x])
    return x * float(c[0, 0])


def constant_as_strided(x: torch.Tensor) -> Any:
    c = torch.zeros(4)
    d = c.detach().as_strided((2, 2), (2, 1))
    d.copy_(x[:2, :2])
    return x * float(c[0])


def drawn(x: torch.Tensor) -> Any:
    c = torch.zeros(4).uniform_()
    return x * float(c[0])


def dropped(x: torch.Tensor) -> Any:
    a = torch.nn.functional.dropout(x, 0.5)
    b = torch.rand(3, 4)
    return torch.nn.functional.dropout(a + b, 0.5)


def disabled(b: Any, x: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        made = b.t * 2
    return made + x


def subclass_disabled(b: Any, x: torch.Tensor) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        made = b.t * 2
    return made + x


class Sub(torch.Tensor):
    """A subclass without behaviour."""


def subclass_made(x: torch.Tensor) -> Any:
    made = x.as_subclass(Sub) * 2
    return made.as_subclass(torch.Tensor)


def restored() -> Any:
    was = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    return was


def nested_modes(x: torch.Tensor) -> Any:
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            c = a * 2
    return a, c


def default_dtype(x: torch.Tensor) -> Any:
    was = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(2)
    finally:
        torch.set_default_dtype(was)


def autocasted(b: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ b.t.t()


def inference(x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return x * 2


def swapped(b: Any) -> Any:
    b.t, b.c = b.c, b.t
    return b.t * 2 + b.c


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 5


class Stateful(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, items: list[Any]) -> Any:
        items.append(len(items))
        return x * len(items)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 5, None


def parameters_updated(b: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        for p in [b.w]:
            p -= 0.1 * x
    return b.w.sum()


def optimized(b: Any, x: torch.Tensor) -> Any:
    b.w.grad = x * 2
    torch.optim.SGD([b.w], lr=0.1).step()
    return b.w.sum()


# --- the run as a whole ---------------------------------------------------------------------


def frames(b: Any, x: torch.Tensor) -> Any:
    return x * sys._getframe().f_lineno


def local_names(b: Any, x: torch.Tensor) -> Any:
    y = 3.0
    return x * locals()["y"]


def evaluated(b: Any, x: torch.Tensor) -> Any:
    return x * eval("y + b.scale", {}, {"y": 2.0, "b": b})


def executed(b: Any, x: torch.Tensor) -> Any:
    exec("b.scale = 7.0", {"b": b})
    return x * b.scale


def traced(b: Any, x: torch.Tensor) -> Any:
    was = sys.gettrace()
    sys.settrace(was)
    return x * 2


def collected(b: Any, x: torch.Tensor) -> Any:
    gc.collect()
    return x * 2


def generator_escapes(b: Any, x: torch.Tensor) -> Any:
    b.kept = (x * i for i in range(2))
    return next(b.kept)


def exception_escapes(b: Any, x: torch.Tensor) -> Any:
    try:
        raise ValueError(b)
    except ValueError as error:
        b.kept = error
    return x * 2


def method_escapes(b: Any, x: torch.Tensor) -> Any:
    b.kept = b.items.append
    b.kept(1.0)
    return x * 2


def closure_escapes(b: Any, x: torch.Tensor) -> Any:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    count()
    b.kept = count
    return x * count()


def two_closures_escape(b: Any, x: torch.Tensor) -> Any:
    n = 0

    def up() -> None:
        nonlocal n
        n += 1

    def get() -> int:
        return n

    up()
    b.kept = [up, get]
    return x * get()


def linked(b: Any, x: torch.Tensor) -> Any:
    node = Box(value=x * 2, items=b.items)
    node.me = node
    b.kept = node
    node.items.append(1.0)
    return node.value


for program in (
    frames,
    local_names,
    evaluated,
    executed,
    traced,
    collected,
    generator_escapes,
    exception_escapes,
    method_escapes,
    closure_escapes,
    two_closures_escape,
    linked,
):
    hidden(program.__name__.replace("_", " "), box(scale=2.0, items=list), program)


@ROWS.row(split=True)
def hidden_arguments_of_varied_identity() -> Scene:
    return Scene(
        lambda x, items: (items.append(x), items[-1] is x, x * len(items))[2],
        args=lambda: call(torch.randn(3, 4), [1.0]),
    )
