"""Numbers of a run that may change, as data, and what a record keeps of them.

    Number  ::= Source | func (Number | constant)*          an object that the run computes with
    Source  ::= Read node key                               a counter on an object
              | Drawn generator method arguments            a random number
              | Size node dim                               a size of a tensor
              | Length node                                 how many items a list has
              | Argument relation                           an argument that was seen to change
              | Item value                                  what an operator reads of a tensor
    Outcome ::= Number true?                                what the program decided by a number

A number may differ at the next call as long as one of its sources is not pinned.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch

from magjit.bytecode.optable import COMPARE
from magjit.errors import Location
from magjit.refgraph import relations as r
from magjit.refgraph.nodes import Leaf, ShadowNode

NUMBERS = (int, float)
TEXTS = (int, float, str)
"""What texts are made of, and they themselves."""
BINARY: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "&": operator.and_,
    "|": operator.or_,
    "^": operator.xor,
}
SYMBOLIC: dict[Any, Callable[..., Any]] = {
    int: torch.sym_int,
    float: torch.sym_float,
    max: torch.sym_max,
    min: torch.sym_min,
    math.sqrt: torch.sym_sqrt,
}
"""Functions that compute with symbols under another name."""
_SYMBOLS = {func: symbol for symbol, func in (BINARY | COMPARE).items()}


@dataclass(slots=True, eq=False)
class Read:
    """A number that an object's ``__dict__`` held before the run."""

    node: ShadowNode | None
    relation: r.Item
    value: Any
    pinned: bool = False
    varies: bool = False
    """It was seen to change between calls, if not in them."""

    @property
    def key(self) -> Any:
        return self.relation.key.key

    def found_in(self, namespace: dict[Any, Any]) -> Any:
        """What it is now."""
        return dict.__getitem__(namespace, self.key)

    def release(self) -> None:
        """Let go of the run."""
        self.node = None

    def pin(self) -> None:
        """The guard compares the value from now on."""
        if not self.pinned and self.node is not None:
            self.pinned = True
            self.node.first.refs[self.relation] = Leaf(self.value)


@dataclass(slots=True, eq=False)
class Drawn:
    """The result of one call of a generator's method; ``value`` is what it was in the run."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    reason: str = ""
    location: Location | None = None
    pinned: bool = False

    def pin(self) -> None:
        """A replay has to draw the same value."""
        self.pinned = True


@dataclass(slots=True, eq=False)
class Argument:
    """A number that the call is given; ``node`` is its own, and its object the run's."""

    node: ShadowNode | None
    parent: ShadowNode | None
    relation: r.Relation
    value: Any
    pinned: bool = False
    varies: bool = False
    """It was seen to change between calls."""

    def found_in(self, value: Any) -> Any:
        """What it is now."""
        return value

    def release(self) -> None:
        """Let go of the run."""
        self.node = self.parent = None

    def pin(self) -> None:
        """The guard compares the value from now on."""
        if not self.pinned and self.parent is not None:
            self.pinned = True
            self.parent.first.refs[self.relation] = Leaf(self.value)


class Size:
    """A size of a tensor from outside; ``sym`` is its symbol in the run's shape environment.

    Which values it may have, the guards of that environment say.
    """

    __slots__ = ("dim", "node", "position", "sym", "value", "was_pinned")

    def __init__(self, node: ShadowNode, position: int, dim: int, value: int, sym: Any) -> None:
        self.node: ShadowNode | None = node
        self.position = position
        self.dim = dim
        self.value = value
        self.sym = sym
        self.was_pinned = False

    @property
    def pinned(self) -> bool:
        """Whether it is a constant after all."""
        return self.was_pinned or (self.sym is not None and bool(self.sym.node.expr.is_number))

    def pin(self) -> None:
        """The shape environment asks for the value."""
        if not self.was_pinned:
            self.was_pinned = True
            int(self.sym)

    def found_in(self, tensor: torch.Tensor) -> int:
        """What it is now."""
        return int(tensor.size(self.dim))

    def release(self) -> None:
        """Let go of the run; it is what it is."""
        self.was_pinned = self.pinned
        self.node = self.sym = None


