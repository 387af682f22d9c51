"""The nodes of layers in the place of their operators, in a joint graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from magjit.plugin.aliases import storage_of
from magjit.plugin.layers.operators import Form, described, fresh

__all__ = ["Expansion"]


@dataclass(slots=True)
class Expansion:
    """Puts a layer's nodes in the place of its two operators."""

    graph: Graph
    forms: Mapping[int, Form]
    sizes: dict[Any, Node] = field(default_factory=dict)
    """By expression, the node that has it; the same size is computed once for all layers."""
    made: dict[int, dict[Node, Any]] = field(default_factory=dict)
    """By layer, what stands for each of its nodes."""
    memory: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """By layer and by a storage of its trace, a fake tensor with a storage that is its own."""

    def run(self) -> None:
        for node in list(self.graph.nodes):
            self._remember(node)
            if node.target is torch.ops.magjit.layer.default:
                number, tensors, sizes = node.args
                form = self.forms[number]
                self.made[number] = {}
                self._give(number, form.primals, (*tensors, *sizes))
                self._keep_memory(node, form.outputs)
                self._insert(node, form, backward=False)
                self._replace(node, [self.made[number][one] for one in form.outputs])
            elif node.target is torch.ops.magjit.layer_backward.default:
                number, *_, tangents = node.args
                form = self.forms[number]
                self._give(number, form.tangents, tangents)
                gradients = [one for one in form.gradients if one is not None]
                self._keep_memory(node, gradients)
                self._insert(node, form, backward=True)
                self._replace(node, [self.made[number][one] for one in gradients])

    def _give(self, number: int, names: Sequence[Node], values: Sequence[Any]) -> None:
        self.made[number].update(zip(names, values, strict=True))
        for name, value in zip(names, values, strict=True):
            if isinstance(like := name.meta["val"], Tensor):
                self.memory[number, storage_of(like)] = value.meta["val"]

    def _keep_memory(self, node: Node, results: Sequence[Node]) -> None:
        """What shares memory with the operator's result shares it with the node in its place."""
        for item in node.users:
            like = results[cast("int", item.args[1])].meta["val"]
            key = cast("int", node.args[0]), storage_of(like)
            self.memory.setdefault(key, item.meta["val"])

    def _remember(self, node: Node) -> None:
        if isinstance(size := node.meta.get("val"), SymInt):
            self.sizes.setdefault(size.node.expr, node)

    def _insert(self, place: Node, form: Form, *, backward: bool) -> None:
        number = cast("int", place.args[0])
        made = self.made[number]
        with self.graph.inserting_before(place):
            for node in form.nodes:
                ready = node not in made and all(one in made for one in node.all_input_nodes)
                if ready and (backward or node.meta.get("partitioner_tag") != "is_backward"):
                    made[node] = self._copied(node, made)
                    if node in form.escaping:
                        made[node].meta["val"] = self._with_memory(number, node.meta["val"])

    def _copied(self, node: Node, made: Mapping[Node, Any]) -> Any:
        size = node.meta.get("val")
        if isinstance(size, SymInt) and size.node.expr in self.sizes:
            return self.sizes[size.node.expr]
        copy = self.graph.node_copy(node, made.__getitem__)
        self._remember(copy)
        return copy

    def _with_memory(self, number: int, like: FakeTensor) -> Tensor:
        """A tensor like it that shares memory with those of its own layer only.

        AOTAutograd does not merge nodes that share memory with a result.
        """
        key = number, storage_of(like)
        with like.fake_mode:
            if key not in self.memory:
                self.memory[key] = fresh(like)
            base = self.memory[key]
            place, wanted = (described([one, one.storage_offset()]) for one in (base, like))
            if place == wanted:
                return base
            return base.as_strided(like.size(), like.stride(), like.storage_offset())

    def _replace(self, node: Node, results: Sequence[Any]) -> None:
        for item in list(node.users):
            item.replace_all_uses_with(results[cast("int", item.args[1])])
            self.graph.erase_node(item)
        self.graph.erase_node(node)
