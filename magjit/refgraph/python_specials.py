"""Python functions of torch that a run does not follow: each becomes one operator, or none."""

from __future__ import annotations

import logging
import types
from _collections_abc import _check_methods  # type: ignore[attr-defined]
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.mutation_guard import GenerationTracker
from torch.amp import autocast_mode
from torch.autograd import grad_mode
from torch.autograd.profiler import record_function

from magjit import _C, marks
from magjit.marks import Mark, mark_of
from magjit.monitor.operator_graph import Operator, ValueRef
from magjit.refgraph.attributes import read_attribute
from magjit.refgraph.autograd_functions import CONTEXT_SPECIALS, apply_function
from magjit.refgraph.checkpoints import checkpoint_special
from magjit.refgraph.containers import read_item, read_membership, read_value
from magjit.refgraph.kinds import MODULE_TABLES, class_lookup, instance_dict
from magjit.refgraph.recorder import StateRecorder

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def opaque_call(rec: StateRecorder, post: Callable[[tuple[Any, ...]], None]) -> Any:
    """The verdict for a call inside which nothing is recorded."""
    rec.operators.active = False
    rec.suspended = True

    def resume(top: tuple[Any, ...]) -> None:
        rec.operators.active = rec.broken is None
        rec.suspended = False
        post(top)

    return (_C.OPAQUE, resume)


def unfollowed(rec: StateRecorder, func: Any) -> Any:
    """The verdict for an annotated function: what Python code in it does goes unseen."""
    if not isinstance(func, types.FunctionType):
        return None
    # It may ask whether two tensors are one, as that of attention does.
    rec.tells_apart |= func.__module__ not in _OF_TENSORS or "attention" in func.__name__
    return _C.OPAQUE


_OF_TENSORS = frozenset({"torch._tensor", "torch.functional", "torch.nn.functional"})


def _enter(rec: StateRecorder, manager: Any, func: Callable[..., Any], state: Args) -> Any:
    """Entering a mode of torch is an operator without tensors; leaving it refers to it."""
    if rec.graph.node_of(manager) is not None:
        rec.split(f"enters a {type(manager).__qualname__} that was made outside the program")
        return _C.OPAQUE
    value = rec.operators.graph.new_value()
    rec.entered.append((manager, value.value_id))
    code, offset = rec.instruction()
    result = ValueRef(value.value_id)
    rec.operators.graph.operators.append(Operator(func, state, {}, result, code, offset))
    return _C.OPAQUE


def _exit(rec: StateRecorder, manager: Any, func: Callable[..., Any]) -> Any:
    for index in range(len(rec.entered) - 1, -1, -1):
        if rec.entered[index][0] is manager:
            value = ValueRef(rec.entered.pop(index)[1])
            code, offset = rec.instruction()
            rec.operators.graph.operators.append(Operator(func, (value,), {}, None, code, offset))
            return _C.OPAQUE
    rec.split(f"leaves a {type(manager).__qualname__} that was entered outside the program")
    return _C.OPAQUE


