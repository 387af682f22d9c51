"""Times of a group with a product on the device: our kernels, and the library's with one more.

Both ways run on memory of the same sizes and strides that nobody else has.  What the library's way
needs besides its product is compiled too: operands that ours never makes, and what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node

from magjit_triton.codegen.domain import Domain
from magjit_triton.codegen.fusion import Group, Plan
from magjit_triton.codegen.ir import Builder, Load
from magjit_triton.codegen.kernel import Kernel, make_kernel
from magjit_triton.codegen.layout import Layout, reach_of, sizes_of
from magjit_triton.codegen.matmul.configuration import (
    Configuration,
    Extent,
    Work,
    default,
    described,
    space,
)
from magjit_triton.codegen.matmul.configuration import seconds as likely_seconds
from magjit_triton.codegen.matmul.family import WORKSPACE
from magjit_triton.codegen.matmul.fusing import ProductFusion, flat_dims
from magjit_triton.codegen.matmul.products import extent_of, operands_of
from magjit_triton.codegen.matmul.steps import product_kernels
from magjit_triton.codegen.runtime import Launcher, interpreting

__all__ = ["Bench", "measured", "promising"]

_MOST_CONFIGURATIONS = 8

Run = Callable[[], None]


def measured(fusion: ProductFusion, group: Group, plan: Plan) -> tuple[float, float] | None:
    """Seconds of our kernels in their best configuration, and of the library's way.

    The configuration goes into ``fusion.cuts``.  None where the device has no room.
    """
    from triton.testing import do_bench

    def timer(run: Run) -> float:
        return float(do_bench(run, warmup=5, rep=20, return_mode="median")) * 1e-3

    try:
        return Bench(fusion, group, plan).times(timer)
    except torch.OutOfMemoryError:
        return None


def promising(extent: Extent, work: Work, multiprocessors: int) -> list[Configuration]:
    """The default, and those that should be fastest besides it."""
    first = default(extent, work, multiprocessors)
    legal = [*space(work), *(o for o in described(extent, multiprocessors) if o.is_legal(work))]
    others = sorted(
        (one for one in legal if one.block_k >= first.block_k // 2 and one.stages > 2),
        key=lambda one: (likely_seconds(one, extent, work, multiprocessors), one),
    )
    found = {(first.block_m, first.block_n, first.split_k, first.described): first}
    for one in others:
        found.setdefault((one.block_m, one.block_n, 1, one.described), one)
    return list(found.values())[:_MOST_CONFIGURATIONS]


@dataclass
class Bench:
    """Memory for a group, and both ways to compute it."""

    fusion: ProductFusion
    group: Group
    plan: Plan
    memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.products = self.fusion.products_in(self.group.nodes)
        self.kept = [node for node in self.group.nodes if node in self.plan.stored]
        self.device = self.products[0].meta["val"].device
        layouts = self.fusion.realized.values()
        self.layouts = {layout.buffer: layout for layout in layouts}
        self.reach = {layout.buffer: reach_of(layout) for layout in layouts}

    def times(self, timer: Callable[[Run], float]) -> tuple[float, float]:
        """Seconds of both, by a timer that runs what it is given."""
        extent = extent_of(self.products[0], self.fusion.hint)
        work = self.fusion.work_of(self.products, self.group.nodes)
        best: tuple[float, Configuration] | None = None
        for cut in promising(extent, work, self.fusion.device.multiprocessors):
            found = timer(self.ours(cut))
            if best is None or found < best[0]:
                best = found, cut
        assert best is not None
        for product in self.products:
            self.fusion.cuts[product] = best[1]
        return best[0], timer(self.library())

    def ours(self, cut: Configuration) -> Run:
        """Our kernels in a configuration."""
        made = product_kernels(
            f"timed_{cut.block_m}_{cut.block_n}_{cut.split_k}",
            self.fusion,
            self.group.nodes,
            self.kept,
            self.reach,
            cut,
        )
        if made.workspace != 0:
            count = self.fusion.hint(made.workspace)
            self.memory[WORKSPACE] = torch.empty(count, device=self.device)
        return self._all([self._launch(kernel) for kernel in made.kernels])

    def library(self) -> Run:
        """The library's products, with the kernels around them."""
        runs = list(self._operands())
        for product in self.products:
            runs.append(self._call(product))
        follows = [node for node in self.kept if node not in self.products]
        if follows:
            dims, memory = flat_dims(self.products[0]), self.fusion.realized
            builder, _ = self.fusion.epilogue(
                self.group.nodes, dims, memory, self._read, whole=True
            )
            names = {self.fusion.realized[node].buffer for node in follows}
            builder.stores = [store for store in builder.stores if store.buffer in names]
            runs.append(self._launch(self._kernel("timed_epilogue", builder)))
        return self._all(runs)

    def _read(
        self,
        builder: Builder,
        number: int,
        point: tuple[sympy.Expr, ...],
        distance: int,
        mask: int | None,
    ) -> int:
        layout = self.fusion.realized[self.products[number]]
        load = Load(layout.buffer, layout.offset_at(point), layout.dtype)
        return builder.emit("load", () if mask is None else (mask,), load, torch.float32)

    def _operands(self) -> Iterator[Run]:
        """Makes the operands that the library cannot read where they are."""
        known = set()
        for product in self.products:
            for node in operands_of(product):
                if node in known or node in self.fusion.realized:
                    continue
                known.add(node)
                found = self.fusion.view_of(node)
                if found is None or found[0] not in self.fusion.realized:
                    domain = Domain(sizes_of(node.meta["val"]))
                    builder = self.fusion.lowered(domain, [node], self.fusion.realized)
                    own = Layout.dense(node.name, node.meta["val"])
                    self.layouts[node.name], self.reach[node.name] = own, reach_of(own)
                    yield self._launch(self._kernel(f"timed_{node.name}", builder))

    def _call(self, product: Node) -> Run:
        tensors = [self._tensor(node) for node in product.args if isinstance(node, Node)]
        result = self._strided(self.fusion.realized[product])
        scales = dict(product.kwargs)
        target: Any = product.target
        write = getattr(target.overloadpacket, "out", target)

        def run() -> None:
            # What is added is the same for both ways, and not worth a kernel of its own here.
            write(*tensors, **scales, out=result)

        return run

    # Memory.

    def _kernel(self, name: str, builder: Builder) -> Kernel:
        return make_kernel(name, builder, self.fusion.hint, self.reach)

    def _launch(self, kernel: Kernel) -> Run:
        launcher = Launcher(kernel)
        tensors = [self._buffer(name) for name in kernel.buffers]
        sizes = [self.fusion.hint(symbol) for symbol in kernel.symbols]
        stream = 0 if interpreting() else torch.cuda.current_stream(self.device).cuda_stream
        return lambda: launcher(stream, *tensors, *sizes)

    @staticmethod
    def _all(runs: Sequence[Run]) -> Run:
        def run() -> None:
            for one in runs:
                one()

        return run

    def _buffer(self, name: str) -> torch.Tensor:
        if name not in self.memory:
            layout, count = self.layouts[name], self.fusion.hint(self.reach[name])
            generator = torch.Generator(self.device).manual_seed(len(self.memory))
            made = torch.zeros(count, dtype=layout.dtype, device=self.device)
            if layout.dtype.is_floating_point:
                made.normal_(generator=generator)
            self.memory[name] = made
        return self.memory[name]

    def _strided(self, layout: Layout) -> torch.Tensor:
        sizes, strides = (
            tuple(map(self.fusion.hint, one)) for one in (layout.sizes, layout.strides)
        )
        memory = self._buffer(layout.buffer)
        return memory.as_strided(sizes, strides, self.fusion.hint(layout.offset))

    def _tensor(self, node: Node) -> torch.Tensor:
        found = self.fusion.view_of(node)
        if found is not None and found[0] in self.fusion.realized:
            return self._strided(found[1])
        if node.name not in self.layouts:
            layout = Layout.dense(node.name, node.meta["val"])
            self.layouts[node.name], self.reach[node.name] = layout, reach_of(layout)
        return self._strided(self.layouts[node.name])
