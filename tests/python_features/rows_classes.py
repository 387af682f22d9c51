"""Classes: properties, descriptors, attribute hooks, metaclasses, special methods."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from .table import FeatureTable

ROWS = FeatureTable()


@ROWS.program()
def classes_made_in_the_run(x: torch.Tensor) -> Any:
    class Base:
        factor = 2

        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

        def apply(self) -> torch.Tensor:
            return self.t * self.factor

    class Derived(Base):
        factor = 3

        def apply(self) -> torch.Tensor:
            return super().apply() + 1

    return Derived(x).apply()


@ROWS.program()
def properties(x: torch.Tensor) -> Any:
    class Owner:
        def __init__(self) -> None:
            self._t = x

        @property
        def t(self) -> torch.Tensor:
            return self._t * 2

        @t.setter
        def t(self, value: torch.Tensor) -> None:
            self._t = value + 1

    owner = Owner()
    owner.t = owner.t
    return owner.t


@ROWS.program()
def descriptors(x: torch.Tensor) -> Any:
    class Doubling:
        def __set_name__(self, owner: type, name: str) -> None:
            self.key = f"_{name}"

        def __get__(self, owner: Any, kind: type) -> Any:
            return getattr(owner, self.key) * 2

        def __set__(self, owner: Any, value: Any) -> None:
            setattr(owner, self.key, value)

    class Owner:
        value = Doubling()

    owner = Owner()
    owner.value = x
    return owner.value


@ROWS.program()
def getattr_hooks(x: torch.Tensor) -> Any:
    class Lazy:
        def __getattr__(self, name: str) -> Any:
            return x * len(name)

    class Loud:
        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, "__dict__").get(name, 7)

    loud = Loud()
    loud.a = 2
    return Lazy().abc, loud.a, loud.b


@ROWS.program()
def metaclasses(x: torch.Tensor) -> Any:
    class Meta(type):
        def __new__(mcs, name: str, bases: Any, body: Any, **options: Any) -> Any:
            body["tag"] = name.lower()
            return super().__new__(mcs, name, bases, body)

        def __call__(cls, *args: Any) -> Any:
            made = super().__call__(*args)
            made.seen = True
            return made

    class Thing(metaclass=Meta, flag=True):
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

    thing = Thing(x)
    return thing.t * len(thing.tag), thing.seen


@ROWS.program()
def multiple_inheritance(x: torch.Tensor) -> Any:
    class A:
        def f(self) -> Any:
            return x

    class B(A):
        def f(self) -> Any:
            return super().f() * 2

    class C(A):
        def f(self) -> Any:
            return super().f() + 3

    class D(B, C):
        pass

    return D().f(), [k.__name__ for k in D.__mro__]


@ROWS.program()
def static_and_class_methods(x: torch.Tensor) -> Any:
    class Owner:
        factor = 2

        @staticmethod
        def double(t: torch.Tensor) -> torch.Tensor:
            return t * 2

        @classmethod
        def scaled(cls, t: torch.Tensor) -> torch.Tensor:
            return t * cls.factor

    return Owner.double(x), Owner().scaled(x)


@ROWS.program()
def special_methods(x: torch.Tensor) -> Any:
    class Vec:
        def __init__(self, t: Any) -> None:
            self.t = t

        def __add__(self, other: Any) -> Any:
            return Vec(self.t + other.t)

        def __rmul__(self, other: Any) -> Any:
            return Vec(self.t * other)

        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> Any:
            return self.t[i]

        def __contains__(self, item: Any) -> bool:
            return item == 3

        def __iter__(self) -> Iterator[Any]:
            return iter([self.t, 2])

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

        def __call__(self, k: int) -> Any:
            return self.t - k

        def __bool__(self) -> bool:
            return False

    v = 2 * (Vec(x) + Vec(x))
    return v.t, len(v), v[0], 3 in v, list(v), v == 1, hash(v), v(2), 1 if v else 2


@ROWS.program()
def new_and_singletons(x: torch.Tensor) -> Any:
    class Single:
        one = None

        def __new__(cls) -> Any:
            if cls.one is None:
                cls.one = super().__new__(cls)
            return cls.one

    return x * 2, Single() is Single()


@ROWS.program()
def abstract_classes_and_protocols(x: torch.Tensor) -> Any:
    import abc

    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self) -> Any: ...

    class Square(Shape):
        def area(self) -> Any:
            return x * x

    return Square().area(), isinstance(Square(), Shape)


@ROWS.program()
def singledispatch(x: torch.Tensor) -> Any:
    @functools.singledispatch
    def double(v: Any) -> Any:
        return v * 2

    @double.register
    def _(v: int) -> Any:
        return v * 20

    return double(x), double(3)
