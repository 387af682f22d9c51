"""The changes of a reference graph as the writes that a mock redoes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from magjit.mocks.writes import (
    DELETED,
    AttrWrite,
    Call,
    CellWrite,
    ContainerState,
    DequeState,
    DictState,
    ItemWrite,
    ListState,
    SetState,
    SlotWrite,
    TensorAttrWrite,
    Write,
)
from magjit.refgraph import relations as r
from magjit.refgraph.nodes import ABSENT, RefGraph
from magjit.refgraph.recorder import Effect
from magjit.refgraph.writes import Change, ContentsChange, EdgeWrite, collect_changes

_STATES: tuple[tuple[type, type[ContainerState]], ...] = (
    (list, ListState),
    (dict, DictState),
    (set, SetState),
    (deque, DequeState),
)


def writes_of(graph: RefGraph, effects: Iterable[Effect]) -> list[Write]:
    """The writes of a run in the order of the objects' discovery, then the calls to repeat."""
    writes = [write for change in collect_changes(graph) for write in _writes(change)]
    whole = {id(node.obj) for node in graph.nodes[1:] if node.mutated}
    calls = [effect for effect in effects if not (effect.args and id(effect.args[0]) in whole)]
    return writes + [Call(effect.func, effect.args, effect.kwargs) for effect in calls]


def _writes(change: Change) -> list[Write]:
    if isinstance(change, ContentsChange):
        return [_contents(change)]
    write = _edge(change)
    if isinstance(write, ItemWrite) and change.again:
        return [replace(write, value=DELETED, may_lack=True), write]
    return [write]


def _contents(change: ContentsChange) -> Write:
    target = change.node.obj
    for base, state in _STATES:
        if isinstance(target, base):
            return state(target, change.initial, change.final)
    raise AssertionError(f"a {type(target).__qualname__} is never changed as a whole")


def _edge(change: EdgeWrite) -> Write:
    target = change.node.obj
    value: Any = DELETED if change.value is ABSENT else change.value
    match change.relation:
        case r.Item(key=key):
            return ItemWrite(target, key.key, value)
        case r.Cell():
            return CellWrite(target, value)
        case r.ContextValue():
            return Call(type(target).set, (target, value))
        case r.ClassAttr(name=name):
            return AttrWrite(target, name, value)
        case r.SlotOf(descriptor=descriptor):
            return SlotWrite(target, descriptor, value, may_lack=value is DELETED)
        case r.CAttr(descriptor=descriptor):
            return TensorAttrWrite(target, descriptor.__name__, value)
    raise AssertionError(f"{change.relation} is never written")
