"""What a shape environment has assumed of the inputs of a graph, as guards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch.fx.experimental.symbolic_shapes import ShapeEnv

from magjit.plugin.backend_guards import ShapeGuard

__all__ = ["shape_guards"]

_INPUT_NAME = re.compile(r"L\['input_(\d+)'\]")


def shape_guards(
    shape_env: ShapeEnv,
    values: Sequence[Any],
    sources: Sequence[Any],
    contexts: Sequence[Any],
    *,
    constants: bool = True,
) -> list[ShapeGuard]:
    """The conditions on the sizes of symbolic inputs, and of the ints among the inputs.

    Args:
        shape_env: where the symbols come from.
        values: fake tensors and symbolic ints.
        sources: name the inputs ``input_0``, ``input_1`` and so on, by position in the graph.
        contexts: by which the fake tensors were made; None for ints.
        constants: also what is no symbol, or has become a constant.
    """
    expressions = shape_env.produce_guards(
        list(values), list(sources), input_contexts=list(contexts), ignore_static=not constants
    )
    found = []
    for expression in expressions:
        read = tuple(sorted({int(i) for i in _INPUT_NAME.findall(expression)}))
        found.append(ShapeGuard(_INPUT_NAME.sub(r"inputs[\1]", expression), read))
    return found
