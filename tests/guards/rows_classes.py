"""State of classes and of objects whose state hides behind methods and descriptors."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ..twin import Scene, isolated
from .rows_python import by_global
from .table import new_table

ROWS = new_table()


def family() -> types.SimpleNamespace:
    """A fresh class with a base and a metaclass, and one instance."""

    class Meta(type):
        meta_scale = 2.0

    class Base(metaclass=Meta):
        base_scale = 2.0

        def from_base(self) -> float:
            return 2.0

    class Derived(Base):
        scale = 2.0

        def method(self) -> float:
            return 2.0

        @property
        def prop(self) -> float:
            return 2.0

        @staticmethod
        def static() -> float:
            return 2.0

        @classmethod
        def klass(cls) -> float:
            return cls.scale

        def __neg__(self) -> float:
            return 2.0

        def up(self) -> float:
            return super().from_base()

    class Other(Base):
        scale = 7.0

    return types.SimpleNamespace(Meta=Meta, Base=Base, Derived=Derived, Other=Other, o=Derived())


# name -> (how the program reads the family, change, unrelated)
CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "class attribute": (
        lambda k: k.o.scale,
        lambda k: setattr(k.Derived, "scale", 3.0),
        lambda k: setattr(k.Derived, "other", 3.0),
    ),
    "class attribute read from the class": (
        lambda k: k.Derived.scale,
        lambda k: setattr(k.Derived, "scale", 3.0),
        lambda k: setattr(k.Base, "other", 3.0),
    ),
    "class attribute on a base": (
        lambda k: k.o.base_scale,
        lambda k: setattr(k.Base, "base_scale", 3.0),
        lambda k: setattr(k.Base, "unread", 3.0),
    ),
    "class attribute put on the nearer class": (
        lambda k: k.o.base_scale,
        lambda k: setattr(k.Derived, "base_scale", 3.0),
        lambda k: setattr(k.Other, "base_scale", 3.0),
    ),
    "class attribute shadowed by the instance": (
        lambda k: k.o.scale,
        lambda k: setattr(k.o, "scale", 3.0),
        lambda k: setattr(k.o, "unread", 3.0),
    ),
    "method replaced on the class": (
        lambda k: k.o.method(),
        lambda k: setattr(k.Derived, "method", lambda self: 3.0),
        lambda k: setattr(k.Derived, "unread", lambda self: 3.0),
    ),
    "method put on the instance": (
        lambda k: k.o.method(),
        lambda k: setattr(k.o, "method", lambda: 3.0),
        lambda k: setattr(k.o, "unread", lambda: 3.0),
    ),
    "method replaced on a base": (
        lambda k: k.o.from_base(),
        lambda k: setattr(k.Base, "from_base", lambda self: 3.0),
        lambda k: setattr(k.Base, "unread", 1),
    ),
    "method reached by super": (
        lambda k: k.o.up(),
        lambda k: setattr(k.Base, "from_base", lambda self: 3.0),
        lambda k: setattr(k.Derived, "from_base", lambda self: 3.0),
    ),
    "property replaced": (
        lambda k: k.o.prop,
        lambda k: setattr(k.Derived, "prop", property(lambda self: 3.0)),
        lambda k: setattr(k.Derived, "prop2", property(lambda self: 3.0)),
    ),
    "staticmethod replaced": (
        lambda k: k.o.static(),
        lambda k: setattr(k.Derived, "static", staticmethod(lambda: 3.0)),
        lambda k: setattr(k.Other, "static", 1),
    ),
    "classmethod replaced": (
        lambda k: k.o.klass(),
        lambda k: setattr(k.Derived, "klass", classmethod(lambda cls: cls.scale + 1)),
        lambda k: setattr(k.Other, "scale", 9.0),
    ),
    "metaclass attribute": (
        lambda k: k.Derived.meta_scale,
        lambda k: setattr(k.Meta, "meta_scale", 3.0),
        lambda k: setattr(k.Meta, "unread", 3.0),
    ),
    "class of an object assigned": (
        lambda k: k.o.scale,
        lambda k: setattr(k.o, "__class__", k.Other),
        lambda k: setattr(k.o, "unread", 1),
    ),
    "class checked by isinstance": (
        lambda k: 2.0 + isinstance(k.o, k.Other),
        lambda k: setattr(k.o, "__class__", k.Other),
        lambda k: setattr(k.o, "unread", 1),
    ),
    "bases assigned": (
        lambda k: k.o.base_scale,
        lambda k: setattr(k.Derived, "__bases__", (type("Base2", (k.Base,), {"base_scale": 3.0}),)),
        lambda k: setattr(k.Other, "unread", 1),
    ),
    "getattr hook added to the class": (
        lambda k: getattr(k.o, "lazy", 2.0),
        lambda k: setattr(k.Derived, "__getattr__", lambda self, name: 3.0),
        lambda k: setattr(k.Other, "__getattr__", lambda self, name: 3.0),
    ),
    "operator method replaced": (
        lambda k: -k.o,
        lambda k: setattr(k.Derived, "__neg__", lambda self: 3.0),
        lambda k: setattr(k.Derived, "__pos__", lambda self: 3.0),
    ),
    "len method replaced": (
        lambda k: len(k.sized),
        lambda k: setattr(type(k.sized), "__len__", lambda self: 3),
        lambda k: setattr(k.sized, "unread", 1),
    ),
    "bool method replaced": (
        lambda k: 2.0 if k.sized else 5.0,
        lambda k: setattr(type(k.sized), "__bool__", lambda self: False),
        lambda k: setattr(k.sized, "unread", 1),
    ),
    "bound method of another object": (
        lambda k: k.bound(),
        lambda k: setattr(k, "bound", k.rich.get),
        lambda k: setattr(k, "unread", 1),
    ),
    "state behind a bound method": (
        lambda k: k.bound(),
        lambda k: setattr(k.poor, "amount", 3.0),
        lambda k: setattr(k.rich, "amount", 3.0),
    ),
    "callable object": (
        lambda k: k.poor(),
        lambda k: setattr(k.poor, "amount", 3.0),
        lambda k: setattr(k.poor, "unread", 3.0),
    ),
    "descriptor state": (
        lambda k: k.poor.described,
        lambda k: setattr(k.descriptor, "factor", 3.0),
        lambda k: setattr(k.descriptor, "unread", 3.0),
    ),
    "getattr fallback then attribute added": (
        lambda k: k.poor.missing,
        lambda k: setattr(k.poor, "missing", 3.0),
        lambda k: setattr(k.poor, "unread", 3.0),
    ),
    "partial keyword contents": (
        lambda k: k.partial(),
        lambda k: setattr(k, "partial", functools.partial(k.poor.get, 2.0)),
        lambda k: setattr(k, "unread", 3.0),
    ),
    "cached property": (
        lambda k: k.poor.cached,
        lambda k: k.poor.__dict__.update(cached=3.0),
        lambda k: setattr(k.poor, "unread", 3.0),
    ),
    "module global through another module's function": (
        lambda k: k.by_global(2.0),
        lambda k: k.by_global.__globals__.update(SCALE=3.0),
        lambda k: k.by_global.__globals__.update(UNREAD=3.0),
    ),
}


def people() -> types.SimpleNamespace:
    """Family plus objects whose state hides behind methods, descriptors and fallbacks."""
    kin = family()

    class Descriptor:
        def __init__(self) -> None:
            self.factor = 2.0

        def __get__(self, owner: Any, kind: type) -> float:
            return self.factor

    descriptor = Descriptor()

    class Account:
        described = descriptor

        def __init__(self, amount: float) -> None:
            self.amount = amount

        def get(self, extra: float = 0.0) -> float:
            return self.amount + extra

        def __call__(self) -> float:
            return self.amount

        def __getattr__(self, name: str) -> float:
            if name != "missing":
                raise AttributeError(name)
            return 2.0

        @functools.cached_property
        def cached(self) -> float:
            return self.amount

    class Sized:
        def __len__(self) -> int:
            return 2

    kin.poor, kin.rich, kin.sized = Account(2.0), Account(5.0), Sized()
    kin.descriptor, kin.bound = descriptor, kin.poor.get
    kin.partial = functools.partial(kin.poor.get, 1.0)
    kin.poor.cached  # noqa: B018 - fills the cache before the first call
    kin.by_global = isolated(by_global)
    return kin


def class_scene(read: Any, change: Any, unrelated: Any) -> Scene:
    kin = people()

    def program(x: torch.Tensor) -> torch.Tensor:
        return x * read(kin)

    def do(step: Any) -> Any:
        def apply(scene: Scene) -> None:
            step(kin)

        return apply

    return Scene(program, change=do(change), unrelated=do(unrelated))


for row_name, entry in CLASSES.items():
    ROWS.add(row_name, functools.partial(class_scene, *entry))