def _enter_autocast(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    manager = args[0]
    state = (manager.device, manager.fast_dtype, manager._enabled, manager._cache_enabled)
    return _enter(rec, manager, autocast_mode._enter_autocast, state)


def _exit_autocast(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _exit(rec, args[0], autocast_mode._exit_autocast)


def _enter_inference(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _enter(rec, args[0], grad_mode._enter_inference_mode, (args[0].mode,))


def _exit_inference(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return _exit(rec, args[0], grad_mode._exit_inference_mode)


def _not_followed(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """What it does is of no consequence to the program."""
    return _C.OPAQUE


def _broken(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    reason = next(iter((*args, *kwargs.values())), "")
    rec.split(f"calls magjit.graph_break(){f': {reason}' if reason else ''}", _UNMARK)
    return _C.OPAQUE


def _disabled(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if args and isinstance(args[0], marks.Exclusion):
        reason, what, where = args[0].reason, "enters a block", rec.location()  # not to be cut
    else:
        reason, what, where = func._magjit_reason, f"calls {func.__qualname__}", None
    text = f"{what} that magjit.disable excludes{f': {reason}' if reason else ''}"
    rec.split(text, _UNMARK, where)
    return _C.OPAQUE


_UNMARK = "take the mark away, or compile with fullgraph=False"


def _as_operator(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A function that ``magjit.allow_in_graph`` names; outside tensors in containers are read."""
    for value in (*args, *kwargs.values()):
        read_value(rec, value, deep=True)
    finish = rec.operators.record_call(func, args, kwargs)
    return opaque_call(rec, lambda top: finish(top[-1]))


def _module_attribute(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``Module.__getattr__``: each use of a parameter or a submodule; what it reads is read here.

    Where it finds nothing, or in tables that are no plain dicts, its code is followed.
    """
    if kwargs or len(args) != 2:
        return None
    module, name = args
    namespace = instance_dict(module) or {}
    tables: list[Any] = [namespace.get(part) for part in MODULE_TABLES]
    if type(name) is not str or any(type(table) is not dict for table in tables):
        return None
    last = next((k for k, table in enumerate(tables) if name in table), None)
    if last is None:
        return None
    key = id(module), func, name
    if rec.graph.looked_up.get(key) == rec.changes:
        return _C.OPAQUE
    cls = type(module)
    if class_lookup(cls, "__getattribute__") is not object.__getattribute__ or not isinstance(
        class_lookup(cls, "__dict__"), types.GetSetDescriptorType
    ):
        return None
    if rec.graph.node_of(module) is not None:
        rec.graph.looked_up[key] = rec.changes
    operators, handling = rec.operators, rec.operators.handling
    operators.handling = True
    try:
        read_attribute(rec, module, "__dict__")
        for part, table in zip(MODULE_TABLES[: last + 1], tables, strict=False):
            read_membership(rec, namespace, part)
            read_item(rec, namespace, part)
            read_membership(rec, table, name)
        read_item(rec, tables[last], name)
        code = rec.graph.node_of(func)
        if code is not None:
            rec.read_function(code)
    finally:
        operators.handling = handling
    return _C.OPAQUE


def _transparent(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """MagJIT's own functions between the program and a compiled object that it calls."""
    return False


def _logs(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A method of a logger: followed where its level is off, else done outside of regions."""
    logger, level = args[0], _LEVELS.get(func.__name__)
    if level is None and len(args) > 1:
        level = args[1]
    off = type(level) is int and (
        level <= logger.manager.disable or level < logger.getEffectiveLevel()
    )
    if off:
        return None
    rec.split("logs a message")
    return _C.OPAQUE


_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "exception": logging.ERROR,
    "critical": logging.CRITICAL,
}
_MARKS: dict[Mark, Callable[..., Any]] = {
    Mark.BREAK: _broken,
    Mark.DISABLED: _disabled,
    Mark.OPERATOR: _as_operator,
    Mark.CONSTANT: _not_followed,
    Mark.TRANSPARENT: _transparent,
}
_PYTHON_SPECIALS: dict[types.CodeType, Callable[..., Any]] = {
    **CONTEXT_SPECIALS,
    autocast_mode.autocast.__enter__.__code__: _enter_autocast,
    autocast_mode.autocast.__exit__.__code__: _exit_autocast,
    grad_mode.inference_mode.__enter__.__code__: _enter_inference,
    grad_mode.inference_mode.__exit__.__code__: _exit_inference,
    torch.autograd.Function.apply.__func__.__code__: apply_function,  # type: ignore[attr-defined]
    torch.nn.Module.__getattr__.__code__: _module_attribute,
    # A part of the program gets a name for the profiler; a replay has no such parts.
    record_function.__enter__.__code__: _not_followed,
    record_function.__exit__.__code__: _not_followed,
    # Gives its arguments back unless a transform of torch.func is active, which splits.
    torch._functorch.utils.unwrap_dead_wrappers.__code__: _not_followed,
    **{getattr(logging.Logger, name).__code__: _logs for name in (*_LEVELS, "log")},
    # What an abstract class finds in a class, it remembers for good.
    _check_methods.__code__: _not_followed,
    # torch._dynamo's list of all modules that were ever made, once it has been used.
    GenerationTracker.tag.__func__.__code__: _not_followed,  # type: ignore[attr-defined]
}


def python_special(func: types.FunctionType) -> Callable[..., Any] | None:
    """The handler of a Python function that is recorded as one operator, or that is marked."""
    found = _PYTHON_SPECIALS.get(func.__code__) or checkpoint_special(func)
    if found is not None:
        return found
    mark = mark_of(func)
    return _MARKS.get(mark) if mark is not None else None
