"""A mock plan as a Python function, ``finish(outs, *slots)``.

An object that is used once is written in place, others get a local variable. Constants that source
code can spell are written out; the others are globals of the generated function.
"""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import re
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from magjit.mocks.ir import (
    Const,
    Expr,
    Let,
    MockPlan,
    Out,
    Ref,
    Seq,
    Slot,
    Step,
    children,
    render,
    render_step,
    walk,
)

Finish = Callable[..., Any] | int | None
_numbers = itertools.count()
_DEEPEST = 12  # levels of brackets in one line; the parser gives up at 200
_LONGEST_LITERAL = 200


class Emitted(NamedTuple):
    """What a record needs to finish a replay.

    Attributes:
        finish: None: return the tuple of outputs itself; k: return output k; else call it with the
            tuple of outputs and the objects of the slots.
        slots: ids of the nodes whose objects ``finish`` takes, in order.
        outputs: ids of the graph values that ``finish`` gets, in order.
        source: for readers, also if ``finish`` is no function.
    """

    finish: Finish
    slots: tuple[int, ...]
    outputs: tuple[int, ...]
    source: str


def emit(plan: MockPlan, go_on: Callable[[Any], Any] | None = None) -> Emitted:
    """Turn a plan into a function; tracebacks and debuggers find its source.

    Args:
        plan: what to do.
        go_on: the function returns what this gives for the plan's result.
    """
    writer = _Writer(plan, go_on)
    source = writer.source()
    finish: Finish
    if go_on is not None:
        finish = _compiled(source, writer.names)
    elif not plan.effects and not plan.lines and isinstance(plan.result, Out):
        finish = plan.outputs.index(plan.result.value_id)
    elif _returns_outputs(plan):
        finish = None
    else:
        finish = _compiled(source, writer.names)
    return Emitted(finish, plan.slots, plan.outputs, source)


def _returns_outputs(plan: MockPlan) -> bool:
    """Whether the result is the tuple of all outputs and nothing else is to be done."""
    if plan.effects or len(plan.lines) != 1 or not plan.outputs:
        return False
    match plan.lines[0]:
        case Let(expr=Seq(kind="tuple", items=items)):
            return items == tuple([Out(value_id) for value_id in plan.outputs])
    return False