@dataclass(slots=True, eq=False)
class Length:
    """How many items a list had when the region began."""

    node: ShadowNode | None
    value: int
    pinned: bool = False
    varies: bool = False

    def found_in(self, items: list[Any]) -> int:
        """What it is now."""
        return len(items)

    def release(self) -> None:
        """Let go of the run."""
        self.node = None

    def pin(self) -> None:
        """The guard compares it from now on."""
        if not self.pinned and self.node is not None:
            self.pinned = True
            self.node.first.refs.setdefault(r.Length(), Leaf(self.value))


@dataclass(slots=True, eq=False)
class Item:
    """A float that an operator of the graph reads of a tensor: known when the graph has run.

    No guard can compare it: where the program needs it before, the run is cut.

    Attributes:
        value_id: what it is in the graph.
        place: code and offset of the call that reads it.
    """

    value_id: int
    value: float
    place: tuple[Any, int]
    pinned: bool = False

    def pin(self) -> None:
        """It stays what it is."""


Source = Read | Drawn | Size | Argument | Length | Item


@dataclass(slots=True, eq=False)
class Number:
    """An int or a float of the run, and how it came about: from a source, or by a call.

    ``sym`` is what it is in the shape environment of the run, where it comes from sizes alone.
    """

    obj: Any
    source: Source | None = None
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    sources: tuple[Source, ...] = ()
    shared: Any = None
    sym: Any = None

    def __post_init__(self) -> None:
        found = {} if self.source is None else {id(self.source): self.source}
        for arg in self.args:
            if isinstance(arg, Number):
                found |= {id(source): source for source in arg.sources}
        self.sources = tuple(found.values())

    @property
    def original(self) -> Any:
        """The object that the program would have here without the recorder."""
        if self.source is not None:
            return self.source.value
        if self.shared is None:
            # an operation gives the object that the interpreter keeps of a small int
            self.shared = self.obj + 0 if type(self.obj) is int else self.obj
        return self.shared

    @property
    def varies(self) -> bool:
        """Whether it was seen to differ from call to call."""
        return any(
            not source.pinned and (isinstance(source, Size) or getattr(source, "varies", False))
            for source in self.sources
        )

    @property
    def of_graph(self) -> bool:
        """Whether it is known only when the graph has run."""
        return any(isinstance(source, Item) for source in self.sources)

    @property
    def live(self) -> bool:
        """Whether it may differ at the next call."""
        return not all(source.pinned for source in self.sources)

    def evaluate(self, values: dict[int, Any]) -> Any:
        """Its value, given those of the sources by identity."""
        if self.source is not None:
            return self.source.value if self.source.pinned else values[id(self.source)]
        found = values.get(id(self), values)
        if found is values:
            assert self.func is not None
            parts = [arg.evaluate(values) if isinstance(arg, Number) else arg for arg in self.args]
            found = values[id(self)] = self.func(*parts)
        return found


# -- what a record keeps of them ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Sources but draws, and the nodes of the objects that they are in, in order."""

    nodes: list[int]
    reads: list[Read | Size | Argument | Length]

    def values(self, holders: tuple[Any, ...]) -> dict[int, Any]:
        """What they are now, by the identity of the source."""
        pairs = zip(self.reads, holders, strict=True)
        return {id(source): source.found_in(holder) for source, holder in pairs}


def binary_symbol(func: Any) -> str | None:
    """The operator that a function is, such as ``+``."""
    return _SYMBOLS.get(func) if isinstance(func, BuiltinFunctionType) else None


def text_of(part: Any, depth: int = 0) -> str:
    """A number as a reader would write it."""
    match part:
        case Number(source=Read() | Drawn() | Size() | Argument() | Length() | Item() as source):
            return text_of(source)
        case Number() if depth == _DEEPEST_TEXT:
            return "..."
        case Number(func=func, args=args):
            shown = [text_of(arg, depth + 1) for arg in args]
            symbol = binary_symbol(func)
            if symbol is not None:
                return f"({shown[0]} {symbol} {shown[1]})"
            return f"{getattr(func, '__name__', '')}({', '.join(shown)})"
        case Read():
            return str(part.key)
        case Drawn(func=func):
            return f"{func.__name__}()"
        case Length():
            return "length"
        case Item():
            return "item()"
        case Size():
            return f"size({part.dim})"
        case Argument(relation=relation):
            return f"argument {getattr(relation, 'index', getattr(relation, 'name', ''))}"
    return repr(part)


_DEEPEST_TEXT = 5
