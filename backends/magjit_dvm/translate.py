"""ATen operators as instructions: what the VM can do.

Each handler adds an operator to a ``Builder`` and returns the value that it computes, a
tuple of values for operators with several results.  Composite operators (softmax, layer
norm and its backward, GELU and so on) are decomposed by their handlers, so that their
parts join the group around them.
"""

from __future__ import annotations

import torch
from torch.fx import Node as FxNode

from magjit_dvm import (
    drawing,
    extremes,
    gathering,
    operators_creation,
    operators_elementwise,
    operators_reductions,
    operators_views,
)
from magjit_dvm.across import check_unused
from magjit_dvm.builder import Builder, NotFusable
from magjit_dvm.cuda.support import missing_words
from magjit_dvm.operators import HANDLERS

__all__ = ["handles", "translate"]

# Imported for the handlers that they register.
_MODULES = (
    drawing,
    extremes,
    gathering,
    operators_creation,
    operators_elementwise,
    operators_reductions,
    operators_views,
)


def handles(node: FxNode) -> bool:
    """Whether some handler takes the operator of ``node``, its arguments left aside."""
    return node.op == "call_function" and node.target in HANDLERS


def translate(builder: Builder, node: FxNode) -> None:
    """Add ``node`` to the group.

    Raises:
        NotFusable: it does not fit; the builder is then spoiled.
    """
    before = len(builder.nodes)
    builder.values[node] = HANDLERS[node.target](builder, node)
    check_unused(builder.nodes, before)
    made = node.meta["val"]
    for one in made if isinstance(made, (tuple, list)) else (made,):
        if isinstance(one, torch.Tensor):
            builder.on(one.device)
    if builder.device is not None and builder.device.type == "cuda":
        for number in range(before, len(builder.nodes)):
            reason = missing_words(builder.nodes, number)
            if reason:
                raise NotFusable(reason)
