"""Sizes that depend on data: what a mask takes, where a tensor is not zero, what is unique.

A compiler has a symbol for such a size, and takes it to be neither 0 nor 1 and to equal another one
where both meet: that is what it makes results' sizes and backwards of, and what kernels read and
write by.  Eager mode broadcasts where a mask takes one element.  No guard can tell in front of a
graph which it will be, so that it is compiled as far as all sizes are known::

    graph  ::= before rest
    before ::= the operators in front of the first that makes such a size
    rest   ::= that one and all behind it, which run as they are
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    free_unbacked_symbols,
)
from torch.utils._pytree import tree_leaves

from magjit.plugin.aliases import is_strided, storage_of
from magjit.plugin.functional import changes
from magjit.plugin.fx_helpers import (
    copy_graph_module,
    fakeify,
    make_graph_module,
    placeholders,
    runnable,
)
from magjit.plugin.fx_nodes import called_at, called_name, graphs_of
from magjit.plugin.inputs import GraphInput
from magjit.plugin.modes import leave_modes_of
from magjit.plugin.overlapping import lies_apart
from magjit.plugin.protocol import CompiledGraph

__all__ = ["Parts", "SizeOfData", "known_by_dynamo", "parted", "refusing_sizes_of_data"]

_MAKERS = frozenset(
    {
        *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "unique_dim"),
        *("_unique", "_unique2", "bincount", "repeat_interleave", "combinations", "nms"),
        *("getitem", "__getitem__", "index"),
    }
)
"""Names of what may make such a size; and ``where`` of a condition alone."""
_LEAST = 3
"""Operators in front of the first such size that are worth a compiler."""


class SizeOfData(Exception):
    """A backend came upon a size that depends on data, where none was expected."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A graph in two.

    Attributes:
        before: has the graph's inputs, and gives what ``rest`` needs of it; None where that would
            hardly compute anything.
        reads: positions of the graph's inputs that ``rest`` takes, in front of what ``before``
            gives.
        rest: the operators that run as they are.
        reason: which operator makes the size, and where.
    """

    before: GraphModule | None
    reads: tuple[int, ...]
    rest: GraphModule
    reason: str

    def joined(self, compiled: CompiledGraph) -> CompiledGraph:
        """The whole graph, of its compiled first part."""
        rest, reads = runnable(self.rest), self.reads

        def call(*inputs: Any) -> Any:
            return rest(*[inputs[position] for position in reads], *compiled(*inputs))

        return call


def parted(
    gm: GraphModule,
    inputs: Sequence[GraphInput],
    dynamic: bool | None = None,
    *,
    grad_enabled: bool = True,
) -> Parts | None:
    """A graph as far as all sizes are known, and the rest; None where all are.

    Args:
        gm: torch-level; is not changed.
        inputs, dynamic: as ``fakeify`` takes them.
        grad_enabled: grad mode at the start of the graph.
    """
    nodes = list(gm.graph.nodes)
    asked = {k for k, node in enumerate(nodes) if _may_make(node) or _runs_maker(gm, node)}
    if not asked:
        return None
    first = _Run(gm, inputs, dynamic, _with_ancestors(nodes, asked)).first()
    if first is None:
        return None
    whole = _Run(gm, inputs, dynamic, set(range(len(nodes))))
    whole.first()
    cut = _cut(nodes, first, whole.memory, grad_enabled)
    place = called_at(nodes[first])
    where = "" if place is None else f", at {place}"
    reason = f"the size of what {called_name(nodes[first])} gives depends on data{where}"
    return _split(gm, nodes, cut, reason)


def known_by_dynamo(gm: GraphModule) -> str | None:
    """Which operator of a graph of Dynamo's makes a size that depends on data, if one does."""
    for node in gm.graph.nodes:
        if node.op != "placeholder" and free_unbacked_symbols(node.meta.get("example_value")):
            return f"the size of what {called_name(node)} gives depends on data"
    return None


@contextmanager
def refusing_sizes_of_data(shape_env: ShapeEnv, taken: bool = False) -> Iterator[None]:
    """Raises ``SizeOfData`` at its end, or instead of another error, if sizes of data were made.

    Args:
        shape_env: of the fake tensors that a backend traces with.
        taken: whether the backend takes such sizes; then only where torch cannot do without one.
    """
    ranges = shape_env.var_to_range
    known = len(ranges)  # Symbols of inputs are made before.
    failed = None
    try:
        yield
    except Exception as error:
        if len(ranges) == known or (taken and not isinstance(error, GuardOnDataDependentSymNode)):
            raise
        failed = error
    if failed is not None or (len(ranges) > known and not taken):
        raise SizeOfData("the size of an operator's result depends on data") from failed


def _may_make(node: Node) -> bool:
    name = called_name(node)
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.dynamic_output_shape in node.target.tags
    if name == "where":
        return len(node.args) + len(node.kwargs) == 1
    return name in _MAKERS and (node.target is not operator.getitem or _is_looked_up(node))


def _runs_maker(gm: GraphModule, node: Node) -> bool:
    """Whether a graph that an operator is given, as of a checkpoint, may make such a size."""
    names = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    graphs = [graph for name in names for graph in graphs_of(getattr(gm, name, None))]
    return any(_may_make(one) for graph in graphs for one in graph.nodes)


