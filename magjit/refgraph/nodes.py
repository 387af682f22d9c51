"""The reference graph: which outside objects a run read and wrote (MagPy §4.1, Figures 7 and 8).

    RefGraph      ::= ShadowNode*                 node 0 is the outside world
    ShadowNode    ::= object, path, version 0, last version
    ShadowVersion ::= (Relation -> Target)*
    Target        ::= Leaf value | Edge node

Only objects that existed before the run have nodes, and only once they are read. Version 0 holds
what the run found, the last version what it wrote; nothing needs the versions in between.
Objects made in the run have none: whatever of them escapes is rebuilt from its final state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from magjit.refgraph.paths import Paths, ReadPlaces, root_label
from magjit.refgraph.paths import short as _short
from magjit.refgraph.relations import Relation


class _Absent:
    __slots__ = ()

    def __repr__(self) -> str:
        return "<absent>"


ABSENT: Any = _Absent()
"""Target value of an edge that led nowhere: the key, attribute or cell was not there."""
# What has a name of its own in a readable path.


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A value that the guard compares: by equality, or by identity where only that can tell."""

    value: Any
    identity: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Lifted(Leaf):
    """A number of which the guard compares the type only; see `magjit.refgraph.numbers`."""

    source: Any = None


@dataclass(frozen=True, slots=True)
class Edge:
    """The object of another node."""

    node_id: int


Target = Leaf | Edge


@dataclass(slots=True)
class ShadowVersion:
    """What an object held at one time, as far as the run looked."""

    refs: dict[Relation, Target] = field(default_factory=dict)

    def fix(self, relation: Relation) -> None:
        """Something uses the value itself, which is more than its type."""
        target = self.refs[relation]
        if isinstance(target, Lifted):
            target.source.pin()


@dataclass(slots=True, eq=False)
class ShadowNode:
    """One outside object.

    Attributes:
        parent, relation: the first path on which it was reached; the parent of a root is node 0.
        fixed: the object is the same at every call (a root), so nothing needs to fetch it.
        first: version 0.
        written: the edges that the run wrote, in the order of their first write, or of the first
            one behind their last deletion.
        deleted: those that it has deleted, and whether they are deleted now.
        snapshot: a container's contents from before its first change.
        structural: values under it may be new objects at each call, so functions found there are
            compared by code and closure, not by identity.
        whole: all of its contents have been recorded in version 0.
        mutated: a C function changed it in place; its final state is replayed as a whole.
        blind: it was changed by calls that do not depend on its contents; the replay repeats them.
    """

    node_id: int
    obj: Any
    parent: int
    relation: Relation
    fixed: bool
    structural: bool = False
    first: ShadowVersion = field(default_factory=ShadowVersion)
    written: dict[Relation, None] = field(default_factory=dict)
    deleted: dict[Relation, bool] | None = None
    snapshot: Any = None
    whole: bool = False
    mutated: bool = False
    blind: list[Any] = field(default_factory=list)
    identity_used: bool = False

    def note_write(self, relation: Relation, deletes: bool) -> None:
        """The run sets an edge, or deletes it: a key that comes back is the last one."""
        if deletes or (self.deleted is not None and self.deleted.get(relation)):
            self.written.pop(relation, None)
            self.deleted = self.deleted or {}
            self.deleted[relation] = deletes
        self.written.setdefault(relation)

    @property
    def changed(self) -> bool:
        return bool(self.written) or self.mutated or bool(self.blind)

    @property
    def last(self) -> ShadowVersion:
        """The last version: what the run left, of the edges that it wrote."""
        return ShadowVersion({relation: Leaf(None) for relation in self.written})


class RefGraph:
    """All nodes of a run, found by the identity of their objects or by number.

    Attributes:
        looked_up: attributes of outside objects whose look-up has been read, and how many changes
            there were before.  Another look-up, with no change since, adds nothing.
    """

    __slots__ = ("_by_identity", "looked_up", "nodes", "places", "where")

    def __init__(self, where: Callable[[], tuple[Any, int]] | None = None) -> None:
        self.where = where
        self.places: ReadPlaces = {}
        outside = ShadowNode(0, None, 0, Relation(), fixed=True)
        self.nodes: list[ShadowNode] = [outside]
        self._by_identity: dict[int, ShadowNode] = {}
        self.looked_up: dict[tuple[int, object, str], int] = {}

    @property
    def outside(self) -> ShadowNode:
        return self.nodes[0]

    def node_of(self, obj: Any) -> ShadowNode | None:
        """The node of an object, or None when the object is not known to come from outside."""
        return self._by_identity.get(id(obj))

    def add(self, obj: Any, parent: ShadowNode, relation: Relation, *, fixed: bool) -> ShadowNode:
        """Make the node of an object that has none; the node keeps the object alive."""
        structural = parent.structural or (parent.node_id == 0 and not fixed)
        node = ShadowNode(
            len(self.nodes),
            obj,
            parent.node_id,
            relation,
            fixed,
            structural=structural and not fixed,
        )
        self.nodes.append(node)
        self._by_identity[id(obj)] = node
        if self.where is not None:
            self.places[node.node_id] = self.where()
        return node

    def note_read(self, node: ShadowNode, relation: Relation) -> None:
        """A value that has no node of its own is read here and now."""
        if self.where is not None:
            self.places[node.node_id, relation] = self.where()

    def __iter__(self) -> Iterator[ShadowNode]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def path(self, node: ShadowNode) -> str:
        """Readable path of a node, such as ``self.layers[0].weight``."""
        return self.paths().path(node.node_id)

    def paths(self) -> Paths:
        """The paths of all nodes so far; they keep none of the user's objects alive."""
        steps = [(n.parent, n.relation, root_label(n.relation, n.obj)) for n in self.nodes]
        return Paths(steps, self.places)

    def verify(self) -> None:
        """Raise AssertionError when the graph is not well formed."""
        for node in self.nodes[1:]:
            assert node.parent < node.node_id, f"node {node.node_id}: parent {node.parent} is later"
            for relation, target in node.first.refs.items():
                if isinstance(target, Edge):
                    assert 0 < target.node_id < len(self.nodes), (
                        f"{node.node_id} {relation}: {target}"
                    )

    def __str__(self) -> str:
        lines = []
        paths = self.paths()
        for node in self.nodes:
            head = paths.path(node.node_id)
            if node.node_id:
                head += f": {type(node.obj).__name__}"
            lines.append(f"#{node.node_id} {head}{' (changed)' if node.changed else ''}")
            for relation, target in node.first.refs.items():
                shown = f"#{target.node_id}" if isinstance(target, Edge) else _short(target.value)
                lines.append(f"    {relation} -> {shown}")
            lines += [f"    {relation} := written" for relation in node.written]
        return "\n".join(lines)
