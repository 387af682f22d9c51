"""Kinds that C code implements: those that reduce to what can be made again, and those refused."""

from __future__ import annotations

import copyreg
import types
from typing import Any

from magjit.mocks.ir import Apply, Const, Do, Expr
from magjit.mocks.layouts import layout_of, lookup
from magjit.mocks.recipes import (
    Kind,
    Make,
    Parts,
    Predicate,
    Recipe,
    exactly,
    is_atom,
    is_python,
    reduced,
    simple,
    state,
    values,
)


def _native_named(*names: str) -> Predicate:
    """Objects whose C type has one of these full names, or is in one of these modules."""

    def matches(obj: Any, cls: type) -> bool:
        native = layout_of(cls).native
        return f"{native.__module__}.{native.__qualname__}" in names or native.__module__ in names

    return matches


def _refused(name: str, matches: Predicate, reason: str, remedy: str | None = None) -> Kind:
    def describe(obj: Any, parts: Parts) -> Recipe:
        parts.refuse(reason, remedy)

    return Kind(name, matches, describe)


_is_array = _native_named("numpy.ndarray")


def _array(obj: Any, parts: Parts) -> Recipe:
    """A copy of the data at every replay; a view is made again from its base."""
    if obj.dtype.hasobject:
        parts.refuse("a NumPy array of Python objects")
    cls = type(obj)
    if cls is not layout_of(cls).native:
        parts.refuse("a NumPy array of a subclass")
    if obj.base is None:
        copy = obj.copy(order="K")
        copy.setflags(write=False)
        if obj.strides != copy.strides:
            parts.refuse("a NumPy array with unusual strides")
        return Make(whole=Apply(cls.copy, (Const(copy), Const("K"))))
    if not _is_array(obj.base, type(obj.base)):
        parts.refuse(f"a NumPy array that shares memory with a {type(obj.base).__name__}")
    base = obj.base
    start = obj.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    if start < 0 or (base.strides and min(base.strides) < 0) or not base.flags.forc:
        parts.refuse("a NumPy view of an array with unusual strides")
    layout = (obj.shape, obj.dtype, parts.value(base, ".base"), start, obj.strides)
    args = tuple([part if isinstance(part, Expr) else Const(part) for part in layout])
    return Make(whole=Apply(cls, args))


def _reduced(obj: Any, parts: Parts) -> Recipe:
    """What a C type's own ``__reduce__`` says, if it needs nothing but that type."""
    cls = type(obj)
    func, args, *rest = reduced(parts, obj)
    if func is copyreg.__newobj__:  # type: ignore[attr-defined]
        func = args[0].__new__
    if func is not cls and not (args and args[0] is cls):
        parts.refuse(f"a {cls.__qualname__} is made again by calling {func!r}")
    if func is cls and (is_python(lookup(cls, "__new__")) or is_python(lookup(cls, "__init__"))):
        parts.refuse(f"making a {cls.__qualname__} again would run its constructor")
    if any(part is not None for part in rest[1:]):
        parts.refuse(f"a {cls.__qualname__} is reduced to items")
    if is_atom(args) and type(func(*args)) is not cls:
        parts.refuse(f"a {cls.__qualname__} is not made by {func!r}")
    made = Apply(func, values(parts, args))
    restore = lookup(cls, "__setstate__")
    if rest and rest[0] is not None and isinstance(restore, types.MethodDescriptorType):
        content = parts.value(rest[0], "")
        return Make(alloc=made, fills=(Do(Apply(restore, (parts.me, content))),))
    return simple(made, state(parts, obj))


def _random(obj: Any, parts: Parts) -> Recipe:
    """A generator of Python's random module, in the state that the run left it in."""
    native: Any = layout_of(type(obj)).native
    restore = Do(Apply(native.setstate, (parts.me, Const(native.getstate(obj)))))
    new = Apply(native.__new__, (Const(type(obj)),))
    return Make(alloc=new, fills=(restore, *state(parts, obj)))


OPAQUE_KINDS = (
    _refused(
        "generator",
        exactly(types.GeneratorType, types.AsyncGeneratorType),
        "a generator keeps a running frame",
        "return a list of its items",
    ),
    _refused("coroutine", exactly(types.CoroutineType), "a coroutine keeps a running frame"),
    _refused("frame", exactly(types.FrameType, types.TracebackType), "a frame of the run"),
    _refused(
        "file",
        _native_named("_io"),
        "an open file",
        "open the file outside the compiled function",
    ),
    _refused("socket", _native_named("_socket"), "a socket"),
    _refused(
        "lock",
        _native_named("_thread"),
        "a lock or other object of a thread",
        "make the lock outside the compiled function",
    ),
    _refused(
        "torch.Generator",
        _native_named("torch._C.Generator", "torch.Generator"),
        "a random number generator made in the run",
        "make the generator outside the compiled function",
    ),
    Kind("NumPy array", _is_array, _array),
    Kind("random.Random", _native_named("_random"), _random),
)
REDUCED_KINDS = (Kind("reduced by its C type", lambda obj, cls: True, _reduced),)
