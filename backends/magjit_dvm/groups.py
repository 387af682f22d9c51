"""A graph that has been divided into fused operators and single nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.fx import Node as FxNode

from magjit_dvm.program import Program

__all__ = [
    "APART",
    "CASTS",
    "OF_READERS",
    "VIEWS",
    "FusedGroup",
    "Fusion",
    "Size",
    "operands_of",
    "results_of",
]

aten = torch.ops.aten
OF_READERS = "magjit_dvm: of readers"
"""In a node's ``meta``: it is made once more, for its readers, and not where its operands are."""
APART = "magjit_dvm: apart"
"""It is written to memory: what reads it is fused with others."""
CASTS = frozenset({aten._to_copy.default, torch.ops.prims.convert_element_type.default})
VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
"""These cost nothing by themselves: used outside of their group, ATen makes the view."""
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Size:
    """A sum of ints that each call finds: numbers, nodes, and sizes of tensors."""

    terms: tuple[int | FxNode | tuple[FxNode, int], ...]

    @property
    def nodes(self) -> list[FxNode]:
        """What it reads."""
        found = [one[0] if isinstance(one, tuple) else one for one in self.terms]
        return [one for one in found if isinstance(one, FxNode)]


@dataclass(slots=True)
class FusedGroup:
    """One fused operator.

    Attributes:
        nodes: what it computes, in the graph's order.
        outputs: those of them that a call returns.
        program: for any sizes.
        arguments: what each call passes, in order.
        values: what each output of the program is, where some are parts of wholes.
        stores: copies to inputs, which it does by itself (``in_place.py``).
        cube: which of the arguments is computed along with the group, panel by panel, or -1.
    """

    nodes: list[FxNode]
    outputs: list[FxNode] = field(default_factory=list)
    program: Program | None = None
    arguments: list[FxNode | int | Size] = field(default_factory=list)
    values: list[FxNode] = field(default_factory=list)
    stores: list[FxNode] = field(default_factory=list)
    cube: int = -1

    @property
    def device(self) -> torch.device:
        """Where its tensors are; it has no nodes where it copies a part of a whole."""
        given = (one for one in self.arguments if isinstance(one, FxNode))
        found = (node.meta.get("val") for node in (*self.nodes, *given))
        return next((one.device for one in found if isinstance(one, torch.Tensor)), _CPU)

    @property
    def on_gpu(self) -> bool:
        """Whether its tensors are on an NVIDIA GPU."""
        return self.device.type == "cuda"

    @property
    def operands(self) -> list[FxNode]:
        """What must have been computed before."""
        nodes = [one for one in self.arguments if isinstance(one, FxNode)]
        nodes += (node for one in self.arguments if isinstance(one, Size) for node in one.nodes)
        if self.cube >= 0:
            product = self.arguments[self.cube]
            assert isinstance(product, FxNode)
            nodes.remove(product)
            nodes += product.all_input_nodes
        return nodes

    @property
    def written(self) -> list[FxNode]:
        """Those arguments that are wholes: the group writes parts of them."""
        outputs = self.program.outputs if self.program is not None else ()
        found = [self.arguments[one.whole] for one in outputs if one.whole >= 0]
        return [one for one in found if isinstance(one, FxNode)]


@dataclass(slots=True)
class Fusion:
    """A graph as a sequence of fused operators and single nodes, and why nodes stayed single.

    Attributes:
        alone: of single nodes that ATen runs as fast, what they are as fused operators.
        stored: of single nodes, copies that a fused operator before them does.
    """

    steps: list[FusedGroup | FxNode]
    reasons: dict[FxNode, str]
    alone: dict[FxNode, FusedGroup] = field(default_factory=dict)
    stored: set[FxNode] = field(default_factory=set)

    @property
    def groups(self) -> list[FusedGroup]:
        """The fused operators."""
        return [step for step in self.steps if isinstance(step, FusedGroup)]


class _Step(Protocol):
    """What is more than one node, in a sequence of what runs."""

    @property
    def operands(self) -> list[FxNode]: ...
    @property
    def outputs(self) -> list[FxNode]: ...


def operands_of(step: FxNode | _Step) -> list[FxNode]:
    """What must have been computed before a step."""
    return step.all_input_nodes if isinstance(step, FxNode) else step.operands


def results_of(step: FxNode | _Step) -> list[FxNode]:
    """What a step computes."""
    return [step] if isinstance(step, FxNode) else step.outputs
