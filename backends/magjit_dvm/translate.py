"""ATen operators as instructions: what the VM can do.

Each handler adds an operator to a ``Builder`` and returns the value that it computes, a
tuple of values for operators with several results.  Composite operators (softmax, layer
norm and its backward, GELU and so on) are decomposed by their handlers, so that their
parts join the group around them.
"""

from __future__ import annotations

from torch.fx import Node as FxNode

from magjit_dvm import (
    extremes,
    gathering,
    operators_creation,
    operators_elementwise,
    operators_reductions,
    operators_views,
)
from magjit_dvm.builder import Builder
from magjit_dvm.operators import HANDLERS

__all__ = ["handles", "translate"]

# Imported for the handlers that they register.
_MODULES = (
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
    builder.values[node] = HANDLERS[node.target](builder, node)
