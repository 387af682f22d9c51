"""Find everything that a run leaves behind and plan how to make it again (MagPy §4.2, Algorithm 1).

The walk starts at the result and at the values written to outside objects and goes on through every
object that did not exist before the run. Where Algorithm 1 follows the last versions of a RefGraph,
it reads the objects themselves: the plan is built when the run has ended.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

import torch

from magjit.errors import Unrebuildable
from magjit.mocks.effects import contents_of, effect_steps
from magjit.mocks.ir import (
    Apply,
    Const,
    Expr,
    Let,
    Line,
    MockPlan,
    Out,
    Ref,
    Slot,
    Step,
    children,
    refs,
    verify,
)
from magjit.mocks.layouts import forget_layouts, instance_dict
from magjit.mocks.recipes import ATOMS, Kind, Make, Shared, state
from magjit.mocks.schedule import Cycle, schedule
from magjit.mocks.value_kinds import kind_of
from magjit.mocks.writes import Call, ContainerState, Write, final_writes
from magjit.refgraph.addresses import address_in
from magjit.refgraph.number_values import Argument, Drawn, Item, Length, Number, Read, Size
from magjit.refgraph.numbers import Numbers


class Resolver(Protocol):
    """What the recorder knows about objects.

    Values of the shared kinds (numbers, strings, classes, modules, C functions ...) are never asked
    for: the plan holds them, so the guard has to pin those that came from outside.
    A resolver may also have

    - ``created(obj) -> bool | None``: whether a class, a function, a module or a globals dict was
      made in the run; without it, those functions existed before that no function defines;
    - ``view(tensor) -> (function, arguments) | None``: a call that makes a tensor again from
      tensors that outlive the graph, for a view that escapes with its base;
    - ``addresses``: where objects of the run lay, as the run read it with ``id``: a replay has
      others in their place.
    """

    def external(self, obj: Any) -> int | None:
        """Node of an object that existed before the run; the replay has the object in a slot."""

    def tensor(self, obj: Any) -> int | None:
        """Graph value of a tensor that an operator of the graph computed."""

    def is_tensor(self, obj: Any) -> bool:
        """Whether the object is a tensor."""


def build_plan(
    result: Any, writes: Iterable[Write], resolver: Resolver, numbers: Numbers | None = None
) -> MockPlan:
    """Plan how a replay makes ``result`` again and redoes ``writes``.

    Args:
        result: what the run returned, in its final state.
        writes: changes of outside objects, in the order in which they happened.
        resolver: tells outside objects and tensors of the graph from the rest.
        numbers: counters and random numbers, which a replay computes anew.

    Raises:
        Unrebuildable: something that leaves the run cannot be made again.
    """
    builder = PlanBuilder(resolver, Numbers() if numbers is None else numbers)
    try:
        return builder.plan(result, final_writes(writes))
    except RecursionError:
        raise Unrebuildable("the keys of a dict or set are nested too deeply") from None
    except Cycle as error:
        raise builder.refusal(error.index, "a cycle of objects that cannot be made empty") from None
    finally:
        forget_layouts()


class PlanBuilder:
    """Collects a recipe for each object that has to be made again."""

    def __init__(self, resolver: Resolver, numbers: Numbers) -> None:
        self._resolver = resolver
        self._numbers = numbers
        self._sources: dict[int, Ref] = {}
        self._computed: dict[int, Ref] = {}
        self._created = getattr(resolver, "created", None)
        self._view = getattr(resolver, "view", None)
        self._addresses: Mapping[int, int] = getattr(resolver, "addresses", {})
        self._changed: set[int] = set()
        self._exprs: dict[int, Expr] = {}
        self._alive: list[Any] = []  # so that no id is used again
        self._inherited: dict[int, Expr] = {}
        self._recipes: dict[int, Make] = {}
        self._origins: list[tuple[int | None, str]] = []
        self._objects: list[Any] = []
        self._types: dict[int, str] = {}
        self._undescribed: deque[tuple[int, Any, Kind]] = deque()

    def plan(self, result: Any, writes: list[Write]) -> MockPlan:
        """See `build_plan`."""
        drawn = [self._draw(source) for source in self._numbers.draws]
        for write in writes:
            if not isinstance(write, Call):
                self._changed.add(id(write.target))
            if isinstance(write, ContainerState) and (target := self.target(write.target)):
                for obj, expr in contents_of(write, target):
                    self._alive.append(obj)
                    self._inherited.setdefault(id(obj), expr)
        returned = self.value(result, "result")
        self._describe()
        effects: list[Step] = []
        for write in writes:
            effects += effect_steps(write, self)
            self._describe()
        used = drawn + refs(returned) + [index for step in effects for index in refs(step)]
        lines = schedule(self._recipes, used)
        return self._finished(returned, lines, effects)

    def _finished(self, returned: Expr, lines: list[Line], effects: list[Step]) -> MockPlan:
        outputs, slots = leaves_in_order((returned, *effects), lines)
        made = {line.index: self._types[line.index] for line in lines if isinstance(line, Let)}
        plan = MockPlan(tuple(lines), tuple(effects), returned, tuple(outputs), tuple(slots), made)
        verify(plan)
        return plan

    def value(self, obj: Any, label: str, parent: int | None = None) -> Expr:
        """An expression for an object that leaves the run."""
        if type(obj) in ATOMS:
            if self._addresses:
                self._refuse_address(obj, label, parent)
            number = self._numbers.find(obj)
            return Const(obj) if number is None else self._number(number)
        key = id(obj)
        found = self._exprs.get(key)
        if found is None:
            self._alive.append(obj)
            found = self._exprs[key] = self._new_value(obj, label, parent)
        return found

    def _draw(self, drawn: Drawn) -> int:
        """The line that draws a random number."""
        index = self._new_index(drawn.value, drawn.func.__name__, None)
        kwargs = tuple([(name, Const(arg)) for name, arg in drawn.kwargs.items()])
        made = Apply(drawn.func, tuple(map(Const, drawn.args)), kwargs)
        self._recipes[index] = Make(whole=made, early=True)
        self._sources[id(drawn)] = Ref(index)
        return index

    def _number(self, number: Number) -> Expr:
        """A number as the replay computes it."""
        if not number.live:
            return Const(number.original)
        if number.func is not None:
            found = self._computed.get(id(number))
            if found is None:
                parts = [
                    self._number(a) if isinstance(a, Number) else Const(a) for a in number.args
                ]
                index = self._new_index(number.obj, "", None)
                self._recipes[index] = Make(whole=Apply(number.func, tuple(parts)))
                found = self._computed[id(number)] = Ref(index)
            return found
        source = number.source
        assert source is not None
        if isinstance(source, Item):
            return Out(source.value_id)
        if isinstance(source, Argument):
            assert source.node is not None
            return Slot(source.node.node_id)
        if id(source) not in self._sources:
            assert isinstance(source, Read | Size | Length) and source.node is not None
            of_tensor = isinstance(source, Size)
            read: Any = torch.Tensor.size if of_tensor else dict.__getitem__
            if isinstance(source, Length):
                index = self._new_index(source.value, "length", None)
                self._recipes[index] = Make(
                    whole=Apply(len, (Slot(source.node.node_id),)), early=True
                )
                self._sources[id(source)] = Ref(index)
                return self._sources[id(source)]
            key = source.dim if isinstance(source, Size) else source.key
            index = self._new_index(source.value, str(key), None)
            place = (Slot(source.node.node_id), Const(key))
            self._recipes[index] = Make(whole=Apply(read, place), early=True)
            self._sources[id(source)] = Ref(index)
        return self._sources[id(source)]

    def _new_value(self, obj: Any, label: str, parent: int | None) -> Expr:
        tensor = self._resolver.is_tensor(obj)
        kind = None if tensor else kind_of(obj)
        if type(obj) is torch.Size and self._numbers.among(obj):
            index = self._new_index(obj, label, parent)
            whole = Apply(torch.Size, (self.value(list(obj), label, index),))
            self._recipes[index] = Make(whole=whole)
            return Ref(index)
        if kind is not None and kind.shared:
            self._numbers.pin(self._numbers.among((obj,)))
            if self._addresses:
                self._refuse_address(obj, label, parent)
            recipe = kind.describe(obj, self._parts(self._new_index(obj, label, parent)))
            assert isinstance(recipe, Shared)
            return recipe.expr
        node_id = self._resolver.external(obj)
        if node_id is not None:
            return Slot(node_id)
        made = self._tensor(obj) if tensor else None
        if isinstance(made, Out) and not instance_dict(obj):
            return made
        index = self._new_index(obj, label, parent)
        if made is not None:
            fills = state(self._parts(index), obj) if instance_dict(obj) else ()
            self._recipes[index] = Make(alloc=made, fills=fills, hashes_contents=False)
        elif id(obj) in self._inherited:
            self._recipes[index] = Make(whole=self._inherited[id(obj)], early=True)
        elif kind is None:
            raise self.refusal(index, "a tensor that no operator of the graph computes")
        else:
            self._undescribed.append((index, obj, kind))
        return Ref(index)

    def _refuse_address(self, obj: Any, label: str, parent: int | None) -> None:
        address = address_in(obj, self._addresses)
        if address is not None:
            index = self._new_index(address, label, parent)
            raise self.refusal(index, "it is the address of an object, read with id()")

    def _tensor(self, obj: Any) -> Expr | None:
        """A tensor of the graph, or a view of a tensor."""
        view = None if self._view is None else self._view(obj)
        if view is not None:
            func, args = view
            return Apply(func, tuple([self.value(arg, ".base") for arg in args]))
        value_id = self._resolver.tensor(obj)
        return None if value_id is None else Out(value_id)

    def _new_index(self, obj: Any, label: str, parent: int | None) -> int:
        index = len(self._origins)
        self._origins.append((parent, label))
        self._objects.append(obj)
        self._types[index] = type(obj).__qualname__
        return index

    def _parts(self, index: int) -> _ObjectParts:
        return _ObjectParts(self, index)

    def _describe(self) -> None:
        """Describe the objects that were found, and those that they lead to."""
        while self._undescribed:
            index, obj, kind = self._undescribed.popleft()
            recipe = kind.describe(obj, self._parts(index))
            made = Make(whole=recipe.expr) if isinstance(recipe, Shared) else recipe
            self._recipes[index] = made

    def target(self, obj: Any) -> Expr | None:
        """The object that a write changes, or None if the run made it: its last state says all."""
        if self._resolver.is_tensor(obj):
            node_id = self._resolver.external(obj)
            value_id = self._resolver.tensor(obj)
            if node_id is None and value_id is not None:
                return self.value(obj, "")
            return None if node_id is None else Slot(node_id)
        node_id = self._resolver.external(obj)
        if node_id is not None:
            return Slot(node_id)
        if kind_of(obj).shared and not self.created(obj):
            return Const(obj)
        return None

    def changed(self, obj: Any) -> bool:
        """Whether one of the writes changes this object, and it is not the run's own."""
        return id(obj) in self._changed and self._resolver.external(obj) is not None

    def refuse_change(self, obj: Any, reason: str) -> NoReturn:
        """Raise `Unrebuildable` for an object whose change cannot be made again."""
        name = type(obj).__qualname__
        raise Unrebuildable(f"the change of a {name} cannot be made again: {reason}", path=name)

    def created(self, obj: Any) -> bool | None:
        """Whether the run made a class, function, module or globals dict; None: not known."""
        return None if self._created is None else self._created(obj)

    def refusal(self, index: int, reason: str, remedy: str | None = None) -> Unrebuildable:
        """The error for an object; its path is put together only now."""
        labels: list[str] = []
        refused = self._objects[index]
        at: int | None = index
        while at is not None:
            at, label = self._origins[at]
            labels.append(label)
        path = _ATTRIBUTE.sub(r".\1", "".join(reversed(labels)))
        message = f"{path} cannot be made again at a replay: {reason}"
        return Unrebuildable(message, path=path, remedy=remedy, obj=refused)


