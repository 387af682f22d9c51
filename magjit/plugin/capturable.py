"""Which ATen graphs can be captured as CUDA graphs, and what such a capture holds for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

from magjit.plugin.fx_nodes import draws_random
from magjit.plugin.views_apart import is_symbolic, tensors_of

__all__ = ["NOTHING_VARIES", "Varying", "can_be_captured", "varying_inputs"]


def can_be_captured(gm: GraphModule, *, varies: bool = False) -> bool:
    """Whether everything that a graph does is launched on one CUDA device and draws no numbers.

    Args:
        gm: ATen operators.
        varies: each combination of sizes is captured for itself, so that they may be symbols.
    """
    devices: set[torch.device] = set()
    for node in gm.graph.nodes:
        if not varies and (is_symbolic(node) or _is_input_but_no_tensor(node)):
            return False
        for one in tensors_of(node):
            devices.add(one.device)
        tags = getattr(node.target, "tags", ())
        if draws_random(node) or torch.Tag.dynamic_output_shape in tags:
            return False
        if torch.Tag.data_dependent_output in tags:
            return False
    return len(devices) == 1 and next(iter(devices)).type == "cuda"


def _is_input_but_no_tensor(node: Node) -> bool:
    return node.op == "placeholder" and not isinstance(node.meta.get("val"), torch.Tensor)


class Varying(NamedTuple):
    """What tells apart the sizes that a function is called with.

    Attributes:
        tensors: positions of inputs whose shapes have symbols.
        numbers: positions of integers.
    """

    tensors: tuple[int, ...]
    numbers: tuple[int, ...]


NOTHING_VARIES = Varying((), ())


def varying_inputs(gm: GraphModule) -> Varying | None:
    """What a captured graph would hold for; None where it depends on numbers beside integers."""
    tensors, numbers = [], []
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for position, node in enumerate(given):
        if not _is_input_but_no_tensor(node):
            tensors += [position] * is_symbolic(node)
        elif node.users:
            if not isinstance(node.meta.get("val"), int | torch.SymInt):
                return None
            numbers.append(position)
    return Varying(tuple(tensors), tuple(numbers))
