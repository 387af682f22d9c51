"""``autograd.Function.apply``: the forward becomes a graph, the backward stays the program's own.

The call runs for real and its forward is followed like any function. What it computes, saves and
sets on its context makes a `FunctionRegion`. A forward that leaves something on its context that
no graph can hold makes one operator of the whole call, which then runs the program's own forward.
"""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, _is_setup_context_defined

from magjit import _C
from magjit.monitor.functions import NotRecordable
from magjit.monitor.operator_graph import Operator, ValueRef, refs_in
from magjit.monitor.regions import FunctionRegion
from magjit.refgraph import relations as r
from magjit.refgraph.attributes import read_class_attr
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import class_lookup, is_atom, is_constant_object
from magjit.refgraph.recorder import StateRecorder

_ABSENT = object()


def _references(value: Any) -> int:
    return sys.getrefcount(value)


_OWN_REFERENCES = _references({"only": "here"}) + 2
"""Of a container on a context, while it is looked at: one more, and somebody else has it, too."""


@dataclass(slots=True, eq=False)
class FunctionCall:
    """A call of ``apply`` that is under way.

    Attributes:
        cls: the program's class.
        args: the tensors that it got, by position; None for anything else.
        record_whole: records the call as one operator, given its result.
        where: the instruction of the program that calls.
        start: how many operators there were before it.
        changes: how many changes of outside objects there were before it.
        forward: the code of the forward.
        returned: what the forward returned.
        marks: (context, method, arguments) of what was said of the context.
    """

    cls: Any
    args: tuple[Any, ...]
    record_whole: Callable[[Any], None]
    where: tuple[types.CodeType | None, int]
    start: int
    changes: int
    forward: types.CodeType
    returned: Any = _ABSENT
    marks: list[tuple[Any, str, tuple[Any, ...]]] = field(default_factory=list)

    def told(self, ctx: Any, method: str) -> tuple[Any, ...] | None:
        """The arguments of the last call of one of the context's methods."""
        found = [args for where, name, args in self.marks if where is ctx and name == method]
        return found[-1] if found else None


def apply_function(rec: StateRecorder, func: Any, args: Any, kwargs: Any) -> Any:
    """The handler of ``autograd.Function.apply``.

    Where no gradient is needed it is followed like any function.
    """
    cls, rest = args[0], args[1:]
    forward = _follow_methods(rec, cls)
    if _is_setup_context_defined(cls.setup_context):
        rest, kwargs = _bound(cls.forward, rest, kwargs)
    if rec.checkpoint is not None and not torch.is_grad_enabled():
        rec.split("calls an autograd function in a re-entrant checkpoint")
        return _C.OPAQUE
    needs_grad = torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in rest
    )
    if not needs_grad:
        return _without_gradient(rec, cls)
    if kwargs:
        rec.split("calls an autograd function with keyword arguments")
        return _C.OPAQUE
    try:
        given = tuple(_argument(rec, value) for value in rest)
    except NotRecordable as problem:
        rec.split(str(problem))
        return _C.OPAQUE
    _read_backward(rec, cls)
    call = FunctionCall(
        cls,
        given,
        _whole_call(rec, cls, rest, kwargs),
        rec.instruction(),
        len(rec.operators.graph.operators),
        rec.changes,
        getattr(forward, "__code__", _NO_CODE),
    )
    return _followed(rec, cls, call, lambda result: _record(rec, call, result))


def _followed(
    rec: StateRecorder, cls: Any, call: FunctionCall | None, record: Callable[[Any], None]
) -> Callable[[tuple[Any, ...]], None]:
    """The verdict for a call whose forward is followed; ``record`` gets the result."""
    rec.function_calls.append(call)
    rec.judged = apply_function

    def finished(top: tuple[Any, ...]) -> None:
        if not rec.function_calls or rec.function_calls[-1] is not call:
            rec.split(f"{cls.__qualname__}.forward raised")
            return
        rec.function_calls.pop()
        record(top[-1])

    return finished


def _current(rec: StateRecorder) -> FunctionCall | None:
    """The innermost call that is under way, where it needs gradients."""
    return rec.function_calls[-1] if rec.function_calls else None


