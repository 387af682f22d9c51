"""The small sibling for Inductor: repeated operands are read once a group there too.

A pass over Inductor's functional graph, before it is scheduled. ``repeat_kv`` written as
``expand`` and ``reshape`` is a copy of all keys and values under Inductor; attention kernels that
know groups, and batched products over the rows of a group, read the heads where they are.
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from magjit.plugin.cache import code_digest
from magjit.plugin.virtual_tensors import grouping
from magjit.plugin.virtual_tensors.grouping import group_repeated

__all__ = ["WithoutCopies", "remove_needless_clones"]

aten = torch.ops.aten


class WithoutCopies(CustomGraphPass):
    """What Inductor takes as ``post_grad_custom_pre_pass``."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite the graph in place."""
        owner: Any = graph.owning_module
        group_repeated(owner, _is_kernel)
        remove_needless_clones(graph)

    def uuid(self) -> str:
        """Changes with what the pass does, so that cached results are not mixed up."""
        return code_digest(Path(grouping.__file__).parent)


def _is_kernel(product: Node) -> bool:
    """Inductor makes loops of products of single rows on the CPU, and fuses the copy into them."""
    value = product.meta["val"]
    return bool(value.device.type != "cpu" or value.shape[1] != 1)


def remove_needless_clones(graph: Graph) -> int:
    """Drop copies that have their operand's layout and that nothing can tell from it.

    Returns:
        How many were dropped.
    """
    written = _written(graph)
    dropped = 0
    for node in list(graph.nodes):
        if node.target is not aten.clone.default:
            continue
        (given,) = node.args
        if not isinstance(given, Node) or given.op != "call_function":
            continue
        if any(user.op == "output" for user in (*node.users, *given.users)):
            continue
        if _root(given) in written or _root(node) in written:
            continue
        one, other = node.meta["val"], given.meta["val"]
        if one.shape == other.shape and one.stride() == other.stride():
            node.replace_all_uses_with(given)
            graph.erase_node(node)
            dropped += 1
    return dropped


def _written(graph: Graph) -> set[Node]:
    """The owners of memory that some operator writes."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.is_mutable:
            found |= {_root(one) for one in node.all_input_nodes}
    return found


def _root(node: Node) -> Node:
    """The tensor whose memory a node's may be: views and whatever may give a view are followed."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and all(one.alias_info is None for one in schema.returns):
            return node
        node = node.args[0]
    return node