def _with_ancestors(nodes: Sequence[Node], asked: set[int]) -> set[int]:
    """The positions of these nodes and of all that they are computed from."""
    order = {node: position for position, node in enumerate(nodes)}
    found = set(asked)
    for position in range(max(asked), -1, -1):
        if position in found:
            found.update(order[one] for one in nodes[position].all_input_nodes)
    return found


def _is_looked_up(node: Node) -> bool:
    """Whether what is given in brackets has a tensor in it."""
    return any(isinstance(one, Node) for one in tree_leaves(node.args[1:]))


class _Run(Interpreter):
    """Operators of a graph over fake inputs, up to the first size that depends on data.

    Args:
        gm, inputs, dynamic: as ``parted`` takes them.
        only: the positions of the nodes to run.

    Attributes:
        memory: position of a node that gives a tensor to which memory that is in.
    """

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[GraphInput],
        dynamic: bool | None,
        only: set[int],
    ) -> None:
        module = copy_graph_module(gm)
        super().__init__(module)
        self._only = only
        self._fakes = fakeify(module, inputs, dynamic)
        self._order = {node: position for position, node in enumerate(module.graph.nodes)}
        self.memory: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no address is used twice

    def first(self) -> int | None:
        """The position of the operator that makes it."""
        env = self._fakes.shape_env
        with (
            torch.no_grad(),
            self._fakes.fake_mode,
            env.suppress_guards(),
            env.ignore_fresh_unbacked_symbols(),
        ):
            try:
                self.run(*self._fakes.values)
            except _Found as found:
                return found.position
            except Exception:  # The backend is to say what it cannot do.
                return None
            finally:
                leave_modes_of(self, grad_enabled=False)
        return None

    def run_node(self, n: Node) -> Any:
        position = self._order[n]
        if position not in self._only and n.op != "placeholder":
            return None
        ranges = self._fakes.shape_env.var_to_range
        known = len(ranges)
        try:
            result = super().run_node(n)
        finally:
            if len(ranges) > known:
                raise _Found(position)
        if isinstance(result, torch.Tensor) and is_strided(result):
            self.memory[position] = storage_of(result)
            self._alive.append(result)
        return result


class _Found(BaseException):
    """The operator at a position makes a size that depends on data."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def _cut(nodes: Sequence[Node], first: int, memory: Mapping[int, int], grad_enabled: bool) -> int:
    """How many nodes are in front.

    What the rest takes from them are tensors, each in memory of its own, which it does not write:
    views are made and memory is written where eager mode does it.  Modes are at the cut as they
    are at the start: what has entered autocast is no tensor.
    """
    order = {node: position for position, node in enumerate(nodes)}
    cut = first
    while True:
        passed = {order[one] for node in nodes[cut:] for one in node.all_input_nodes}
        passed = {one for one in passed if one < cut and not _is_given(nodes[one])}
        behind = passed - memory.keys()
        seen: dict[int, int] = {}
        for position in sorted(passed & memory.keys()):
            if seen.setdefault(memory[position], position) != position:
                behind.add(position)
        written = {memory.get(order[node]) for node in _written(nodes[cut:])}
        behind |= {one for one in range(cut) if memory.get(one) in written - {None}}
        switches = [k for k in range(cut) if nodes[k].target is torch._C._set_grad_enabled]
        if switches and nodes[switches[-1]].args != (grad_enabled,):
            behind.add(switches[-1])
        if not behind:
            break
        cut = min(behind)
    return 0 if sum(map(_computes, nodes[:cut])) < _LEAST else cut


def _written(nodes: Sequence[Node]) -> set[Node]:
    """Nodes in front of these whose memory these may write, by what names of functions tell."""
    here = set(nodes)
    asked = [one for node in nodes if changes(node) for one in node.all_input_nodes]
    known = set(asked)
    while asked:
        node = asked.pop()
        if node in here and (changes(node) or not lies_apart(node)):
            asked += [one for one in node.all_input_nodes if one not in known]
            known.update(node.all_input_nodes)
    return {node for node in known - here if not _is_given(node)}


def _is_given(node: Node) -> bool:
    return node.op in ("placeholder", "get_attr")


def _computes(node: Node) -> bool:
    return not _is_given(node) and node.target is not operator.getitem


def _split(gm: GraphModule, nodes: Sequence[Node], cut: int, reason: str) -> Parts:
    if cut == 0:
        reads = tuple(range(len(placeholders(gm))))
        return Parts(None, reads, gm, reason)
    front = [node for node in nodes[:cut] if not _is_given(node)]
    behind = nodes[cut:]
    needed = dict.fromkeys(one for node in behind for one in node.all_input_nodes)
    given = [node for node in nodes if _is_given(node)]
    passed = [node for node in front if node in needed]
    before, rest = Graph(), Graph()
    copied: dict[Node, Node] = {}
    for node in (*given, *front):
        copied[node] = before.node_copy(node, copied.__getitem__)
    before.output(tuple(copied[node] for node in passed))
    copied = {}
    read = [node for node in given if node in needed]
    for node in read:
        copied[node] = rest.node_copy(node, copied.__getitem__)
    for node in passed:
        copied[node] = rest.placeholder(node.name)
    for node in behind:
        copied[node] = rest.node_copy(node, copied.__getitem__)
    inputs = placeholders(gm)
    reads = tuple(inputs.index(node) for node in read if node.op == "placeholder")
    return Parts(_module(gm, before), reads, make_graph_module(gm, rest), reason)


def _module(gm: GraphModule, graph: Graph) -> GraphModule:
    made = make_graph_module(gm, graph)
    made.meta = dict(gm.meta)
    return made
