"""What kind of value something is, as far as guards are concerned.

An *atom* is compared by value; a *constant object* by identity, because the program cannot have
another one that means the same; everything else gets a node and is compared by what was read of it.
"""

from __future__ import annotations

import contextvars
import datetime
import decimal
import enum
import re
import types
from collections import OrderedDict, defaultdict, deque
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

SEQUENCES = (list, tuple, deque)
MAPPINGS = (dict,)
SETS = (set, frozenset)
CONTAINERS = (*SEQUENCES, *MAPPINGS, *SETS)


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
    for base in type.__dict__["__mro__"].__get__(cls):
        namespace = type.__dict__["__dict__"].__get__(base)
        if name in namespace:
            return namespace[name]
    return ABSENT


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


def has_own_iteration(obj: Any) -> bool:
    """Whether a container's class replaces the protocol methods of its builtin base by Python code."""
    tp = type(obj)
    if tp in (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict):
        return False
    return any(
        isinstance(class_lookup(tp, name), types.FunctionType)
        for name in ("__iter__", "__getitem__", "__len__", "__contains__")
    )
