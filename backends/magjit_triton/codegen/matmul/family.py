"""A family of matmul kernels as source: for every configuration one, for all sizes the same.

    Family   ::= Operand (left), Operand* (right), epilogue
    Operand  ::= Builder, value, axes      a tile of it is computed as it is read
    epilogue ::= Builder with stores       over ``given`` values ``product0``, ``product1``

``matmul_source(name, family, configuration)`` is the kernel; ``MatmulKernel.grid`` its launch from
the sizes.  Operands and what the epilogue reads and writes are virtual (VTC §4.1): every element is
loaded or stored through the composed movements.  Two right operands share the loads of the left
one.  With ``split_k`` the epilogue stores partial sums, see ``partial_sums``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import sympy
import torch

from magjit_triton.codegen.ir import Builder, Dim, Store
from magjit_triton.codegen.kernel import Kernel, rename_buffers, size_symbols
from magjit_triton.codegen.matmul.configuration import Configuration, Work
from magjit_triton.codegen.nest import Axis, Nest
from magjit_triton.codegen.printer import HEADER, TRITON_DTYPES, Blocks, Printer, expression

__all__ = [
    "WORKSPACE",
    "Family",
    "MatmulKernel",
    "Operand",
    "matmul_kernel",
    "matmul_source",
    "partial_sums",
    "taken_parameters",
    "workspace_offset",
]

WORKSPACE = "workspace"
"""The buffer of partial sums: [products, splits, batch, m, n] of float32, row-major."""

_SPLIT = sympy.Symbol("i900", integer=True, nonnegative=True)


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


def nest_of_tiles(builder: Builder) -> Nest:
    """Each dimension as an axis of its own."""
    axes = tuple(Axis(dim.axis, (dim,)) for dim in builder.dims)
    return Nest(axes, {}, dict(builder.ranges))


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
        order = tuple(symbol for symbol in symbols if symbol.name != _SPLIT.name)
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
        computed = any(not _is_load(one, self.dtype) for one in operands)
        exact = self.dtype == torch.float32 and self.precision == "ieee"
        return Work(self.dtype, len(self.rights), exact, computed)

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


@dataclass(frozen=True)
class MatmulKernel(Kernel):
    """A family with a configuration."""

    family: Family
    configuration: Configuration

    @property
    def checks(self) -> bool:
        """Whether it asserts that indices read from memory are in range."""
        return self.family.checks

    def text(self, blocks: Blocks) -> str:
        """Source of the kernel."""
        return matmul_source(self.name, self.family, self.configuration, wide=blocks.wide)

    @cached_property
    def source(self) -> str:
        """Triton source with its imports."""
        return HEADER + self.text(self.blocks)

    def grid(self) -> tuple[str, str]:
        """How many programs, as Python expressions over the size symbols."""
        batch, m, n, _ = self.family.sizes
        cut = self.configuration
        rows, columns = _tiles(m, cut.block_m), _tiles(n, cut.block_n)
        total = f"{expression(batch)} * {rows} * {columns} * {cut.split_k}"
        return (f"min({total}, {cut.programs})" if cut.programs else total), "1"


def matmul_kernel(
    name: str,
    family: Family,
    configuration: Configuration,
    reach: Mapping[str, sympy.Expr],
    *,
    wide: bool,
) -> MatmulKernel:
    """The kernel of a family, cut in one way.

    Args:
        reach: buffer → number of elements from its first to its last.
        wide: whether addresses need 64 bits for the likely sizes.
    """
    cut = configuration
    blocks = Blocks(cut.block_m, cut.block_n, wide=wide, warps=cut.warps, stages=cut.stages)
    return MatmulKernel(
        name,
        family.epilogue,
        nest_of_tiles(family.epilogue),
        blocks,
        family.buffers,
        family.written,
        family.dtypes,
        family.symbols,
        tuple(reach[buffer] for buffer in family.buffers),
        family,
        configuration,
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
    builder = Builder((Dim(_SPLIT, sympy.Integer(splits), "g"), *dims))
    index = [dim.symbol for dim in dims]
    for number in range(products):
        given = builder.emit("given", (), f"product{number}", torch.float32)
        offset = workspace_offset(number, _SPLIT, splits, index, [dim.size for dim in dims])
        builder.stores.append(Store(WORKSPACE, offset, given, None, torch.float32))
    return builder


# Source.


class TilePrinter(Printer):
    """Writes the part of a kernel that makes a tile of an operand, or that stores one."""

    def __init__(self, builder: Builder, nest: Nest, blocks: Blocks, indent: str) -> None:
        super().__init__(builder, nest, blocks)
        self.indent = indent

    def zero_to_store(self) -> str:
        """Every lane of a tile has an address: which of them store is in the masks."""
        return f"tl.zeros([{self.blocks.p}, {self.blocks.inner}], tl.int32)"

    def begin(self, rows: str, columns: str) -> None:
        """The indices of the tile's elements, from those of its first one."""
        for axis in self.nest.axes:
            if axis.name != "g":
                self.axis_begin(axis, rows if axis.name == "p" else columns)

    def tile(self, label: str, operand: Operand, dtype: torch.dtype, inner: str) -> None:
        """Names a tile: zeros wherever axis ``inner`` is beyond its end."""
        number = operand.value
        instruction = self.builder.instructions[number]
        axis = self.nest.axis(inner)
        assert axis is not None
        masked = self.exact(axis)
        if _is_load(operand, dtype):
            for one in self.builder.operands(number):
                self.emit(one)
            text = self.loaded(instruction)
            masked = masked or inner in self.axes_of(instruction.attribute.offset)
        else:
            self.emit(number)
            text = f"v{number}.to({TRITON_DTYPES[dtype]})"
        if not {"p", "q"} <= {one.replace("r", "q") for one in self.varies(number)} or (
            self.blocks.p == 1
        ):
            text = f"tl.broadcast_to({text}, [{self.blocks.p}, {self.blocks.inner}])"
        self.write(f"{label} = {text}")
        if not masked:
            self.write(f"{label} = tl.where({inner}_mask, {label}, 0)")


