"""Whether what a graph computes needs a group: paths between nodes, where groups run as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch.fx import Graph
from torch.fx import Node as FxNode

from magjit.plugin.aliases import memory_of, readers, written_by
from magjit.plugin.fx_nodes import draws_random
from magjit_dvm.groups import FusedGroup

__all__ = ["Paths"]


class Paths:
    """Of a graph whose nodes are grouped step by step.

    Attributes:
        position: of each node in the graph's order.
        before: what runs before a node though that does not read it.
    """

    def __init__(self, graph: Graph, group_of: Mapping[FxNode, FusedGroup]) -> None:
        self.group_of = group_of
        self.position = {node: k for k, node in enumerate(graph.nodes)}
        self.before = _order_of_effects(graph)
        self._after: dict[FxNode, list[FxNode]] = {}
        for node, earlier in self.before.items():
            for one in earlier:
                self._after.setdefault(one, []).append(node)
        self._across = [0] * (len(self.position) + 1)
        """How many groups have nodes before each position, and nodes from there on; at least."""

    def spread(self, nodes: Iterable[FxNode]) -> None:
        """A group has these nodes now."""
        positions = [self.position[node] for node in nodes]
        for position in range(min(positions) + 1, max(positions) + 1):
            self._across[position] += 1

    def depend(self, nodes: Sequence[FxNode], groups: Sequence[FusedGroup]) -> bool:
        """Whether one of ``nodes`` needs a result of one of ``groups``.

        Looks from both ends in turns, until they meet or one of them is done: where there is no
        path that is soon, be the other's surroundings as large as they may.
        """
        if not nodes:
            return False
        reached = {id(group) for group in groups}  # and, in turns, what needs them
        sought = {self._unit(node) for node in nodes}
        if not reached.isdisjoint(sought):
            return True
        made = [node for group in groups for node in group.nodes]
        first = min(self.position[node] for node in made)
        last = max(self.position[one] for node in nodes for one in self._members(node))
        while self._across[first]:  # no path leads back from before there
            first -= 1
        while self._across[last + 1]:  # nor from behind there to what is sought
            last += 1
        within = range(first, last + 1)
        reading = [user for node in made for user in self._later(node)]
        back = self._search(list(nodes), self._earlier, reached, set(), within)
        on = self._search(reading, self._later, sought, reached, within)
        return any(found for pair in zip(back, on, strict=False) for found in pair)

    def _search(
        self,
        waiting: list[FxNode],
        beside: Callable[[FxNode], Iterable[FxNode]],
        wanted: set[int],
        seen: set[int],
        within: range,
    ) -> Iterator[bool]:
        """For each unit that is reached, whether it is wanted."""
        while waiting:
            node = waiting.pop()
            unit = self._unit(node)
            if unit in seen or self.position[node] not in within:
                continue
            yield unit in wanted
            seen.add(unit)
            for member in self._members(node):
                waiting.extend(beside(member))

    def _unit(self, node: FxNode) -> int:
        group = self.group_of.get(node)
        return id(node) if group is None else id(group)

    def _members(self, node: FxNode) -> Sequence[FxNode]:
        group = self.group_of.get(node)
        return (node,) if group is None else group.nodes

    def _earlier(self, node: FxNode) -> list[FxNode]:
        return [*node.all_input_nodes, *self.before.get(node, ())]

    def _later(self, node: FxNode) -> list[FxNode]:
        return [*node.users, *self._after.get(node, ())]


def _order_of_effects(graph: Graph) -> dict[FxNode, tuple[FxNode, ...]]:
    """What runs before a node though that does not read it.

    Before a node that draws random numbers, the last one that did: eager draws in this order.
    Before a write, who reads what has been there.
    """
    found: dict[FxNode, tuple[FxNode, ...]] = {}
    seen: set[FxNode] = set()
    last = None
    for node in graph.nodes:
        if draws_random(node):
            if last is not None:
                found[node] = (last,)
            last = node
        of = memory_of(written_by(node))
        earlier = [one for memory in of for one in readers(memory) if one in seen]
        if earlier:
            found[node] = (*found.get(node, ()), *earlier)
        seen.add(node)
    return found
