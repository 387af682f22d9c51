"""Changes that a run made to outside objects, and the steps that make them again.

    Write ::= AttrWrite | SlotWrite | ItemWrite | GlobalWrite | CellWrite     a value or DELETED
            | ContainerState                                                  by C code, in place
            | TensorAttrWrite
            | Call                                                            of another sort

Only the final state counts, so of several writes to one place the last value is written, at the
position of the first: that gives a dict the order of keys that it has in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from magjit.mocks.layouts import instance_dict, is_data_descriptor, lookup


class _Deleted:
    __slots__ = ()

    def __repr__(self) -> str:
        return "DELETED"


DELETED: Any = _Deleted()
"""The value of a place that was deleted."""

Via = Literal["setattr", "instance_dict", "object.__setattr__"]


@dataclass(frozen=True, slots=True, eq=False)
class AttrWrite:
    """``target.name = value``; ``via`` says what did it in the end.

    ``setattr`` runs a ``__setattr__`` or descriptor of the class; what Python code of these did
    is better given as the writes that it made.
    """

    target: Any
    name: str
    value: Any
    via: Via = "setattr"
    may_lack: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SlotWrite:
    """A place that a descriptor written in C stands for, such as a member of ``__slots__``."""

    target: Any
    descriptor: Any
    value: Any
    may_lack: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ItemWrite:
    """``target[key] = value``, of a dict or a list, by the method of the builtin type."""

    target: Any
    key: Any
    value: Any
    may_lack: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class GlobalWrite:
    """A global variable, in the globals ``target``."""

    target: dict[str, Any]
    name: str
    value: Any
    may_lack: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class CellWrite:
    """The variable that a closure cell holds."""

    target: Any
    value: Any
    may_lack: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ContainerState:
    """A container that C code changed in place.

    Attributes:
        target: the container.
        initial: a copy of its contents before the run; a list for sequences.
        final: a copy of its contents after the run; item writes to it count for nothing then.
    """

    target: Any
    initial: Any
    final: Any


class ListState(ContainerState):
    """Of a list; ``initial`` and ``final`` are lists."""

    __slots__ = ()


class DictState(ContainerState):
    """Of a dict; ``initial`` and ``final`` are dicts in the container's order."""

    __slots__ = ()


class SetState(ContainerState):
    """Of a set; ``initial`` and ``final`` are sets."""

    __slots__ = ()


class DequeState(ContainerState):
    """Of a deque; ``initial`` and ``final`` are lists."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class TensorAttrWrite:
    """``tensor.name = value`` for ``grad``, ``requires_grad`` or ``data``."""

    target: Any
    name: str
    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An effect outside Python's objects, such as a print: call a function with final values."""

    func: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


Write = (
    AttrWrite
    | SlotWrite
    | ItemWrite
    | GlobalWrite
    | CellWrite
    | ContainerState
    | TensorAttrWrite
    | Call
)


def final_writes(writes: Iterable[Write]) -> list[Write]:
    """One write per place, with its last value, in the order in which the places were written."""
    states = {id(w.target): w for w in writes if isinstance(w, ContainerState)}
    kept: list[Write | None] = []
    places: dict[Any, int] = {}
    for write in writes:
        place = _place(write)
        if isinstance(write, ContainerState):
            write = states[id(write.target)]
        elif place is not None and place[0] == "item" and place[1] in states:
            continue
        at = places.get(place)
        earlier = None if at is None else kept[at]
        if earlier is not None and at is not None:
            if isinstance(write, ContainerState):
                continue
            if not is_deletion(write) and not is_deletion(earlier):
                kept[at] = replace(earlier, value=write.value)  # type: ignore[union-attr]
                continue
            if is_deletion(write):
                kept[at] = None
                write = replace(write, may_lack=True)  # type: ignore[arg-type]
        if place is not None:
            places[place] = len(kept)
        kept.append(write)
    return [write for write in kept if write is not None]


def is_deletion(write: Write) -> bool:
    """Whether a write takes a value away."""
    return getattr(write, "value", None) is DELETED


def _place(write: Write) -> tuple[Any, ...] | None:
    """What a write changes, the same for all ways to change it."""
    match write:
        case AttrWrite(target=target, name=name, via=via):
            names = instance_dict(target)
            if names is not None and (
                via == "instance_dict" or not is_data_descriptor(lookup(type(target), name))
            ):
                return ("item", id(names), name)
            return ("attribute", id(target), name)
        case SlotWrite(target=target, descriptor=descriptor):
            if lookup(type(target), descriptor.__name__) is descriptor:
                return ("attribute", id(target), descriptor.__name__)
            return ("slot", id(target), id(descriptor))
        case ItemWrite(target=target, key=key):
            return ("item", id(target), key if _has_plain_hash(key) else _Same(key))
        case GlobalWrite(target=target, name=name):
            return ("item", id(target), name)
        case CellWrite(target=target):
            return ("cell", id(target))
        case ContainerState(target=target):
            return ("container", id(target))
        case TensorAttrWrite(target=target, name=name):
            return ("attribute", id(target), name)
        case _:
            return None


def _has_plain_hash(key: Any) -> bool:
    return type(key) in (str, int, bool, float, bytes, type(None))


class _Same:
    """A key that is the same place only if it is the same object."""

    __slots__ = ("_obj",)

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._obj is self._obj

    def __hash__(self) -> int:
        return id(self._obj)


def changed_region(initial: Sequence[Any], final: Sequence[Any]) -> tuple[int, int]:
    """Lengths of the common start and the common end of two sequences, which do not overlap."""
    shorter = min(len(initial), len(final))
    start = 0
    while start < shorter and is_same(initial[start], final[start]):
        start += 1
    end = 0
    while end < shorter - start and is_same(initial[-1 - end], final[-1 - end]):
        end += 1
    return start, end


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are one object, or numbers or strings that nobody can tell apart."""
    if a is b:
        return True
    return type(a) is type(b) and type(a) in (int, str, bytes) and bool(a == b)