def _bound(forward: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments by position, with defaults, as torch gives them to C where it can."""
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # the call will say so itself
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _without_gradient(rec: StateRecorder, cls: Any) -> Any:
    """The forward is followed like any function; torch runs it with grad mode off."""
    if not torch.is_grad_enabled():
        return None
    graph, where = rec.operators.graph, rec.instruction()
    switch = torch._C._set_grad_enabled
    off, on = (Operator(switch, (enabled,), {}, None, *where) for enabled in (False, True))
    graph.operators.append(off)
    return _followed(rec, cls, None, lambda result: graph.operators.append(on))


def _argument(rec: StateRecorder, value: Any) -> Any:
    """An argument of ``apply``: only the places of its tensors matter, to their gradients."""
    return rec.operators.template(value, []) if isinstance(value, torch.Tensor) else None


def _whole_call(rec: StateRecorder, cls: Any, args: Any, kwargs: Any) -> Callable[[Any], None]:
    """What records the call as one operator, given its result."""
    try:
        if not all(isinstance(value, torch.Tensor) or is_atom(value) for value in args):
            raise NotRecordable("keeps what only its caller knows for its backward")
        return rec.operators.call_operator(cls.apply, args, kwargs)
    except NotRecordable as problem:
        reason = str(problem)
        return lambda result: rec.split(reason)


def _no_code() -> None:
    """Stands for the code of a forward that is no Python function."""


_NO_CODE = _no_code.__code__


def _follow_methods(rec: StateRecorder, cls: Any) -> Any:
    """C code looks the class's methods up, unseen."""
    rec.root(_method(rec, cls, "setup_context"))
    forward = _method(rec, cls, "forward")
    rec.root(forward)
    return forward


def _method(rec: StateRecorder, cls: Any, name: str) -> Any:
    """The function of a static method."""
    found = read_class_attr(rec, cls, name)
    return getattr(found, "__func__", found)


def _read_backward(rec: StateRecorder, cls: Any) -> None:
    """A backend may trace the backward: the values that it names are part of what was compiled.

    One that does more than compute (it changes an object, or calls functions of the program) has
    to run each time, which only the graph as it is does.
    """
    backward = _method(rec, cls, "backward")
    if not isinstance(backward, types.FunctionType):
        return
    rec.read_function(rec.root(backward))
    code, namespace = backward.__code__, backward.__globals__
    globals_node = rec.root(namespace)
    plain = not backward.__closure__ and _CHANGING.isdisjoint(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR", "DELETE_GLOBAL"):
            plain = False
        elif instruction.opname == "LOAD_GLOBAL" and instruction.argval in namespace:
            value = namespace[instruction.argval]
            rec.read(globals_node, r.Item.of(instruction.argval), value)
            plain = plain and (is_atom(value) or _is_torchs(value))
    if not plain:
        rec.eager_only = f"the backward of {cls.__qualname__} has state of its own"


_CHANGING = frozenset(
    {"append", "extend", "insert", "pop", "update", "clear", "setdefault", "remove"}
    | {"print", "open", "exec", "eval", "setattr", "globals", "input"}
)


def _is_torchs(value: Any) -> bool:
    name = getattr(value, "__name__", "") if isinstance(value, types.ModuleType) else ""
    module = name or getattr(value, "__module__", "") or ""
    return module.partition(".")[0] in ("torch", "math", "builtins")


def left_frame(rec: StateRecorder, state: FrameState, result: Any) -> None:
    """A followed frame ended: perhaps it was the forward of a call."""
    call = _current(rec)
    if call is not None and state.code is call.forward:
        call.returned = result


def _record(rec: StateRecorder, call: FunctionCall, result: Any) -> None:
    graph = rec.operators.graph
    inner = graph.operators[call.start :]
    results = result if isinstance(result, tuple) else (result,)
    try:
        ctx = _context(call, results)
        region = _region(rec, call, inner, ctx, results)
    except NotRecordable as problem:
        if rec.changes != call.changes:
            rec.split(f"{call.cls.__qualname__}.forward {problem}, and changes other objects, too")
            return
        del graph.operators[call.start :]
        call.record_whole(result)
        return
    del graph.operators[call.start :]
    graph.operators.append(region.operator(*call.where))
    rec.contexts.append((ctx, dict(vars(ctx))))


def _region(
    rec: StateRecorder,
    call: FunctionCall,
    inner: list[Operator],
    ctx: Any,
    results: tuple[Any, ...],
) -> FunctionRegion:
    if class_lookup(call.cls, "__init_subclass__") is not class_lookup(object, "__init_subclass__"):
        raise NotRecordable("belongs to a class that notes its subclasses")
    returned = _template(rec, call.returned)
    told = {name: call.told(ctx, name) for name in CONTEXT_METHODS}
    saved, materialize = told["save_for_backward"], told["set_materialize_grads"]
    mentioned = {
        "returned": returned,
        "saved": None if saved is None else _template(rec, saved),
        "dirty": _template(rec, told["mark_dirty"] or ()),
        "undifferentiable": _template(rec, told["mark_non_differentiable"] or ()),
        "attributes": {name: _template(rec, value) for name, value in vars(ctx).items()},
    }
    templates = tuple(mentioned.values())
    given = returned if isinstance(returned, tuple) else (returned,)
    if len(given) != len(results):
        raise NotRecordable("returns something else than apply does")
    region = FunctionRegion.of(
        inner,
        templates,
        function=call.cls,
        call_args=call.args,
        result=[_result(rec, *pair) for pair in zip(given, results, strict=True)],
        materialize=bool(materialize[0]) if materialize else True,
        **mentioned,
    )
    mentions = {ref.value_id for ref in refs_in(templates)}
    for value, tensor in rec.operators.alive(region.made):
        if tensor.requires_grad and value.value_id not in mentions:
            raise NotRecordable("makes a tensor with a gradient of its own")
    return region


def _context(call: FunctionCall, results: tuple[Any, ...]) -> Any:
    for value in results:
        if isinstance(value, torch.Tensor) and isinstance(value.grad_fn, call.cls._backward_cls):
            return value.grad_fn
    raise NotRecordable("has no differentiable result")


def _result(rec: StateRecorder, before: Any, after: Any) -> Any:
    """The value of a result; an input that is given back becomes a tensor of its own."""
    if not isinstance(after, torch.Tensor):
        return after
    known = rec.operators.value_of(after)
    if known is not None and ValueRef(known.value_id) == before:
        known.const = False
        return before
    if known is not None or not isinstance(before, ValueRef):
        raise NotRecordable("returns a tensor in a way that was not observed")
    return ValueRef(rec.operators.new_value(after).value_id)


def _template(rec: StateRecorder, value: Any) -> Any:
    """A value of the forward as part of a graph."""
    if value is _ABSENT:
        raise NotRecordable("was not observed")
    inside = value if type(value) is torch.Size else ()
    rec.numbers.pin(rec.numbers.among((value, *inside)))
    if type(value) in (list, dict) and sys.getrefcount(value) > _OWN_REFERENCES:
        raise NotRecordable(f"shares a {type(value).__name__} with its backward")
    if type(value) in (list, tuple):
        return type(value)(_template(rec, item) for item in value)
    if type(value) is dict:
        return {key: _template(rec, item) for key, item in value.items()}
    if type(value) is torch.Size or is_constant_object(value):
        return value
    if not isinstance(value, torch.Tensor) and not is_atom(value):
        raise NotRecordable(f"keeps a {type(value).__qualname__} for its backward")
    return rec.operators.template(value, [])


def _context_method(name: str) -> Callable[..., Any]:
    def handler(rec: StateRecorder, func: Any, args: Any, kwargs: Any) -> Any:
        call = _current(rec)
        if call is not None:
            call.marks.append((args[0], name, (*args[1:], *kwargs.values())))
        return _C.OPAQUE

    return handler


CONTEXT_METHODS: dict[str, types.CodeType] = {
    name: getattr(FunctionCtx, name).__code__
    for name in (
        "save_for_backward",
        "mark_dirty",
        "mark_non_differentiable",
        "set_materialize_grads",
    )
}
CONTEXT_SPECIALS = {code: _context_method(name) for name, code in CONTEXT_METHODS.items()}
