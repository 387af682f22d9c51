"""A mock plan: what a replay does after the graph has run (MagPy §4.2, Figure 11d).

    MockPlan ::= Line* effect:Step* result:Expr    with the outputs and slots that they use
    Line     ::= Let index Expr | Step
    Step     ::= Do Apply                          a call made for what it changes
               | SetAttr Expr name Expr            target.name = value
               | SetItem Expr Expr Expr            target[key] = value
    Expr     ::= Const value                       immutable, shared by all replays
               | Slot node                         an object that existed before the call
               | Out value                         a tensor that the graph computed
               | Ref index                         an object made by an earlier Let
               | Seq kind Expr* | Map (Expr, Expr)*
               | Attr Expr name | Apply func Expr* (name, Expr)*

The lines make new objects and change nothing else; the effects change what is outside, in order.
A line reads an outside object only in a Let that is marked `early`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, eq=False)
class Const:
    """An immutable value, or an object that the program has by reference, such as a class."""

    value: Any


@dataclass(frozen=True, slots=True)
class Slot:
    """The object of a RefGraph node, as found at replay."""

    node_id: int


@dataclass(frozen=True, slots=True)
class Out:
    """A tensor of the operator graph."""

    value_id: int


@dataclass(frozen=True, slots=True)
class Ref:
    """The object that ``Let(index, ...)`` made."""

    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Seq:
    """A new tuple, list or set."""

    kind: Literal["tuple", "list", "set"]
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """A new dict, in order."""

    items: tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Attr:
    """An attribute that is written in C, such as ``__dict__``."""

    obj: Expr
    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Apply:
    """The result of a call.

    ``hashed`` are those arguments whose hash the call needs, so that they must be complete.
    """

    func: Callable[..., Any]
    args: tuple[Expr, ...]
    kwargs: tuple[tuple[str, Expr], ...] = ()
    hashed: tuple[Expr, ...] = ()


Expr = Const | Slot | Out | Ref | Seq | Map | Attr | Apply


@dataclass(frozen=True, slots=True, eq=False)
class Let:
    """Name a new object; an ``early`` one is taken before any effect and never moved."""

    index: int
    expr: Expr
    early: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Do:
    """A call made for what it changes."""

    call: Apply


@dataclass(frozen=True, slots=True, eq=False)
class SetAttr:
    """``target.name = value``."""

    target: Expr
    name: str
    value: Expr


@dataclass(frozen=True, slots=True, eq=False)
class SetItem:
    """``target[key] = value``, of an exact list or dict."""

    target: Expr
    key: Expr
    value: Expr


Step = Do | SetAttr | SetItem
Line = Let | Step


@dataclass(frozen=True, slots=True, eq=False)
class MockPlan:
    """See the grammar above.

    Attributes:
        lines: make the objects that the result and the effects need.
        effects: changes of outside objects, in order.
        result: what the call returns.
        outputs: ids of the graph values that are used; the graph returns them in this order.
        slots: ids of the nodes whose objects are used, in the order of the mock's parameters.
        types: the type name of every ``Let``, for readers.
    """

    lines: tuple[Line, ...]
    effects: tuple[Step, ...]
    result: Expr
    outputs: tuple[int, ...]
    slots: tuple[int, ...]
    types: dict[int, str]

    def __str__(self) -> str:
        text = [f"graph outputs: {', '.join(f'%{i}' for i in self.outputs) or 'none'}"]
        if self.lines:
            text.append("build:")
            text += [f"    {self._line(line)}" for line in self.lines]
        if self.effects:
            text.append("effects:")
            text += [f"    {render_step(step, show_leaf)}" for step in self.effects]
        text.append(f"return {render(self.result, show_leaf)}")
        return "\n".join(text)

    def _line(self, line: Line) -> str:
        if isinstance(line, Let):
            kind = self.types.get(line.index, "?")
            return f"v{line.index}: {kind} = {render(line.expr, show_leaf)}"
        return render_step(line, show_leaf)


Leaf = Callable[[Expr], str]
"""How to print a Const, Slot, Out or Ref; the callable of an Apply comes as a Const."""

_BRACKETS = {"tuple": ("(", ")"), "list": ("[", "]"), "set": ("{", "}")}


def render(expr: Expr, leaf: Leaf) -> str:
    """An expression as Python source; ``leaf`` prints its leaves."""
    match expr:
        case Seq(kind="set", items=()):
            return "set()"
        case Seq(kind=kind, items=items):
            left, right = _BRACKETS[kind]
            comma = "," if kind == "tuple" and len(items) == 1 else ""
            return f"{left}{', '.join(render(item, leaf) for item in items)}{comma}{right}"
        case Map(items=pairs):
            shown = ", ".join(f"{render(k, leaf)}: {render(v, leaf)}" for k, v in pairs)
            return f"{{{shown}}}"
        case Attr(obj=obj, name=name):
            return f"{render(obj, leaf)}.{name}"
        case Apply(func=func, args=args, kwargs=kwargs):
            shown = ", ".join(
                [render(arg, leaf) for arg in args]
                + [f"{name}={render(value, leaf)}" for name, value in kwargs]
            )
            return f"{leaf(Const(func))}({shown})"
        case _:
            return leaf(expr)


def render_step(step: Step, leaf: Leaf) -> str:
    """A step as one line of Python source."""
    match step:
        case Do(call=call):
            return render(call, leaf)
        case SetAttr(target=target, name=name, value=value):
            return f"{render(target, leaf)}.{name} = {render(value, leaf)}"
        case SetItem(target=target, key=key, value=value):
            return f"{render(target, leaf)}[{render(key, leaf)}] = {render(value, leaf)}"


def show_leaf(expr: Expr) -> str:
    """A leaf as a reader of the plan sees it: ``%2`` a graph value, ``#3`` an outside object."""
    match expr:
        case Slot(node_id=node_id):
            return f"#{node_id}"
        case Out(value_id=value_id):
            return f"%{value_id}"
        case Ref(index=index):
            return f"v{index}"
        case Const(value=value):
            return show_value(value)
        case _:
            raise TypeError(f"not a leaf: {expr!r}")


