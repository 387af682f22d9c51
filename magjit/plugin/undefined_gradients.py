"""Gradients that are undefined in eager mode, and zeros where a graph's backward is compiled.

A compiled backward computes all gradients of a graph, with zeros for results whose gradients
nobody asks for.  In eager mode what only those results depend on has no gradient: ``grad`` stays
None, and an optimizer leaves a parameter alone that it would decay for a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    IntermediateBaseAOTOutput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from magjit.plugin.fx_helpers import placeholders, results_of
from magjit.plugin.fx_nodes import called_name
from magjit.plugin.protocol import CompiledGraph

__all__ = ["Reaching", "backward_of"]

Hook = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]
Split = Callable[..., tuple[GraphModule, GraphModule]]
aten = torch.ops.aten

_OF_ZERO_SLOPE = ("floor", "ceil", "round", "trunc", "sign", "sgn", "floor_divide", "heaviside")
_BACKWARD = "CompiledFunctionBackward"


@dataclass
class Reaching:
    """Which results of a graph the gradient of an input depends on, for those that not all reach.

    Attributes:
        results: position of an input → positions of results.
    """

    results: dict[int, frozenset[int]] = field(default_factory=dict)

    def noting(self, split: Split) -> Split:
        """A partitioner that first takes a joint graph's word for it."""

        def note(joint: GraphModule, inputs: Any, **options: Any) -> Any:
            self.results = _reaching(joint)
            return split(joint, inputs, **options)

        return note

    def applied(self, compiled: CompiledGraph) -> CompiledGraph:
        """A compiled graph whose gradients are undefined where those of all results are."""
        if not self.results:
            return compiled
        known: tuple[int, Hook] | None = None

        def call(*inputs: Any) -> Sequence[Any]:
            nonlocal known
            results: Sequence[Any] = compiled(*inputs)
            known = known or _undefining(inputs, results, self.results)
            if known is not None and (found := backward_of(results[known[0]])) is not None:
                found[0].register_hook(known[1])
            return results

        return call


def _reaching(joint: GraphModule) -> dict[int, frozenset[int]]:
    """What ``Reaching.results`` is, by the paths of a joint graph from tangents to gradients.

    Of an input none where a path comes from anything else that has a gradient: an input that was
    changed, or zeros, whose tangent a decomposition may have removed.
    """
    tangents = [one for one in placeholders(joint) if _tangent_of(one) is not None]
    if len(tangents) < 2:
        return {}
    reached: dict[Node, frozenset[Node]] = {one: frozenset([one]) for one in tangents}
    for node in joint.graph.nodes:
        if node.op not in ("placeholder", "output"):
            given = (reached.get(one, frozenset()) for one in node.all_input_nodes)
            reached[node] = frozenset().union(*given, filter(_is_made_here, _summands(node)))
    found = {}
    level = _reached_without_slope(joint)
    for result, desc in _described(joint):
        if not isinstance(desc, GradAOTOutput):
            continue
        sources = reached.get(result, frozenset())
        if not isinstance(desc.grad_of, PlainAOTInput) or len(sources) in (0, len(tangents)):
            continue
        known = [_position_of(_tangent_of(one)) for one in sources]
        positions = {one for one in known if one is not None}
        if None not in known:
            found[desc.grad_of.idx] = frozenset(positions | level.get(desc.grad_of.idx, set()))
    return found


def _reached_without_slope(joint: GraphModule) -> dict[int, set[int]]:
    """By way of steps, whose slope is zero: positions of inputs → positions of results.

    Decompositions make zeros of such a gradient, which come from no tangent any more.
    """
    nodes = list(joint.graph.nodes)
    if not any(called_name(node) in _OF_ZERO_SLOPE for node in nodes):
        return {}
    made_of: dict[Node, frozenset[int]] = {}
    behind: dict[Node, frozenset[int]] = {}
    for node in nodes:
        desc = node.meta.get("desc") if node.op == "placeholder" else None
        own = [desc.idx] if isinstance(desc, PlainAOTInput) else []
        made_of[node] = frozenset(own).union(*(made_of[one] for one in node.all_input_nodes))
        steps = made_of[node] if called_name(node) in _OF_ZERO_SLOPE else frozenset()
        behind[node] = steps.union(*(behind[one] for one in node.all_input_nodes))
    found: dict[int, set[int]] = {}
    for result, desc in _described(joint):
        if isinstance(desc, PlainAOTOutput):
            for one in behind[result]:
                found.setdefault(one, set()).add(desc.idx)
    return found


