"""Reads and writes of containers: subscripts, iteration, membership, comparison, truth."""

from __future__ import annotations

import decimal
import types
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

from magjit.bytecode import EventKind
from magjit.bytecode.optable import FILLING
from magjit.refgraph import relations as r
from magjit.refgraph.attributes import read_attribute, read_class_attr, read_mro
from magjit.refgraph.blind import add_blindly, unread
from magjit.refgraph.frames import FrameState
from magjit.refgraph.kinds import (
    CONTAINERS,
    MAPPINGS,
    SEQUENCES,
    SETS,
    base_value,
    class_lookup,
    is_atom,
    is_constant_object,
    mapping_behind,
    reads_unknown_state,
)
from magjit.refgraph.long_loops import RANGE_ITERATOR
from magjit.refgraph.nodes import ABSENT, Leaf, ShadowNode
from magjit.refgraph.recorder import Handler, StateRecorder

_ITERATION = frozenset({"GET_ITER", "GET_YIELD_FROM_ITER", "UNPACK_SEQUENCE", "UNPACK_EX"})
_TRUTH_DUNDERS = ("__bool__", "__len__")
_DUNDERS: dict[str, tuple[str, ...]] = {
    "GET_ITER": ("__iter__", "__getitem__"),
    "CONTAINS_OP": ("__contains__", "__iter__", "__getitem__"),
    "UNARY_NEGATIVE": ("__neg__",),
    "UNARY_POSITIVE": ("__pos__",),
    "UNARY_INVERT": ("__invert__",),
    "UNARY_NOT": _TRUTH_DUNDERS,
    "COMPARE_OP": ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    "FORMAT_VALUE": ("__format__", "__str__", "__repr__"),
    "FORMAT_SIMPLE": ("__format__", "__str__", "__repr__"),
    "FORMAT_WITH_SPEC": ("__format__", "__str__", "__repr__"),
    "CONVERT_VALUE": ("__str__", "__repr__"),
}
_OPERATORS: dict[str, tuple[str, ...]] = {
    symbol: (f"__{name}__", f"__r{name}__")
    for symbol, name in (
        ("+", "add"),
        ("-", "sub"),
        ("*", "mul"),
        ("/", "truediv"),
        ("//", "floordiv"),
        ("%", "mod"),
        ("**", "pow"),
        ("@", "matmul"),
        ("&", "and"),
        ("|", "or"),
        ("^", "xor"),
        ("<<", "lshift"),
        (">>", "rshift"),
    )
}
_BINARY = tuple(name for names in _OPERATORS.values() for name in names)
_ARITHMETIC = frozenset({"__neg__", "__pos__", *_BINARY})
_INPLACE = tuple(name.replace("__", "__i", 1) for name in _BINARY if not name.startswith("__r"))


