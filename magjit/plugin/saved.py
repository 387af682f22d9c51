"""What a forward graph keeps for its backward, where it changes its own inputs.

A partitioner takes an input for something that is there anyway: what the backward needs of it is
computed again from the input itself.  Where the program has changed the input meanwhile, that is
another value: up to torch 2.13 ``torch.compile`` gives wrong gradients then, without any sign, or
raises at the backward, according to where the change is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from magjit.errors import BackendError
from magjit.plugin.aliases import memory_of
from magjit.plugin.fx_helpers import called, placeholders, results_of, set_results
from magjit.plugin.inference import written_inputs

__all__ = ["keep_old_values", "keeping_old_values"]

aten = torch.ops.aten

Split = Callable[..., tuple[GraphModule, GraphModule]]


def keeping_old_values(split: Split) -> Split:
    """A partitioner whose forward graphs keep copies of inputs that change."""

    def keeping(joint: GraphModule, inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        behind = _changed_behind(joint)
        forward, backward = split(joint, inputs, **options)
        keep_old_values(forward, options["num_fwd_outputs"], behind)
        return forward, backward

    return keeping


def keep_old_values(
    forward: GraphModule, results: int, behind: Collection[str] = frozenset()
) -> None:
    """Have a forward graph keep copies where it keeps inputs that change, or views of them.

    Args:
        forward: is changed.
        results: how many outputs come before those that are kept for the backward.
        behind: names of inputs that AOTAutograd writes after the graph.

    Raises:
        BackendError: such an input has gaps in memory, which a copy has not.
    """
    changed = written_inputs(forward)
    changed |= {node for node in placeholders(forward) if node.name in behind}
    outputs = results_of(forward.graph)
    kept = [
        (position, node)
        for position, node in enumerate(outputs[results:], results)
        if isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)
        if not changed.isdisjoint(memory_of([node]))
    ]
    if not kept:
        return
    read = changed & memory_of(node for _, node in kept)
    copies = {node: _copied(forward, node) for node in placeholders(forward) if node in read}
    for position, node in kept:
        outputs[position] = _made_of(node, copies)
    set_results(forward, outputs)


def _changed_behind(joint: GraphModule) -> set[str]:
    """Names of the inputs that AOTAutograd writes after the forward, by what it says of outputs."""
    results = tree_leaves(joint.graph.output_node().meta.get("desc", ()))
    changed = [one.mutated_input for one in results if isinstance(one, InputMutationAOTOutput)]
    return {node.name for node in placeholders(joint) if node.meta.get("desc") in changed}


def _copied(forward: GraphModule, node: Node) -> Node:
    first = next(one for one in forward.graph.nodes if one.op != "placeholder")
    with forward.graph.inserting_before(first):
        copy = called(forward.graph, aten.clone.default, node)
    if copy.meta["val"].stride() != node.meta["val"].stride():
        raise BackendError(
            "an input with gaps in memory changes after it is used, and a gradient needs it",
            remedy="make the input contiguous, or use backend='eager'",
        )
    return copy


def _made_of(node: Node, copies: dict[Node, Node]) -> Node:
    """A view of an input as one of its copy."""
    if node in copies or node.op == "placeholder":
        return copies.get(node, node)
    if memory_of([node]).isdisjoint(copies):
        return node
    operands = {one: _made_of(one, copies) for one in node.all_input_nodes}
    if all(one is other for one, other in operands.items()):
        return node
    with node.graph.inserting_after(node):
        copies[node] = node.graph.node_copy(node, operands.__getitem__)
    return copies[node]
