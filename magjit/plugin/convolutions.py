"""Convolutions: their biases apart, and which library computes one under symbols.

A library adds a bias in a kernel of its own, which reads and writes the whole result again; apart
from the convolution it is added wherever the result is read. Which library is chosen is no property
of the shapes.

Torch's fake convolution asks which library would be chosen, for the memory format of the result,
and so guards what that choice depends on, such as a batch of at least 16. Where input and weight
are contiguous the result is, whatever is chosen. Images on a CPU lie in memory alike whether oneDNN
or ATen's own loops make them, if these say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from magjit.plugin.fx_helpers import called

__all__ = ["bias_apart", "is_convolution", "unguarded_convolutions"]

aten = torch.ops.aten


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution of any kind."""
    if node.op != "call_function" or node.target is not aten.convolution.default:
        return False
    return isinstance(node.meta.get("val"), torch.Tensor)


def bias_apart(graph: Graph, node: Node) -> None:
    """The bias of a convolution is added by an operator of its own, which can be fused."""
    with graph.inserting_before(node.next):
        bias = node.args[2]
        for _ in range(node.meta["val"].dim() - 2):
            bias = called(graph, aten.unsqueeze.default, bias, -1)
        total = graph.call_function(aten.add.Tensor, (node, bias))
    total.meta = dict(node.meta)
    node.update_arg(2, None)
    node.replace_all_uses_with(total)
    total.update_arg(0, node)  # which was replaced there, too


@contextmanager
def unguarded_convolutions(shape_env: ShapeEnv) -> Iterator[None]:
    """No guards on the choice of a library, while fake convolutions of this environment run."""
    select = torch._C._select_conv_backend

    def selected(*args: Any, **kwargs: Any) -> Any:
        tensors = args[:2] or (kwargs.get("input"), kwargs.get("weight"))
        if all(isinstance(one, torch.Tensor) for one in tensors):
            with shape_env.suppress_guards():
                chosen = select(*args, **kwargs)
                if _is_alike(chosen, *tensors):
                    return chosen
        return select(*args, **kwargs)

    namespace: Any = torch._C
    namespace._select_conv_backend = selected
    try:
        yield
    finally:
        namespace._select_conv_backend = select


def _is_alike(chosen: Any, given: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the result lies in memory alike, whichever library computes it."""
    if given.is_contiguous() and weight.is_contiguous():
        return True
    namespace: Any = torch._C
    among = [namespace._ConvBackend.Mkldnn, namespace._ConvBackend.Slow2d]
    if given.dim() != 4 or given.device.type != "cpu" or chosen not in among:
        return False
    # Without oneDNN, large batches may go to NNPACK, whose result is contiguous.
    if not namespace._get_mkldnn_enabled():
        return False
    layout = namespace._conv_determine_backend_memory_format
    return len({layout(given, weight, one) for one in among}) == 1
