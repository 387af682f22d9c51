"""How one object is made again: what a value kind says of an object.

    Recipe ::= Shared Expr                     nothing is made; every replay gets the same object
             | Make whole? alloc? fill:Step*

``whole`` makes the object with its contents, ``alloc`` without them; ``fill`` completes what
``alloc`` made. An object on a cycle of references is made in two steps. Without ``whole``, every
object is. With ``whole`` and no ``alloc``, the object cannot be on a cycle.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from magjit.mocks.ir import (
    Apply,
    Attr,
    Const,
    Do,
    Expr,
    Map,
    Ref,
    SetAttr,
    Step,
)
from magjit.mocks.layouts import Layout, instance_dict, layout_of, lookup, slot_values

# What an instance's __dict__ is set by where the class has a __setattr__ of its own.
object_setattr: Callable[..., None] = object.__setattr__


ATOMS: frozenset[type] = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range}
)


def is_atom(obj: Any) -> bool:
    """Whether an object is immutable all the way down, so that all replays can share it."""
    pending = [obj]
    while pending:
        part = pending.pop()
        cls = type(part)
        if cls is tuple or cls is frozenset:
            pending.extend(part)
        elif cls is slice:
            pending += (part.start, part.stop, part.step)
        elif cls not in ATOMS:
            return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class SetState:
    """Give ``target`` the namespace (an instance's ``__dict__``) that ``names`` refers to.

    It becomes steps when it is known whether anything else refers to the namespace.
    """

    target: Ref
    names: Ref
    layout: Layout


Fill = Step | SetState


@dataclass(frozen=True, slots=True, eq=False)
class Shared:
    """The object itself, or another expression that is the same object at every use."""

    expr: Expr


@dataclass(slots=True, eq=False)
class Make:
    """See the module's grammar; ``hashes_contents``: its hash depends on what fills it."""

    whole: Expr | None = None
    alloc: Expr | None = None
    fills: tuple[Fill, ...] = ()
    hashes_contents: bool = True
    early: bool = False


Recipe = Shared | Make


class Parts(Protocol):
    """What a value kind may ask for while it describes an object."""

    @property
    def me(self) -> Ref:
        """The object that is described."""

    def value(self, obj: Any, label: str) -> Expr:
        """A part of it; ``label`` continues the readable path, such as ``[0]`` or ``.name``."""

    def created(self, obj: Any) -> bool | None:
        """Whether a class or function was made in the run; None when that is not known."""

    def changed(self, obj: Any) -> bool:
        """Whether it is an outside object that the effects will change."""

    def refuse(self, reason: str, remedy: str | None = None) -> NoReturn:
        """Raise `Unrebuildable` for the object that is described."""


Predicate = Callable[[Any, type], bool]
Describe = Callable[[Any, Parts], Recipe]


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One row of the table of value kinds: what it is, which objects, and their recipe.

    ``shared`` kinds are asked before the resolver is: nothing of theirs is ever outside.
    """

    name: str
    matches: Predicate
    describe: Describe
    shared: bool = False


def exactly(*classes: type) -> Predicate:
    """Objects whose type is one of these, not a subclass."""
    return lambda obj, cls: cls in classes


def named(*names: str) -> Predicate:
    """Objects of a C type of this full name, in a module that may not be loaded."""
    return lambda obj, cls: f"{cls.__module__}.{cls.__qualname__}" in names


def native_is(*classes: type) -> Predicate:
    """Objects of these types written in C and of all Python subclasses of theirs."""
    return lambda obj, cls: layout_of(cls).native in classes


def shared(obj: Any, parts: Parts) -> Recipe:
    """The object itself: it is immutable, or the program has it by reference."""
    return Shared(Const(obj))


def simple(expr: Expr, fills: tuple[Fill, ...] = ()) -> Make:
    """Made by one expression with all its contents, but for the given steps."""
    return Make(alloc=expr, fills=fills) if fills else Make(whole=expr)


def values(parts: Parts, items: Any) -> tuple[Expr, ...]:
    """All items of an iterable, labelled by position."""
    return tuple([parts.value(item, f"[{i}]") for i, item in enumerate(items)])


def dict_items(parts: Parts, items: Any) -> tuple[tuple[Expr, Expr], ...]:
    """Keys and values of a dict."""
    found: list[tuple[Expr, Expr]] = []
    for key, value in items:
        shown = repr(key) if type(key) in (str, int, bool, float) else f"<{type(key).__name__}>"
        found.append((parts.value(key, f".keys()[{len(found)}]"), parts.value(value, f"[{shown}]")))
    return tuple(found)


def state(parts: Parts, obj: Any) -> tuple[Fill, ...]:
    """Steps that restore the ``__dict__`` and ``__slots__`` of an instance."""
    layout = layout_of(type(obj))
    steps: list[Fill] = []
    names = instance_dict(obj)
    if names is not None:
        ref = parts.value(names, ".__dict__")
        if isinstance(ref, Ref):
            steps.append(SetState(parts.me, ref, layout))
        elif layout.dict_settable:
            steps.append(set_dict(parts.me, ref, layout))
        else:
            parts.refuse("its __dict__ is an object from outside the program")
    for member, value in slot_values(obj, layout):
        part = parts.value(value, f".{member.__name__}")
        if layout.stores_slot(member):
            steps.append(SetAttr(parts.me, member.__name__, part))
        else:
            steps.append(Do(Apply(member.__set__, (parts.me, part))))
    return tuple(steps)


def set_dict(target: Expr, names: Expr, layout: Layout) -> Step:
    """``target.__dict__ = names``, past a ``__setattr__`` of the class."""
    if layout.plain_setattr:
        return SetAttr(target, "__dict__", names)
    return Do(Apply(object_setattr, (target, Const("__dict__"), names)))


def get_dict(target: Expr, layout: Layout) -> Expr:
    """``target.__dict__``, past a ``__getattribute__`` of the class."""
    if layout.plain_getattribute:
        return Attr(target, "__dict__")
    return Apply(object.__getattribute__, (target, Const("__dict__")))


def state_steps(step: SetState, contents: Map | None) -> tuple[Step, ...]:
    """Steps for a namespace that has no other user; ``contents`` is None if it has."""
    target, layout = step.target, step.layout
    if contents is None:
        return (set_dict(target, step.names, layout),)
    pairs = [(key.value, value) for key, value in contents.items if isinstance(key, Const)]
    if len(pairs) == len(contents.items) and all(layout.stores(name) for name, _ in pairs):
        return tuple([SetAttr(target, name, value) for name, value in pairs])
    if layout.dict_settable:
        return (set_dict(target, contents, layout),)
    return (Do(Apply(dict.update, (get_dict(target, layout), contents))),)


def reduced(parts: Parts, obj: Any) -> tuple[Any, ...]:
    """What reduces the object, if that runs C code only; else refuse."""
    cls = type(obj)
    hooks = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")
    if cls in copyreg.dispatch_table or any(is_python(lookup(cls, name)) for name in hooks):
        parts.refuse(f"{cls.__qualname__} is reduced by Python code, which would run at the replay")
    try:
        found = lookup(cls, "__reduce_ex__")(obj, 4)
    except Exception as error:  # whatever a C type raises, it means that it cannot be reduced
        parts.refuse(f"a {cls.__qualname__} has state that only C code sees ({error})")
    if not isinstance(found, tuple):
        parts.refuse(f"{cls.__qualname__} is reduced to a name")
    return found


def is_python(value: Any) -> bool:
    """Whether a class attribute is, or wraps, a function written in Python."""
    kind = type(value).__name__
    return kind in ("function", "staticmethod", "classmethod", "property", "method")
