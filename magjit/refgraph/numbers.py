"""Numbers that change from call to call, without a new capture for each (MagPy §6.2.1).

    Number  ::= Source | func (Number | constant)*          an object that the run computes with
    Source  ::= Read node key                               a counter on an object
              | Drawn generator method arguments            a random number
    Outcome ::= Number true?                                what the program decided by a number

A number is told apart from equal ones by identity: the recorder puts an object of its own in its
place on the program's stack, and the tracer reports every instruction that uses it. What computes,
compares or stores it is understood. All else *pins* the sources that it comes from, which makes
constants of them: the guard compares their values. So does the end of the run with what the program
has read, but not changed.
"""

from __future__ import annotations

import copy
import functools
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType
from typing import Any

from magjit import _C
from magjit.bytecode import stored_attributes
from magjit.errors import Location
from magjit.refgraph import relations as r
from magjit.refgraph.generators import (
    GLOBAL_GENERATORS,
    copy_with,
    repeated,
    same_draw,
    same_state,
    state_of,
)
from magjit.refgraph.nodes import Leaf, Lifted, ShadowNode

NUMBERS = (int, float)
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
COMPARE: dict[str, Callable[..., Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
}
_SYMBOLS = {func: symbol for symbol, func in (BINARY | COMPARE).items()}
_MOST = 200
"""Numbers of one run; a program that makes more gets constants."""


@dataclass(slots=True, eq=False)
class Read:
    """A number that an object's ``__dict__`` held before the run."""

    node: ShadowNode | None
    relation: r.Item
    value: Any
    pinned: bool = False

    @property
    def key(self) -> Any:
        return self.relation.key.key

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


Source = Read | Drawn


@dataclass(slots=True, eq=False)
class Number:
    """An int or a float of the run, and how it came about: from a source, or by a call."""

    obj: Any
    source: Source | None = None
    func: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    sources: tuple[Source, ...] = ()
    shared: Any = None

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


def _nothing(obj: Any) -> None:
    """Nobody asks."""


@dataclass(slots=True, eq=False)
class Numbers:
    """The numbers of one run."""

    watch: Callable[[Any], None] = _nothing
    reads: list[Read] = field(default_factory=list)
    draws: list[Drawn] = field(default_factory=list)
    outcomes: list[tuple[Number, bool]] = field(default_factory=list)
    on_pinned_draw: Callable[[Drawn], None] = _nothing
    into_graph: bool = False
    """Whether the backend takes numbers as inputs of the graph."""
    states: dict[Any, Any] = field(default_factory=dict)
    """The states of the generators before the run."""
    _by_identity: dict[int, Number] = field(default_factory=dict)
    _reads: dict[tuple[int, r.Relation], Number] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._by_identity)

    def find(self, obj: Any) -> Number | None:
        """The number that an object is, pinned or not."""
        return self._by_identity.get(id(obj))

    def among(self, values: Any) -> list[Number]:
        """Those of the values, and of the parts of slices among them."""
        found = []
        for value in values:
            if type(value) is slice:
                found += self.among((value.start, value.stop, value.step))
            elif (number := self._by_identity.get(id(value))) is not None:
                found.append(number)
        return found

    def start(self) -> None:
        """Just before the run."""
        self.states = {generator: state_of(generator) for generator in GLOBAL_GENERATORS}

    def _add(self, number: Number) -> Number:
        self._by_identity[id(number.obj)] = number
        self.watch(number.obj)
        if len(self._by_identity) > _MOST:
            self.pin_all()
        return number

    # -- sources ---------------------------------------------------------------------------------

    def known_read(self, node: ShadowNode, relation: r.Relation) -> Number | None:
        """The number that was read there before."""
        return self._reads.get((node.node_id, relation))

    def read(self, node: ShadowNode, relation: r.Item, value: Any) -> Number:
        """A counter: its guard asks for the type alone, unless it is pinned."""
        source = Read(node, relation, value)
        node.first.refs[relation] = Lifted(value, source=source)
        self.reads.append(source)
        number = Number(_C.fresh_number(value), source)
        self._reads[node.node_id, relation] = number
        return self._add(number)

    def draw(self, drawn: Drawn) -> Number | None:
        """A draw; None where its result is no plain number, which pins it."""
        self.draws.append(drawn)
        if type(drawn.value) not in NUMBERS:
            drawn.value = copy.deepcopy(drawn.value)
            self._pin(drawn)
            return None
        return self._add(Number(_C.fresh_number(drawn.value), drawn))

    # -- what the program does with them ---------------------------------------------------------

    def computed(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> Number | None:
        """The result of a call; None where it is no plain number or raises."""
        try:
            value = func(*operands)
        except Exception:
            return None
        if type(value) not in NUMBERS:
            return None
        number = self._add(Number(_C.fresh_number(value), None, func, self._parts(operands)))
        if type(value) is float and any(type(operand) is int for operand in operands):
            self.decided(_succeeds, (number.obj,))  # an int may be too large for a float
        return number

    def held(self, holder: Any, numbers: list[Number]) -> None:
        """A new tuple, list or dict holds numbers: whatever uses it uses them."""
        self._add(Number(holder, None, None, tuple(numbers)))

    def decided(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        """The program goes on by what a test of numbers says."""
        number = Number(None, None, func, self._parts(operands))
        if number.live:
            self.outcomes.append((number, bool(func(*operands))))

    def _parts(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self.find(operand) or operand for operand in operands])

    # -- constants -------------------------------------------------------------------------------

    def _pin(self, source: Source) -> None:
        if not source.pinned:
            source.pin()
            if isinstance(source, Drawn):
                self.on_pinned_draw(source)

    def pin(self, numbers: list[Number]) -> None:
        """Something uses these that has to be given the same at each call."""
        for number in numbers:
            for source in number.sources:
                self._pin(source)

    def pin_all(self) -> None:
        """Something may use any of them."""
        self.pin(list(self._by_identity.values()))

    def unseen_draws(self) -> bool:
        """Whether C code has drawn from a generator, too: the draws explain not its last state."""
        copies = {id(one): copy_with(one, state) for one, state in self.states.items()}
        try:
            for drawn in self.draws:
                repeated(drawn.func, drawn.args, drawn.kwargs, copies)
        except Exception:
            return True
        return any(
            not same_state(state_of(generator), state_of(copies[id(generator)]))
            for generator in self.states
        )

    def settle(self) -> None:
        """At the end of the run: a number that the program left alone is likely to stay."""
        for source in self.reads:
            if source.node is not None and source.relation not in source.node.written:
                source.pin()
        self.outcomes = [outcome for outcome in self.outcomes if outcome[0].live]

    def inputs(self, numbers: list[Number]) -> NumberInputs:
        """What computes the numbers that the graph takes."""
        return NumberInputs(self._reads_of(numbers), numbers)

    def _reads_of(self, numbers: list[Number]) -> Reads:
        """What has to be read for some numbers."""
        needed = {id(source) for number in numbers for source in number.sources}
        reads = [source for source in self.reads if id(source) in needed and not source.pinned]
        return Reads([source.node.node_id for source in reads if source.node is not None], reads)

    def guard(self) -> NumberGuard | None:
        """What a call has to agree with, or None."""
        pinned = [index for index, drawn in enumerate(self.draws) if drawn.pinned]
        if not self.outcomes and not pinned:
            return None
        needed = {id(source) for number, _ in self.outcomes for source in number.sources}
        last = max((i for i, drawn in enumerate(self.draws) if id(drawn) in needed), default=-1)
        count = max([last, *pinned]) + 1
        reads = self._reads_of([number for number, _ in self.outcomes])
        return NumberGuard(reads, self.draws[:count], self.outcomes)

    def give_back(self) -> None:
        """Lists and dicts that the run has made hold the interpreter's own small ints again."""
        for number in self._by_identity.values():
            places = list(enumerate(number.obj)) if type(number.obj) is list else []
            places = list(number.obj.items()) if type(number.obj) is dict else places
            for key, value in places:
                found = self.find(value)
                if found is not None and type(value) is int:
                    number.obj[key] = found.original

    def release(self) -> None:
        """Let go of the user's objects; the guard goes on without them."""
        self.watch = _nothing
        self.on_pinned_draw = _nothing
        for source in self.reads:
            source.node = None
        self._by_identity = {}
        self._reads = {}


def _succeeds(value: Any) -> bool:
    """To have computed a number is all that counts."""
    return True


# -- what a record keeps of them ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Reads:
    """Counters, and the nodes of the namespaces that they are in, in order."""

    nodes: list[int]
    reads: list[Read]

    def values(self, namespaces: tuple[dict[Any, Any], ...]) -> dict[int, Any]:
        """What they hold now, by the identity of the source."""
        pairs = zip(self.reads, namespaces, strict=True)
        return {id(source): dict.__getitem__(names, source.key) for source, names in pairs}


@dataclass(frozen=True, slots=True, eq=False)
class NumberGuard:
    """Whether the numbers of a call lead to the same decisions.

    Called with the namespaces of the reads. Random numbers are drawn from a copy of their
    generator.
    """

    reads: Reads
    draws: list[Drawn]
    outcomes: list[tuple[Number, bool]]

    def __call__(self, *namespaces: dict[Any, Any]) -> bool:
        values = self.reads.values(namespaces)
        copies: dict[int, Any] = {}
        try:
            for drawn in self.draws:
                value = repeated(drawn.func, drawn.args, drawn.kwargs, copies)
                if drawn.pinned and not same_draw(drawn.value, value):
                    return False
                values[id(drawn)] = value
            return all(
                bool(number.evaluate(values)) is expected for number, expected in self.outcomes
            )
        except Exception:  # what raises now did not in the run
            return False

    def __str__(self) -> str:
        fixed = [f"{_text(drawn)} == {drawn.value!r:.40}" for drawn in self.draws if drawn.pinned]
        tests = [f"{_text(number)} is {expected}" for number, expected in self.outcomes]
        return ", ".join(dict.fromkeys(fixed + tests))


@dataclass(frozen=True, slots=True, eq=False)
class NumberInputs:
    """Numbers for a graph; called with the namespaces of the reads."""

    reads: Reads
    numbers: list[Number]

    def __call__(self, namespaces: tuple[dict[Any, Any], ...]) -> list[Any]:
        values = self.reads.values(namespaces)
        return [number.evaluate(values) for number in self.numbers]


def binary_symbol(func: Any) -> str | None:
    """The operator that a function is, such as ``+``."""
    return _SYMBOLS.get(func) if isinstance(func, BuiltinFunctionType) else None


def _text(part: Any, depth: int = 0) -> str:
    """A number as a reader would write it."""
    match part:
        case Number(source=Read() | Drawn() as source):
            return _text(source)
        case Number() if depth == _DEEPEST_TEXT:
            return "..."
        case Number(func=func, args=args):
            shown = [_text(arg, depth + 1) for arg in args]
            symbol = binary_symbol(func)
            if symbol is not None:
                return f"({shown[0]} {symbol} {shown[1]})"
            return f"{getattr(func, '__name__', '')}({', '.join(shown)})"
        case Read():
            return str(part.key)
        case Drawn(func=func):
            return f"{func.__name__}()"
    return repr(part)


_DEEPEST_TEXT = 5


# -- which attributes are counters --------------------------------------------------------------

_known: dict[int, tuple[weakref.ref[type], set[str]]] = {}
"""By identity: looking a class up must not run code of its metaclass."""


def may_change(cls: type, name: str) -> bool:
    """Whether some method of a class stores to an attribute, other than ``__init__``; a guess."""
    return any(name in _stored_by(base) for base in cls.__mro__)


def _stored_by(cls: type) -> set[str]:
    found = _known.get(id(cls))
    if found is not None and found[0]() is cls:
        return found[1]
    names: set[str] = set()
    if str(cls.__module__).partition(".")[0] not in ("builtins", "torch"):
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType) and name != "__init__":
                names |= stored_attributes(value.__code__)
    _known[id(cls)] = weakref.ref(cls, functools.partial(_known.pop, id(cls))), names
    return names
