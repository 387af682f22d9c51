"""The kernels of a group with products: one, or one of partial sums and one that adds them up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from magjit_triton.codegen.domain import total
from magjit_triton.codegen.ir import Builder, Load
from magjit_triton.codegen.kernel import WIDE_FROM, Kernel, make_kernel
from magjit_triton.codegen.layout import sizes_of
from magjit_triton.codegen.matmul.configuration import Configuration, default
from magjit_triton.codegen.matmul.family import WORKSPACE, Family, partial_sums, workspace_offset
from magjit_triton.codegen.matmul.fusing import AXES, ProductFusion, flat_dims, tile_dims
from magjit_triton.codegen.matmul.kernel import matmul_kernel
from magjit_triton.codegen.matmul.points import Given, as_given
from magjit_triton.codegen.matmul.precision import float32_precision
from magjit_triton.codegen.matmul.products import extent_of, operands_of

__all__ = ["ProductKernels", "family_of", "product_kernels"]

Hint = Callable[[sympy.Expr], int]


@dataclass(frozen=True)
class ProductKernels:
    """What runs for a group.

    Attributes:
        kernels: in order.
        workspace: elements of float32 that they share under the name ``family.WORKSPACE``, or 0.
    """

    kernels: tuple[Kernel, ...]
    workspace: sympy.Expr


def product_kernels(
    name: str,
    fusion: ProductFusion,
    nodes: Sequence[Node],
    kept: Sequence[Node],
    reach: Mapping[str, sympy.Expr],
    configuration: Configuration | None = None,
) -> ProductKernels:
    """The kernels that compute the nodes of a group.

    Args:
        name: of the first kernel.
        nodes: of the group, products among them.
        kept: those that are stored.
        reach: buffer → number of elements from its first to its last.
        configuration: of the product; by default one for the likely sizes.
    """
    products = fusion.products_in(nodes)
    family = family_of(fusion, nodes, kept)
    extent = extent_of(products[0], fusion.hint)
    work = family.work
    if not fusion.device.describes:
        work = replace(work, described=False)
    cut = configuration or default(extent, work, fusion.device.multiprocessors)
    if cut.described and not family.descriptions:
        cut = replace(cut, described=False)
    if cut.split_k == 1:
        return ProductKernels((_made(name, family, cut, reach, fusion.hint),), sympy.S.Zero)
    dims = tile_dims(products[0], AXES["result"])
    partial = partial_sums(dims, len(products), cut.split_k)
    operands = fusion.operands(products)
    parts = Family.of(
        operands[0],
        operands[1:],
        partial,
        family.sizes,
        family.dtype,
        family.precision,
    )
    count = sympy.expand(len(products) * cut.split_k * total(sizes_of(products[0].meta["val"])))
    reach = {**reach, WORKSPACE: count}
    first = _made(name, parts, cut, reach, fusion.hint)
    adding = _adding(fusion, nodes, kept, cut.split_k)
    second = make_kernel(f"{name}_sums", adding, fusion.hint, reach)
    return ProductKernels((first, second), count)


def _made(
    name: str, family: Family, cut: Configuration, reach: Mapping[str, sympy.Expr], hint: Hint
) -> Kernel:
    wide = any(hint(reach[buffer]) >= WIDE_FROM for buffer in family.buffers)
    return matmul_kernel(name, family, cut, reach, wide=wide)


def family_of(fusion: ProductFusion, nodes: Sequence[Node], kept: Sequence[Node]) -> Family:
    """What the kernels of a group compute, in any configuration.

    Args:
        nodes, kept: as ``product_kernels`` is given them.
    """
    products = fusion.products_in(nodes)

    dims = tile_dims(products[0], AXES["result"])
    epilogue = _epilogue(fusion, nodes, kept, dims, as_given)
    operands = fusion.operands(products)
    sizes = sizes_of(products[0].meta["val"])
    batch = sizes[0] if len(sizes) == 3 else sympy.S.One
    k = sizes_of(operands_of(products[0])[0].meta["val"])[-1]
    return Family.of(
        operands[0],
        operands[1:],
        epilogue,
        (batch, sizes[-2], sizes[-1], k),
        products[0].meta["val"].dtype,
        float32_precision(),
    )


def _adding(
    fusion: ProductFusion, nodes: Sequence[Node], kept: Sequence[Node], splits: int
) -> Builder:
    """A pointwise kernel: parts are added in their order, so that results do not vary."""
    product = fusion.products_in(nodes)[0]
    sizes = sizes_of(product.meta["val"])

    def given(
        builder: Builder,
        number: int,
        point: tuple[sympy.Expr, ...],
        distance: int,
        mask: int | None,
    ) -> int:
        result: int | None = None
        within = () if mask is None else (mask,)
        for split in range(splits):
            place = workspace_offset(number, sympy.Integer(split), splits, point, sizes)
            load = Load(WORKSPACE, place, torch.float32)
            value = builder.emit("load", within, load, torch.float32)
            result = value if result is None else builder.emit("add", (result, value))
        assert result is not None
        return result

    return _epilogue(fusion, nodes, kept, flat_dims(product), given)


def _epilogue(
    fusion: ProductFusion,
    nodes: Sequence[Node],
    kept: Sequence[Node],
    dims: tuple[object, ...],
    given: Given,
) -> Builder:
    products = fusion.products_in(nodes)
    read = any(one in kept for one in products)
    builder, _ = fusion.epilogue(nodes, dims, fusion.realized, given, rounded=read)  # type: ignore[arg-type]
    names = {fusion.realized[node].buffer for node in kept}
    builder.stores = [store for store in builder.stores if store.buffer in names]
    return builder
