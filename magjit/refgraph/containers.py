"""Reads and writes of containers: subscripts, iteration, membership, comparison, truth."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from magjit.bytecode import EventKind
from magjit.refgraph import relations as r
from magjit.refgraph.attributes import read_class_attr
from magjit.refgraph.blind import add_blindly, unread
from magjit.refgraph.kinds import CONTAINERS, MAPPINGS, SEQUENCES, SETS, is_atom
from magjit.refgraph.nodes import ABSENT, Leaf, ShadowNode
from magjit.refgraph.recorder import FrameState, Handler, StateRecorder

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
_PLAIN_MAPPINGS = (dict, OrderedDict, defaultdict)


def read_values(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    """An instruction works on the values of its inputs."""
    opname = state.info.instrs[offset].opname
    if opname == "CONTAINS_OP":
        read_membership(rec, inputs[1], inputs[0])
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
    node = rec.graph.node_of(value)
    if isinstance(value, CONTAINERS):
        if node is None:
            if deep:
                read_inside_fresh(rec, value)
        elif length_only:
            read_truth(rec, node, value) if truth else read_length(rec, node)
        else:
            rec.open(node, deep=deep)
    if type(value) not in (list, tuple, dict, set, frozenset, deque):
        for dunder in dunders:
            read_class_attr(rec, type(value), dunder)
    if node is not None and is_running_iterator(value):
        rec.split("uses up an iterator that was made outside the program")


def read_inside_fresh(rec: StateRecorder, value: Any) -> None:
    """A container of the run may hold outside containers."""
    items = value.values() if isinstance(value, dict) else value
    for item in items:
        node = rec.graph.node_of(item)
        if node is not None:
            rec.open_deep(node)


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
            return int(base.__len__(obj))
    return len(obj)


def read_membership(rec: StateRecorder, container: Any, item: Any) -> None:
    """``item in container``."""
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


def read_item(rec: StateRecorder, container: Any, key: Any) -> None:
    """``container[key]``, done by C code."""
    if isinstance(container, torch.Tensor) or is_plain(container):
        return
    node = rec.graph.node_of(container)
    if isinstance(container, MAPPINGS):
        getter = read_class_attr(rec, type(container), "__getitem__")
        if node is not None and not isinstance(getter, types.FunctionType):
            read_mapping_item(rec, node, container, key)
    elif isinstance(container, SEQUENCES):
        getter = read_class_attr(rec, type(container), "__getitem__")
        if node is not None and not isinstance(getter, types.FunctionType):
            _read_sequence_item(rec, node, container, key)
    elif isinstance(container, type):
        read_class_attr(rec, container, "__class_getitem__")
        read_class_attr(rec, type(container), "__getitem__")
    else:
        getter = read_class_attr(rec, type(container), "__getitem__")
        if node is not None and not isinstance(getter, types.FunctionType):
            if not isinstance(container, types.MappingProxyType):
                rec.split(f"subscripts an object of class {type(container).__qualname__}")
            else:
                rec.split("reads through a mappingproxy from outside")


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
    write_item(rec, inputs[1], inputs[2], "__setitem__")


def delete_subscr(
    rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]
) -> None:
    write_item(rec, inputs[0], inputs[1], "__delitem__")


def write_item(rec: StateRecorder, container: Any, key: Any, method: str) -> None:
    """``container[key] = value`` or ``del container[key]``, done by C code."""
    if isinstance(container, torch.Tensor):
        return
    setter = read_class_attr(rec, type(container), method)
    node = rec.graph.node_of(container)
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
    node = rec.graph.node_of(target)
    if node is not None and isinstance(target, (list, dict, set, deque)):
        rec.mutate(node)
    else:
        read_value(rec, target)


def binary(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    for value in inputs:
        read_value(rec, value)


def for_iter(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    iterator = inputs[0]
    if rec.graph.node_of(iterator) is not None:
        read_value(rec, iterator)


def identity(rec: StateRecorder, state: FrameState, offset: int, inputs: tuple[Any, ...]) -> None:
    """``a is b``."""
    note_identity(rec, inputs)


def note_identity(rec: StateRecorder, values: tuple[Any, ...]) -> None:
    """Two outside objects are compared: whether they are one object is part of the guard."""
    nodes = [rec.graph.node_of(value) for value in values]
    if all(node is not None for node in nodes):
        for node in nodes:
            assert node is not None
            node.identity_used = True


HANDLERS: dict[EventKind, Handler] = {
    EventKind.READ: read_values,
    EventKind.BINARY_OP: binary,
    EventKind.INPLACE: inplace,
    EventKind.FOR_ITER: for_iter,
    EventKind.IS_OP: identity,
    EventKind.LOAD_SUBSCR: load_subscr,
    EventKind.STORE_SUBSCR: store_subscr,
    EventKind.DELETE_SUBSCR: delete_subscr,
}
