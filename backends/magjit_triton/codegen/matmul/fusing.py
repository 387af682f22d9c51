"""Products as backbones of groups (TSCompiler §4.2; VTC §5.1): what follows joins them.

A product that our kernels compute is a node of a group like any other.  What joins it is computed
at the points of the product (``products.Places``); a reduction never does.  Two products of one
left operand that meet in what follows share a group.  Which products those are is the choice's:
the plan is made with all candidates, and again without those that do not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch
from torch.fx import Node

from magjit.plugin.virtual_tensors.costs import tensor_bytes
from magjit.plugin.virtual_tensors.indexing import size_expr
from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.codegen.attention import attention_parts
from magjit_triton.codegen.decoding import SHORTEST, Decoding, find_decoding
from magjit_triton.codegen.domain import Domain, same
from magjit_triton.codegen.fusion import Fusion, Group, Plan
from magjit_triton.codegen.graphs import movement_of
from magjit_triton.codegen.handlers import REDUCTIONS
from magjit_triton.codegen.ir import Builder, Dim, Store
from magjit_triton.codegen.layout import Layout, sizes_of
from magjit_triton.codegen.lowering import Lowering, Unfusible, operator_name
from magjit_triton.codegen.matmul.choice import (
    Device,
    Facts,
    current_device,
    ours_pays,
    recomputing_pays,
)
from magjit_triton.codegen.matmul.configuration import Configuration, Work, default
from magjit_triton.codegen.matmul.described import describe
from magjit_triton.codegen.matmul.family import Operand, is_contiguous
from magjit_triton.codegen.matmul.points import (
    Given,
    PointLowering,
    as_given,
    pairs_in,
    rounded_tiles,
)
from magjit_triton.codegen.matmul.precision import float32_precision
from magjit_triton.codegen.matmul.products import Places, extent_of, is_product, operands_of

__all__ = ["AXES", "ProductFusion", "flat_dims", "tile_dims"]

AXES = {"left": ("g", "p", "r"), "right": ("g", "p", "q"), "result": ("g", "p", "q")}
_MOST_RECOMPUTED = 2**24
_MOST_STEPS_TO_MEET = 12


def tile_dims(node: Node, axes: Sequence[str]) -> tuple[Dim, ...]:
    """All dimensions of a matrix or a batch, on axes of their own."""
    sizes = sizes_of(node.meta["val"])
    symbols = (sympy.Symbol(f"i{k}", integer=True, nonnegative=True) for k in range(len(sizes)))
    return tuple(map(Dim, symbols, sizes, axes[-len(sizes) :]))


def flat_dims(node: Node) -> tuple[Dim, ...]:
    """The dimensions of a pointwise kernel over a tensor."""
    return Domain(sizes_of(node.meta["val"])).dims()


@dataclass
class ProductFusion(Fusion):
    """A fusion in which products may be ours.

    Attributes:
        setting: one of ``settings.PRODUCTS``.
        own: products that our kernels compute.
        device: what the choice knows of the GPU.
        measured: times our kernel of a group and the library's way, as ``choice.estimate`` does,
            and may put the best configuration into ``cuts``; None where it cannot say.
        cuts: the configurations of products that are not the default.
    """

    setting: str = "library"
    own: set[Node] = field(default_factory=set)
    device: Device = field(default_factory=current_device)
    measured: Callable[[ProductFusion, Group, Plan], tuple[float, float] | None] | None = None
    cuts: dict[Node, Configuration] = field(default_factory=dict)

    def planned(self) -> Plan:
        """The plan with those products of ours that pay."""
        if self.setting != "library":
            find_decoding(self.gm, self.fusible_devices, self._decodes)
        self.own = {node for node in self.gm.graph.nodes if self.is_candidate(node)}
        while True:
            self._forget()
            plan = super().planned()
            groups = [unit for unit in plan.units if isinstance(unit, Group)]
            refused = {
                node
                for group in groups
                for node in self.products_in(group.nodes)
                if not self.pays(group, plan)
            }
            if not refused:
                return plan
            self.own -= refused

    def _forget(self) -> None:
        of_nodes = (self.realized, self.views, self._fusible, self._unit_of, self._reads)
        for known in (*of_nodes, self._before, self.filled, self.placed):
            known.clear()
        self.strategy, self._barrier, self._last, self.units = Strategy(), set(), None, []

    def is_candidate(self, node: Node) -> bool:
        """Whether a product may be ours."""
        if self.setting == "library" or node.op != "call_function":
            return False
        if not is_product(node, self.fusible_devices):
            return False
        if self.setting == "triton":
            return True
        # There is nothing to gain in an interpreter.
        return node.meta["val"].device.type == "cuda" and self._may_pay(node)

    def _may_pay(self, node: Node) -> bool:
        """Whether it is worth planning with a product: all that could be saved pays."""
        work, extent = self.work_of([node]), extent_of(node, self.hint)
        work = replace(work, described=self.device.describes)
        operands = extent.batch * (extent.m + extent.n) * extent.k * work.dtype.itemsize
        result = Facts(extent, work, 0.0).result
        hoped = Facts(extent, work, 4 * result + 2 * operands, launches=4)
        return self.measured is not None or ours_pays(hoped, self.device)

    def _decodes(self, node: Node, operands: Sequence[Node]) -> bool:
        """Whether attention of few rows is ours: where the library would copy what it reads."""
        if self.setting == "triton":
            return True
        keys = operands[1].meta["val"]
        if keys.device.type != "cuda" or self.hint(sizes_of(keys)[2]) < SHORTEST:
            return False
        return any(self._is_made(one) for one in operands[1:])

    def _is_made(self, node: Node) -> bool:
        """Whether a tensor is computed, or moved in several parts, for one reader only."""
        while self.fusible(node) and node not in self.updates and len(node.users) == 1:
            moved = movement_of(node)
            if moved is None or len(moved[0].parts) > 1:
                return True
            node = moved[1][moved[0].parts[0].operand]
        return False

    def products_in(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of our products that are among nodes."""
        return [node for node in nodes if node in self.own]

    # What a group computes.

    def _is_fusible(self, node: Node) -> bool:
        return node in self.own or super()._is_fusible(node)

    def lowered(
        self, domain: Domain, nodes: Iterable[Node], memory: Mapping[Node, Layout]
    ) -> Builder:
        """The instructions of a group; of one with a product, those that follow it."""
        nodes = list(nodes)
        products = self.products_in(nodes)
        if not products:
            return super().lowered(domain, nodes, memory)
        builder, _ = self.epilogue(nodes, flat_dims(products[0]), memory, as_given)
        read = {load.buffer for one in self.operands(products) for load in one.builder.loads()}
        if read & {self.realized[node].buffer for node in nodes if node in self.updates}:
            raise Unfusible("a product is written over what it is made of")
        return builder

    def epilogue(
        self,
        nodes: Sequence[Node],
        dims: tuple[Dim, ...],
        memory: Mapping[Node, Layout],
        given: Given,
        *,
        rounded: bool = False,
        whole: bool = False,
    ) -> tuple[Builder, list[Node]]:
        """What follows the products of a group, with a store for each node.

        Args:
            dims: loops over the product's points.
            given: the products' values.
            rounded: whether they are rounded to the products' dtype, as something reads them; those
                whose columns are exchanged always are.
            whole: whether the given values have what is added to products.

        Raises:
            Unfusible: a node is computed elsewhere than at the product's points.
        """
        products = self.products_in(nodes)
        own = set(nodes)
        outside = {node: layout for node, layout in memory.items() if node not in own}
        builder = Builder(dims)
        domain = Domain(sizes_of(products[0].meta["val"]))
        places = Places(products, lambda node: node in outside, self.updates)
        lowering = PointLowering(
            builder, domain, outside, movement_of, places, given, rounded, whole
        )
        lowering.given = {
            (product, places.point): lowering.product(product, places.point) for product in products
        }
        computed = {}
        for node in nodes:
            place = places.of(node)
            if place is None:
                raise Unfusible(f"{node} is not made of {products[0]} element by element")
            computed[node] = place.index
        lowering.computed = computed
        for node in nodes:
            self._store(lowering, node, places)
        if not rounded and pairs_in(builder) > 1:
            # Rounded, as eager mode has it, a tile that is exchanged needs half the registers.
            return self.epilogue(nodes, dims, memory, given, rounded=True, whole=whole)
        return builder, products

    def _store(self, lowering: Lowering, node: Node, places: Places) -> None:
        place = places.of(node)
        assert place is not None
        builder = lowering.builder
        mask = None if place.condition == sympy.true else lowering.truth(place.condition)
        if mask is not None:
            span = places.span(place.condition)
            if span is not None:
                builder.spans[mask] = span
        if node in self.updates:
            lowering.update(self.updates[node], place.index, self.realized[node], mask)
            return
        value = lowering.value(node, place.index, mask)
        layout = self.layout_of(node)
        value = lowering.rounded(value, layout.dtype)
        offset = layout.offset_at(place.index)
        builder.stores.append(Store(layout.buffer, offset, value, mask, layout.dtype))

    def operand(self, node: Node, side: str, memory: Mapping[Node, Layout]) -> Operand:
        """An operand of a product as a tile is read.

        Raises:
            Unfusible: it cannot be read, or computed, where it is needed.
        """
        builder = Builder(tile_dims(node, AXES[side]))
        domain = Domain(sizes_of(node.meta["val"]))
        lowering = Lowering(builder, domain, memory, movement_of)
        value = lowering.value(node, domain.point())
        builder.kept.append(value)
        return Operand(builder, value)

    def operands(self, products: Sequence[Node]) -> list[Operand]:
        """The left operand that products share, then their right ones."""
        left = operands_of(products[0])[0]
        rights = [operands_of(one)[1] for one in products]
        return [
            self.operand(left, "left", self.realized),
            *(self.operand(one, "right", self.realized) for one in rights),
        ]

    # What has memory.

    def _decide_memory(self) -> None:
        for node in self.gm.graph.nodes:
            if node in self.own:
                self.realize(node)
        super()._decide_memory()
        for node in self.gm.graph.nodes:
            if isinstance(node.meta.get("magjit_attention"), Decoding):
                try:
                    attention_parts(node, self.realized)
                except (Unfusible, NotImplementedError):
                    for one in node.all_input_nodes:
                        self.realize(one)
            if node in self.own:
                for side, operand in zip(("left", "right"), operands_of(node), strict=True):
                    self._realize_operand(node, operand, side)
                try:
                    self.lowered(Domain(sizes_of(node.meta["val"])), [node], self.realized)
                except (Unfusible, NotImplementedError):
                    for one in node.all_input_nodes:  # What is added.
                        self.realize(one)

    def _realize_operand(self, product: Node, operand: Node, side: str) -> None:
        waiting = [operand]
        while waiting:
            node = waiting.pop()
            if node in self.realized or not self.fusible(node):
                continue
            moved = movement_of(node)
            if moved is not None:
                waiting += moved[1]
            elif not self._recomputes(product, node, side):
                self.realize(node)
        try:
            self.operand(operand, side, self.realized)
        except (Unfusible, NotImplementedError):
            self.realize(operand)

    def _recomputes(self, product: Node, node: Node, side: str) -> bool:
        """Whether a computed operand is computed anew by each program that reads it."""
        reads = self.reads_of(node)
        # What follows a product of ours is its epilogue: that saves more.
        if len(node.users) > 1 or len(reads) > 3 or reads & self.own:
            return False
        passes = self._passes(product, side)
        made = tensor_bytes(node.meta["val"])
        read = sum(tensor_bytes(one.meta["val"]) for one in reads)
        elements = made / node.meta["val"].dtype.itemsize
        if passes * elements > _MOST_RECOMPUTED:
            return False
        return recomputing_pays(passes, read, made, self.device)

    def _passes(self, product: Node, side: str) -> int:
        extent = extent_of(product, self.hint)
        cut = default(extent, self.work_of([product]), self.device.multiprocessors)
        if side == "left":
            return max(1, -(-extent.n // cut.block_n))
        return max(1, -(-extent.m // cut.block_m))

    def work_of(
        self, products: Sequence[Node], nodes: Sequence[Node] = (), *, computed: bool = False
    ) -> Work:
        """What is multiplied.

        Args:
            nodes: of the group, if what follows and how operands lie is to be known, too.
        """
        dtype = products[0].meta["val"].dtype
        exact = dtype == torch.float32 and float32_precision() == "ieee"
        if not nodes:
            return Work(dtype, len(products), exact, computed)
        dims = tile_dims(products[0], AXES["result"])
        builder, _ = self.epilogue(nodes, dims, self.realized, as_given)
        operands = self.operands(products)
        described = self.device.describes and all(
            describe(one.builder, one.value, dtype) is not None for one in operands
        )
        heavy = not rounded_tiles(builder, dtype)
        return Work(dtype, len(products), exact, computed, described, pairs_in(builder), heavy)

    def hint(self, expr: sympy.Expr) -> int:
        """The likely value of a size."""
        if expr.is_Integer:
            return int(expr)
        known = {}
        for node in self.gm.graph.nodes:
            value = node.meta.get("val") if node.op == "placeholder" else None
            sizes = value.shape if isinstance(value, torch.Tensor) else [value]
            for size in sizes:
                if isinstance(size, torch.SymInt) and size_expr(size).is_Symbol:
                    found = getattr(size.node, "hint", None)
                    known[size_expr(size)] = 4096 if found is None else int(found)
        return int(expr.xreplace({one: known.get(one, 4096) for one in expr.free_symbols}))

    # Units.

    def _place(self, node: Node) -> None:
        if node not in self.own:
            super()._place(node)
            return
        reads = set(self._direct_reads(node))
        needed = {id(found) for one in reads if (found := self._unit_of.get(one)) is not None}
        behind = set().union(*(self._before[one] for one in needed)) | needed
        domain = Domain(sizes_of(node.meta["val"]))
        for group in (unit for unit in self.units if isinstance(unit, Group)):
            if id(group) in behind or id(group) in self._barrier:
                continue
            if self._is_twin(group, node) and super()._join(group, node, domain, behind):
                return
        self._add(Group(domain, [node]), [node])

    def _is_twin(self, group: Group, node: Node) -> bool:
        products = self.products_in(group.nodes)
        left = [operands_of(one)[0] for one in (*products, node)]
        if len(products) != 1 or not self._share(*left):
            return False
        if not same(sizes_of(products[0].meta["val"]), sizes_of(node.meta["val"])):
            return False
        return bool(self._reached(products[0]) & self._reached(node))

    def _share(self, one: Node, other: Node) -> bool:
        """Whether two left operands are the same elements."""
        if one is other:
            return True
        a, b = one.meta["val"], other.meta["val"]
        if a.dtype != b.dtype or not same(sizes_of(a), sizes_of(b)):
            return False
        left = [self.operand(node, "left", self.realized).builder for node in (one, other)]
        return str(left[0]) == str(left[1])

    def _reached(self, node: Node) -> set[Node]:
        """What is computed of a product, element by element and before it is read elsewhere."""
        found: set[Node] = set()
        waiting = [(node, 0)]
        while waiting:
            one, steps = waiting.pop()
            for user in one.users:
                if user in found or steps >= _MOST_STEPS_TO_MEET or user in self.own:
                    continue
                if self.fusible(user) and operator_name(user) not in REDUCTIONS:
                    found.add(user)
                    waiting.append((user, steps + 1))
        return found

    def _join(self, group: Group, node: Node, domain: Domain, behind: set[int]) -> bool:
        if domain.reduced and self.products_in(group.nodes):
            return False
        return super()._join(group, node, domain, behind)

    def _are_apart(self, group: Group, node: Node, joint: Domain) -> bool:
        return not self.products_in(group.nodes) and super()._are_apart(group, node, joint)

    def _stored(self) -> set[Node]:
        stored = super()._stored()
        for unit in self.units:
            products = self.products_in(unit.nodes) if isinstance(unit, Group) else []
            if products:
                operands = self.operands(products)
                names = {load.buffer for one in operands for load in one.builder.loads()}
                found = {n for n, layout in self.realized.items() if layout.buffer in names}
                stored |= {node for node in found if self.fusible(node)}
        return stored

    # The choice.

    def pays(self, group: Group, plan: Plan) -> bool:
        """Whether the products of a group are ours."""
        if self.setting == "triton":
            return True
        facts = self.facts(group, plan)
        times = None
        if self.measured is not None and (facts.saved or ours_pays(facts, self.device)):
            times = self.measured(self, group, plan)
        return ours_pays(facts, self.device, times)

    def pays_described(self, group: Group, plan: Plan) -> bool:
        """Whether descriptors load the operands, all sizes are known, and the products are ours."""
        (product, *_) = self.products_in(group.nodes)
        if not all(size.is_Integer for size in sizes_of(product.meta["val"])):
            return False
        facts = self.facts(group, plan)
        cut = default(facts.extent, facts.work, self.device.multiprocessors)
        return cut.described and ours_pays(facts, self.device)

    def facts(self, group: Group, plan: Plan) -> Facts:
        """What is known about the kernel of a group with a product."""
        products = self.products_in(group.nodes)
        follows = [node for node in group.nodes if node in plan.stored and node not in products]
        saved = again = 0.0
        launches = len(products) - 1
        for product in products:
            size = tensor_bytes(product.meta["val"])
            if follows:
                saved += size if product in plan.stored else 2 * size
        launches += bool(follows)
        sides = [("left", operands_of(products[0])[0])]
        sides += [("right", operands_of(one)[1]) for one in products]
        scattered = computed = False
        for side, node in sides:
            operand = self.operand(node, side, self.realized)
            scattered |= not is_contiguous(operand)
            if node in self.realized or self.view_of(node) is not None:
                continue
            size = tensor_bytes(node.meta["val"])
            read = sum(tensor_bytes(one.meta["val"]) for one in self.reads_of(node))
            saved += 2 * size
            again += (self._passes(products[0], side) - 1) * max(0.0, read - size)
            launches += 1
            computed |= movement_of(node) is None
        work = self.work_of(products, group.nodes, computed=computed)
        extent = extent_of(products[0], self.hint)
        return Facts(extent, work, saved, again, launches, scattered, bool(follows))
