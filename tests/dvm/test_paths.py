"""Whether a node needs a group is what the graph of groups says, however they lie in it."""

from __future__ import annotations

import operator
import random

import networkx
import pytest
import torch
from torch.fx import Graph, Node

from magjit_dvm.groups import FusedGroup
from magjit_dvm.paths import Paths


def drawn_graph(chosen: random.Random, count: int) -> list[Node]:
    """Sums of what is near, most often, and draws, which keep their order."""
    graph = Graph()
    made = [graph.placeholder(f"x{k}") for k in range(3)]
    for node in made:
        node.meta["val"] = torch.empty(2)
    for _ in range(count):
        near = made[-6:] if chosen.random() < 0.8 else made
        given = tuple(chosen.choice(near) for _ in range(2))
        if chosen.random() < 0.1:
            made.append(graph.call_function(torch.ops.aten.rand_like.default, given[:1]))
        else:
            made.append(graph.call_function(operator.add, given))
        made[-1].meta["val"] = torch.empty(2)
    graph.output(made[-1])
    return list(graph.nodes)


@pytest.mark.parametrize("seed", range(30))
def test_paths_are_those_of_the_graph_of_groups(seed: int) -> None:
    chosen = random.Random(seed)
    nodes = drawn_graph(chosen, 40)
    group_of: dict[Node, FusedGroup] = {}
    paths = Paths(nodes[0].graph, group_of)
    free = nodes[3:-1]
    while len(free) > 12:
        first = chosen.randrange(len(free))
        members = free[first : first + chosen.randint(1, 9) : chosen.randint(1, 3)]
        free = [node for node in free if node not in members]
        paths.spread(members)
        group_of |= dict.fromkeys(members, FusedGroup(members))

    units = {node: id(group_of.get(node, node)) for node in nodes}
    whole = networkx.DiGraph()
    whole.add_nodes_from(units.values())
    for node in nodes:
        for one in (*node.all_input_nodes, *paths.before.get(node, ())):
            if units[one] != units[node]:
                whole.add_edge(units[one], units[node])
    groups = list({id(group): group for group in group_of.values()}.values())
    found = set()
    for _ in range(60):
        asked = chosen.sample(groups, chosen.randint(1, 2))
        wanted = {id(group) for group in asked}
        others = [node for node in nodes if units[node] not in wanted]
        sought = chosen.sample(others, chosen.randint(0, 2))
        behind = set().union(*(networkx.descendants(whole, key) for key in wanted))
        needed = any(units[node] in behind for node in sought)
        assert paths.depend(sought, asked) == needed
        found.add(needed)
    assert found == {True, False}


def test_what_is_in_the_group_needs_it() -> None:
    nodes = drawn_graph(random.Random(0), 5)
    group = FusedGroup(nodes[3:5])
    paths = Paths(nodes[0].graph, dict.fromkeys(group.nodes, group))
    assert paths.depend(nodes[4:5], [group]) and not paths.depend(nodes[:3], [group])
