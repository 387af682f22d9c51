"""Calls: Python functions are followed, C functions are judged by the annotation database.

The order of the questions is MagPy's Figure 12: is there a rule; is it an operator (the mode
records it); is it a pure closure; does it read a tensor's data. A C function without a rule, or one
that is not pure, splits the program.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from magjit import _C
from magjit.annotations import Kind, Read, Rule, is_c_callable, missing_entry
from magjit.bytecode import EventKind
from magjit.refgraph import relations as r
from magjit.refgraph.arrays import constructed
from magjit.refgraph.attributes import read_attribute, read_class_attr
from magjit.refgraph.blind import is_blind_change
from magjit.refgraph.cached_functions import cached_call
from magjit.refgraph.containers import (
    is_plain,
    is_running_iterator,
    read_bytes,
    read_inside_fresh,
    read_value,
    shown,
)
from magjit.refgraph.draw_events import draw
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import (
    CONTAINERS,
    HEAP_TYPE,
    base_value,
    c_class,
    class_lookup,
    instance_dict,
)
from magjit.refgraph.legacy import call_variable
from magjit.refgraph.number_events import pin_inside
from magjit.refgraph.python_specials import opaque_call, python_special, unfollowed
from magjit.refgraph.recorder import Handler, StateRecorder
from magjit.refgraph.specials import AS_PURE, SPECIALS
from magjit.refgraph.stack import CALLABLE_DEPTH, length_of, observed_frame

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def call(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> Any:
    """CALL: the callable, the receiver or NULL, then the arguments."""
    callable_, receiver, *rest = inputs
    state.calling = callable_
    args: Args = tuple(rest) if receiver is _C.NULL else (receiver, *rest)
    names = state.info.instrs[offset].kwnames
    sized = rec.numbers.shapes is not None and len(args) == 1 and not names
    if callable_ is len and sized and isinstance(args[0], torch.Tensor):
        return length_of(rec, call_value(rec, callable_, args, {}))
    if not names:
        return call_value(rec, callable_, args, {})
    split = len(args) - len(names)
    return call_value(rec, callable_, args[:split], dict(zip(names, args[split:], strict=True)))


def call_ex(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> Any:
    """CALL_FUNCTION_EX: the callable, a sequence and perhaps a mapping."""
    callable_, args, kwargs = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else _C.NULL
    state.calling = callable_
    read_value(rec, args)
    if kwargs is not _C.NULL:
        read_value(rec, kwargs)
    if not isinstance(args, (tuple, list)):
        args = ()
    return call_value(rec, callable_, tuple(args), dict(kwargs) if isinstance(kwargs, dict) else {})


def call_value(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Judge one call; the result is the handler's verdict for the tracer."""
    if isinstance(func, types.FunctionType):
        return _call_python(rec, func, args, kwargs)
    if isinstance(func, types.MethodType):
        node = rec.graph.node_of(func)
        if node is not None:
            rec.read(node, r.MethodFunc(), func.__func__)
            rec.read(node, r.MethodSelf(), func.__self__)
        return call_value(rec, func.__func__, (func.__self__, *args), kwargs)
    for applies, handler in _CALLABLES:
        if applies(func):
            return handler(rec, func, args, kwargs)
    if is_c_callable(func):
        return call_c(rec, func, args, kwargs)
    return _call_instance(rec, func, args, kwargs)


