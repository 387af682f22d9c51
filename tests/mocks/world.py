"""A fake recorder, and a comparison of whole object graphs by type, state and identity.

Alike.differ(a, b)  walks two values side by side and keeps a one-to-one map of their objects
fresh(a, b)         lists objects that two values share although every run makes new ones
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import gc
import re
import sys
import types
import typing
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from magjit.mocks import build_plan, emit, verify
from magjit.mocks.layouts import instance_dict, layout_of, slot_values


class FakeResolver:
    """Outside objects and graph tensors are given; `created` knows classes and functions."""

    def __init__(self, outside: Any = (), tensors: Any = (), created: Any = ()) -> None:
        self._outside = list(outside)
        self._tensors = list(tensors)
        self._created = list(created)

    def external(self, obj: Any) -> int | None:
        return _position(self._outside, obj)

    def tensor(self, obj: Any) -> int | None:
        return _position(self._tensors, obj)

    def is_tensor(self, obj: Any) -> bool:
        return issubclass(type(obj), torch.Tensor)

    def created(self, obj: Any) -> bool | None:
        return True if _position(self._created, obj) is not None else None


def _position(items: list[Any], obj: Any) -> int | None:
    return next((i for i, item in enumerate(items) if item is obj), None)


def tensors(count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(2, 2) for _ in range(count)]


class Replay:
    """What a record does with a mock: run it for given graph values and outside objects."""

    def __init__(self, result: Any, writes: Any = (), outside: Any = (), made: Any = (), **known):
        self.plan = build_plan(result, writes, FakeResolver(outside, made, **known))
        verify(self.plan)
        str(self.plan)
        self.finish, self.slots, self.outputs, self.source = emit(self.plan)

    def __call__(self, values: Any = (), outside: Any = ()) -> Any:
        outs = tuple([values[i] for i in self.outputs])
        if self.finish is None:
            return outs
        if isinstance(self.finish, int):
            return outs[self.finish]
        return self.finish(outs, *[outside[i] for i in self.slots])


SHARED = (
    *(re.Pattern, datetime.date, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(
        typing._GenericAlias,
        types.UnionType,
    ),
    *(int, float, complex, str, bytes, bool, type(None), type(...), type(NotImplemented), range),
    *(type, types.CodeType, enum.Enum),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.generic),
    *(np.ufunc, type(np.mean)),
    *(torch.finfo, np.dtype),
)


class Alike:
    """Compares two values; equal objects on one side must be equal objects on the other."""

    def __init__(self) -> None:
        self.there: dict[int, Any] = {}
        self.back: dict[int, Any] = {}
        self.pairs: list[tuple[Any, Any]] = []

    def differ(self, a: Any, b: Any) -> str | None:
        """The first difference, with its path; None if there is none."""
        pending = [("value", a, b)]
        while pending:
            path, a, b = pending.pop()
            if type(a) is not type(b):
                return f"{path}: {type(a)} against {type(b)}"
            if isinstance(a, SHARED) and type(a).__flags__ & 1 << 9 == 0 or a is b is None:
                if a is not b and not (a == b and repr(a) == repr(b)) and repr(a) != "nan":
                    return f"{path}: {a!r} against {b!r}"
                continue
            if isinstance(a, SHARED) and not isinstance(a, (int, float, str, bytes, complex)):
                if a is not b and a != b:
                    return f"{path}: {a!r} against {b!r}"
                continue
            if a is b and _belongs_to_python(a):
                continue
            if id(a) in self.there or id(b) in self.back:
                if self.there.get(id(a)) is not b or self.back.get(id(b)) is not a:
                    if _shareable(a) and a == b:
                        continue
                    return f"{path}: other identity"
                continue
            self.there[id(a)], self.back[id(b)] = b, a
            self.pairs.append((a, b))
            if isinstance(a, torch.Tensor) and not torch.equal(a, b):
                return f"{path}: tensors differ"
            left, right = (dict(parts(x)) for x in (a, b))
            if list(left) != list(right):
                return f"{path}: parts {list(left)} against {list(right)}"
            pending += [(path + name, left[name], right[name]) for name in reversed(left)]
        return None


def _belongs_to_python(obj: Any) -> bool:
    """Whether Python itself has only one of these."""
    if isinstance(obj, types.FunctionType):
        return "<locals>" not in obj.__code__.co_qualname
    if isinstance(obj, types.BuiltinFunctionType):
        return obj.__self__ is None or isinstance(obj.__self__, (type, types.ModuleType))
    if isinstance(obj, types.ModuleType):
        return sys.modules.get(obj.__name__) is obj
    return type(obj) is weakref.ref and obj.__callback__ is None


def _shareable(obj: Any) -> bool:
    """Immutable all the way down: Python itself may have one where we have two."""
    if type(obj) in (tuple, frozenset) or hasattr(type(obj), "n_sequence_fields"):
        return all(map(_shareable, obj))
    if type(obj) is slice:
        return all(map(_shareable, (obj.start, obj.stop, obj.step)))
    return isinstance(obj, SHARED)


def parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """What an object consists of, by path."""
    match obj:
        case list() | tuple() | collections.deque():
            native = layout_of(type(obj)).native
            yield from ((f"[{i}]", x) for i, x in enumerate(native.__iter__(obj)))
        case collections.OrderedDict():
            keys = list(collections.OrderedDict.__iter__(obj))
            yield from _pairs([(k, dict.__getitem__(obj, k)) for k in keys])
        case dict():
            yield from _pairs(list(dict.items(obj)))
        case set() | frozenset():
            native = layout_of(type(obj)).native
            items = sorted(native.__iter__(obj), key=repr)
            yield from ((f"{{{i}}}", x) for i, x in enumerate(items))
        case int() | str() | float() | bytes() | complex():
            yield "plain", layout_of(type(obj)).native.__repr__(obj)
        case bytearray():
            yield "plain", bytes(obj)
        case slice():
            yield from ((f".{n}", getattr(obj, n)) for n in ("start", "stop", "step"))
        case types.FunctionType():
            names = "code globals name qualname module doc closure defaults kwdefaults annotations"
            for name in names.split():
                value = getattr(obj, f"__{name}__")
                yield f".__{name}__", value if name != "globals" else id(value)
        case types.MethodType():
            yield ".__func__", obj.__func__
            yield ".__self__", obj.__self__
        case types.CellType():
            if gc.get_referents(obj):
                yield ".cell_contents", obj.cell_contents
        case types.MethodWrapperType() | types.BuiltinFunctionType():
            yield ".__name__", obj.__name__
            yield ".__self__", obj.__self__
        case functools.partial():
            yield from ((f".{n}", getattr(obj, n)) for n in ("func", "args", "keywords"))
        case weakref.ref():
            yield "()", weakref.ref.__call__(obj)
            yield ".callback", obj.__callback__
        case staticmethod() | classmethod():
            yield ".__func__", obj.__func__
        case property():
            yield from ((f".{n}", getattr(obj, n)) for n in ("fget", "fset", "fdel", "__doc__"))
        case BaseException():
            names = "args __cause__ __context__ __suppress_context__ name path obj value code"
            extra = " errno strerror filename start end reason object"
            for name in (names + extra).split():
                if hasattr(obj, name):
                    yield f".{name}", getattr(obj, name)
        case np.ndarray():
            yield ".array", (obj.shape, obj.strides, str(obj.dtype), obj.tobytes())
            yield ".base", obj.base
        case types.MappingProxyType():
            yield ".mapping", gc.get_referents(obj)[0]
        case (
            collections.abc.KeysView() | collections.abc.ValuesView() | collections.abc.ItemsView()
        ):
            if type(obj).__module__ == "builtins" or "odict" in type(obj).__name__:
                yield ".mapping", gc.get_referents(obj)[0]
        case _ if layout_of(type(obj)).native is not object and hasattr(type(obj), "__next__"):
            yield ".reduced", obj.__reduce__()
    if isinstance(obj, collections.defaultdict):
        yield ".default_factory", obj.default_factory
    if isinstance(obj, collections.deque):
        yield ".maxlen", obj.maxlen
    names = instance_dict(obj)
    if names is not None and (names or not isinstance(obj, torch.Tensor)):
        yield ".__dict__", names
    for member, value in slot_values(obj, layout_of(type(obj))):
        yield f".{member.__objclass__.__name__}.{member.__name__}", value


def _pairs(items: Any) -> Iterator[tuple[str, Any]]:
    for i, (key, value) in enumerate(items):
        yield f".key{i}", key
        yield f"[{i}]", value


def shared_objects(alike: Alike, allowed: Any = ()) -> list[Any]:
    """Objects that are the same on both sides although a run makes new ones."""
    known = {id(x) for x in allowed}
    return [a for a, b in alike.pairs if a is b and id(a) not in known and not _shareable(a)]
