"""Calls with a handler of their own: C functions that read or write Python state by name, and
Python functions of torch that become one operator.

A handler runs before the call; its result is the verdict for the tracer.
"""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import operator
import string
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from magjit import _C
from magjit.annotations import Rule
from magjit.refgraph import relations as r
from magjit.refgraph.addresses import BY_ADDRESS, KEEP_ADDRESSES
from magjit.refgraph.arrays import from_numpy
from magjit.refgraph.attributes import (
    before_deletion,
    read_attribute,
    read_class_attr,
    read_descriptor,
    read_plain_attribute,
    write_attribute,
    write_descriptor,
)
from magjit.refgraph.blind import unread
from magjit.refgraph.containers import (
    METHODS,
    change_in_place,
    is_running_iterator,
    note_identity,
    read_instance_check,
    read_item,
    read_mapping_item,
    read_membership,
    read_value,
    shown,
    write_item,
)
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import CONTAINERS, class_lookup, is_atom, is_constant_object
from magjit.refgraph.nodes import ABSENT
from magjit.refgraph.output import printed, warned
from magjit.refgraph.recorder import StateRecorder
from magjit.refgraph.stack import in_place_of, observed_frame

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Special = Callable[[StateRecorder, Rule, Any, Args, Kwargs], Any]


def _getattr(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if len(args) >= 2 and isinstance(args[1], str):
        read_attribute(rec, args[0], args[1])


def _getattribute(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """``object.__getattribute__(obj, name)``: overriding methods are not asked again."""
    if len(args) < 2 or not isinstance(args[1], str):
        return
    if isinstance(args[0], (type, types.ModuleType, torch.Tensor, types.FunctionType, super)):
        read_attribute(rec, args[0], args[1])
    else:
        read_plain_attribute(rec, args[0], args[1])


def _setattr(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if len(args) < 2 or not isinstance(args[1], str):
        return
    if len(args) == 2:
        before_deletion(rec, args[0], args[1])
    if rule.name in _ASKING:
        setter = read_class_attr(rec, type(args[0]), _ASKING[rule.name])
        if isinstance(setter, types.FunctionType):
            return
    write_attribute(rec, args[0], args[1], deletes=len(args) == 2)


_ASKING = {"builtins.setattr": "__setattr__", "builtins.delattr": "__delattr__"}


def _no_effect(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """What it looks at is guarded already: types, or objects of the run."""


def _isinstance(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    for value in args[1:]:
        read_value(rec, value, deep=True)
    if len(args) == 2:
        read_instance_check(rec, args[0], args[1])
    if rule.name.startswith("_abc."):
        # Which classes are registered with abstract ones is one counter of the process.
        counter = _abc.get_cache_token
        rec.read(rec.root(counter), r.CResult(operator.call), counter())


def _iter(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    for value in (*args, *kwargs.values()):
        read_value(rec, value, ("__iter__",))


def _next(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if args and rec.graph.node_of(args[0]) is not None and is_running_iterator(args[0]):
        rec.split("uses up an iterator that was made outside the program")


def _dict_get(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    mapping = shown(args[0])
    node = rec.graph.node_of(mapping)
    if node is not None and len(args) > 1:
        if is_atom(args[1]):
            value = dict.get(mapping, args[1], ABSENT)
            rec.read(node, r.Item.of(args[1]), value)
        else:
            read_mapping_item(rec, node, dict(mapping), args[1])


def _dict_setdefault(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    node = rec.graph.node_of(args[0])
    if node is None or len(args) < 2:
        return
    if not is_atom(args[1]):
        rec.mutate(node)
        return
    _dict_get(rec, rule, func, args, kwargs)
    if args[1] not in args[0]:
        rec.write(node, r.Item.of(args[1]))


def _dict_view(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    rec.open(rec.graph.node_of(shown(args[0])))


def _contains(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if len(args) == 2:
        read_membership(rec, args[0], args[1])


def _getitem(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if len(args) == 2:
        read_item(rec, args[0], args[1])


def _setitem(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if len(args) >= 2:
        name = "__delitem__" if len(args) == 2 else "__setitem__"
        write_item(rec, args[0], args[1], name)


def _context_get(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if rec.node_for(args[0]) is not None:
        rec.read(rec.root(args[0]), r.ContextValue(), args[0].get(ABSENT))


def _context_set(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """What it held before is read too: a program that puts it back has changed nothing."""
    _context_get(rec, rule, func, args, kwargs)
    if rec.node_for(args[0]) is not None:
        rec.write(rec.root(args[0]), r.ContextValue())


def _globals(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """The frame's own dict, which is a root already."""


def _locals(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """The frame's own variables, in a dict that no instruction has made."""
    rec.numbers.pin_all()


def _vars(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if not args:
        _locals(rec, rule, func, args, kwargs)
    if args and isinstance(args[0], type) and args[0] not in rec.made_classes:
        rec.split("reads the __dict__ of a class")
    elif args:
        rec.instance_dict_node(rec.node_for(args[0]), args[0])


def _descriptor_get(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """``type(obj).name.__get__(obj)``: the getter of a property is followed."""
    if len(args) >= 2 and args[1] is not None:
        read_descriptor(rec, rec.graph.node_of(args[1]), args[1], args[0], args[0].__name__)


def _descriptor_set(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if len(args) >= 2 and not isinstance(args[0], property):
        if len(args) == 2:
            read_descriptor(rec, rec.graph.node_of(args[1]), args[1], args[0], args[0].__name__)
        write_descriptor(rec, rec.graph.node_of(args[1]), args[0], args[0].__name__)


def _format(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """``str.format``: fields that name attributes or items read what no event shows."""
    template, *values = args
    for value in (*values, *kwargs.values()):
        read_value(rec, value, ("__format__", "__str__", "__repr__"), deep=True)
    if isinstance(template, str) and not is_atom((*values, *kwargs.values())):
        names = [name or "" for _, name, _, _ in string.Formatter().parse(template)]
        if any("." in name or "[" in name for name in names):
            rec.split("formats attributes or items that are named in a text")


def _id(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    state, offset = rec.state, rec.offset
    module = str(state.globals.get("__name__", "")) if state is not None else ""
    node = rec.node_for(args[0]) if args else None
    if node is not None and node.fixed:
        return None
    if node is not None and not is_atom(args[0]):
        node.identity_used = True
    if state is None or (module not in KEEP_ADDRESSES and not module.startswith("torch.")):
        rec.split("reads the address of an object with id()")
        return None
    return _address(rec, state, offset)


def _address(rec: StateRecorder, state: FrameState, offset: int) -> Any:
    """What notes that a call gives an address, or what was made of some."""

    def note(top: tuple[Any, ...]) -> None:
        address = rec.addresses.setdefault(top[-1], top[-1])
        rec.made.setdefault(id(address), (address, *rec.place(state, offset)))

    return note


def _hash(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if not args:
        return None
    state, offset = rec.state, rec.offset
    read_value(rec, args[0], ("__hash__",), deep=True)
    of_addresses = _hashes_address(rec, args[0], whole=func is not object.__hash__)
    return _address(rec, state, offset) if of_addresses and state is not None else None


def _hashes_address(rec: StateRecorder, value: Any, *, whole: bool = True) -> bool:
    """Whether a hash is made of an address that is another one at the next call.

    Args:
        whole: by the class of the value; otherwise by its address anyhow.
    """
    if whole and type(value) in (tuple, frozenset):
        parts = [_hashes_address(rec, part) for part in value]  # each notes what it finds
        return any(parts)
    if isinstance(value, weakref.ref) and whole:
        return value() is not None and _hashes_address(rec, value())
    if isinstance(value, METHODS) and whole:
        return _hashes_address(rec, value.__self__, whole=False)
    if is_atom(value) or is_constant_object(value):
        return False
    node = rec.graph.node_of(value)
    if whole and class_lookup(type(value), "__hash__") not in BY_ADDRESS:
        return False
    if node is not None and not node.fixed:
        node.identity_used = True
    return node is None or not node.fixed


def _weak(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """Two weak references are one if what they refer to is."""
    for value in args:
        node = rec.graph.node_of(value)
        if node is not None and not node.fixed:
            node.identity_used = True


def _reduce(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    node = rec.graph.node_of(args[0]) if args else None
    if node is None:
        return
    rec.open(rec.instance_dict_node(node, args[0]))
    if isinstance(args[0], CONTAINERS):
        rec.open(node)


def _import(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    known = bool(args) and isinstance(args[0], str) and args[0] in sys.modules
    rec.imports(str(args[:1]), known=known and len(args) == 1 and not kwargs)
    if known:
        rec.read(rec.root(sys.modules), r.Item.of(args[0]), sys.modules[args[0]])
    return _C.OPAQUE


def _build_class(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    def note(top: tuple[Any, ...]) -> None:
        if isinstance(top[-1], type):
            rec.made_classes.add(top[-1])

    if args and isinstance(args[0], types.FunctionType):
        rec.made_codes.add(args[0].__code__)
    return note


def _len(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    for value in args[:1]:
        lifted = _lifted_length(rec, value) if rec.in_region and type(value) is list else None
        if lifted is not None:
            return lifted
        read_value(rec, value, ("__len__",), length_only=True)
    return None


def _lifted_length(rec: StateRecorder, items: list[Any]) -> Any:
    """The length of a list that the frames were handed: it grows from one region to the next."""
    node = rec.graph.node_of(items)
    if node is None or not unread(node) or rec.called_back or observed_frame(rec) is None:
        return None
    before = len(items if node.snapshot is None else node.snapshot)
    number = rec.numbers.length_of(node, items, before)
    return None if number is None else in_place_of(rec, number, len(items))


def _bool(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    for value in args[:1]:
        read_value(rec, value, ("__bool__", "__len__"), length_only=True)


def _is(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    note_identity(rec, args[:2])


def _inplace(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    change_in_place(rec, args)


def _callable(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    for value in args[:1]:
        read_class_attr(rec, type(value), "__call__")


def _attrgetter(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    for path in func.__reduce__()[1]:
        obj = args[-1]
        for name in path.split("."):
            read_attribute(rec, obj, name)
            if "." in path:
                obj = getattr(obj, name)


def _itemgetter(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    for key in func.__reduce__()[1]:
        read_item(rec, args[-1], key)


def _generator(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    if args and rec.graph.node_of(args[0]) is not None:
        rec.split("drives a generator that was made outside the program")


def _evaluate(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """The code that ``eval`` and ``exec`` run is followed like a function of the run."""
    rec.numbers.pin_all()  # the caller's variables are its namespace
    rec.evaluating = True


def _recursion_limit(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    """The standard library asks for it only to stop endless recursion."""
    module = str(rec.state.globals.get("__name__", "")) if rec.state is not None else ""
    if module not in sys.stdlib_module_names:
        rec.split("reads the recursion limit of the interpreter")


def _queried_state(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """State of torch that the guard asks for by the same call, where a program does.

    Inside a mode that the program entered itself the answer is the program's own.
    """
    if rec.entered or kwargs or len(args) > 1 or not all(is_atom(arg) for arg in args):
        return None

    def note(top: tuple[Any, ...]) -> None:
        if args:
            rec.read(rec.root(args[0]), r.CResult(func), top[-1])
        else:
            rec.read(rec.root(func), r.CResult(operator.call), top[-1])

    return note


def _environment(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    rec.replay_call(func, args, kwargs)


def _impure(rec: StateRecorder, rule: Rule, func: Any, args: Args, kwargs: Kwargs) -> None:
    rec.split(f"calls {rule.name}: {rule.reason or 'it acts on the world outside the program'}")


SPECIALS: dict[str, Special] = {
    "getattr": _getattr,
    "hasattr": _getattr,
    "getattribute": _getattribute,
    "setattr": _setattr,
    "delattr": _setattr,
    "isinstance": _isinstance,
    "issubclass": _isinstance,
    "type": _no_effect,
    "super": _no_effect,
    "call": _no_effect,
    "new": _no_effect,
    "descriptor_get": _descriptor_get,
    "descriptor_set": _descriptor_set,
    "descriptor_delete": _descriptor_set,
    "format": _format,
    "autograd_function": _no_effect,
    "has_torch_function": _no_effect,
    "set_grad_enabled": _no_effect,
    "tensor_grad": _no_effect,
    "tensor_set_grad": _no_effect,
    "tensor_set_data": _no_effect,
    "tensor_requires_grad": _no_effect,
    "tensor_deepcopy": _no_effect,
    "exc_info": _no_effect,
    "locals": _locals,
    "contextvar_get": _context_get,
    "contextvar_set": _context_set,
    "contextvar_reset": _context_set,
    "globals": _globals,
    "vars": _vars,
    "id": _id,
    "weak": _weak,
    "hash": _hash,
    "len": _len,
    "bool": _bool,
    "is": _is,
    "iter": _iter,
    "next": _next,
    "getitem": _getitem,
    "setitem": _setitem,
    "delitem": _setitem,
    "contains": _contains,
    "inplace": _inplace,
    "dict_get": _dict_get,
    "dict_setdefault": _dict_setdefault,
    "dict_items": _dict_view,
    "callable": _callable,
    "dict_keys": _dict_view,
    "dict_values": _dict_view,
    "reduce": _reduce,
    "attrgetter": _attrgetter,
    "itemgetter": _itemgetter,
    "import": _import,
    "build_class": _build_class,
    "print": printed,
    "warn": warned,
    "dir": _impure,
    "exec": _evaluate,
    "eval": _evaluate,
    "compile": _no_effect,
    "generator": _generator,
    "coroutine": _generator,
    "lock": _no_effect,
    "dynamo_eval_frame": _no_effect,
    "from_numpy": from_numpy,
    "putenv": _environment,
    "repeated": _environment,
    "recursion_limit": _recursion_limit,
    "queried_state": _queried_state,
    "torch_generator": _impure,
    "autocast": _impure,
    "inference_mode": _impure,
}
AS_PURE = frozenset({"sorted", "sort", "map", "filter", "reduce_call"})
"""Handlers whose whole effect is that of a pure function which calls its arguments."""
