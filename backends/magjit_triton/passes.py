"""The pipeline of one ATen graph, as a list of named passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule, Node

from magjit.plugin import BackendContext
from magjit.plugin.aliases import is_alias, written_by
from magjit.plugin.fx_helpers import copy_graph_module
from magjit.plugin.virtual_tensors.accounts import Account, account, bytes_by_itself
from magjit.plugin.virtual_tensors.calls import operand_nodes
from magjit.plugin.virtual_tensors.costs import CostModel, left_to_move
from magjit.plugin.virtual_tensors.grouping import group_repeated
from magjit.plugin.virtual_tensors.opportunities import (
    Movements,
    Opportunities,
    find_opportunities,
)
from magjit.plugin.virtual_tensors.refining import refined
from magjit.plugin.virtual_tensors.search import Strategy, search
from magjit.plugin.writes import updated, write_early, write_late
from magjit_triton.decisions import Decisions
from magjit_triton.direct import call_directly
from magjit_triton.emit import emit
from magjit_triton.kernels import AtenKernels
from magjit_triton.measuring import Stopwatch, example_inputs
from magjit_triton.reuse import reuse_memory, write_directly
from magjit_triton.settings import DEFAULTS, Settings
from magjit_triton.strides import correct_strides

__all__ = ["bytes_before", "compiled_graph"]


def compiled_graph(
    gm: GraphModule, context: BackendContext, settings: Settings = DEFAULTS
) -> GraphModule:
    """The graph that runs in place of an ATen graph."""
    decisions = Decisions.of(gm, settings, "aten")
    before = bytes_before(gm) if context.want_dumps else {}
    merge_items(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.meta.get("val") is None:
            node.meta["val"] = ()  # Checks have no results.
    correct_strides(gm)
    group_repeated(gm)
    search = _Search.of(gm, settings)
    strategy = search.decided(decisions, settings)
    context.dump("points_to.txt", lambda: described(strategy))
    made = search.emitted(strategy)
    context.dump("triton_graph.py", lambda: readable(made))
    title = f"graph {len(context.movement) + 1}"
    context.explain_movement(
        lambda: account(title, before, bytes_by_itself(made.graph), pointed_to(strategy))
    )
    call_directly(made)
    return made


@dataclass
class _Search:
    """The search for a strategy of one graph, and the graphs that strategies become."""

    gm: GraphModule
    kernels: AtenKernels
    model: CostModel
    opportunities: Opportunities

    @classmethod
    def of(cls, gm: GraphModule, settings: Settings) -> _Search:
        writes = overwritten(gm.graph, write_in_place(gm.graph))
        movements = Movements.of(gm.graph)
        kernels = AtenKernels(movements)
        model = CostModel(gm.graph, movements, kernels, writes, settings.objective, is_alias)
        fixed = escaping(gm)
        opportunities = find_opportunities(gm.graph, fixed, kernels.can_write, movements)
        return cls(gm, kernels, model, opportunities)

    def decided(self, decisions: Decisions, settings: Settings) -> Strategy:
        """What was decided before, or is now."""
        order = self.model.order
        known = decisions.strategy(self.opportunities, self.model, order)
        if known is None:
            known = search(self.opportunities, self.model.gain, self.model.total)
            if settings.measures_places:
                known = self.measured(known)
            decisions.choose(known, order)
            decisions.keep()
        return without_copies(self.gm, known, self.kernels)

    def emitted(self, strategy: Strategy) -> GraphModule:
        """The graph under a strategy."""
        made = emit(self.gm, strategy, self.kernels)
        write_directly(made)
        reuse_memory(made)
        return made

    def measured(self, strategy: Strategy) -> Strategy:
        """The strategy after trying on the device what the model takes for as good."""
        inputs = example_inputs(self.gm)
        if inputs is None:
            return strategy
        watch = Stopwatch(inputs)
        programs: dict[int, tuple[Strategy, Callable[..., Any]]] = {}

        def program(one: Strategy) -> Callable[..., Any]:
            if id(one) not in programs:
                made = self.emitted(without_copies(self.gm, one, self.kernels))
                call_directly(made)
                programs[id(one)] = one, made.forward
            return programs[id(one)][1]

        def faster(one: Strategy, other: Strategy) -> bool | None:
            if watch.is_over():
                return None
            return watch.is_faster(program(one), program(other))

        try:
            return refined(strategy, self.opportunities, self.model, faster)
        finally:
            watch.stop()


def merge_items(graph: Graph) -> None:
    """One name for one result of an operator of several."""
    known: dict[tuple[object, ...], Node] = {}
    for node in list(graph.nodes):
        if node.target is operator.getitem:
            first = known.setdefault(node.args, node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def write_in_place(graph: Graph) -> dict[Node, Node]:
    """Write parts of inputs where they are; of which values have been overwritten by what."""
    writes = write_early(graph)
    write_late(graph)
    return writes


def overwritten(graph: Graph, writes: Mapping[Node, Node]) -> dict[Node, Node]:
    """Every tensor whose memory an operator changes, with the first that does.

    Args:
        graph: with updates done in place.
        writes: versions of a memory of which each is overwritten later than the one before.
    """
    order = {node: number for number, node in enumerate(graph.nodes)}
    found = dict(writes)
    for node in graph.nodes:
        if node in writes.values():
            continue
        for memory in written_by(node):
            # Views' views too: what is written may be a part of a larger memory.
            while is_alias(memory) or memory.target in (operator.getitem, updated):
                (memory, *_) = memory.all_input_nodes
            if memory not in found or order[node] < order[found[memory]]:
                found[memory] = node
    waiting = list(found)
    while waiting:
        memory = waiting.pop()
        for user in memory.users:
            if is_alias(user) or user.target is operator.getitem:
                if user not in found or order[found[memory]] < order[found[user]]:
                    found[user] = found[memory]
                    waiting.append(user)
    return found


def without_copies(gm: GraphModule, strategy: Strategy, kernels: AtenKernels) -> Strategy:
    """Virtual tensors that would have to be made to be read are physical.

    So are those of another layout than in eager mode of which a view is left: who reads the view
    expects eager's.
    """
    chosen = dict(strategy.chosen)
    while True:
        strategy = Strategy(dict(chosen))
        for node in gm.graph.nodes:
            movement = node in kernels.movements.directions
            read = (
                left_to_move(node, kernels.movements, strategy) if movement else operand_nodes(node)
            )
            for one in read if node.op == "call_function" else ():
                viewed = movement and is_alias(node)
                if kernels.is_copied(one, strategy) or (
                    viewed and not kernels.lies_as_in_eager(one, strategy)
                ):
                    chosen.pop(one, None)
        if len(chosen) == len(strategy.chosen):
            return strategy


def escaping(gm: GraphModule) -> dict[Node, str]:
    """Tensors that share memory with what the graph returns: they stay what they are."""
    found: dict[Node, str] = {}
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    waiting = list(output.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = "shares memory with an output"
        if is_alias(node) or getattr(node.target, "__name__", "") == "getitem":
            waiting += node.all_input_nodes
    return found


def bytes_before(gm: GraphModule) -> Account:
    """Bytes that the operators of eager mode move: what is updated is updated in place there."""
    copy = copy_graph_module(gm)
    write_in_place(copy.graph)
    return bytes_by_itself(copy.graph)


def pointed_to(strategy: Strategy) -> dict[Node, list[tuple[Node, str]]]:
    """Virtual tensor → those that it points to, with the operator that this makes needless."""
    return {
        tensor: [
            (target, one.operator.name)
            for target in dict.fromkeys(one.targets)
            if target is not None
        ]
        for tensor, one in strategy.chosen.items()
    }


def described(strategy: Strategy) -> str:
    """The points-to graph as text."""
    lines = [str(opportunity) for opportunity in strategy.chosen.values()]
    return "\n".join([*lines, ""])


def readable(gm: GraphModule) -> str:
    """The graph with shapes, strides and devices."""
    return str(gm.print_readable(print_output=False, include_stride=True, include_device=True))
