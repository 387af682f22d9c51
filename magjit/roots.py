"""What a monitor run starts from: the program, its arguments, and where it is defined."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from magjit.bytecode import decode
from magjit.continuations import Chain
from magjit.errors import Location
from magjit.refgraph import attributes, calls
from magjit.refgraph import relations as r
from magjit.refgraph.kinds import class_lookup
from magjit.refgraph.recorder import StateRecorder


def sees_keyword_order(target: Any) -> bool:
    """Whether the program's first function collects keywords in a dict."""
    if isinstance(target, Chain):
        return False
    function = _entry_function(target)[0]
    return function is None or bool(function.__code__.co_flags & inspect.CO_VARKEYWORDS)


def register_roots(
    recorder: StateRecorder,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lifted: set[int | str],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Note what the call is given; gives the arguments with numbers of the run in them."""
    if isinstance(target, Chain):
        recorder.resumed.update(target.codes())
        recorder.in_region = True
        on_stack = [kind == "stack" for _, kind, _ in target.places()]
        recorder.filled = [
            value
            for value, may_be in zip(args, on_stack, strict=True)
            if may_be and type(value) in (list, dict, set)
        ]
        return _register_values(recorder, args, lifted), {}
    recorder.root(target)
    if isinstance(target, torch.nn.Module):
        attributes.read_class_attr(recorder, type(target), "__call__")
        attributes.read_class_attr(recorder, type(target), "forward")
    elif isinstance(target, types.MethodType):
        recorder.root(target.__func__)
        recorder.root(target.__self__)
    elif not isinstance(target, types.FunctionType):
        calls.call_value(recorder, target, args, kwargs)
    unused = _unused_arguments(target, len(args), tuple(kwargs))
    outside = recorder.graph.outside
    lifted -= unused
    given: list[Any] = []
    for index, value in enumerate(args):
        relation = r.Arg(index)
        if index not in unused | lifted:
            recorder.read(outside, relation, value)
        lift = index in lifted
        given.append(recorder.numbers.argument(recorder.graph, relation, value) if lift else value)
    named: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name not in unused | lifted:
            recorder.read(outside, r.Kwarg(name), value)
        lift = name in lifted
        named[name] = (
            recorder.numbers.argument(recorder.graph, r.Kwarg(name), value) if lift else value
        )
    return tuple(given), named


def _register_values(
    recorder: StateRecorder, values: tuple[Any, ...], lifted: set[int | str]
) -> tuple[Any, ...]:
    """The values that a chain of frames is handed."""
    outside = recorder.graph.outside
    given: list[Any] = []
    for index, value in enumerate(values):
        if index in lifted:
            value = recorder.numbers.argument(recorder.graph, r.Arg(index), value)
        else:
            recorder.read(outside, r.Arg(index), value)
        given.append(value)
    return tuple(given)


def _unused_arguments(target: Any, count: int, keywords: tuple[str, ...]) -> set[int | str]:
    """Arguments that the program's first function never loads: nothing needs to guard them."""
    function, offset = _entry_function(target)
    if function is None:
        return set()
    code = function.__code__
    loads = decode(code).loads
    if "locals" in code.co_names or "vars" in code.co_names or "eval" in code.co_names:
        return set()
    positional = code.co_varnames[offset : code.co_argcount]
    unused: set[int | str] = {
        index for index, name in enumerate(positional[:count]) if name not in loads
    }
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return unused | {name for name in keywords if name in named and name not in loads}


def _entry_function(target: Any) -> tuple[types.FunctionType | None, int]:
    if isinstance(target, types.FunctionType):
        return target, 0
    if isinstance(target, types.MethodType) and isinstance(target.__func__, types.FunctionType):
        return target.__func__, 1
    if not isinstance(target, torch.nn.Module) or _has_hooks(target):
        return None, 0
    forward = class_lookup(type(target), "forward")
    if "forward" in vars(target) or not isinstance(forward, types.FunctionType):
        return None, 0
    if type(target).__call__ is not torch.nn.Module.__call__:
        return None, 0
    return forward, 1


def is_passed_through(target: Any) -> bool:
    """Whether the program's result is that of its first frame, unchanged."""
    if isinstance(target, (Chain, types.FunctionType)):
        return True
    if isinstance(target, types.MethodType):
        return isinstance(target.__func__, types.FunctionType)
    return isinstance(class_lookup(type(target), "__call__"), types.FunctionType)


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def definition(target: Any) -> Location | None:
    """Where a program begins."""
    if isinstance(target, Chain):
        return Location.of(target.last.code, target.last.offset)
    function: Callable[..., Any] | None = _entry_function(target)[0]
    if function is None:
        function = getattr(type(target), "forward", None) or getattr(type(target), "__call__", None)
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    return Location(code.co_filename, code.co_firstlineno, code.co_qualname)
