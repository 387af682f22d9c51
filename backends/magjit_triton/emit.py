"""A graph under a strategy as a graph that runs: memory, views of it, kernels that write into it.

    Step ::= empty_strided                   memory of a tensor that others are written into
           | as_strided                      a virtual tensor, where something reads it
           | kernel(…, out=as_strided)       a computed tensor that is virtual
           | copy_ | fill_                   what no kernel writes in place
           | the operator as it was

Whatever an operator is given has the values that it has in eager mode, and what it returns the
layout: a result whose layout would follow from its operands' is written into memory of the right
one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from magjit.plugin import make_graph_module
from magjit.plugin.aliases import is_alias
from magjit.plugin.fx_helpers import called
from magjit.plugin.virtual_tensors import Affine
from magjit.plugin.virtual_tensors.calls import operand_nodes, result_nodes
from magjit.plugin.virtual_tensors.costs import left_to_fill, left_to_move
from magjit.plugin.virtual_tensors.indexing import size_expr
from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.kernels import AtenKernels, is_border, out_variant, same_layout, strided
from magjit_triton.sizes import Sizes

__all__ = ["emit"]

aten = torch.ops.aten


def emit(gm: GraphModule, strategy: Strategy, kernels: AtenKernels) -> GraphModule:
    """The graph that runs; each of its nodes keeps ``meta["val"]``."""
    graph = _Emission(gm, strategy, kernels).emitted()
    made = make_graph_module(gm, graph)
    made.meta = dict(gm.meta)
    return made


class _Emission:
    def __init__(self, gm: GraphModule, strategy: Strategy, kernels: AtenKernels) -> None:
        self.gm = gm
        self.strategy = strategy
        self.kernels = kernels
        self.graph = Graph()
        self.made: dict[Node, Node] = {}
        """Tensor of the old graph → the node that is it in the new one."""
        self.memory: dict[Node, Node] = {}
        """Physical tensor of the old graph → where it is, when allocated ahead of its operator."""
        self.sizes = Sizes(self.graph)

    def emitted(self) -> Graph:
        for node in self.gm.graph.nodes:
            if node.op == "output":
                self.graph.output(torch.fx.map_arg(node.args[0], self.read)).meta = dict(node.meta)
            elif node.op in ("placeholder", "get_attr"):
                self.made[node] = self._copied(node)
                self.sizes.know(self.made[node])
            elif node in self.kernels.movements.directions:
                self._movement(node)
            elif node.target is operator.getitem:
                self._item(node)
            else:
                self._computation(node)
        return self.graph

    # -- reading --

    def read(self, tensor: Node) -> Node:
        """The node that is a tensor of the old graph, with its strides if it is virtual."""
        if tensor not in self.made:
            for source in self.strategy.place(tensor).sources:
                if source not in self.made and source not in self.memory:
                    raise AssertionError(f"{source} is read and nothing has written it")
            self.made[tensor] = self._virtual(tensor)
        return self.made[tensor]

    def _virtual(self, tensor: Node) -> Node:
        opportunity = self.strategy.chosen.get(tensor)
        if opportunity is None:
            return self._memory(tensor)
        native = self._as_in_eager(tensor)
        if native is not None:
            return native
        affine = self.kernels.affine(tensor, self.strategy)
        assert affine is not None, f"{tensor} is read but has no strides"
        source = self.strategy.place(tensor).sources[affine.source]
        assert isinstance(source, Node)
        return self._strided(source, affine, tensor.meta["val"])

    def _as_in_eager(self, tensor: Node) -> Node | None:
        """The view operator itself, where its operand is as it was."""
        opportunity = self.strategy.chosen[tensor]
        maker = opportunity.operator
        if opportunity.backward or not is_alias(maker):
            return None
        operands = operand_nodes(maker)
        if any(self.kernels.affine(one, self.strategy) is None for one in operands):
            return None
        if self.kernels.result_value(maker, self.strategy) is None:
            return None
        called = self._call_as_it_is(maker)
        if called is None or maker is tensor:
            return called
        item = self.graph.call_function(operator.getitem, (called, tensor.args[1]))
        item.meta = {"val": called.meta["val"][tensor.args[1]]}
        return item

    def _call_as_it_is(self, node: Node) -> Node:
        if node not in self.made or node.target is operator.getitem:
            copied = self._copied(node)
            copied.meta["val"] = self.kernels.result_value(node, self.strategy)
            self.made[node] = copied
        return self.made[node]

    def _strided(self, source: Node, affine: Affine, like: torch.Tensor) -> Node:
        base = self._memory(source)
        sizes = [self.sizes.node(size_expr(size)) for size in like.shape]
        strides = [self.sizes.node(stride) for stride in affine.strides]
        given = base.meta["val"]
        offset = affine.offset
        if base.op != "call_function" or base.target is not aten.empty_strided.default:
            base = self._expected(base, given)
        with given.fake_mode, torch.no_grad():
            value = torch.as_strided(
                given,
                like.shape,
                [self.sizes.value(stride, given) for stride in affine.strides],
                self.sizes.value(size_expr(given.storage_offset()) + offset, given),
            )
        made = self.graph.call_function(as_strided, (base, sizes, strides, self.sizes.node(offset)))
        made.meta = {"val": value}
        return made

    def _expected(self, base: Node, value: torch.Tensor) -> Node:
        """A tensor that no guard and no allocation of ours gives its strides: they are checked."""
        if base.op == "placeholder" or base.target is expect_strides:
            return base
        strides = [self.sizes.node(size_expr(stride)) for stride in value.stride()]
        checked = self.graph.call_function(expect_strides, (base, strides))
        checked.meta = dict(base.meta)
        for tensor, node in self.made.items():
            if node is base:
                self.made[tensor] = checked
        return checked

    def _memory(self, tensor: Node) -> Node:
        """A physical tensor: made already, or memory that is allocated for it now."""
        if tensor in self.made:
            return self.made[tensor]
        if tensor not in self.memory:
            self.memory[tensor] = self._allocated(tensor.meta["val"])
        return self.memory[tensor]

    def _allocated(self, like: torch.Tensor) -> Node:
        sizes = [self.sizes.node(size_expr(size)) for size in like.shape]
        strides = [self.sizes.node(size_expr(stride)) for stride in like.stride()]
        made = self.graph.call_function(
            aten.empty_strided.default,
            (sizes, strides),
            {"dtype": like.dtype, "device": like.device},
        )
        with like.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            made.meta = {
                "val": torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=like.device
                )
            }
        return made

    def _fill_borders(self, tensor: Node) -> None:
        """The values of a padded tensor around what is written into its middle."""
        given = tensor.args[2] if len(tensor.args) > 2 else tensor.kwargs.get("value", 0)
        around: Any = tensor.args[1]
        pads: Sequence[Any] = torch.fx.map_arg(around, self.read)
        value = torch.fx.map_arg(given, self.read)
        made = self.read(tensor)
        rank = tensor.meta["val"].dim()
        for number, pad in enumerate(pads):
            if pad == 0:
                continue
            dim = rank - 1 - number // 2
            bounds = (dim, 0, pad) if number % 2 == 0 else (dim, self._negated(pad), 2**63 - 1)
            border = self._call(aten.slice.Tensor, (made, *bounds))
            self._call(aten.fill_.Scalar, (border, value))

    def _negated(self, size: Any) -> Any:
        if not isinstance(size, Node):
            return -size
        made = self.graph.call_function(operator.neg, (size,))
        made.meta = {"val": -size.meta["val"]}
        return made

    def _call(self, target: Any, args: tuple[Any, ...]) -> Node:
        return called(self.graph, target, *args)

    def _copied(self, node: Node) -> Node:
        return self.graph.node_copy(node, self.read)

    # -- operators --

    def _item(self, node: Node) -> None:
        if node not in self.strategy.chosen and node not in self.made:
            maker = node.args[0]
            if maker in self.made:
                self.made[node] = self._copied(node)

    def _computation(self, node: Node) -> None:
        out = out_variant(node)
        natural = self.kernels.result_value(node, self.strategy)
        written = node in self.strategy.chosen
        value = node.meta.get("val")
        if not written and isinstance(value, torch.Tensor) and natural is not None:
            if isinstance(natural, torch.Tensor) and same_layout(natural, value):
                self.made[node] = self._copied(node)
                return
        if isinstance(value, torch.Tensor) and out is not None:
            place = self._virtual(node) if written else self._allocated(value)
            args = torch.fx.map_arg(node.args, self.read)
            kwargs = torch.fx.map_arg(node.kwargs, self.read)
            made = self.graph.call_function(out, args, {**kwargs, "out": place})
            made.meta = {"val": place.meta["val"]}
            self.made[node] = made
            return
        assert not written, f"{node} is virtual but cannot be written in place"
        self.made[node] = self._with_eager_layouts(node, natural)

    def _with_eager_layouts(self, node: Node, natural: Any) -> Node:
        """The operator on operands of the layouts that it had, if its results need that."""
        if natural is not None and _same_layouts(natural, node.meta.get("val")):
            return self._copied(node)

        def given(one: Node) -> Node:
            made = self.read(one)
            value = one.meta.get("val")
            if not isinstance(value, torch.Tensor) or same_layout(made.meta["val"], value):
                return made
            place = self._allocated(value)
            return self._call(aten.copy_.default, (place, made))

        return self.graph.node_copy(node, given)

    def _movement(self, node: Node) -> None:
        left = left_to_move(node, self.kernels.movements, self.strategy)
        fills = left_to_fill(node, self.kernels.movements, self.strategy)
        if not left and not fills:
            return
        operands = operand_nodes(node)
        results = [one for one in result_nodes(node) if one is not None]
        ahead = any(one in self.strategy.chosen or one in self.memory for one in results)
        if len(left) == len(operands) and not ahead:
            self._whole(node, results)
        elif len(results) == 1 and self._placed(node, left, results[0]):
            self.made[results[0]] = self._virtual(results[0])
            if fills:
                self._fill_borders(node)
        else:
            self._copied_results(node, results)

    def _whole(self, node: Node, results: Sequence[Node]) -> None:
        """The operator runs; a result with another layout than in eager mode is copied."""
        natural = self.kernels.result_value(node, self.strategy)
        if natural is not None and (is_alias(node) or _same_layouts(natural, node.meta["val"])):
            self.made[node] = self._copied(node)
            if isinstance(natural, torch.Tensor) and natural is not node.meta["val"]:
                self.made[node].meta["val"] = natural
        elif len(results) == 1 and self._placed(node, operand_nodes(node), results[0]):
            self.made[node] = self._memory(node)
            if left_to_fill(node, self.kernels.movements, self.strategy):
                self._fill_borders(node)
        else:
            self.made[node] = self._with_eager_layouts(node, natural)

    def _placed(self, node: Node, left: Sequence[Node], result: Node) -> bool:
        """Operands copied to their places in the result, where all those places have strides."""
        if not self._can_fill(node):
            return False
        directions = self.kernels.movements.directions[node]
        target = self.strategy.place(result)
        copies = []
        for position, operand in enumerate(operand_nodes(node)):
            if operand not in left:
                continue
            movement = directions.operands.get(position)
            place = None if movement is None else strided(movement.over([target.mapping]))
            if place is None:
                return False
            copies.append((operand, place))
        for operand, place in copies:
            source = target.sources[place.source]
            assert isinstance(source, Node)
            where = self._strided(source, place, operand.meta["val"])
            self._call(aten.copy_.default, (where, self.read(operand)))
        return True

    def _can_fill(self, node: Node) -> bool:
        """Whether the values that are no operand's, if any, are those of a border."""
        if not left_to_fill(node, self.kernels.movements, self.strategy):
            return True
        return is_border(node)

    def _copied_results(self, node: Node, results: Sequence[Node]) -> None:
        """The operator runs and its results are copied to where they belong."""
        called = self._copied(node)
        for result in results:
            made = called
            if result is not node:
                made = self.graph.call_function(operator.getitem, (called, result.args[1]))
                made.meta = dict(result.meta)
            place = self._virtual(result)
            self._call(aten.copy_.default, (place, made))
            self.made[result] = place


def _same_layouts(one: Any, other: Any) -> bool:
    ones = one if isinstance(one, list | tuple) else [one]
    others = other if isinstance(other, list | tuple) else [other]
    return len(ones) == len(others) and all(
        not isinstance(a, torch.Tensor) or same_layout(a, b)
        for a, b in zip(ones, others, strict=True)
    )


def as_strided(
    base: torch.Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> torch.Tensor:
    """``as_strided`` with an offset from the tensor's first element, not from its storage's."""
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def expect_strides(given: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A tensor with the strides that it was compiled for: itself, or else a copy."""
    if given.stride() == tuple(strides):
        return given
    made = torch.empty_strided(given.shape, strides, dtype=given.dtype, device=given.device)
    return made.copy_(given)