def _call_python(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    code = func.__code__
    if kwargs or len(args) != code.co_argcount or code.co_kwonlyargcount:
        node = rec.graph.node_of(func)
        if node is not None:
            rec.read_function(node)  # the call may fail before a frame is entered
    special = python_special(func)
    if special is not None:
        return special(rec, func, args, kwargs)
    rule = rec.database.lookup(func)
    if rule is not None:
        return apply_rule(rec, rule, func, args, kwargs)
    if rec.is_opaque(func.__code__, func.__module__ or ""):
        for value in (*args, *kwargs.values()):
            if isinstance(value, CONTAINERS):
                _open_argument(rec, value, Read.DEEP)
    return None


def _call_class(rec: StateRecorder, cls: type, args: Args, kwargs: Kwargs) -> Any:
    rec.makes_instance(cls)
    if cls in rec.made_classes:
        return None
    read_class_attr(rec, type(cls), "__call__")
    rule = rec.database.lookup(cls)
    if rule is not None:
        if cls is type and len(args) == 3:
            return _MadeClass(rec)
        return apply_rule(rec, rule, cls, args, kwargs)
    if not int(cls.__flags__) & HEAP_TYPE:
        rec.split(f"calls the C class {cls.__qualname__}, which is not annotated", _yaml(cls))
        return None
    if issubclass(cls, type):
        return _MadeClass(rec)
    for name in ("__new__", "__init__"):
        found = read_class_attr(rec, cls, name)
        if isinstance(found, types.FunctionType | staticmethod):
            continue
        if issubclass(cls, CONTAINERS):
            for value in (*args, *kwargs.values()):
                _open_argument(rec, value, Read.ITEMS)
    return None


class _MadeClass:
    """Post-event of a call that makes a class: the class is the run's own."""

    __slots__ = ("rec",)

    def __init__(self, rec: StateRecorder) -> None:
        self.rec = rec

    def __call__(self, top: tuple[Any, ...]) -> None:
        if isinstance(top[-1], type):
            self.rec.made_classes.add(top[-1])


def _call_partial(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    node = rec.graph.node_of(func)
    if node is not None:
        for name in ("func", "args", "keywords"):
            rec.read(node, r.CAttr(vars(functools.partial)[name]), getattr(func, name))
            rec.open(rec.graph.node_of(getattr(func, name)) if name != "func" else None)
    return call_value(rec, func.func, (*func.args, *args), {**func.keywords, **kwargs})


def _call_thunk(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The program goes on in the next frame of a region."""
    return None


def _call_weakref(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    rec.read(rec.graph.node_of(func), r.Referent(), func())
    return None


def _call_cached(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    for value in (*args, *kwargs.values()):
        _open_argument(rec, value, Read.DEEP)
    return cached_call(rec, func, args, kwargs)


def _call_jit(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A scripted function: the run calls the Python function that it was made of instead."""
    inline = getattr(func, "_torchdynamo_inline", None)
    frame = observed_frame(rec)
    plain = rec.state is not None and rec.state.info.instrs[rec.offset].opname != "CALL_FUNCTION_EX"
    if not isinstance(inline, types.FunctionType) or frame is None or not plain:
        rec.split("calls a TorchScript function", "compile the Python function instead")
        return None
    _C.replace_stack(frame, len(args) + len(kwargs) + CALLABLE_DEPTH, inline)
    rec.root(inline)
    return _call_python(rec, inline, args, kwargs)


def _call_instance(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    found = read_class_attr(rec, type(func), "__call__")
    if isinstance(found, types.FunctionType):
        return _call_python(rec, found, (func, *args), kwargs)
    if found is not None and is_c_callable(found):
        return call_c(rec, func, args, kwargs)
    return None


def _is_compiled(func: Any) -> bool:
    return isinstance(getattr(type(func), _DISPATCHER, None), _C.Dispatcher)


_DISPATCHER = "_magjit_dispatcher"


def _call_compiled(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A compiled object in a program that is captured itself: it is what it was made of."""
    found = read_class_attr(rec, type(func), _DISPATCHER)
    target = found.miss.__self__.target
    rec.root(target)
    return call_value(rec, target, args, kwargs)


_CALLABLES: list[tuple[Callable[[Any], bool], Callable[..., Any]]] = [
    (lambda f: f is torch.autograd.Variable, call_variable),
    (lambda f: isinstance(f, type), _call_class),
    (lambda f: isinstance(f, _C.Thunk), _call_thunk),
    (lambda f: isinstance(f, functools.partial), _call_partial),
    (lambda f: isinstance(f, weakref.ref), _call_weakref),
    (lambda f: isinstance(f, functools._lru_cache_wrapper), _call_cached),
    (_is_compiled, _call_compiled),
    (lambda f: isinstance(f, (torch.jit.ScriptFunction, torch._C.ScriptMethod)), _call_jit),
]


# -- C functions --------------------------------------------------------------------------------


def call_c(rec: StateRecorder, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A callable without Python code."""
    if is_blind_change(rec, func, args, kwargs):
        return None
    if rec.knows_graph_nodes and rec.state is not None:
        verdict = rec.hook_called(rec.state.globals, func, args)
        if verdict is not None:
            return verdict
    rule = rec.database.lookup(func, args[0] if args else None)
    if rule is None:
        rec.missing.append(func)
        rec.split(f"calls the C function {_name(func)}, which is not annotated", _yaml(func))
        return None
    return apply_rule(rec, rule, func, args, kwargs)


def apply_rule(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Do what an annotation says of a call."""
    return _KINDS[rule.kind](rec, rule, func, args, kwargs)


def _operator(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    for value in (*args, *kwargs.values()):
        if isinstance(value, (*CONTAINERS, np.ndarray)):
            _open_argument(rec, value, Read.DEEP)
    return unfollowed(rec, func)


def _metadata(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return unfollowed(rec, func)


def _pure(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    receiver, rest = _receiver(func, args)
    arguments: list[tuple[Any, Any]] = [] if receiver is None else [("self", receiver)]
    arguments += list(enumerate(rest)) + list(kwargs.items())
    deep = _calls_c_code(rec, rule, arguments)
    for key, value in arguments:
        _argument(rec, rule, key, value, deep)
        if rule.text:
            read_value(rec, value, ("__format__", "__str__", "__repr__"), deep=True)
    return unfollowed(rec, func)


def _receiver(func: Any, args: Args) -> tuple[Any, Args]:
    """Whose method it is, if it is one, and the other arguments."""
    bound = getattr(func, "__self__", None)
    if bound is not None and not isinstance(bound, types.ModuleType):
        return bound, args
    if isinstance(func, (types.MethodDescriptorType, types.WrapperDescriptorType)) and args:
        return args[0], args[1:]
    return None, args


def _argument(rec: StateRecorder, rule: Rule, key: Any, value: Any, deep: bool) -> None:
    spec = rule.argument(key)
    if spec.in_place:
        _change_argument(rec, rule, value)
        return
    if spec.calls and not isinstance(value, types.FunctionType):
        _called_back(rec, value)
    _open_argument(rec, value, Read.DEEP if deep else spec.read)


def _change_argument(rec: StateRecorder, rule: Rule, value: Any) -> None:
    """C code changes an argument; ``out=`` of NumPy may be a tuple of arrays."""
    if isinstance(value, memoryview):
        value = value.obj
    if isinstance(value, (np.ndarray, tuple)):
        for array in value if isinstance(value, tuple) else (value,):
            if isinstance(array, np.ndarray):
                rec.change_array(array)
        return
    node = rec.graph.node_of(value)
    if node is None:
        return
    if isinstance(value, CONTAINERS):
        rec.mutate(node)
    elif not isinstance(value, type):
        rec.split(f"{rule.name} changes an object of class {type(value).__qualname__}")


def _called_back(rec: StateRecorder, func: Any) -> None:
    """A C function will call this: Python code is followed, C code must be harmless."""
    if func is None or isinstance(func, types.FunctionType):
        return
    if not is_c_callable(func) or isinstance(func, (types.MethodType, functools.partial)):
        before, rec.called_back = rec.called_back, True
        call_value(rec, func, (), {})
        rec.called_back = before
        return
    rule = rec.database.lookup(func)
    harmless = rule is not None and (
        rule.kind in (Kind.PURE, Kind.OP, Kind.METADATA)
        or (rule.kind is Kind.SPECIAL and rule.handler in _HARMLESS_CALLBACKS)
    )
    if harmless and rule is not None and rule.mutates:
        receiver = getattr(func, "__self__", None)
        harmless = receiver is not None and rec.graph.node_of(receiver) is None
    if not harmless:
        rec.split(f"a C function calls {_name(func)} back", _yaml(func))


_HARMLESS_CALLBACKS = frozenset(
    {"type", "isinstance", "issubclass", "len", "bool", "itemgetter", "hash", "getitem"}
    | {"dict_get", "dict_items", "dict_keys", "dict_values", "contains", "sorted", "iter"}
)


def _calls_c_code(rec: StateRecorder, rule: Rule, arguments: list[tuple[Any, Any]]) -> bool:
    """Whether a callback is C code, which then reads the elements of the other arguments."""
    return any(
        rule.argument(key).calls
        and value is not None
        and not isinstance(value, (types.FunctionType, types.MethodType))
        for key, value in arguments
    )


def _open_argument(rec: StateRecorder, value: Any, read: Read) -> None:
    if read is Read.NONE or value is None or is_plain(value) or isinstance(value, torch.Tensor):
        return
    value = shown(value)
    node = rec.graph.node_of(value)
    if rec.numbers and read is Read.DEEP and rec.numbers.offered is None:
        pin_inside(rec, value)
    if isinstance(value, bytearray):
        read_bytes(rec, node, value)
        return
    if type(value) is np.ndarray:
        rec.read_array(value)
        return
    if isinstance(value, CONTAINERS):
        if node is not None:
            rec.open(node, deep=read is Read.DEEP)
        if read in (Read.DEEP, Read.ITEMS):
            read_inside_fresh(rec, value)
        return
    if node is None or node.fixed:
        return
    if is_running_iterator(value):
        rec.split("uses up an iterator that was made outside the program")
    elif (
        c_class(type(value)) is not object
        and base_value(value) is None
        and not isinstance(value, (types.FunctionType, types.MethodType))
    ):
        rec.split(f"a C function reads an object of class {type(value).__qualname__}")


def _special(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if rule.handler in AS_PURE:
        return _pure(rec, rule, func, args, kwargs)
    handler = SPECIALS.get(rule.handler or "") or _CALLING.get(rule.handler or "")
    if handler is None:
        rec.split(f"calls {rule.name}, which needs a handler of its own ({rule.handler})")
        return None
    receiver, rest = _receiver(func, args)
    if receiver is not None and rest is args:
        args = (receiver, *args)
    return handler(rec, rule, func, args, kwargs)


def _methodcaller(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """``operator.methodcaller(name, ...)(obj)`` is ``obj.name(...)``."""
    made, parts = func.__reduce__()
    keywords: Kwargs = {}
    if isinstance(made, functools.partial):
        keywords, parts = made.keywords, (*made.args, *parts)
    name, *rest = parts
    obj = args[-1]
    read_attribute(rec, obj, name)
    found = class_lookup(type(obj), name)
    if name in (instance_dict(obj) or {}) or isinstance(obj, (type, types.ModuleType)):
        rec.split("calls something by operator.methodcaller that is no method of a class")
        return None
    if isinstance(found, types.FunctionType) or is_c_callable(found):
        return call_value(rec, found, (obj, *rest), keywords)
    rec.split("calls something by operator.methodcaller that is no plain method")
    return None


def _named_tuple(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Makes a class of names, for which it looks at its caller's frame."""
    for value in (*args, *kwargs.values()):
        _open_argument(rec, value, Read.DEEP)
    return opaque_call(rec, _MadeClass(rec))


_CALLING: dict[str, Callable[..., Any]] = {
    "methodcaller": _methodcaller,
    "named_tuple": _named_tuple,
}
"""Handlers that judge the call that they lead to."""


def _impure(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    rec.split(f"calls {rule.name}: {rule.reason or rule.kind.value}")
    return None


def _random(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    def read(value: Any) -> None:
        _open_argument(rec, value, Read.DEEP)

    return draw(rec, rule, func, args, kwargs, read)


def _value_read(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return None  # the mode sees it, and knows whether the tensor is a constant


def _unseen(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if rule.as_op != "call":
        return _impure(rec, rule, func, args, kwargs)
    if args and type(args[0]) is np.ndarray and hasattr(func, "dtype"):
        return constructed(rec, rule, func, args, kwargs)
    for value in (*args, *kwargs.values()):
        _open_argument(rec, value, Read.DEEP)
    finish = rec.operators.record_call(func, args, kwargs)
    return (_C.OPAQUE, lambda top: finish(top[-1]))


_KINDS: dict[Kind, Callable[..., Any]] = {
    Kind.OP: _operator,
    Kind.METADATA: _metadata,
    Kind.PURE: _pure,
    Kind.VALUE_READ: _value_read,
    Kind.SPECIAL: _special,
    Kind.RANDOM: _random,
    Kind.EFFECT: _impure,
    Kind.DYNAMIC: _impure,
    Kind.UNSEEN: _unseen,
}


def _name(func: Any) -> str:
    return str(getattr(func, "__qualname__", None) or type(func).__qualname__)


def _yaml(func: Any) -> str:
    return "annotate it:\n" + missing_entry(func)


HANDLERS: dict[EventKind, Handler] = {
    EventKind.CALL: call,
    EventKind.CALL_EX: call_ex,
}
