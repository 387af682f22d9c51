"""Numbers that change from call to call, without a new capture for each (MagPy §6.2.1).

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
from types import FunctionType
from typing import Any, Protocol

from magjit import _C
from magjit.bytecode import stored_attributes
from magjit.refgraph import relations as r
from magjit.refgraph.generators import (
    GLOBAL_GENERATORS,
    copy_with,
    repeated,
    same_state,
    state_of,
)
from magjit.refgraph.nodes import Edge, Lifted, RefGraph, ShadowNode
from magjit.refgraph.number_records import NumberGuard, NumberInputs
from magjit.refgraph.number_values import (
    NUMBERS,
    TEXTS,
    Argument,
    Drawn,
    Item,
    Length,
    Number,
    Read,
    Reads,
    Size,
    Source,
)

_MOST, _MOST_SIZES = 200, 2000
"""Numbers of one run; a program that makes more gets constants."""


class Shapes(Protocol):
    """What computes with symbols beside the program; see `magjit.symbolic_shapes`."""

    failure: str | None

    def computed(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> Number | None: ...

    def decided(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> bool: ...


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
    on_pinned_size: Callable[[Size], None] = _nothing
    on_needed_item: Callable[[Item], None] = _nothing
    into_graph: frozenset[type] = frozenset()
    """The types of the numbers that the backend takes as inputs of the graph."""
    as_tensors: bool = False
    """Floats among them are tensors there, where the operator has a form for that."""
    shapes: Shapes | None = None
    sizes: list[Size] = field(default_factory=list)
    arguments: list[Argument] = field(default_factory=list)
    lengths: list[Length] = field(default_factory=list)
    changed: set[int | str] = field(default_factory=set)
    """Arguments, by position or name, that were seen to change between calls."""
    varying: dict[str, set[str]] = field(default_factory=dict)
    """Attributes that were seen to change between calls: by name, the paths of their objects."""
    root: Any = None
    """The program, once any number was seen to change: its floats are taken to change, too."""
    late: list[Number] = field(default_factory=list)
    """Those in containers of the run that were filled when something else held these already."""
    length: Number | None = None
    """What ``len`` of a tensor is, while it is called."""
    offered: Any = None
    """The function that is being called with numbers and, if it is an operator, records them."""
    may_draw: bool = True
    """Otherwise a random number is drawn between two regions."""
    closed: bool = False
    """The region has ended, and its record is made: what uses them now is no part of it."""
    states: dict[Any, Any] = field(default_factory=dict)
    """The states of the generators before the run."""
    _by_identity: dict[int, Number] = field(default_factory=dict)
    _reads: dict[tuple[int, r.Relation], Number] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._by_identity)

    def find(self, obj: Any) -> Number | None:
        """The number that an object is, pinned or not."""
        return self._by_identity.get(id(obj))

    def watch_with(self, watch: Callable[[Any], None]) -> None:
        """What has instructions reported that use an object; of those so far, too."""
        self.watch = watch
        for number in self._by_identity.values():
            watch(number.obj)

    def original(self, value: Any) -> Any:
        """What the program would have without the recorder in the place of a number."""
        number = self.find(value) if type(value) in TEXTS else None
        return value if number is None else number.original

    def among(self, values: Any) -> list[Number]:
        """Those of the values, and of the parts of slices among them."""
        found = []
        for value in values:
            if (number := self._by_identity.get(id(value))) is not None:
                found.append(number)
            elif type(value) is slice:
                found += self.among((value.start, value.stop, value.step))
        return found

    def start(self) -> None:
        """Just before the run."""
        self.states = {generator: state_of(generator) for generator in GLOBAL_GENERATORS}

    def _add(self, number: Number) -> Number:
        self._by_identity[id(number.obj)] = number
        self.watch(number.obj)
        if len(self._by_identity) > (_MOST if self.shapes is None else _MOST_SIZES):
            self.pin_all()
        return number

    # -- sources ---------------------------------------------------------------------------------

    def known_read(self, node: ShadowNode, relation: r.Relation) -> Number | None:
        """The number that was read there before."""
        return self._reads.get((node.node_id, relation))

    def read(
        self, node: ShadowNode, relation: r.Item, value: Any, *, varies: bool = False
    ) -> Number:
        """A counter: its guard asks for the type alone, unless it is pinned."""
        source = Read(node, relation, value, varies=varies)
        node.first.refs[relation] = Lifted(value, source=source)
        self.reads.append(source)
        number = Number(_C.fresh_number(value), source)
        self._reads[node.node_id, relation] = number
        return self._add(number)

    def argument(self, graph: RefGraph, relation: r.Relation, value: Any) -> Any:
        """A number that the call is given; what the program gets in its place."""
        obj = _C.fresh_number(value)
        node = graph.add(obj, graph.outside, relation, fixed=False)
        graph.outside.first.refs[relation] = Edge(node.node_id)
        place = getattr(relation, "index", getattr(relation, "name", None))
        source = Argument(node, graph.outside, relation, value, varies=place in self.changed)
        self.arguments.append(source)
        return self._add(Number(obj, source)).obj

    def length_of(self, node: ShadowNode, items: list[Any], before: int) -> Number | None:
        """The number of items of a list, to which this region has added some."""
        source = next((one for one in self.lengths if one.node is node), None)
        if source is None:
            source = Length(node, before)
            self.lengths.append(source)
        if source.pinned:
            return None
        number = self._add(Number(_C.fresh_number(before), source))
        added = len(items) - before
        return number if not added else self.computed(operator.add, (number.obj, added))

    def draw(self, drawn: Drawn) -> Number | None:
        """A draw; None where its result is no plain number, which pins it."""
        self.draws.append(drawn)
        if type(drawn.value) not in NUMBERS:
            drawn.value = copy.deepcopy(drawn.value)
            self._pin(drawn)
            return None
        return self._add(Number(_C.fresh_number(drawn.value), drawn))

    def item(self, source: Item) -> Number:
        """What an operator of the graph reads of a tensor."""
        return self._add(Number(_C.fresh_number(source.value), source))

    def size(self, source: Size) -> Number:
        """The number that a size of a tensor is."""
        self.sizes.append(source)
        return self._add(Number(_C.fresh_number(source.value), source, sym=source.sym))

    def sized(self, obj: Any, func: Callable[..., Any], args: tuple[Any, ...], sym: Any) -> Number:
        """A number that is computed from sizes alone."""
        return self._add(Number(obj, None, func, args, sym=sym))

    # -- what the program does with them ---------------------------------------------------------

    def computed(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> Number | None:
        """The result of a call; None where it is no plain number or raises."""
        try:
            value = func(*operands)
        except Exception:
            return None
        if type(value) not in TEXTS or value == "":
            return None
        of_sizes = self.shapes is not None and self.shapes.failure is None
        if of_sizes and type(value) is not str and self.all_sizes(self.among(operands)):
            assert self.shapes is not None
            return self.shapes.computed(func, operands)
        number = self._add(Number(_C.fresh_number(value), None, func, self._parts(operands)))
        if type(value) is float and any(map(self._is_varying_int, operands)):
            self.decided(_succeeds, (number.obj,))  # an int may be too large for a float
        return number

    def _is_varying_int(self, value: Any) -> bool:
        return type(value) is int and self.find(value) is not None

    def held(self, holder: Any, numbers: list[Number]) -> None:
        """A new tuple, list or dict holds numbers: whatever uses it uses them."""
        self._add(Number(holder, None, None, tuple(numbers)))

    def note_held(self, holder: Any) -> None:
        """An object of the run may hold numbers now."""
        found = self.among(dict.values(holder) if isinstance(holder, dict) else holder)
        if found:
            self.held(holder, found)

    def all_sizes(self, numbers: list[Number]) -> bool:
        """Whether some numbers come from sizes alone."""
        return all(isinstance(s, Size) for number in numbers for s in number.sources)

    def plain(self, numbers: list[Number]) -> list[Number]:
        """The ints and floats among numbers, and among what the holders among them hold."""
        found = []
        for number in numbers:
            holds = number.obj is not None and type(number.obj) not in TEXTS
            found += self.plain(list(number.args)) if holds else [number]
        return found

    def for_graph(self, value: Any, *, in_region: bool) -> Number | None:
        """The number that an operator's argument is, where a replay gives the graph its value."""
        number = self.find(value)
        if number is None or not number.live:
            return None
        drawn = any(isinstance(source, Drawn) for source in number.sources)
        taken = type(number.obj) in self.into_graph and not drawn
        if not in_region and (number.sym is not None or taken):
            return number
        self.pin([number])
        return None

    def decided(self, func: Callable[..., Any], operands: tuple[Any, ...]) -> None:
        """The program goes on by what a test of numbers says."""
        if self.shapes is not None and self.shapes.decided(func, operands):
            return
        number = Number(None, None, func, self._parts(operands))
        if number.of_graph:
            self.pin([number])
            return
        if number.live:
            self.outcomes.append((number, bool(func(*operands))))

    def _parts(self, operands: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self.find(operand) or operand for operand in operands])

    # -- constants -------------------------------------------------------------------------------

    def _pin(self, source: Source) -> None:
        if not source.pinned and not self.closed:
            source.pin()
            if isinstance(source, Drawn):
                self.on_pinned_draw(source)
            elif isinstance(source, Size):
                self.on_pinned_size(source)
            elif isinstance(source, Item):
                self.on_needed_item(source)

    def pin(self, numbers: list[Number]) -> None:
        """Something uses these that has to be given the same at each call."""
        for number in numbers:
            for source in number.sources:
                self._pin(source)

    def pin_all(self) -> None:
        """Something may use any of them."""
        self.pin(list(self._by_identity.values()))

    def pin_sizes(self) -> None:
        """Shapes are compared exactly."""
        for source in self.sizes:
            source.was_pinned = True

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
            written = source.node is None or source.relation in source.node.written
            if not written and not source.varies:
                source.pin()
        self.outcomes = [outcome for outcome in self.outcomes if outcome[0].live]

    def given(self, numbers: list[Number]) -> list[Number]:
        """Those that a graph is given, of the numbers that it takes: it makes the others itself."""
        found: dict[int, Number] = {}
        for number in numbers:
            if not number.of_graph:
                if number.live:
                    found[id(number)] = number
            elif number.source is None:
                parts = [part for part in number.args if isinstance(part, Number)]
                found |= {id(part): part for part in self.given(parts)}
        return list(found.values())

    def inputs(self, numbers: list[Number]) -> NumberInputs:
        """What computes the numbers that the graph takes."""
        return NumberInputs(self._reads_of(numbers), numbers)

    def _reads_of(self, numbers: list[Number]) -> Reads:
        """What has to be read for some numbers."""
        needed = {id(source) for number in numbers for source in number.sources}
        known: list[Read | Size | Argument | Length] = [*self.reads, *self.sizes, *self.arguments]
        known += self.lengths
        reads = [source for source in known if id(source) in needed and not source.pinned]
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
        self.on_pinned_draw = self.on_pinned_size = self.on_needed_item = _nothing
        for read in self.reads:
            read.release()
        for size in self.sizes:
            size.release()
        for argument in self.arguments:
            argument.release()
        for length in self.lengths:
            length.release()
        for number in self._by_identity.values():
            number.sym = None
        self.shapes = self.root = None
        self.late = []
        self._by_identity = {}
        self._reads = {}


def _succeeds(value: Any) -> bool:
    """To have computed a number is all that counts."""
    return True


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
