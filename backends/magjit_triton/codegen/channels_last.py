"""Convolutions in channels-last memory: the order in which the library's quick kernels read.

Given another order, the library rearranges operand and result in kernels of its own.  Here fused
kernels write what a convolution reads in that order, and what follows keeps it; where the graph's
results must lie as in eager mode, the kernel that makes them writes that order, and reads inputs
as they lie: a copy that convolutions alone read is free again when they are done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from magjit.plugin.convolutions import is_convolution
from magjit.plugin.fx_nodes import may_follow_strides
from magjit_triton.codegen.convolutions import is_grouped_product
from magjit_triton.codegen.graphs import is_tensor, mutates

__all__ = ["in_channels_last"]

aten = torch.ops.aten
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_MOST_RESTORED = 2
_WIDE = 64
_LARGE_FILTER = 25


class _Impossible(Exception):
    """The graph cannot be followed in another order."""


def in_channels_last(gm: GraphModule) -> None:
    """Bring convolutions' operands into channels-last memory, if that pays; strides follow."""
    found = [node for node in gm.graph.nodes if _is_movable(node)]
    if not found or not _pays(found):
        return
    rewrite = _Rewrite(gm)
    try:
        rewrite.run(set(found))
    except (_Impossible, RuntimeError, TypeError, NotImplementedError):
        rewrite.undo()


def _is_movable(node: Node) -> bool:
    """Whether a node is a convolution that has another order."""
    if not is_convolution(node):
        return False
    value = node.meta["val"]
    return value.dim() == 4 and value.dtype in _FLOATS


def _pays(convolutions: list[Node]) -> bool:
    """Whether the library's quick kernels do most of the work, and none in groups is slowed.

    Seen on an H200 with TF32: from 64 channels on, 1.1 to 1.7 times as fast in this order; with
    fewer, or where some convolutions are grouped, down to 0.7 times.  But of single channels by
    filters of 5 x 5 in float32, 2.4 times as fast; and what becomes a product does not count.
    """
    wide = total = 0
    for node in convolutions:
        result, weight = node.meta["val"], node.args[1].meta["val"]  # type: ignore[union-attr]
        if any(isinstance(size, torch.SymInt) for size in (*result.shape, *weight.shape)):
            return False
        if is_grouped_product(node):
            continue
        slow = _is_slow_by_channels(node, weight)
        if node.args[8] != 1 and not slow:
            return False
        work = result.numel() * weight[0].numel()
        total += work
        channels = weight.shape[0] if node.args[6] else weight.shape[1]
        wide += work if slow or channels >= _WIDE else 0
    return 2 * wide > total


def _is_slow_by_channels(node: Node, weight: torch.Tensor) -> bool:
    """Whether a convolution of single channels has no quick kernel but in this order."""
    if node.args[6] or weight.shape[1] != 1 or node.args[8] != weight.shape[0]:
        return False
    return weight.dtype == torch.float32 and weight[0].numel() >= _LARGE_FILTER


class _Rewrite:
    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.before: dict[Node, Any] = {}  # values of nodes that changed
        self.targets: dict[Node, Any] = {}
        self.made: dict[Node, Node] = {}  # operand → itself in the other order
        self.copies: set[Node] = set()

    def run(self, convolutions: set[Node]) -> None:
        self.mode = next(iter(convolutions)).meta["val"].fake_mode
        restored: list[Node] = []
        for node in list(self.gm.graph.nodes):
            if node.op == "output":
                for one in node.all_input_nodes:
                    if one in self.before and is_tensor(one):
                        restored += self.restore(one, node)
                if len(restored) > _MOST_RESTORED:
                    raise _Impossible
                continue
            if node in convolutions:
                for operand in node.args[:2]:
                    self.convert(operand, node)
            for one in node.all_input_nodes:
                if one in self.made and not mutates(node):
                    node.replace_input_with(one, self.made[one])
            if any(one in self.before or one in self.copies for one in node.all_input_nodes):
                self.follow(node)
        for result in restored:
            self.read_in_place(result)

    def read_in_place(self, result: Node) -> None:
        """Let the kernel of a restored result read the tensors that were copied, not the copies."""
        chain: dict[Node, None] = {}
        waiting = list(result.all_input_nodes)
        while waiting:
            node = waiting.pop()
            if node in chain or node in self.copies or len(node.users) != 1:
                continue
            if torch.Tag.pointwise in getattr(node.target, "tags", ()):
                chain[node] = None
                waiting += node.all_input_nodes
        for node in [one for one in self.gm.graph.nodes if one in chain]:
            for one in node.all_input_nodes:
                if one in self.copies:
                    node.replace_input_with(one, one.all_input_nodes[0])
            self.follow(node)

    def convert(self, operand: Any, user: Node) -> None:
        """Let ``user`` read an operand in channels-last memory."""
        value = operand.meta["val"]
        if value.is_contiguous(memory_format=torch.channels_last):
            return
        if operand not in self.made:
            with self.gm.graph.inserting_before(user), value.fake_mode:
                moved = value.contiguous(memory_format=torch.channels_last)
                self.made[operand] = self.copy(operand, moved)
        user.replace_input_with(operand, self.made[operand])

    def copy(self, operand: Node, value: Any) -> Node:
        """The same numbers elsewhere: a conversion that a kernel makes, not a view."""
        node = self.gm.graph.call_function(
            torch.ops.prims.convert_element_type.default, (operand, value.dtype)
        )
        node.meta = {"val": value}
        self.copies.add(node)
        return node

    def restore(self, result: Node, output: Node) -> list[Node]:
        """A result of the graph as it lies in eager mode: the copy of it, if it needs one."""
        old, new = self.before[result], result.meta["val"]
        if old.stride() == new.stride():
            return []
        if not old.is_contiguous():
            raise _Impossible
        with self.gm.graph.inserting_before(output):
            copy = self.copy(result, old)
        output.replace_input_with(result, copy)
        return [copy]

    def follow(self, node: Node) -> None:
        """The value of a node whose operands lie in another order."""
        if node.op != "call_function" or may_follow_strides(node):
            raise _Impossible
        if mutates(node):
            return
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        with self.mode, torch.no_grad():
            try:
                value = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, ValueError):
                if node.target not in (aten.view.default, aten._unsafe_view.default):
                    raise
                self.targets[node] = node.target
                node.target = aten.reshape.default
                value = node.target(*args, **kwargs)
        self.before.setdefault(node, node.meta["val"])
        node.meta["val"] = value
        node.meta.pop("magjit_movement", None)

    def undo(self) -> None:
        """The graph as it was."""
        for node, value in self.before.items():
            node.meta["val"] = value
            node.meta.pop("magjit_movement", None)
        for node, target in self.targets.items():
            node.target = target
        for node in self.copies:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            self.gm.graph.erase_node(node)
