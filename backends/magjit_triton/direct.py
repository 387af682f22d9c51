"""The same operators by a shorter way than the dispatcher's Python entry."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from magjit.plugin.writes import updated
from magjit_triton.emit import as_strided

__all__ = ["call_directly"]

aten = torch.ops.aten

_FUNCTIONS = (
    "abs acos add addcdiv addcmul addmm amax amin asin atan baddbmm bmm cat ceil clamp clamp_max "
    "clamp_min clone cos cosh div empty_strided erf erfc exp exp2 expm1 floor log log10 log1p log2 "
    "maximum minimum mm mul neg permute reciprocal round rsqrt select sigmoid sin sinh split "
    "split_with_sizes sqrt squeeze stack sub t tan tanh transpose trunc unbind unsqueeze where "
    "convolution embedding native_layer_norm native_group_norm relu "
    "_native_batch_norm_legit_no_training _scaled_dot_product_flash_attention_for_cpu _softmax"
)
_METHODS = ("view", "expand", "copy_", "index_copy_", "fill_")
_NN = ("gelu", "silu", "elu", "hardsigmoid", "hardtanh", "leaky_relu", "softplus")


def _table() -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name in _FUNCTIONS.split():
        table[name] = getattr(torch, name, None)
    for name in _METHODS:
        table[name] = getattr(torch.Tensor, name, None)
    for name in _NN:
        table[name] = getattr(torch._C._nn, name, None)
    return {name: function for name, function in table.items() if function is not None}


_TABLE = _table()
# These overloads mean something else, or are given arguments that the short way names otherwise.
_OVERLOADS = ("default", "Tensor", "out", "int", "dim", "dims", "self", "self_out", "Scalar")


def call_directly(gm: GraphModule) -> None:
    """Replace targets; leave out what changes nothing when the graph runs."""
    for node in list(gm.graph.nodes):
        if node.target is updated:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif node.target is as_strided and _starts_its_memory(node.args[0]):
            node.target = torch.as_strided
        elif isinstance(node.target, torch._ops.OpOverload):
            packet = node.target._schema.name.removeprefix("aten::")
            overload = node.target._overloadname
            if packet in _TABLE and overload in _OVERLOADS and _fits(node, packet):
                node.target = _TABLE[packet]
    gm.recompile()


def _starts_its_memory(node: Any) -> bool:
    """Whether a tensor is memory of the graph's own from its first element."""
    return node.target is aten.empty_strided.default or node.target is torch.empty_strided


def _fits(node: Any, packet: str) -> bool:
    tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    if packet == "empty_strided":
        return True
    # A Python method or function of this name would dispatch on its first tensor.
    return bool(tensors)
