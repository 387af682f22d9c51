"""Reads and writes of names: globals, closures, attributes of objects, classes and modules.

Each handler mirrors how CPython resolves the name, without running it: every place that the
look-up consults is a read, also where it finds nothing.
"""

from __future__ import annotations

import collections
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from magjit.bytecode import EventKind
from magjit.refgraph import relations as r
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import (
    HEAP_TYPE,
    class_lookup,
    instance_dict,
    is_atom,
    is_data_descriptor,
)
from magjit.refgraph.nodes import ABSENT, Edge, Leaf, ShadowNode
from magjit.refgraph.number_events import read_counter
from magjit.refgraph.recorder import Handler, StateRecorder

_TUPLE_GETTER = type(collections.namedtuple("_Probe", "field").field)  # type: ignore[attr-defined]
_FORWARDING: tuple[type, ...] = (weakref.ProxyType, weakref.CallableProxyType, threading.local)
"""Their attributes are those of another object, or of a thread."""
_PLAIN_GETATTR = frozenset({object.__getattribute__, types.ModuleType.__getattribute__})


# -- globals and closures -----------------------------------------------------------------------


def load_global(rec: StateRecorder, state: FrameState, offset: int, _: tuple[Any, ...]) -> None:
    name = state.info.instrs[offset].argval
    if name in state.globals:
        rec.read(state.globals_node, r.Item.of(name), state.globals[name])
        return
    rec.read(state.globals_node, r.Item.of(name), ABSENT)
    rec.read(rec.root(state.builtins), r.Item.of(name), state.builtins.get(name, ABSENT))


def store_global(rec: StateRecorder, state: FrameState, offset: int, _: tuple[Any, ...]) -> None:
    rec.write(state.globals_node, r.Item.of(state.info.instrs[offset].argval))


def delete_global(rec: StateRecorder, state: FrameState, offset: int, _: tuple[Any, ...]) -> None:
    name = state.info.instrs[offset].argval
    rec.read(state.globals_node, r.Item.of(name), state.globals.get(name, ABSENT))
    rec.write(state.globals_node, r.Item.of(name), deletes=True)