def show_value(value: Any) -> str:
    """A constant, in few characters and without running a user's code."""
    kind = type(value)
    if isinstance(value, type) or (kind.__module__ == "builtins" and callable(value)):
        return str(value.__qualname__)
    if kind.__module__ in ("builtins", "torch") and kind is not dict:
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    return f"<{kind.__qualname__}>"


def _nothing(leaf: Any) -> tuple[Expr, ...]:
    return ()


def _of_map(expr: Map) -> tuple[Expr, ...]:
    return tuple([part for pair in expr.items for part in pair])


def _of_apply(expr: Apply) -> tuple[Expr, ...]:
    if not expr.kwargs:
        return expr.args
    return expr.args + tuple([value for _, value in expr.kwargs])


_PARTS: dict[type, Callable[[Any], tuple[Expr, ...]]] = {
    Const: _nothing,
    Slot: _nothing,
    Out: _nothing,
    Ref: _nothing,
    Seq: lambda expr: expr.items,
    Map: _of_map,
    Attr: lambda expr: (expr.obj,),
    Apply: _of_apply,
    Do: lambda step: (step.call,),
    SetAttr: lambda step: (step.target, step.value),
    SetItem: lambda step: (step.target, step.key, step.value),
}


def children(expr: Expr | Step) -> tuple[Expr, ...]:
    """The direct parts of an expression or a step, in order of evaluation."""
    return _PARTS[type(expr)](expr)


def walk(expr: Expr | Step) -> Iterator[Expr | Step]:
    """An expression or step and all its parts, in order of evaluation."""
    pending: list[Expr | Step] = [expr]
    while pending:
        current = pending.pop()
        yield current
        parts = _PARTS[type(current)](current)
        if parts:
            pending.extend(parts[::-1])


def refs(expr: Expr | Step) -> list[int]:
    """Indices of the objects that an expression or step uses."""
    return [part.index for part in walk(expr) if isinstance(part, Ref)]


def hashed_refs(expr: Expr | Step) -> list[int]:
    """Indices of the objects whose hash an expression or step needs."""
    found: list[Expr] = []
    for part in walk(expr):
        match part:
            case Seq(kind="set", items=items):
                found += items
            case Map(items=pairs):
                found += [key for key, _ in pairs]
            case Apply(hashed=hashed):
                found += hashed
            case SetItem(key=key):
                found.append(key)
    return [part.index for part in found if isinstance(part, Ref)]


def verify(plan: MockPlan) -> None:
    """Raise AssertionError when a plan is not well formed.

    Every object is made once and before it is used; the outputs and slots are just those used.
    """
    made: set[int] = set()
    outputs: dict[int, None] = {}
    slots: dict[int, None] = {}

    def use(expr: Expr | Step) -> None:
        for part in walk(expr):
            match part:
                case Ref(index=index):
                    assert index in made, f"v{index} is used before it is made"
                case Out(value_id=value_id):
                    outputs[value_id] = None
                case Slot(node_id=node_id):
                    slots[node_id] = None

    for line in plan.lines:
        if isinstance(line, Let):
            use(line.expr)
            assert line.index not in made, f"v{line.index} is made twice"
            assert line.index in plan.types, f"v{line.index} has no type"
            made.add(line.index)
        else:
            use(line)
    for step in plan.effects:
        use(step)
    use(plan.result)
    assert set(outputs) == set(plan.outputs), f"outputs: {plan.outputs}, used: {tuple(outputs)}"
    assert set(slots) == set(plan.slots), f"slots: {plan.slots}, used: {tuple(slots)}"
    assert len(plan.outputs) == len(outputs), f"outputs: {plan.outputs} has one twice"
    assert len(plan.slots) == len(slots), f"slots: {plan.slots} has one twice"