def _compiled(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    filename = f"<magjit mock {next(_numbers)}>"
    namespace = {"__name__": "magjit.mock", **names}
    exec(compile(source, filename, "exec"), namespace)
    finish: Callable[..., Any] = namespace.pop("finish")
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    weakref.finalize(finish, linecache.cache.pop, filename, None).atexit = False
    return finish


class _Writer:
    """Writes the source of one plan and collects the constants that it names."""

    def __init__(self, plan: MockPlan, go_on: Callable[[Any], Any] | None) -> None:
        self._plan = plan
        self._goes_on = go_on is not None
        self.names: dict[str, Any] = {"go_on": go_on} if self._goes_on else {}
        self._named: dict[int, str] = {}
        self._inlined: dict[int, Expr] = {}
        self._positions = {value_id: k for k, value_id in enumerate(plan.outputs)}
        self._output_names: dict[int, str] = {}
        self._uses: dict[int, int] = {}
        self._output_uses: dict[int, int] = dict.fromkeys(plan.outputs, 0)

    def source(self) -> str:
        """The function's source."""
        plan = self._plan
        lets = [line.expr if isinstance(line, Let) else line for line in plan.lines]
        for top in (*lets, *plan.effects, plan.result):
            self._count(top)
        self._choose_inlined()
        body = [
            f"{self._output_names.setdefault(value_id, f'o{k}')} = outs[{k}]"
            for k, value_id in enumerate(plan.outputs)
            if self._output_uses[value_id] > 1
        ]
        for line in plan.lines:
            if not isinstance(line, Let):
                body.append(self._step(line))
            elif line.index not in self._inlined:
                body.append(f"v{line.index} = {self._expr(line.expr)}")
        body += [self._step(step) for step in plan.effects]
        result = self._expr(plan.result)
        body.append(f"return go_on({result})" if self._goes_on else f"return {result}")
        params = ", ".join(["outs", *(f"s{node_id}" for node_id in plan.slots)])
        return f"def finish({params}):\n" + "".join(f"    {line}\n" for line in body)

    def _count(self, top: Expr | Step) -> None:
        for part in walk(top):
            if isinstance(part, Ref):
                self._uses[part.index] = self._uses.get(part.index, 0) + 1
            elif isinstance(part, Out):
                self._output_uses[part.value_id] += 1

    def _choose_inlined(self) -> None:
        depths: dict[int, int] = {}
        for line in self._plan.lines:
            if not isinstance(line, Let) or line.early:
                continue
            leaf = isinstance(line.expr, (Const, Slot))
            depth = _depth(line.expr, depths)
            if leaf or (self._uses.get(line.index, 0) == 1 and depth < _DEEPEST):
                self._inlined[line.index] = line.expr
                depths[line.index] = depth

    def _expr(self, expr: Expr) -> str:
        return render(expr, self._leaf)

    def _step(self, step: Step) -> str:
        return render_step(step, self._leaf)

    def _leaf(self, expr: Expr) -> str:
        match expr:
            case Slot(node_id=node_id):
                return f"s{node_id}"
            case Ref(index=index):
                inlined = self._inlined.get(index)
                return f"v{index}" if inlined is None else self._expr(inlined)
            case Out(value_id=value_id):
                name = self._output_names.get(value_id)
                return name or f"outs[{self._positions[value_id]}]"
            case Const(value=value):
                return literal(value) or self._name(value)
            case _:
                raise TypeError(f"not a leaf: {expr!r}")

    def _name(self, value: Any) -> str:
        """The global name of a constant, after its own name where it has one."""
        found = self._named.get(id(value))
        if found is None:
            text = _own_name(value)
            stem = re.sub(r"\W+", "_", text.replace("<locals>.", ""), flags=re.ASCII).strip("_")
            if not stem.isidentifier() or keyword.iskeyword(stem) or _RESERVED.fullmatch(stem):
                stem = f"c_{stem}"
            found = stem
            for n in itertools.count(2):
                if found not in self.names:
                    break
                found = f"{stem}_{n}"
            self.names[found] = value
            self._named[id(value)] = found
        return found


def _own_name(value: Any) -> str:
    """What a reader would call a constant."""
    if type(value) is dict and type(value.get("__name__")) is str:
        return f"globals_of_{value['__name__']}"
    own = getattr(value, "__qualname__", None) if isinstance(value, _NAMED) else None
    return own if isinstance(own, str) else type(value).__name__


_NAMED: tuple[type, ...] = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType),
)
_RESERVED = re.compile(r"outs|finish|set|[svo]\d+|__\w+__")


def literal(value: Any, depth: int = 0) -> str | None:
    """Source code for a constant, if there is some that gives the same value and is short."""
    kind = type(value)
    if value is None or kind is bool or value is ...:
        return "..." if value is ... else repr(value)
    if kind is int:
        return repr(value) if abs(value) < 1 << 64 else None
    if kind is float:
        return repr(value) if math.isfinite(value) else None
    if kind is str or kind is bytes:
        return repr(value) if len(value) <= _LONGEST_LITERAL else None
    if kind is tuple and len(value) <= 16 and depth < 4:
        parts = [literal(item, depth + 1) for item in value]
        if None not in parts:
            return f"({', '.join(map(str, parts))}{',' if len(parts) == 1 else ''})"
    return None


def _depth(expr: Expr, known: dict[int, int]) -> int:
    """Levels of brackets of an expression, those of inlined objects included."""
    if isinstance(expr, Ref):
        return known.get(expr.index, 0)
    below = [_depth(part, known) for part in children(expr)]
    return max(below, default=0) + (0 if isinstance(expr, (Const, Slot, Out)) else 1)