def load_name(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    """In a class body: locals first, then as a global; a local found is the run's own."""
    load_global(rec, state, offset, inputs)


def cell_node(rec: StateRecorder, state: FrameState, cell: Any) -> ShadowNode | None:
    """The node of a cell that belongs to an outside function; the run's own cells have none."""
    node = rec.graph.node_of(cell)
    func_node = state.func_node
    if func_node is None or (node is not None and node.fixed and func_node.fixed):
        return node
    for index, candidate in enumerate(state.func.__closure__ or ()):
        if candidate is cell:
            if node is None and func_node.fixed:
                return rec.root(cell)
            rec.read(func_node, r.Closure(index), cell)  # also where two functions share it
            return rec.graph.node_of(cell)
    return node


def load_deref(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    cell = inputs[0]
    if not isinstance(cell, types.CellType):
        return
    node = cell_node(rec, state, cell)
    if node is not None:
        rec.read(node, r.Cell(), _cell_contents(cell))


def store_deref(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    if isinstance(inputs[-1], types.CellType):
        rec.write(cell_node(rec, state, inputs[-1]), r.Cell())


def delete_deref(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    load_deref(rec, state, offset, inputs[-1:])
    store_deref(rec, state, offset, inputs)


def _cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


# -- attributes ---------------------------------------------------------------------------------


def read_class_attr(rec: StateRecorder, cls: type, name: str) -> Any:
    """A look-up along the MRO of a class; classes made in the run need no guard."""
    value = class_lookup(cls, name)
    if cls not in rec.made_classes:
        node = rec.root(cls)
        relation = r.ClassAttr(name)
        if relation not in node.first.refs and relation not in node.written:
            node.first.refs[relation] = (
                Leaf(ABSENT) if value is ABSENT else Edge(rec.root(value).node_id)
            )
    return value


def read_mro(rec: StateRecorder, cls: type) -> None:
    """The order of a class's bases, which a program can replace."""
    if cls in rec.made_classes:
        return
    mro = vars(type)["__mro__"]
    rec.root(cls).first.refs.setdefault(r.CAttr(mro), Leaf(mro.__get__(cls), identity=True))


def read_attribute(rec: StateRecorder, obj: Any, name: str) -> None:
    """The program reads ``obj.name``."""
    for applies, handler in _READERS:
        if applies(obj):
            handler(rec, obj, name)
            return


def _read_module(rec: StateRecorder, obj: types.ModuleType, name: str) -> None:
    node = rec.node_for(obj)
    namespace = instance_dict(obj)
    assert namespace is not None
    dict_node = rec.instance_dict_node(node, obj)
    rec.read(dict_node, r.Item.of(name), namespace.get(name, ABSENT))
    if name not in namespace and class_lookup(type(obj), name) is ABSENT:
        rec.read(dict_node, r.Item.of("__getattr__"), namespace.get("__getattr__", ABSENT))


def _read_class(rec: StateRecorder, cls: type, name: str) -> None:
    if name == "__dict__" and cls not in rec.made_classes:
        if cls.__flags__ & HEAP_TYPE:  # of a class written in C it never changes
            rec.split("reads the __dict__ of a class")
        return
    if name in ("__mro__", "__bases__") and cls not in rec.made_classes:
        node = rec.root(cls)
        relation = r.CAttr(vars(type)[name])
        node.first.refs.setdefault(relation, Leaf(getattr(cls, name), identity=True))
        for base in cls.__mro__:
            rec.root(base)
        return
    value = read_class_attr(rec, type(cls), name)
    if value is not ABSENT and is_data_descriptor(value):
        if isinstance(value, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            _read_class_fact(rec, cls, name, value)
        else:
            _read_by_descriptor(rec, value)
        return
    if class_lookup(type(cls), "__getattribute__") is not type.__getattribute__:
        read_class_attr(rec, type(cls), "__getattribute__")
    value = read_class_attr(rec, cls, name)
    if value is ABSENT:
        read_class_attr(rec, type(cls), "__getattr__")


def _read_class_fact(rec: StateRecorder, cls: type, name: str, getter: Any) -> None:
    """The name, the text or another member of the C part of a class."""
    if cls in rec.made_classes or int(cls.__flags__) & (1 << 8):
        return  # made in the run, or immutable
    try:
        value = getter.__get__(cls)
    except AttributeError:
        value = ABSENT
    if value is ABSENT:
        read_class_attr(rec, cls, name)
    elif is_atom(value) or isinstance(value, type):
        rec.read(rec.root(cls), r.CAttr(getter), value)
    else:
        read_class_attr(rec, cls, name)


def _read_by_descriptor(rec: StateRecorder, descriptor: Any) -> None:
    """A descriptor of a class answers: Python code is followed."""
    if not isinstance(descriptor, property):
        read_class_attr(rec, type(descriptor), "__get__")


def _read_super(rec: StateRecorder, obj: Any, name: str) -> None:
    this, start = obj.__thisclass__, obj.__self_class__
    read_super_attribute(rec, this, start, name)


def read_super_attribute(rec: StateRecorder, this: type, start: type | None, name: str) -> None:
    """``super(this, self).name``: every class behind ``this`` in the MRO is consulted in turn."""
    if start is None:
        return
    read_mro(rec, start)
    mro = start.__mro__
    for base in mro[mro.index(this) + 1 :]:
        read_class_attr(rec, base, name)
        if name in vars(base):
            return


def _read_tensor(rec: StateRecorder, obj: torch.Tensor, name: str) -> None:
    if class_lookup(type(obj), name) is not ABSENT:
        return  # seen by the operator recorder
    node = rec.graph.node_of(obj)
    namespace = instance_dict(obj)
    if node is not None and namespace is not None:
        dict_node = rec.instance_dict_node(node, obj)
        rec.read(dict_node, r.Item.of(name), namespace.get(name, ABSENT))


def _read_function(rec: StateRecorder, obj: types.FunctionType, name: str) -> None:
    node = rec.graph.node_of(obj)
    if node is None:
        return
    if class_lookup(types.FunctionType, name) is not ABSENT:
        rec.read_function(node)
        if name in _OF_FUNCTIONS:
            getter = class_lookup(types.FunctionType, name)
            rec.read(node, r.CAttr(getter), getattr(obj, name))
        elif node.fixed:
            _read_fixed_function(rec, node, obj, name)
        elif name in ("__defaults__", "__kwdefaults__", "__closure__", "__dict__", "__globals__"):
            rec.split(f"reads the {name} of a function that came with the call")
        return
    rec.read(rec.instance_dict_node(node, obj), r.Item.of(name), obj.__dict__.get(name, ABSENT))


def _read_fixed_function(
    rec: StateRecorder, node: ShadowNode, func: types.FunctionType, name: str
) -> None:
    if name == "__globals__":
        rec.root(func.__globals__)
    elif name == "__dict__":
        rec.instance_dict_node(node, func)
    elif name == "__closure__":
        for cell in func.__closure__ or ():
            rec.root(cell)


_OF_FUNCTIONS = ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__")


def _read_cell(rec: StateRecorder, obj: types.CellType, name: str) -> None:
    if name == "cell_contents":
        rec.read(rec.graph.node_of(obj), r.Cell(), _cell_contents(obj))


def _read_method(rec: StateRecorder, obj: types.MethodType, name: str) -> None:
    """A bound method has few attributes of its own; it asks its function for the others."""
    if (
        class_lookup(types.MethodType, name) is ABSENT
        or name == "__doc__"
        or name not in ("__func__", "__self__", "__call__", "__class__")
    ):
        read_attribute(rec, obj.__func__, name)


def _read_instance(rec: StateRecorder, obj: Any, name: str) -> None:
    cls = type(obj)
    getter = class_lookup(cls, "__getattribute__")
    if getter not in _PLAIN_GETATTR:
        read_class_attr(rec, cls, "__getattribute__")
        if isinstance(getter, types.FunctionType):
            return
        if isinstance(obj, _FORWARDING):
            rec.split(f"reads an attribute of an object of class {cls.__qualname__}")
            return
    if rec.graph.looked_up.get((id(obj), cls, name)) != rec.changes:
        read_plain_attribute(rec, obj, name)


def read_plain_attribute(rec: StateRecorder, obj: Any, name: str) -> None:
    """``object.__getattribute__(obj, name)``."""
    cls = type(obj)
    found = read_class_attr(rec, cls, name)
    node = rec.graph.node_of(obj)
    if found is not ABSENT and is_data_descriptor(found):
        read_descriptor(rec, node, obj, found, name)
        return
    namespace, value = instance_dict(obj), ABSENT
    if namespace is not None:
        value = namespace.get(name, ABSENT)
        rec.read(rec.instance_dict_node(node, obj), r.Item.of(name), value)
    if node is not None and not isinstance(value, _NUMBERS):  # Each use of a number counts.
        rec.graph.looked_up[id(obj), cls, name] = rec.changes
    if value is not ABSENT:
        return
    if found is ABSENT:
        read_class_attr(rec, cls, "__getattr__")


_NUMBERS = (int, float, complex, np.generic)
_ARRAY_METADATA = frozenset({"shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides"})


def read_descriptor(
    rec: StateRecorder, node: ShadowNode | None, obj: Any, descriptor: Any, name: str
) -> None:
    if isinstance(descriptor, types.MemberDescriptorType):
        value = _member(descriptor, obj)
        in_c = not descriptor.__objclass__.__flags__ & HEAP_TYPE and is_atom(value)
        rec.read(node, r.CAttr(descriptor) if in_c else r.SlotOf(descriptor), value)
    elif isinstance(descriptor, types.GetSetDescriptorType):
        if name == "__dict__":
            rec.instance_dict_node(node, obj)
        elif isinstance(obj, np.ndarray) and name not in _ARRAY_METADATA:
            rec.read_array(obj)  # its memory, under another shape or type
        elif name not in ("__class__", "__weakref__", "__doc__") and node is not None:
            rec.read(node, r.CAttr(descriptor), descriptor.__get__(obj))
    elif type(descriptor) is _TUPLE_GETTER:
        if node is not None:
            index = descriptor.__reduce__()[1][0]
            rec.read(node, r.Index(index), tuple.__getitem__(obj, index))
    elif not isinstance(descriptor, property):
        get = class_lookup(type(descriptor), "__get__")
        if get is not ABSENT:
            read_class_attr(rec, type(descriptor), "__get__")


def _member(descriptor: Any, obj: Any) -> Any:
    try:
        return descriptor.__get__(obj)
    except AttributeError:
        return ABSENT


_READERS: list[tuple[Callable[[Any], bool], Callable[[StateRecorder, Any, str], None]]] = [
    (lambda obj: isinstance(obj, torch.Tensor), _read_tensor),
    (lambda obj: type(obj) is types.FunctionType, _read_function),
    (lambda obj: type(obj) is types.CellType, _read_cell),
    (lambda obj: type(obj) is types.MethodType, _read_method),
    (lambda obj: isinstance(obj, type), _read_class),
    (lambda obj: type(obj) is super, _read_super),
    (lambda obj: isinstance(obj, types.ModuleType), _read_module),
    (lambda obj: True, _read_instance),
]


def write_attribute(rec: StateRecorder, obj: Any, name: str, *, deletes: bool = False) -> None:
    """The program stores or deletes ``obj.name``, and no Python code of the user does it."""
    if isinstance(obj, torch.Tensor) and class_lookup(type(obj), name) is not ABSENT:
        return  # seen by the operator recorder
    if isinstance(obj, type):
        if obj not in rec.made_classes:
            rec.write(rec.root(obj), r.ClassAttr(name))
        return
    node = rec.node_for(obj)
    if not isinstance(obj, types.ModuleType):
        found = read_class_attr(rec, type(obj), name)
        if found is not ABSENT and is_data_descriptor(found):
            write_descriptor(rec, node, found, name)
            return
    if node is not None:
        rec.write(rec.instance_dict_node(node, obj), r.Item.of(name), deletes=deletes)


def write_descriptor(
    rec: StateRecorder, node: ShadowNode | None, descriptor: Any, name: str
) -> None:
    if isinstance(descriptor, property) or node is None:
        return
    if isinstance(descriptor, types.MemberDescriptorType):
        rec.write(node, r.SlotOf(descriptor))
        return
    setter = ABSENT
    if not isinstance(descriptor, types.GetSetDescriptorType):
        setter = read_class_attr(rec, type(descriptor), "__set__")
    if not isinstance(setter, types.FunctionType):
        rec.split(f"sets the attribute {name} of an object from outside")


# -- events -------------------------------------------------------------------------------------


def load_attr(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> Any:
    return read_counter(rec, inputs[0], state.info.instrs[offset].argval, read_attribute)


def load_super_attr(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    _, this, obj = inputs
    start = obj if isinstance(obj, type) and issubclass(obj, this) else type(obj)
    read_super_attribute(rec, this, start, state.info.instrs[offset].argval)


def store_attr(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    _set(rec, inputs[-1], state.info.instrs[offset].argval, "__setattr__")


def delete_attr(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    before_deletion(rec, inputs[-1], state.info.instrs[offset].argval)
    _set(rec, inputs[-1], state.info.instrs[offset].argval, "__delattr__")


def before_deletion(rec: StateRecorder, obj: Any, name: str) -> None:
    """Whether there is something to delete is read."""
    if isinstance(obj, type):
        if obj not in rec.made_classes:
            rec.split("deletes an attribute of a class")
    elif isinstance(obj, (torch.Tensor, types.ModuleType, types.FunctionType)):
        read_attribute(rec, obj, name)
    else:
        read_plain_attribute(rec, obj, name)


def _set(rec: StateRecorder, obj: Any, name: str, method: str) -> None:
    setter = read_class_attr(rec, type(obj), method)
    if not isinstance(setter, types.FunctionType):
        write_attribute(rec, obj, name, deletes=method == "__delattr__")


HANDLERS: dict[EventKind, Handler] = {
    EventKind.LOAD_GLOBAL: load_global,
    EventKind.LOAD_NAME: load_name,
    EventKind.STORE_GLOBAL: store_global,
    EventKind.DELETE_GLOBAL: delete_global,
    EventKind.LOAD_DEREF: load_deref,
    EventKind.STORE_DEREF: store_deref,
    EventKind.DELETE_DEREF: delete_deref,
    EventKind.LOAD_ATTR: load_attr,
    EventKind.LOAD_SUPER_ATTR: load_super_attr,
    EventKind.STORE_ATTR: store_attr,
    EventKind.DELETE_ATTR: delete_attr,
}