def _is_load(operand: Operand, dtype: torch.dtype) -> bool:
    """Whether an element is read from memory as it is."""
    instruction = operand.builder.instructions[operand.value]
    return instruction.op == "load" and instruction.attribute.dtype == dtype


def _tiles(size: sympy.Expr, block: int) -> str:
    if size.is_Integer:
        return str(-(-int(size) // block))
    return f"(({expression(size)} + {block - 1}) // {block})"


def matmul_source(
    name: str, family: Family, configuration: Configuration, *, wide: bool = False
) -> str:
    """The source of a kernel, without the header; its parameters are pointers, then sizes.

    Args:
        name: of the kernel.
        wide: whether addresses need 64 bits.
    """
    parameters = [f"b{k}" for k in range(len(family.buffers))]
    sizes = [symbol.name for symbol in family.symbols]
    lines = [f"    {one} = tl.cast({one}, tl.int64)" for one in sizes if wide]
    lines += _body(family, configuration, wide)
    return "\n".join(["@triton.jit", f"def {name}({', '.join(parameters + sizes)}):", *lines, ""])


def _body(family: Family, cut: Configuration, wide: bool) -> list[str]:
    batch, m, n, _ = family.sizes
    rows, columns = _tiles(m, cut.block_m), _tiles(n, cut.block_n)
    start = "tl.program_id(0).to(tl.int64)" if wide else "tl.program_id(0)"
    lines = [f"    rows = {rows}", f"    columns = {columns}"]
    indent = "    "
    if cut.programs:
        total = f"{expression(batch)} * rows * columns * {cut.split_k}"
        lines.append(f"    for program in range({start}, {total}, tl.num_programs(0)):")
        indent = "        "
    else:
        lines.append(f"    program = {start}")
    lines += [indent + line for line in _tile_of_program(family, cut)]
    lines += _products(family, cut, wide, indent)
    blocks = Blocks(cut.block_m, cut.block_n, wide=wide)
    printer = TilePrinter(family.epilogue, nest_of_tiles(family.epilogue), blocks, indent)
    printer.begin(f"row * {cut.block_m} + ", f"column * {cut.block_n} + ")
    printer.store_all(family.epilogue.stores)
    return lines + printer.lines


def _tile_of_program(family: Family, cut: Configuration) -> list[str]:
    """Tiles in groups of rows: neighbours in time share operands (Triton's grouped order)."""
    lines = ["place = program % (rows * columns)"]
    batched = len(family.left.builder.dims) == 3
    if batched or cut.split_k > 1:
        lines.append("rest = program // (rows * columns)")
    if cut.split_k > 1:
        lines.append(f"{_SPLIT} = rest % {cut.split_k}")
    if batched:
        lines.append(f"i0 = rest // {cut.split_k}" if cut.split_k > 1 else "i0 = rest")
    if cut.group_m == 1:
        return [*lines, "row = place // columns", "column = place % columns"]
    return [
        *lines,
        f"first = place // ({cut.group_m} * columns) * {cut.group_m}",
        f"height = tl.minimum(rows - first, {cut.group_m})",
        f"row = first + place % ({cut.group_m} * columns) % height",
        f"column = place % ({cut.group_m} * columns) // height",
    ]


def _products(family: Family, cut: Configuration, wide: bool, indent: str) -> list[str]:
    k = family.sizes[3]
    block = f"[{cut.block_m}, {cut.block_n}]"
    names = [f"product{number}" for number in range(len(family.rights))]
    lines = [f"{indent}{name} = tl.zeros({block}, tl.float32)" for name in names]
    if cut.split_k > 1:
        share = f"({_tiles(k, cut.block_k)} + {cut.split_k - 1}) // {cut.split_k} * {cut.block_k}"
        lines.append(f"{indent}begin = {_SPLIT} * ({share})")
        lines.append(f"{indent}end = tl.minimum(begin + {share}, {expression(k)})")
        lines.append(f"{indent}for step in range(begin, end, {cut.block_k}):")
    else:
        lines.append(f"{indent}for step in range(0, {expression(k)}, {cut.block_k}):")
    inside = indent + "    "
    along = "step + "
    if wide:
        along = "tl.full([1, 1], 0, tl.int64) + step + "
    blocks = Blocks(cut.block_m, cut.block_k, wide=wide)
    printer = TilePrinter(family.left.builder, family.left.nest, blocks, inside)
    printer.begin(f"row * {cut.block_m} + ", along)
    printer.tile("left", family.left, family.dtype, "r")
    lines += printer.lines
    blocks = Blocks(cut.block_k, cut.block_n, wide=wide)
    short = TRITON_DTYPES[family.dtype]
    for name, right in zip(names, family.rights, strict=True):
        printer = TilePrinter(right.builder, right.nest, blocks, inside)
        printer.begin(along, f"column * {cut.block_n} + ")
        printer.tile("right", right, family.dtype, "p")
        lines += printer.lines
        product = f'h.accumulate(left, right, {name}, {short}, "{family.precision}")'
        lines.append(f"{inside}{name} = {product}")
    return lines