def read_values(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    """An instruction works on the values of its inputs."""
    opname = state.info.instrs[offset].opname
    if opname in _ITERATION and rec.goes_over_data(inputs[0]):
        rec.split("goes over a tensor whose size depends on data")
        return
    if opname == "CONTAINS_OP":
        read_membership(rec, inputs[1], inputs[0])
        return
    if opname in FILLING:
        fill(rec, state, offset, inputs)
        return
    if opname == "MATCH_CLASS":
        subject, cls, keywords = inputs
        _read_pattern(rec, subject, cls, keywords, state.info.instrs[offset].arg)
        return
    truth = (
        opname.startswith("POP_JUMP")
        or opname in ("UNARY_NOT", "TO_BOOL")
        or (opname.startswith("JUMP_IF"))
    )
    dunders = _TRUTH_DUNDERS if truth else _DUNDERS.get(opname, ())
    deep = opname == "COMPARE_OP" or opname.startswith(("FORMAT", "CONVERT"))
    for value in inputs:
        read_value(rec, value, dunders, length_only=truth, truth=truth, deep=deep)


def fill(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    """A container of an expression is filled; it is an outside one where the run was cut there."""
    container, *values = inputs
    opname = state.info.instrs[offset].opname
    for value in values if opname in _READS_ADDED else ():
        read_value(rec, value)
    node = rec.graph.node_of(container)
    if node is None:
        return
    method = _ADDS.get(opname)
    if opname == "MAP_ADD" and is_atom(values[0]):
        rec.write(node, r.Item.of(values[0]))
    elif method is None or not unread(node) or not add_blindly(rec, node, method, tuple(values)):
        rec.mutate(node)


_READS_ADDED = frozenset({"LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"})
_ADDS = {"LIST_APPEND": "append", "SET_ADD": "add", "LIST_EXTEND": "extend", "SET_UPDATE": "update"}


def hold(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    """What goes into an object of the run is of no interest, but for numbers."""
    opname = state.info.instrs[offset].opname
    if opname in FILLING:
        fill(rec, state, offset, inputs)
    elif opname in ("LIST_TO_TUPLE", "CALL_INTRINSIC_1"):
        rec.open(rec.graph.node_of(inputs[0]))


def _read_pattern(rec: StateRecorder, subject: Any, cls: Any, keywords: Any, count: int) -> None:
    """``case Cls(a, b, key=c)``: the type, its names of positions and the attributes."""
    read_instance_check(rec, subject, cls)
    if not isinstance(cls, type):
        return
    names = tuple(keywords)
    if count and class_lookup(cls, "__match_args__") is not ABSENT:
        read_attribute(rec, cls, "__match_args__")
        names += tuple(class_lookup(cls, "__match_args__")[:count])
    elif count:
        read_value(rec, subject, deep=True)
    if isinstance(subject, cls):
        for name in names:
            read_attribute(rec, subject, name)


def read_instance_check(rec: StateRecorder, obj: Any, cls: Any) -> None:
    """``isinstance(obj, cls)``, also of a tuple of classes and for ``issubclass``."""
    if isinstance(cls, tuple):
        for item in cls:
            read_instance_check(rec, obj, item)
    elif isinstance(cls, type):
        given = obj if isinstance(obj, type) else type(obj)
        if given is not cls:
            read_mro(rec, given)
        for name in ("__instancecheck__", "__subclasscheck__"):
            if type(cls) is not type:
                read_class_attr(rec, type(cls), name)


METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
"""They are equal, and have one hash, if they are of one object."""


def read_value(
    rec: StateRecorder,
    value: Any,
    dunders: tuple[str, ...] = (),
    *,
    length_only: bool = False,
    truth: bool = False,
    deep: bool = False,
) -> None:
    """C code reads one value: a container's contents, or an object's special methods."""
    if value is None or isinstance(value, torch.Tensor) or is_plain(value):
        return
    value = shown(value)
    node = rec.graph.node_of(value)
    if type(value) is np.ndarray:
        rec.read_array(value)
        return
    if deep and "__repr__" in dunders and shows_a_set(value):
        rec.split("shows a set as text, whose order nothing guards")
    if isinstance(value, bytearray):
        read_bytes(rec, node, value)
    elif isinstance(value, CONTAINERS):
        if node is None:
            if deep:
                read_inside_fresh(rec, value)
        elif length_only:
            read_truth(rec, node, value) if truth else read_length(rec, node)
        else:
            rec.open(node, deep=deep)
    if type(value) is decimal.Decimal and not _ARITHMETIC.isdisjoint(dunders):
        rec.split("computes with decimals, by the context of the thread")
    if type(value) in METHODS and "__eq__" in dunders:
        note_identity(rec, (value.__self__,))
    if type(value) not in (list, tuple, dict, set, frozenset, deque):
        for dunder in dunders:
            read_class_attr(rec, type(value), dunder)
    if node is None:
        return
    if is_running_iterator(value):
        rec.split("uses up an iterator that was made outside the program")
    elif isinstance(value, type):
        if "__repr__" in dunders:
            for name in ("__module__", "__qualname__"):
                read_attribute(rec, value, name)
    elif "__repr__" in dunders and not node.fixed and shows_address(type(value)):
        rec.split("shows the address of an object as text")
    elif not isinstance(value, (*CONTAINERS, bytearray)) and base_value(value) is None:
        if not is_constant_object(value) and reads_unknown_state(type(value), dunders):
            rec.split(f"C code reads an object of class {type(value).__qualname__}")


def shows_a_set(value: Any, depth: int = 0) -> bool:
    """Whether the text of a value depends on the order of a set in it."""
    if type(value) in (set, frozenset):
        return len(value) > 1
    if type(value) not in CONTAINERS or depth > _DEEPEST:
        return False
    items = [*value, *value.values()] if type(value) is dict else value
    return any(shows_a_set(item, depth + 1) for item in items)


def shows_address(cls: type) -> bool:
    """Whether the text of an object is the default one."""
    return class_lookup(cls, "__repr__") is object.__repr__ and not any(
        isinstance(class_lookup(cls, name), types.FunctionType)
        for name in ("__format__", "__str__")
    )


def shown(value: Any) -> Any:
    """What a read-only view of a mapping shows; any other value itself."""
    return mapping_behind(value) if type(value) is types.MappingProxyType else value


def read_bytes(rec: StateRecorder, node: ShadowNode | None, value: bytearray) -> None:
    """The contents of a bytearray from before the run."""
    if node is not None and not node.changed:
        node.first.refs.setdefault(r.CResult(bytearray.hex), Leaf(bytearray.hex(value)))


_DEEPEST = 20


def read_inside_fresh(rec: StateRecorder, value: Any, depth: int = 0) -> None:
    """A container of the run may hold outside containers and arrays."""
    items = value.values() if isinstance(value, dict) else value
    for item in items:
        node = rec.graph.node_of(item)
        if node is not None:
            rec.open_deep(node)
        elif isinstance(item, CONTAINERS) and depth < _DEEPEST:
            read_inside_fresh(rec, item, depth + 1)


def is_plain(value: Any) -> bool:
    return type(value) in (bool, int, float, str, bytes, complex, range, slice)


def is_running_iterator(value: Any) -> bool:
    """Whether using a value changes it: generators and iterators."""
    return isinstance(value, types.GeneratorType) or (
        hasattr(type(value), "__next__")
        and not isinstance(type(value).__next__, types.FunctionType)
    )


def read_truth(rec: StateRecorder, node: ShadowNode, value: Any) -> None:
    """Whether a container is empty: of a sequence that is not, the length does not matter."""
    if node.snapshot is None and isinstance(value, (list, tuple)) and _plain_length(value):
        if not node.whole and r.Length() not in node.first.refs:
            node.first.refs[r.NonEmpty()] = Leaf(True)
    else:
        read_length(rec, node)


def read_length(rec: StateRecorder, node: ShadowNode) -> None:
    if node.whole or r.Length() in node.first.refs:
        return
    initial = node.snapshot if node.snapshot is not None else node.obj
    size = len(initial) if type(initial) in CONTAINERS else _plain_length(initial)
    node.first.refs[r.Length()] = Leaf(size)


def _plain_length(obj: Any) -> int:
    for base in CONTAINERS:
        if isinstance(obj, base):
            return int(base.__len__(obj))  # type: ignore[arg-type]
    return len(obj)


def read_membership(rec: StateRecorder, container: Any, item: Any) -> None:
    """``item in container``."""
    container = shown(container)
    node = rec.graph.node_of(container)
    if node is not None and isinstance(container, MAPPINGS):
        if is_atom(item) or (rec.node_for(item) is not None and rec.node_for(item).fixed):  # type: ignore[union-attr]
            present = dict.__contains__(container, item)
            if r.Item.of(item) not in node.first.refs:
                rec.read(node, r.Has(r.ItemKey(item)), True if present else ABSENT)
        else:
            rec.open(node)
        return
    read_value(rec, container, _DUNDERS["CONTAINS_OP"], deep=not isinstance(container, SETS))


# -- subscripts ---------------------------------------------------------------------------------


def load_subscr(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    container, key = inputs[0], inputs[1]
    read_item(rec, container, key)


def _read_index(rec: StateRecorder, key: Any) -> None:
    """The index of a tensor: all of it is read."""
    if isinstance(key, (list, tuple, np.ndarray)):
        read_value(rec, key, deep=True)


def read_item(rec: StateRecorder, container: Any, key: Any) -> None:
    """``container[key]``, done by C code."""
    if isinstance(container, torch.Tensor):
        _read_index(rec, key)
        return
    if is_plain(container):
        return
    container = shown(container)
    node = rec.graph.node_of(container)
    if isinstance(container, bytearray):
        read_bytes(rec, node, container)
    elif isinstance(container, MAPPINGS):
        getter = read_class_attr(rec, type(container), "__getitem__")
        if node is not None and not isinstance(getter, types.FunctionType):
            read_mapping_item(rec, node, container, key)
    elif isinstance(container, SEQUENCES):
        getter = read_class_attr(rec, type(container), "__getitem__")
        if node is not None and not isinstance(getter, types.FunctionType):
            _read_sequence_item(rec, node, container, key)
    elif type(container) is np.ndarray:
        rec.read_array(container)
    elif isinstance(container, type):
        read_class_attr(rec, container, "__class_getitem__")
        read_class_attr(rec, type(container), "__getitem__")
    else:
        getter = read_class_attr(rec, type(container), "__getitem__")
        if node is not None and not isinstance(getter, types.FunctionType):
            rec.split(f"subscripts an object of class {type(container).__qualname__}")


def read_mapping_item(rec: StateRecorder, node: ShadowNode, container: Any, key: Any) -> None:
    """A look-up of one key; a missing key of a defaultdict is then stored."""
    key_node = None if is_atom(key) else rec.node_for(key)
    if not is_atom(key) and (key_node is None or not key_node.fixed):
        rec.open(node)
        return
    value = dict.get(container, key, ABSENT)
    rec.read(node, r.Item.of(key), value)
    if value is ABSENT and isinstance(container, defaultdict):
        rec.read(node, r.CAttr(defaultdict.default_factory), container.default_factory)  # type: ignore[misc]
        rec.write(node, r.Item.of(key))


def _read_sequence_item(rec: StateRecorder, node: ShadowNode, container: Any, key: Any) -> None:
    if not isinstance(key, int):
        rec.open(node)
        return
    size = _plain_length(container)
    index = int(key)
    if node.snapshot is not None:
        rec.open(node)
        return
    if index < 0 or index >= size:
        read_length(rec, node)
        index += size
    if 0 <= index < size:
        base = next(base for base in SEQUENCES if isinstance(container, base))
        rec.read(node, r.Index(index), base.__getitem__(container, index))


def store_subscr(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    value, container, key = inputs
    node = rec.graph.node_of(container)
    if node is not None and type(container) is bytearray and is_atom((value, key)):
        read_bytes(rec, node, container)
        node.blind.append(bytearray.__setitem__)
        rec.replay_call(bytearray.__setitem__, (container, key, value), {})
        return
    write_item(rec, container, key, "__setitem__")


def delete_subscr(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    write_item(rec, inputs[0], inputs[1], "__delitem__")


def write_item(rec: StateRecorder, container: Any, key: Any, method: str) -> None:
    """``container[key] = value`` or ``del container[key]``, done by C code."""
    if isinstance(container, torch.Tensor):
        _read_index(rec, key)
        return
    setter = read_class_attr(rec, type(container), method)
    node = rec.graph.node_of(container)
    if isinstance(container, memoryview | np.flatiter) and node is not None:
        rec.split(f"changes what a {type(container).__name__} from outside shows")
        return
    if isinstance(container, memoryview):
        write_item(rec, container.obj, key, method)
        return
    if isinstance(container, (np.ndarray, np.flatiter)):
        rec.change_array(container if isinstance(container, np.ndarray) else container.base)
        return
    if node is None or isinstance(setter, types.FunctionType):
        return
    if isinstance(container, MAPPINGS) and is_atom(key) and method == "__setitem__":
        rec.write(node, r.Item.of(key))
    elif isinstance(container, CONTAINERS):
        rec.mutate(node)
    else:
        rec.split(f"changes an object of class {type(container).__qualname__}")


def inplace(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    """``a += b`` and its kin."""
    node = rec.graph.node_of(inputs[0])
    adds = state.info.instrs[offset].argval in ("+=", "+")
    if node is not None and adds and unread(node) and type(inputs[0]) in (list, deque):
        if add_blindly(rec, node, "extend", inputs[1:]):
            return
    change_in_place(rec, inputs)


def change_in_place(rec: StateRecorder, inputs: tuple[Any, ...]) -> None:
    """The first of the values may change in place, the others are read."""
    target = inputs[0]
    for value in inputs[1:]:
        read_value(rec, value, deep=False)
    if isinstance(target, torch.Tensor) or is_plain(target):
        return
    if isinstance(target, np.ndarray):
        rec.change_array(target)
        return
    node = rec.graph.node_of(target)
    if node is not None and isinstance(target, (list, dict, set, deque)):
        rec.mutate(node)
    elif node is not None and reads_unknown_state(type(target), _INPLACE):
        rec.split(f"changes an object of class {type(target).__qualname__}")
    else:
        read_value(rec, target, _BINARY)


def binary(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    for value in inputs:
        if rec.graph.node_of(value) is not None or type(value) is decimal.Decimal:
            kind = state.info.instrs[offset].argval.rstrip("=")
            read_value(rec, value, _OPERATORS.get(kind, _BINARY))


def for_iter(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    iterator = inputs[0]
    if rec.graph.node_of(iterator) is not None:
        read_value(rec, iterator)
    elif type(iterator) is RANGE_ITERATOR and rec.loops is not None:
        rec.loops.turn(rec, state, offset, iterator)


def identity(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    """``a is b``."""
    note_identity(rec, inputs)


def note_identity(rec: StateRecorder, values: tuple[Any, ...]) -> None:
    """Outside objects are compared, or hashed: whether they are one is part of the guard."""
    nodes = [rec.graph.node_of(value) for value in values]
    if all(node is not None for node in nodes):
        for node in nodes:
            assert node is not None
            node.identity_used = True


HANDLERS: dict[EventKind, Handler] = {
    EventKind.HOLD: hold,
    EventKind.READ: read_values,
    EventKind.BINARY_OP: binary,
    EventKind.INPLACE: inplace,
    EventKind.FOR_ITER: for_iter,
    EventKind.IS_OP: identity,
    EventKind.LOAD_SUBSCR: load_subscr,
    EventKind.STORE_SUBSCR: store_subscr,
    EventKind.DELETE_SUBSCR: delete_subscr,
}
