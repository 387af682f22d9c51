"""Floats of a call as operands of kernels on another device than the CPU, where they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["floats_on_device"]

aten = torch.ops.aten


def floats_on_device(graph: Graph) -> None:
    """Copy tensors without dimensions to the device of the elementwise operators that use them.

    ATen's kernels take such a tensor of the CPU as a number; kernels that are generated read the
    memory of their device alone. The copy is one of some bytes for a call, which the host does not
    wait for: their memory is read before it returns.

    Args:
        graph: of ATen operators, with fake values in ``meta["val"]``; is changed.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    floats = {node for node in inputs if _is_float(node)}
    if not floats:
        return
    copies: dict[tuple[Node, torch.device], Node] = {}
    for node in nodes:
        device = _elsewhere(node)
        for given in node.all_input_nodes if device is not None else ():
            if given in floats:
                assert device is not None
                if (given, device) not in copies:
                    with graph.inserting_after(inputs[-1]):
                        copies[given, device] = _copied(graph, given, device)
                node.replace_input_with(given, copies[given, device])


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return False
    return value.dim() == 0 and value.dtype.is_floating_point


def _elsewhere(node: Node) -> torch.device | None:
    """The device of an elementwise operator's result, if that is not the CPU."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return None
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return value.device if tagged or node.target is aten.masked_fill.Tensor else None


def _copied(graph: Graph, given: Node, device: torch.device) -> Node:
    to_device: dict[str, Any] = {"device": device, "non_blocking": True}
    copied = graph.call_function(aten._to_copy.default, (given,), to_device)
    value = given.meta["val"]
    with value.fake_mode:
        copied.meta["val"] = torch.empty((), dtype=value.dtype, device=device)
    return copied
