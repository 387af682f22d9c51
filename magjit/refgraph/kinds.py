"""What kind of value something is, as far as guards are concerned.

An *atom* is compared by value; a *constant object* by identity, because the program cannot have
another one that means the same; everything else gets a node and is compared by what was read of it.
"""

from __future__ import annotations

import contextvars
import datetime
import decimal
import enum
import gc
import operator
import re
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from magjit.refgraph.nodes import ABSENT

_PLAIN: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_CONSTANT: tuple[type, ...] = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.CodeType,
    types.GenericAlias,
    types.MappingProxyType,
    operator.attrgetter,
    operator.itemgetter,
    operator.methodcaller,
    enum.Enum,
    property,
    classmethod,
    staticmethod,
    contextvars.ContextVar,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch.jit.ScriptFunction,
    torch.finfo,
    torch.iinfo,
)

_VALUE_CLASSES: tuple[type, ...] = (
    int,
    float,
    complex,
    str,
    bytes,
    np.generic,
    decimal.Decimal,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    re.Pattern,
)
"""Immutable values whose class is not an atom's: compared by identity."""

HEAP_TYPE = 1 << 9
"""Flag of a class that is written in Python, or may change like one."""

SEQUENCES = (list, tuple, deque)
MAPPINGS = (dict,)
SETS = (set, frozenset)
CONTAINERS = (*SEQUENCES, *MAPPINGS, *SETS)

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""Where an ``nn.Module`` keeps its parts, in the order in which it looks for them."""


def is_atom(value: Any) -> bool:
    """Whether a value is compared by type and value: immutable, all the way down."""
    tp = type(value)
    if tp in _PLAIN:
        return True
    if tp is tuple or tp is torch.Size or tp is frozenset:
        return all(is_atom(item) for item in value)
    if tp is slice:
        return is_atom((value.start, value.stop, value.step))
    return False


CONTAINER_SETTINGS: tuple[tuple[type, Any], ...] = (
    (defaultdict, vars(defaultdict)["default_factory"]),
    (deque, vars(deque)["maxlen"]),
)
"""What a copy of a container has of it besides the contents."""


def is_constant_object(value: Any) -> bool:
    """Whether a value is compared by identity: a class, a module, an enum member, a date ...

    Atoms have been told apart before.
    """
    return isinstance(value, _CONSTANT) or isinstance(value, _VALUE_CLASSES)


def instance_dict(obj: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, found without running a user's code."""
    try:
        found = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def class_lookup(cls: type, name: str) -> Any:
    """What the MRO of a class says for a name (as ``_PyType_Lookup``), or ABSENT."""
    for base in _mro_of(cls):
        namespace = _namespace_of(base)
        if name in namespace:
            return namespace[name]
    return ABSENT


# The own descriptors of ``type``: a metaclass may say something else.
_mro_of = type.__dict__["__mro__"].__get__
_namespace_of = type.__dict__["__dict__"].__get__


def is_data_descriptor(value: Any) -> bool:
    """Whether a class attribute takes precedence over the instance's ``__dict__``."""
    tp = type(value)
    return class_lookup(tp, "__set__") is not ABSENT or class_lookup(tp, "__delete__") is not ABSENT


def contents_copy(obj: Any) -> Any:
    """A shallow copy of a container's contents that no later change can reach."""
    if isinstance(obj, dict):
        # The order of an OrderedDict is not that of the dict under it.
        return dict((OrderedDict if isinstance(obj, OrderedDict) else dict).items(obj))
    if isinstance(obj, list):
        return list.__getitem__(obj, slice(None))
    if isinstance(obj, (set, frozenset)):
        return set(set.__iter__(obj) if isinstance(obj, set) else frozenset.__iter__(obj))
    if isinstance(obj, deque):
        return list(deque.__iter__(obj))
    if isinstance(obj, tuple):
        return list(tuple.__iter__(obj))
    return None


_BASE_VALUES: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__getnewargs__),
    (float, float.__getnewargs__),
    (complex, vars(complex)["__getnewargs__"]),
    (str, str.__getnewargs__),
    (bytes, bytes.__getnewargs__),
    (np.generic, np.generic.tobytes),
)


def base_value(value: Any) -> Callable[[Any], Any] | None:
    """The C function that gives what an immutable value of a subclass is worth, if there is one.

    Two objects of one class that are worth the same are the same to a program that does not ask
    for their attributes, which are read on their own.
    """
    if isinstance(value, enum.Enum) or type(value) in _PLAIN:
        return None
    if isinstance(value, np.void) or isinstance(value, np.object_):
        return None
    for base, worth in _BASE_VALUES:
        if isinstance(value, base) and type(value) is not base:
            return worth
    return None


def held(obj: Any) -> tuple[Any, ...]:
    """What an immutable object of a C type refers to for life: it is the same as long as it is."""
    if isinstance(obj, property):
        found: tuple[Any, ...] = (obj.fget, obj.fset, obj.fdel)
    elif isinstance(obj, (classmethod, staticmethod)):
        found = (obj.__func__,)
    elif isinstance(obj, (types.BuiltinFunctionType, types.MethodWrapperType)):
        found = (obj.__self__,)
    elif isinstance(obj, types.MappingProxyType):
        found = (mapping_behind(obj),)
    else:
        return ()
    return tuple(item for item in found if item is not None)


def mapping_behind(proxy: types.MappingProxyType[Any, Any]) -> Any:
    """The mapping that a read-only view shows."""
    (mapping,) = gc.get_referents(proxy)
    return mapping


_C_METHODS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_HARMLESS_OWNERS: tuple[type, ...] = (
    object,
    type,
    *CONTAINERS,
    OrderedDict,
    defaultdict,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
)
"""Their C methods read what the recorder knows of."""


def reads_unknown_state(cls: type, names: tuple[str, ...]) -> bool:
    """Whether one of these methods is C code of a type whose state the recorder does not know."""
    for name in names:
        found = class_lookup(cls, name)
        if isinstance(found, _C_METHODS) and found.__objclass__ not in _HARMLESS_OWNERS:
            return True
    return False


def c_class(cls: type) -> type:
    """The first class of the MRO that is written in C; ``object`` for a class in pure Python."""
    bases: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    for base in bases:
        if not int(base.__flags__) & (1 << 9):
            return base
        for value in vars(base).values():
            if isinstance(value, types.MethodDescriptorType | types.WrapperDescriptorType):
                if value.__objclass__ is base:
                    return base
            elif isinstance(value, types.BuiltinFunctionType) and value.__self__ is base:
                return base
    return object


def name_in_class(cls: type, func: Any) -> str | None:
    """The name under which a class or one of its bases holds a function."""
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if value is func or func in _functions_of(value):
                return name
    return None


def _functions_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    if isinstance(value, (classmethod, staticmethod)):
        return (value.__func__,)
    wrapped = getattr(value, "func", None) if type(value).__module__ == "functools" else None
    return (wrapped,) if wrapped is not None else ()
