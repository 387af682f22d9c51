"""Side effects of a replay, written as the program would write them."""

from __future__ import annotations

import types
from typing import Any

from magjit.mocks.ir import (
    Apply,
    Attr,
    Const,
    Do,
    Expr,
    Let,
    MockPlan,
    Out,
    Ref,
    SetAttr,
    SetItem,
    Slot,
    Step,
    render,
)
from magjit.refgraph.number_values import binary_symbol
from magjit.refgraph.relations import Item
from magjit.reporting.names import short
from magjit.reporting.places import Places

_DEEPEST = 4
_BUILTINS = ("setattr", "delattr", "_quiet_delattr")
_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)


def effect_text(step: Step, plan: MockPlan, places: Places) -> str:
    """One effect of a mock plan, such as ``model.calls = 1`` or ``model.log.append(%3)``."""
    writer = _Writer(plan, places)
    match step:
        case SetAttr(target=target, name=name, value=value):
            place = writer.text(target)
            place = place if name == "cell_contents" else f"{place}.{name}"
            return f"{place} = {writer.text(value)}"
        case SetItem(target=target, key=key, value=value):
            return f"{writer.item(target, key)} = {writer.text(value)}"
        case Do(call=call):
            return writer.call(call)


class _Writer:
    def __init__(self, plan: MockPlan, places: Places) -> None:
        self._places = places
        self._made = {line.index: line.expr for line in plan.lines if isinstance(line, Let)}
        self._types = plan.types
        self._depth = 0

    def text(self, expr: Expr) -> str:
        match expr:
            case Apply(func=dict.__getitem__, args=(target, key)):
                return self.item(target, key)
            case Apply(args=(left, right)) if (symbol := binary_symbol(expr.func)) is not None:
                return f"{self._operand(left)} {symbol} {self._operand(right)}"
            case Ref(index=index):
                return self._made_object(index)
        return render(expr, self._leaf)

    def _operand(self, expr: Expr) -> str:
        computed = isinstance(expr, Apply) and binary_symbol(expr.func) is not None
        return f"({self.text(expr)})" if computed else self.text(expr)

    def item(self, target: Expr, key: Expr) -> str:
        """``target[key]``, or the attribute or global that a namespace keeps under the key."""
        name = key.value if isinstance(key, Const) else None
        if type(name) is slice:
            return f"{self.text(target)}[{slice_text(name)}]"
        if isinstance(name, str):
            if isinstance(target, Slot):
                return self._places.edge(target.node_id, Item.of(name))
            if isinstance(target, Attr) and target.name == "__dict__":
                return f"{self.text(target.obj)}.{name}"
            if isinstance(target, Const) and isinstance(target.value, dict):
                module = dict.get(target.value, "__name__", "?")
                return f"{module}.{name}"
        return f"{self.text(target)}[{self.text(key)}]"

    def call(self, call: Apply) -> str:
        """A call; a method or operator of a builtin type is written as the program would."""
        func: Any = call.func
        name = getattr(func, "__name__", "")
        if call.kwargs or not call.args or not (isinstance(func, _METHODS) or name in _BUILTINS):
            return self.text(call)
        target, *rest = call.args
        if name in ("__setitem__", "__delitem__"):
            return self._statement(self.item(target, rest[0]), rest[1:])
        if name == "pop" and len(rest) == 2:  # how a mock deletes what may not be there
            return self._statement(self.item(target, rest[0]), [])
        if name in _BUILTINS or name in ("__setattr__", "__delattr__"):
            attribute = rest[0].value if isinstance(rest[0], Const) else self.text(rest[0])
            return self._statement(f"{self.text(target)}.{attribute}", rest[1:])
        return f"{self.text(target)}.{name}({', '.join(self.text(arg) for arg in rest)})"

    def _statement(self, place: str, value: list[Expr]) -> str:
        return f"{place} = {self.text(value[0])}" if value else f"del {place}"

    def _leaf(self, expr: Expr) -> str:
        match expr:
            case Slot(node_id=node_id):
                return self._places.path(node_id)
            case Out(value_id=value_id):
                return f"%{value_id}"
            case Ref(index=index):
                return self._made_object(index)
            case Const(value=value):
                return short(value)
            case _:
                raise TypeError(f"not a leaf: {expr!r}")

    def _made_object(self, index: int) -> str:
        """How an object is made; one that is filled after it was made, by its type alone."""
        expr = self._made.get(index)
        func: Any = expr.func if isinstance(expr, Apply) else None
        bare = func is types.FunctionType or getattr(func, "__name__", "") == "__new__"
        if expr is None or bare or self._depth >= _DEEPEST:
            return f"new {self._types.get(index, 'object')}"
        self._depth += 1
        try:
            return self.text(expr)
        finally:
            self._depth -= 1


def slice_text(value: slice) -> str:
    """``1:`` for ``slice(1, None)``."""
    start, stop, step = (
        "" if part is None else short(part) for part in (value.start, value.stop, value.step)
    )
    return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"
