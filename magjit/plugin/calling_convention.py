"""Bring a graph into the form that AOTAutograd expects of its front end, and back.

Two things are beyond what it takes, and Dynamo never gives it: one tensor as several
inputs, and outputs that are constants.  ``simplify`` removes both from a graph, and the
``CallingConvention`` puts them back around the compiled one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from magjit.plugin.backend_guards import BackendGuard, SameInput
from magjit.plugin.fx_helpers import placeholders
from magjit.plugin.inputs import GraphInput, TensorInput
from magjit.plugin.protocol import CompiledGraph

__all__ = ["CallingConvention", "simplify"]


@dataclass(frozen=True, slots=True)
class CallingConvention:
    """How to call a simplified graph with the inputs of the original one.

    Attributes:
        kept: for each input of the simplified graph, its position in the original one.
        repeated: position of an input left out, to the position of the equal one.
        outputs: for each output of the original graph, its position among those of the
            simplified graph, or ``None`` for a constant.
        constants: the outputs with the computed ones blank.
    """

    kept: tuple[int, ...]
    repeated: dict[int, int]
    outputs: tuple[int | None, ...]
    constants: tuple[Any, ...]

    def guards(self, added: Sequence[BackendGuard]) -> list[BackendGuard]:
        """Guards on the original inputs, given those on the simplified graph's."""
        moved = [guard.at(self.kept) for guard in added]
        return moved + [SameInput(first, other) for other, first in self.repeated.items()]

    def wrap(self, compiled: CompiledGraph) -> CompiledGraph:
        """A callable with the original convention; ``compiled`` itself when that is the same."""
        if not self.repeated and all(position is not None for position in self.outputs):
            return compiled
        kept, outputs, constants = self.kept, self.outputs, self.constants

        def call(*inputs: Any) -> Sequence[Any]:
            computed = compiled(*[inputs[i] for i in kept])
            return tuple(
                constant if position is None else computed[position]
                for position, constant in zip(outputs, constants, strict=True)
            )

        return call


def simplify(gm: GraphModule, inputs: Sequence[GraphInput]) -> CallingConvention:
    """Make one placeholder of those for one tensor, and drop constant outputs; changes ``gm``."""
    kept, repeated = _merge_repeated_inputs(gm, inputs)
    outputs, constants = _drop_constant_outputs(gm)
    if repeated or None in outputs:
        gm.recompile()
    return CallingConvention(kept, repeated, outputs, constants)


def _merge_repeated_inputs(
    gm: GraphModule, inputs: Sequence[GraphInput]
) -> tuple[tuple[int, ...], dict[int, int]]:
    nodes = placeholders(gm)
    first: dict[int, int] = {}
    kept: list[int] = []
    repeated: dict[int, int] = {}
    for position, given in enumerate(inputs):
        identity = _identity(given)
        if identity is None or identity not in first:
            kept.append(position)
            if identity is not None:
                first[identity] = position
            continue
        repeated[position] = first[identity]
        nodes[position].replace_all_uses_with(nodes[first[identity]])
        gm.graph.erase_node(nodes[position])
    return tuple(kept), repeated


def _identity(given: GraphInput) -> int | None:
    if isinstance(given, TensorInput) and given.description is not None:
        return given.description.id
    return None


def _drop_constant_outputs(gm: GraphModule) -> tuple[tuple[int | None, ...], tuple[Any, ...]]:
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    results = output.args[0]
    assert isinstance(results, (tuple, list)), "the output of a graph is a tuple"
    computed = [one for one in results if isinstance(one, Node)]
    places = iter(range(len(computed)))
    positions = tuple(next(places) if isinstance(one, Node) else None for one in results)
    constants = tuple(None if isinstance(one, Node) else one for one in results)
    if len(computed) < len(results):
        output.args = (tuple(computed),)
    return positions, constants
