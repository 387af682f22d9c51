"""Searching the reference graph (MagPy §4.2, Algorithm 1)."""

from __future__ import annotations

from magjit.refgraph.nodes import Edge, RefGraph, ShadowNode


def reachable(graph: RefGraph) -> list[ShadowNode]:
    """All nodes that the outside world reached before the run, in the order of their discovery.

    Every one of them is checked by the guard. A node is added to the graph only together with the
    edge that leads to it, so the search visits all nodes; what it adds is the proof.
    """
    found = {0}
    queue = [graph.outside]
    while queue:
        node = queue.pop()
        for target in node.first.refs.values():
            if isinstance(target, Edge) and target.node_id not in found:
                found.add(target.node_id)
                queue.append(graph.nodes[target.node_id])
    return [graph.nodes[node_id] for node_id in sorted(found) if node_id]


def changed(graph: RefGraph) -> list[ShadowNode]:
    """Outside objects that the run changed: the mock redoes the changes (Algorithm 1, line 22)."""
    return [node for node in graph.nodes[1:] if node.changed]
