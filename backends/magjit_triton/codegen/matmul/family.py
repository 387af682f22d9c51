"""A family of matmul kernels as source: for every configuration one, for all sizes the same.

    Family   ::= Operand (left), Operand* (right), epilogue
    Operand  ::= Builder, value, axes      a tile of it is computed as it is read
    epilogue ::= Builder with stores       over ``given`` values ``product0``, ``product1``

``source.matmul_source`` is the kernel, ``kernel.MatmulKernel.grid`` its launch from the sizes.
Operands and what the epilogue reads and writes are virtual (VTC §4.1): every element is loaded or
stored through the composed movements.  Two right operands share the loads of the left one.  With
``split_k`` the epilogue stores partial sums, see ``partial_sums``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import sympy
import torch

from magjit_triton.codegen.ir import Builder, Dim, Store
from magjit_triton.codegen.kernel import rename_buffers, size_symbols
from magjit_triton.codegen.matmul.configuration import Work
from magjit_triton.codegen.matmul.described import Description, describe
from magjit_triton.codegen.matmul.points import pairs_in, rounded_tiles
from magjit_triton.codegen.nest import Axis, Nest

__all__ = [
    "SPLIT",
    "WORKSPACE",
    "Family",
    "Operand",
    "is_contiguous",
    "is_load",
    "nest_of_tiles",
    "partial_sums",
    "taken_parameters",
    "workspace_offset",
]

_NEIGHBOURS = 8
WORKSPACE = "workspace"
"""The buffer of partial sums: [products, splits, batch, m, n] of float32, row-major."""


SPLIT = sympy.Symbol("i900", integer=True, nonnegative=True)
"""The number of a part of ``k``."""


def taken_parameters(
    operands: Sequence[Operand], results: Builder
) -> tuple[dict[str, torch.dtype], frozenset[str], tuple[sympy.Symbol, ...]]:
    """What a kernel of several builders has as parameters; buffers get the kernel's own names.

    Returns:
        Graph-wide names of its buffers, in order, with their dtypes; those that it writes; the
        size symbols, by name.
    """
    builders = [*(one.builder for one in operands), results]
    dtypes: dict[str, torch.dtype] = {}
    for builder in builders:
        dtypes.update({load.buffer: load.dtype for load in builder.loads()})
    written = frozenset(store.buffer for store in results.stores)
    dtypes.update({store.buffer: store.dtype for store in results.stores})
    names = {buffer: f"b{k}" for k, buffer in enumerate(dtypes)}
    symbols: dict[str, sympy.Symbol] = {}
    for builder in builders:
        rename_buffers(builder, names)
        found = size_symbols(builder, nest_of_tiles(builder))
        symbols.update({symbol.name: symbol for symbol in found})
    return dtypes, written, tuple(symbols[name] for name in sorted(symbols))


def nest_of_tiles(builder: Builder) -> Nest:
    """Each dimension as an axis of its own."""
    axes = tuple(Axis(dim.axis, (dim,)) for dim in builder.dims)
    return Nest(axes, {}, dict(builder.ranges))


def is_load(operand: Operand, dtype: torch.dtype) -> bool:
    """Whether an element is read from memory as it is."""
    instruction = operand.builder.instructions[operand.value]
    return instruction.op == "load" and instruction.attribute.dtype == dtype


@dataclass(frozen=True)
class Operand:
    """A matrix, or a batch of them.

    Attributes:
        builder: its instructions over the axes g (batch), p (rows) and r or q (columns).
        value: the instruction that is an element.
    """

    builder: Builder
    value: int

    @cached_property
    def nest(self) -> Nest:
        """The loops of a tile."""
        return nest_of_tiles(self.builder)


def is_contiguous(operand: Operand) -> bool:
    """Whether each load has runs of neighbours, which begin at multiples of 16 bytes."""
    dims = operand.builder.dims[-2:]
    for load in operand.builder.loads():
        symbols = load.offset.free_symbols
        if not any(dim.symbol in symbols for dim in dims):
            continue
        start = {one: sympy.S.Zero for one in symbols if one.name[:1] == "i"}
        along = [dim for dim in dims if _runs(load.offset, dim, start)]
        if not along:
            return False
        step = 16 // load.dtype.itemsize
        for dim in operand.builder.dims:
            if dim is not along[0] and dim.symbol in start:
                place = load.offset.xreplace({**start, dim.symbol: sympy.S.One})
                if sympy.expand(place - load.offset.xreplace(start)) % step != 0:
                    return False
    return True


def _runs(offset: sympy.Expr, dim: Dim, start: Mapping[sympy.Symbol, sympy.Expr]) -> bool:
    count = _NEIGHBOURS if not dim.size.is_Integer else min(_NEIGHBOURS, int(dim.size))
    if count < 2 or dim.symbol not in start:
        return False
    places = [offset.xreplace({**start, dim.symbol: sympy.Integer(k)}) for k in range(count)]
    return all(sympy.expand(b - a) == 1 for a, b in pairwise(places))


@dataclass(frozen=True)
class Family:
    """Everything about a kernel but its cut.

    Attributes:
        left, rights: operands.
        epilogue: stores, of values over ``product0`` and so on.
        sizes: batch, m, n, k.
        buffers: graph-wide names of its memory; ``b0`` and so on in the kernel.
        dtypes: of their elements.
        written: the buffers that the epilogue stores to.
        dtype: of the operands.
        precision: of float32 products, ``"tf32"`` or ``"ieee"``.
        symbols: sizes that are parameters.
    """

    left: Operand
    rights: tuple[Operand, ...]
    epilogue: Builder
    sizes: tuple[sympy.Expr, sympy.Expr, sympy.Expr, sympy.Expr]
    buffers: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    written: frozenset[str]
    dtype: torch.dtype
    precision: str
    symbols: tuple[sympy.Symbol, ...]

    @classmethod
    def of(
        cls,
        left: Operand,
        rights: Sequence[Operand],
        epilogue: Builder,
        sizes: tuple[sympy.Expr, sympy.Expr, sympy.Expr, sympy.Expr],
        dtype: torch.dtype,
        precision: str,
    ) -> Family:
        """Takes builders with graph-wide names of buffers, and gives them the kernel's own."""
        dtypes, written, symbols = taken_parameters((left, *rights), epilogue)
        order = tuple(symbol for symbol in symbols if symbol.name != SPLIT.name)
        buffers = tuple(dtypes)
        return cls(
            left,
            tuple(rights),
            epilogue,
            sizes,
            buffers,
            tuple(dtypes.values()),
            written,
            dtype,
            precision,
            order,
        )

    @property
    def work(self) -> Work:
        """What decides about its configuration."""
        operands = (self.left, *self.rights)
        computed = any(not is_load(one, self.dtype) for one in operands)
        exact = self.dtype == torch.float32 and self.precision == "ieee"
        pairs = pairs_in(self.epilogue)
        described = bool(self.descriptions)
        heavy = not rounded_tiles(self.epilogue, self.dtype)
        return Work(self.dtype, len(self.rights), exact, computed, described, pairs, heavy)

    @cached_property
    def descriptions(self) -> tuple[Description, ...]:
        """The operands as descriptors load them; empty where one of them cannot be."""
        found = [describe(one.builder, one.value, self.dtype) for one in (self.left, *self.rights)]
        return tuple(one for one in found if one is not None) if all(found) else ()

    @property
    def checks(self) -> bool:
        """Whether it asserts that indices read from memory are in range."""
        builders = [one.builder for one in (self.left, *self.rights)] + [self.epilogue]
        return any(builder.indirect for builder in builders)

    @property
    def read_by_operands(self) -> frozenset[str]:
        """The buffers that operands are read from: other programs may still read them."""
        loads = {load.buffer for one in (self.left, *self.rights) for load in one.builder.loads()}
        return frozenset(
            buffer for k, buffer in enumerate(self.buffers) if {f"b{k}", buffer} & loads
        )


# Partial sums.


def workspace_offset(
    product: int,
    split: sympy.Expr,
    splits: int,
    index: Sequence[sympy.Expr],
    sizes: Sequence[sympy.Expr],
) -> sympy.Expr:
    """Where in the workspace a partial sum is.

    Args:
        product: which one.
        split: which part of ``k``, of ``splits``.
        index: of the product's element, with a batch or without.
        sizes: of the product, with as many dimensions.
    """
    offset = product * splits + split
    for expr, size in zip(index, sizes, strict=True):
        offset = offset * size + expr
    return sympy.expand(offset)


def partial_sums(dims: Sequence[Dim], products: int, splits: int) -> Builder:
    """The epilogue that stores the sums over parts of ``k``."""
    builder = Builder((Dim(SPLIT, sympy.Integer(splits), "g"), *dims))
    index = [dim.symbol for dim in dims]
    for number in range(products):
        given = builder.emit("given", (), f"product{number}", torch.float32)
        offset = workspace_offset(number, SPLIT, splits, index, [dim.size for dim in dims])
        builder.stores.append(Store(WORKSPACE, offset, given, None, torch.float32))
    return builder
