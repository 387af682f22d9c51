"""What a program reads of classes and metaclasses by unusual ways."""

from __future__ import annotations

import abc
import functools
import types
from typing import Any

from .hidden import add_hidden, box, set_of
from .table import new_table

ROWS = new_table()
hidden = functools.partial(add_hidden, ROWS)


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


def replace_class(state: Any) -> None:
    state.obj.__class__ = state.second


def inherited() -> Any:
    root = type("Root", (), {"scale": 2.0})
    other = type("Other", (), {"scale": 5.0})
    middle = type("Middle", (root,), {})
    return box(root=root, other=other, leaf=type("Leaf", (middle,), {}), made=[])


def abstract() -> Any:
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
    inherited,
    lambda b: setattr(b.leaf, "__bases__", (b.other,)),
    lambda b: b.leaf().scale,
)
hidden(
    "bases replaced, issubclass",
    inherited,
    lambda b: setattr(b.leaf, "__bases__", (b.other,)),
    lambda b: 1 + issubclass(b.leaf, b.root),
)
hidden(
    "bases replaced, super",
    inherited,
    lambda b: setattr(b.leaf, "__bases__", (b.other,)),
    lambda b: super(b.leaf, b.leaf()).scale,
)
hidden(
    "subclasses of a class",
    inherited,
    lambda b: b.made.append(type("More", (b.root,), {})),
    lambda b: len(b.root.__subclasses__()),
)
hidden(
    "abstract class registered",
    abstract,
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
    slotted,
    lambda s: setattr(s, "a", 5.0),
    lambda s: type(s).a.__get__(s),
)
hidden(
    "property function by fget",
    propertied,
    lambda b: setattr(b, "scale_", 5.0),
    lambda b: type(b).scale.fget(b),
)
hidden(
    "property by __get__",
    propertied,
    lambda b: setattr(b, "scale_", 5.0),
    lambda b: type(b).scale.__get__(b),
)
hidden(
    "descriptor with state",
    described,
    lambda b: setattr(type(b).__dict__["scale"], "value", 5.0),
    lambda b: b.scale,
)
hidden(
    "function rebound by __get__",
    propertied,
    lambda b: setattr(b, "scale_", 5.0),
    lambda b: type(b).method.__get__(b)(),
)
hidden(
    "cached property",
    cached,
    lambda b: b.__dict__.__setitem__("scale", 5.0),
    lambda b: b.scale,
)
hidden(
    "cached property dropped",
    cached,
    lambda b: (b.__dict__.pop("scale", None), b.__dict__.__setitem__("value", 5.0)),
    lambda b: b.scale,
)
hidden(
    "class that becomes callable",
    lambda: type("Made", (), {}),
    set_of("", "__call__", lambda self: 5.0),
    lambda cls: 5.0 if callable(cls()) else 2.0,
)
