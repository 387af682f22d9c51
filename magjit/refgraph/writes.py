"""What a run changed in the outside world, node by node (MagPy §4.2).

Only final states count: they are taken when the run has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magjit.refgraph import relations as r
from magjit.refgraph.kinds import contents_copy
from magjit.refgraph.nodes import ABSENT, Leaf, RefGraph, ShadowNode
from magjit.refgraph.search import changed


@dataclass(frozen=True, slots=True, eq=False)
class EdgeWrite:
    """One edge of an outside object leads elsewhere now; ABSENT when it was deleted.

    Attributes:
        again: it was deleted, and made again behind all others.
    """

    node: ShadowNode
    relation: r.Relation
    value: Any
    again: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ContentsChange:
    """A container was changed as a whole; both states are shallow copies."""

    node: ShadowNode
    initial: Any
    final: Any


Change = EdgeWrite | ContentsChange


def collect_changes(graph: RefGraph) -> list[Change]:
    """All changes, in the order of the nodes' discovery and of the first write to each edge."""
    found: list[Change] = []
    for node in changed(graph):
        if node.mutated:
            final = contents_copy(node.obj)
            found.append(ContentsChange(node, node.snapshot, final))
        else:
            for relation in node.written:
                value = final_value(node, relation)
                if not _is_restored(node, relation, value):
                    again = node.deleted is not None and relation in node.deleted
                    found.append(EdgeWrite(node, relation, value, again and value is not ABSENT))
    return found


def _is_restored(node: ShadowNode, relation: r.Relation, value: Any) -> bool:
    """Whether a context variable holds again what the guard says that it held before."""
    before = node.first.refs.get(relation)
    if not isinstance(relation, r.ContextValue) or not isinstance(before, Leaf):
        return False
    return before.value is value


def final_value(node: ShadowNode, relation: r.Relation) -> Any:
    """What an edge leads to now."""
    obj = node.obj
    match relation:
        case r.Item(key=key):
            return dict.get(obj, key.key, ABSENT)
        case r.ContextValue():
            return obj.get(ABSENT)
        case r.Cell():
            try:
                return obj.cell_contents
            except ValueError:
                return ABSENT
        case r.ClassAttr(name=name):
            return vars(obj).get(name, ABSENT)
        case r.SlotOf(descriptor=descriptor) | r.CAttr(descriptor=descriptor):
            try:
                return descriptor.__get__(obj)
            except AttributeError:
                return ABSENT
        case _:
            raise AssertionError(f"{relation} is never written")
