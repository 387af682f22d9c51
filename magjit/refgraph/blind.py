"""Changes that do not depend on what a container holds: ``losses.append(loss)`` and its kin.

An outside container that a run only adds to needs no guard on its contents, so a history may grow
from call to call without a new capture. The replay repeats the calls. As soon as the program reads
the container, its contents before the run become part of the guard.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from magjit.refgraph import relations as r
from magjit.refgraph.kinds import contents_copy, is_atom
from magjit.refgraph.nodes import ShadowNode
from magjit.refgraph.recorder import StateRecorder

_ONE = {
    (list, "append"),
    (set, "add"),
    (set, "discard"),
    (deque, "append"),
    (deque, "appendleft"),
}
_MANY = {
    (list, "extend"),
    (list, "__iadd__"),
    (set, "update"),
    (deque, "extend"),
    (deque, "extendleft"),
}


def is_blind_change(
    rec: StateRecorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Note a call that adds to an outside container; False when the call is something else."""
    receiver = getattr(func, "__self__", None)
    if receiver is None:
        receiver, args = (args[0], args[1:]) if args else (None, ())
    cls = type(receiver)
    name = getattr(func, "__name__", "")
    if kwargs or cls not in (list, set, deque) or getattr(cls, name, None) is None:
        return False
    node = rec.graph.node_of(receiver)
    if node is None or not unread(node):
        return False
    return add_blindly(rec, node, name, args)


def add_blindly(rec: StateRecorder, node: ShadowNode, name: str, args: tuple[Any, ...]) -> bool:
    """Note a change by a method that only adds; False when the method is another one."""
    cls = type(node.obj)
    if (cls, name) in _ONE and len(args) == 1:
        if cls is set and not is_atom(args[0]):
            return False
        captured: tuple[Any, ...] = args
    elif (cls, name) in _MANY and len(args) == 1 and type(args[0]) in (list, tuple, set, dict):
        if cls is set and not all(is_atom(item) for item in args[0]):
            return False
        captured = (tuple(args[0]),)
        rec.open(rec.graph.node_of(args[0]))
        name = "extend" if name == "__iadd__" else name
    elif (cls, name) == (list, "insert") and len(args) == 2 and type(args[0]) is int:
        captured = args
    else:
        return False
    if node.snapshot is None:
        node.snapshot = contents_copy(node.obj)
    method = getattr(cls, name)
    node.blind.append(method)
    rec.replay_call(method, (node.obj, *captured), {})
    return True


def unread(node: ShadowNode) -> bool:
    """Whether nothing that was read depends on what else the container holds."""
    return not (
        node.whole
        or node.mutated
        or any(isinstance(ref, (r.Length, r.Index, r.Members)) for ref in node.first.refs)
    )
