"""From the torch-level graph of a program to functional ATen, without AOTAutograd's cost.

Where no gradient is asked for, one trace over fake tensors does: mutations of
intermediate tensors become new values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["lower_for_inference"]


def lower_for_inference(
    gm: GraphModule, example_inputs: Sequence[Any], fake_mode: FakeTensorMode | None
) -> GraphModule | None:
    """The ATen graph that ``gm`` runs for inputs like these fake ones.

    Returns:
        None where the program writes its inputs: what then holds of them (which of them
        overlap) is for AOTAutograd to find out.
    """
    function = torch.func.functionalize(gm.forward, remove="mutations")
    with torch.no_grad(), _taking_constants(fake_mode):
        lowered: GraphModule = make_fx(function, _allow_non_fake_inputs=True)(*example_inputs)
    lowered.graph.eliminate_dead_code(_has_effects)
    inputs = {node for node in lowered.graph.nodes if node.op == "placeholder"}
    for node in lowered.graph.nodes:
        if node.op == "call_function" and _writes(node, inputs):
            return None
    return lowered


def _has_effects(node: torch.fx.Node) -> bool:
    """Whether a node matters although nothing uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags


@contextmanager
def _taking_constants(fake_mode: FakeTensorMode | None) -> Iterator[None]:
    """Tensors that the graph holds are real; the mode's owner does not expect any."""
    if fake_mode is None:
        yield
        return
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        with fake_mode:
            yield
    finally:
        fake_mode.allow_non_fake_inputs = before


def _writes(node: torch.fx.Node, inputs: set[torch.fx.Node]) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return False
    return any(one in inputs for one in node.all_input_nodes)
