"""How instances of a class hold their state, so that it can be read and set without user code."""

from __future__ import annotations

import keyword
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_HEAP_TYPE = 1 << 9
_MISSING = object()
_C_METHODS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where an instance of a class keeps what it holds.

    Attributes:
        cls: the class.
        native: the base that is written in C and says what an instance is, such as list or object.
        slots: the members that ``__slots__`` made, of all bases.
        dict_settable: ``instance.__dict__ = {}`` is possible.
        plain_setattr: neither class nor base has a ``__setattr__`` of its own.
        plain_getattribute: neither class nor base has a ``__getattribute__`` of its own.
        identity_hash: the hash of an instance does not depend on its state.
    """

    cls: type
    native: type
    slots: tuple[types.MemberDescriptorType, ...]
    dict_settable: bool
    plain_setattr: bool
    plain_getattribute: bool
    identity_hash: bool

    def stores(self, name: str) -> bool:
        """Whether ``instance.name = value`` does nothing but set an item of ``__dict__``."""
        if not self.plain_setattr or not is_name(name):
            return False
        return not is_data_descriptor(lookup(self.cls, name))

    def stores_slot(self, slot: types.MemberDescriptorType) -> bool:
        """Whether ``instance.name = value`` does nothing but set this member."""
        name = slot.__name__
        return self.plain_setattr and is_name(name) and lookup(self.cls, name) is slot


_layouts: dict[type, Layout] = {}


def forget_layouts() -> None:
    """Let go of the classes whose layouts were asked for."""
    _layouts.clear()


def layout_of(cls: type) -> Layout:
    """The layout of a class; kept until the plan that is being built is ready."""
    found = _layouts.get(cls)
    if found is None:
        found = _layouts[cls] = _layout(cls)
    return found


def _layout(cls: type) -> Layout:
    native = cls
    while is_python_class(native) or _adds_nothing(native):
        native = base_of(native)
    slots = [
        member
        for base in mro(cls)
        if is_python_class(base)
        for member in namespace(base).values()
        if isinstance(member, types.MemberDescriptorType) and member.__objclass__ is base
    ]
    descriptor = lookup(cls, "__dict__")
    return Layout(
        cls=cls,
        native=native,
        slots=tuple(slots),
        dict_settable=isinstance(descriptor, types.GetSetDescriptorType)
        and (is_python_class(descriptor.__objclass__) or issubclass(native, BaseException)),
        plain_setattr=isinstance(lookup(cls, "__setattr__"), types.WrapperDescriptorType),
        plain_getattribute=not isinstance(lookup(cls, "__getattribute__"), types.FunctionType),
        identity_hash=lookup(cls, "__hash__") is object.__hash__,
    )


def is_python_class(cls: type) -> bool:
    """Whether a class statement (or ``type()``) made the class, so that it adds no hidden state."""
    if not cls.__flags__ & _HEAP_TYPE:
        return False
    names = namespace(cls)
    if isinstance(names.get("__new__"), types.BuiltinFunctionType):
        return False
    has_slots = "__slots__" in names
    for name, value in names.items():
        if getattr(value, "__objclass__", None) is not cls:
            continue
        if isinstance(value, types.GetSetDescriptorType):
            if name not in ("__dict__", "__weakref__"):
                return False
        elif isinstance(value, _C_METHODS) or not has_slots:
            return False
    return True


def _adds_nothing(cls: type) -> bool:
    """Whether a C class is only a mix-in: typing.Generic is one since 3.12."""
    return (
        cls is not object
        and cls.__basicsize__ == object.__basicsize__
        and cls.__itemsize__ == 0
        and bool(cls.__flags__ & _HEAP_TYPE)
        and not isinstance(namespace(cls).get("__new__"), types.BuiltinFunctionType)
        and not cls.__flags__ & (1 << 7)  # no instances at all
    )


def mro(cls: type) -> tuple[type, ...]:
    """The classes that look-ups go through; a metaclass cannot interfere."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return found


def base_of(cls: type) -> type:
    """The base whose layout a class extends."""
    found: type = type.__dict__["__base__"].__get__(cls)
    return found


def namespace(cls: type) -> types.MappingProxyType[str, Any]:
    """The ``__dict__`` of a class; a metaclass cannot interfere."""
    found: types.MappingProxyType[str, Any] = type.__dict__["__dict__"].__get__(cls)
    return found


def lookup(cls: type, name: str) -> Any:
    """What a class and its bases say for a name; a private object when they say nothing."""
    for base in mro(cls):
        value = namespace(base).get(name, _MISSING)
        if value is not _MISSING:
            return value
    return _MISSING


def is_data_descriptor(value: Any) -> bool:
    """Whether a class attribute takes precedence over the instance's ``__dict__``."""
    kind = type(value)
    return lookup(kind, "__set__") is not _MISSING or lookup(kind, "__delete__") is not _MISSING


def is_name(name: object) -> bool:
    """Whether source code can spell an attribute of this name."""
    return (
        type(name) is str and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    )


def instance_dict(obj: Any) -> Any:
    """The ``__dict__`` of an instance, or None; no user code runs."""
    descriptor = lookup(type(obj), "__dict__")
    if not isinstance(descriptor, (types.GetSetDescriptorType, types.MemberDescriptorType)):
        return None
    try:
        return descriptor.__get__(obj)
    except AttributeError:
        return None


def slot_values(obj: Any, layout: Layout) -> Iterator[tuple[types.MemberDescriptorType, Any]]:
    """The members of ``__slots__`` that are set, with their values."""
    for member in layout.slots:
        try:
            yield member, member.__get__(obj)
        except AttributeError:
            continue
