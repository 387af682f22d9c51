"""How one Python object holds another: the edges of the reference graph (MagPy §4.1).

    relation ::= Arg i | Kwarg name | Root                  from the outside world (node 0)
               | InstanceDict | ModuleDict                  an object's or a module's __dict__
               | Item key | Index i | Member                in a dict, in a sequence, in a set
               | Cell | Closure i | Globals | FuncDict      of cells and functions
               | Defaults | KwDefaults | MethodFunc | MethodSelf
               | ClassAttr name                             look-up along a class's MRO
               | SlotOf descriptor | CAttr descriptor       members and getters written in C
               | Referent                                   of a weak reference
    fact     ::= Length | Keys | Members | Code             what a whole-object read depends on

A fact's target is always a `Leaf`; a relation's target is a `Leaf` or another node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any


class Relation:
    """Base of all edges; equal edges of one node lead to one target."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Root(Relation):
    """A constant of the compiled object itself: its module or function, a class, a globals dict."""

    ident: int


@dataclass(frozen=True, slots=True)
class Arg(Relation):
    """Positional argument of the compiled call."""

    index: int


@dataclass(frozen=True, slots=True)
class Kwarg(Relation):
    """Keyword argument of the compiled call."""

    name: str


@dataclass(frozen=True, slots=True)
class InstanceDict(Relation):
    """The ``__dict__`` of an object."""


@dataclass(frozen=True, slots=True)
class ModuleDict(Relation):
    """The namespace of a module."""


class ItemKey:
    """A dict key as part of an edge: 1, 1.0 and True are different edges."""

    __slots__ = ("_hash", "key")

    def __init__(self, key: Any) -> None:
        self.key = key
        self._hash = hash((type(key), key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ItemKey) or type(self.key) is not type(other.key):
            return False
        return self.key is other.key or bool(self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return repr(self.key)


@dataclass(frozen=True, slots=True)
class Item(Relation):
    """Value under a key of a dict."""

    key: ItemKey

    @classmethod
    def of(cls, key: Any) -> Item:
        """The edge of a key; names have one each, which is found sooner than made."""
        return _named(key) if type(key) is str else cls(ItemKey(key))

    def __hash__(self) -> int:
        return self.key._hash


@lru_cache(maxsize=8192)
def _named(key: str) -> Item:
    return Item(ItemKey(key))


@dataclass(frozen=True, slots=True)
class Has(Relation):
    """Whether a dict has a key; the value under it was not read."""

    key: ItemKey


@dataclass(frozen=True, slots=True)
class Index(Relation):
    """Element of a list, tuple or deque."""

    index: int


@dataclass(frozen=True, slots=True)
class Cell(Relation):
    """Contents of a closure cell."""


@dataclass(frozen=True, slots=True)
class Closure(Relation):
    """A cell of a function's closure."""

    index: int


@dataclass(frozen=True, slots=True)
class Globals(Relation):
    """The globals dict of a function."""


@dataclass(frozen=True, slots=True)
class Defaults(Relation):
    """The tuple of default values of a function."""


@dataclass(frozen=True, slots=True)
class KwDefaults(Relation):
    """The dict of keyword-only default values of a function."""


@dataclass(frozen=True, slots=True)
class MethodFunc(Relation):
    """The function of a bound method."""


@dataclass(frozen=True, slots=True)
class MethodSelf(Relation):
    """The object that a method is bound to."""


@dataclass(frozen=True, slots=True)
class ClassAttr(Relation):
    """What a class and its bases say for a name, without running descriptors."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Described(Relation):
    """An edge named by a descriptor written in C; descriptors compare by identity."""

    descriptor: Any

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.descriptor is self.descriptor

    def __hash__(self) -> int:
        return hash((type(self), id(self.descriptor)))


@dataclass(frozen=True, slots=True, eq=False)
class SlotOf(Described):
    """A ``__slots__`` member."""

    __eq__ = Described.__eq__
    __hash__ = Described.__hash__


@dataclass(frozen=True, slots=True, eq=False)
class CAttr(Described):
    """A getter or member of a type written in C, such as ``deque.maxlen`` or ``Tensor.grad``."""

    __eq__ = Described.__eq__
    __hash__ = Described.__hash__


@dataclass(frozen=True, slots=True, eq=False)
class CResult(Described):
    """Fact: what a C method without further arguments gives, such as a storage offset."""

    __eq__ = Described.__eq__
    __hash__ = Described.__hash__


@dataclass(frozen=True, slots=True)
class NonEmpty(Relation):
    """Fact: a sequence has at least one element."""


@dataclass(frozen=True, slots=True)
class Referent(Relation):
    """What a weak reference refers to."""


@dataclass(frozen=True, slots=True)
class ContextValue(Relation):
    """The value of a context variable in the current context."""


@dataclass(frozen=True, slots=True)
class Length(Relation):
    """Fact: the number of elements."""


@dataclass(frozen=True, slots=True)
class Keys(Relation):
    """Fact: the keys of a dict, in order."""


@dataclass(frozen=True, slots=True)
class Members(Relation):
    """Fact: the members of a set of atoms."""


@dataclass(frozen=True, slots=True)
class Code(Relation):
    """Fact: the code object of a function."""


@dataclass(frozen=True, slots=True)
class TypeIs(Relation):
    """Fact: the exact type of an object."""