def _described(joint: GraphModule) -> list[tuple[Node, Any]]:
    """The results of a joint graph and what AOTAutograd says of each; none if it says nothing."""
    whose = tree_leaves(joint.graph.output_node().meta.get("desc", ()), is_leaf=_is_missing)
    results = results_of(joint.graph)
    if len(whose) != len(results):
        return []
    pairs = zip(results, whose, strict=True)
    return [(result, desc) for result, desc in pairs if isinstance(result, Node)]


def _position_of(output: Any) -> int | None:
    """The result that has the gradient of a tangent: itself, or one in the same memory."""
    if isinstance(output, IntermediateBaseAOTOutput):
        output = output.base_of
    return output.idx if isinstance(output, PlainAOTOutput) else None


def _tangent_of(node: Node) -> Any:
    desc = node.meta.get("desc")
    return desc.output if isinstance(desc, TangentAOTInput) else None


def _summands(node: Node) -> Sequence[Node]:
    return node.all_input_nodes if node.target is aten.add.Tensor else ()


def _is_made_here(node: Node) -> bool:
    """Whether a tensor is made of none."""
    return node.op == "call_function" and not node.all_input_nodes


def _is_missing(one: object) -> bool:
    return one is None


def _undefining(
    inputs: Sequence[Any], results: Sequence[Any], reaching: Mapping[int, frozenset[int]]
) -> tuple[int, Hook] | None:
    """What leaves out of a backward what eager mode would not compute, and one of its results.

    Where gradients are among the backward's is the same in all calls; None where it is not known.
    """
    places: dict[int, int] = {}
    found: set[Any] = set()
    for position in frozenset().union(*reaching.values()):
        made_by = backward_of(results[position])
        if made_by is None:
            return None
        backward, places[position] = made_by
        found.add(backward)
    if len(found) != 1:
        return None
    (backward,) = found
    edges = _edges(backward, inputs, reaching)
    wanted = [
        (edges[position], [places[one] for one in sources])
        for position, sources in reaching.items()
        if position in edges
    ]

    def undefine(found: Sequence[Any], given: Sequence[Any]) -> tuple[Any, ...]:
        made = list(found)
        for edge, sources in wanted:
            if all(given[one] is None for one in sources):
                made[edge] = None
        return tuple(made)

    return (next(iter(places)), undefine) if wanted else None


def backward_of(result: Any) -> tuple[Any, int] | None:
    """The compiled backward through which a result's gradient goes first, and as which output's."""
    if not isinstance(result, torch.Tensor):
        return None
    node, number = result.grad_fn, result.output_nr
    while node is not None and type(node).__name__ != _BACKWARD:  # of a view of an output
        if len(node.next_functions) != 1:
            return None
        node, number = node.next_functions[0]
    return None if node is None else (node, number)


def _edges(backward: Any, inputs: Sequence[Any], positions: Mapping[int, Any]) -> dict[int, int]:
    """Where the gradients of inputs are among those of a backward."""
    found = {}
    for position in positions:
        one = inputs[position]
        if not isinstance(one, torch.Tensor) or not one.requires_grad:
            continue
        for edge, (node, number) in enumerate(backward.next_functions):
            ends_in_it = getattr(node, "variable", None) is one
            if ends_in_it or (node is not None and (node, number) == (one.grad_fn, one.output_nr)):
                found[position] = edge
    return found