def leaves_in_order(
    roots: Iterable[Expr | Step], lines: Iterable[Line]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The graph values and nodes that are used, in the order in which a reader of the result,
    and then of the effects, meets them.
    """
    bodies: dict[int, list[Expr | Step]] = {}
    for line in lines:
        if isinstance(line, Let):
            bodies.setdefault(line.index, []).append(line.expr)
        elif targets := refs(line):
            bodies.setdefault(targets[0], []).append(line)
    outputs: dict[int, None] = {}
    slots: dict[int, None] = {}
    pending: list[Expr | Step] = list(roots)[::-1]
    while pending:
        part = pending.pop()
        if isinstance(part, Out):
            outputs[part.value_id] = None
        elif isinstance(part, Slot):
            slots[part.node_id] = None
        elif isinstance(part, Ref):
            pending.extend(reversed(bodies.pop(part.index, ())))
        else:
            pending.extend(children(part)[::-1])
    return tuple(outputs), tuple(slots)


# What a namespace holds, as a reader writes it.
_ATTRIBUTE = re.compile(r"\.__dict__\['(\w+)'\]")


class _ObjectParts:
    """The `Parts` of one object."""

    __slots__ = ("_builder", "_index")

    def __init__(self, builder: PlanBuilder, index: int) -> None:
        self._builder = builder
        self._index = index

    @property
    def me(self) -> Ref:
        return Ref(self._index)

    def value(self, obj: Any, label: str) -> Expr:
        return self._builder.value(obj, label, self._index)

    def created(self, obj: Any) -> bool | None:
        return self._builder.created(obj)

    def changed(self, obj: Any) -> bool:
        return self._builder.changed(obj)

    def refuse(self, reason: str, remedy: str | None = None) -> NoReturn:
        raise self._builder.refusal(self._index, reason, remedy)
