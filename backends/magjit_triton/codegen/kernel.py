"""One kernel: its instructions, its loops, how it is cut into blocks, its source.

    Kernel ::= name, Builder, Nest, Blocks, parameters, sizes

``source`` is plain Triton.  Sizes that are symbols are parameters, so that another shape needs no
other kernel; a variant of a kernel differs in whether addresses need 64 bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch

from magjit_triton.codegen.ir import Builder, sorted_symbols
from magjit_triton.codegen.nest import Axis, Hint, Nest, _step, near_step, nest_of, row_block
from magjit_triton.codegen.printer import HEADER, Blocks, expression, kernel_source

__all__ = ["WIDE_FROM", "Kernel", "make_kernel", "rename_buffers", "size_symbols"]

_PROGRAMS = 264  # two for each of an H100's multiprocessors
_LONGEST_WHOLE_ROW = 8192
WIDE_FROM = 2**31 - 2**17


def _power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True)
class Kernel:
    """A kernel as it is launched.

    Attributes:
        buffers: graph-wide names of its memory, in the order of the pointer parameters.
        written: which of them it stores to.
        dtypes: of the buffers' elements.
        symbols: size symbols, parameters after the pointers.
        extents: numbers of elements that addresses and indices reach; 64 bits where one is large.
    """

    name: str
    builder: Builder
    nest: Nest
    blocks: Blocks
    buffers: tuple[str, ...]
    written: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    symbols: tuple[sympy.Symbol, ...]
    extents: tuple[sympy.Expr, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters."""
        pointers = (f"b{k}" for k in range(len(self.buffers)))
        return (*pointers, *(symbol.name for symbol in self.symbols))

    @property
    def descriptors(self) -> tuple[Any, ...]:
        """What is passed after the sizes: none but for described operands."""
        return ()

    def by_pointers(self) -> Kernel:
        """The same without descriptors, for memory or devices that have none."""
        return self

    @property
    def checks(self) -> bool:
        """Whether it asserts that indices read from memory are in range."""
        return bool(self.builder.indirect)

    @cached_property
    def source(self) -> str:
        """Triton source with its imports."""
        return HEADER + self.text(self.blocks)

    @property
    def identity(self) -> Hashable:
        """What two kernels have in common that differ in their names and memory alone."""
        source = self.source.replace(f"def {self.name}(", "def (")
        blocks = self.blocks
        return source, self.dtypes, self.symbols, self.extents, self.grid(), blocks, self.checks

    def text(self, blocks: Blocks) -> str:
        """Source of the kernel cut in another way."""
        return kernel_source(self.name, self.builder, self.nest, blocks, self.parameters)

    def with_blocks(self, blocks: Blocks) -> Kernel:
        """The same kernel cut in another way."""
        return replace(self, blocks=blocks)

    def grid(self) -> tuple[str, str]:
        """How many programs, as Python expressions over the size symbols."""
        sizes = {axis.name: axis.size for axis in self.nest.axes}
        first = _programs(sizes.get("p", sympy.Integer(1)), self.blocks.p)
        second = _programs(sizes["q"], self.blocks.inner) if "q" in sizes else "1"
        return first, second

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.buffers)})\n{self.builder}"


def _programs(size: sympy.Expr, block: int) -> str:
    if size.is_Integer:
        return str(-(-int(size) // block))
    return f"-(-{expression(size)} // {block})"


def make_kernel(
    name: str,
    builder: Builder,
    hint: Hint,
    reach: Mapping[str, sympy.Expr],
) -> Kernel:
    """A kernel from the instructions of a group.

    Args:
        builder: with its stores; buffers have their graph-wide names.
        hint: the likely value of a size.
        reach: buffer → number of elements from its first to its last.
    """
    written = dict.fromkeys(store.buffer for store in builder.stores)
    read = dict.fromkeys(load.buffer for load in builder.loads())
    buffers = tuple(dict.fromkeys([*read, *written]))
    dtype_of = {load.buffer: load.dtype for load in builder.loads()}
    dtype_of.update({store.buffer: store.dtype for store in builder.stores})
    rename_buffers(builder, {buffer: f"b{k}" for k, buffer in enumerate(buffers)})
    nest = nest_of(builder, hint)
    extents = [axis.size for axis in nest.axes] + [reach[buffer] for buffer in buffers]
    kernel = Kernel(
        name,
        builder,
        nest,
        _blocks(builder, nest, hint),
        buffers,
        frozenset(written),
        tuple(dtype_of[buffer] for buffer in buffers),
        size_symbols(builder, nest),
        tuple(extents),
    )
    wide = any(hint(extent) >= WIDE_FROM for extent in extents)
    return kernel.with_blocks(replace(kernel.blocks, wide=wide))


def rename_buffers(builder: Builder, names: Mapping[str, str]) -> None:
    """Give the memory of a kernel the names of its parameters."""
    for number, instruction in enumerate(builder.instructions):
        if instruction.op == "load" and instruction.attribute.buffer in names:
            load = replace(instruction.attribute, buffer=names[instruction.attribute.buffer])
            builder.instructions[number] = replace(instruction, attribute=load)
    builder.stores = [replace(store, buffer=names[store.buffer]) for store in builder.stores]


def size_symbols(builder: Builder, nest: Nest) -> tuple[sympy.Symbol, ...]:
    expressions: list[sympy.Expr] = [axis.size for axis in nest.axes]
    expressions += [dim.size for axis in nest.axes for dim in axis.dims]
    for number in builder.live():
        instruction = builder.instructions[number]
        if instruction.op == "load":
            expressions.append(nest.rewritten(instruction.attribute.offset))
        elif instruction.op == "index":
            expressions.append(nest.rewritten(instruction.attribute))
    expressions += [nest.rewritten(store.offset) for store in builder.stores]
    expressions += [builder.ranges[symbol] for symbol in builder.indirect]
    own = {dim.symbol for axis in nest.axes for dim in axis.dims} | set(builder.indirect)
    found = {s: None for expr in expressions for s in sorted_symbols(expr) if s not in own}
    return tuple(sorted(found, key=lambda symbol: symbol.name))


def _blocks(builder: Builder, nest: Nest, hint: Hint) -> Blocks:
    rows, columns = nest.axis("p"), nest.axis("q")
    reduced = nest.axis("r")
    count = hint(rows.size) if rows is not None else 1
    if reduced is not None:
        return _reduction_blocks(builder, nest, count, reduced, hint)
    if columns is not None and not _crosses(builder, nest):
        block = row_block(hint(columns.size)) or 256
        return Blocks(1024 // block, block, warps=4)
    if columns is not None:
        return Blocks(32, 64 if hint(columns.size) >= 64 else 32, warps=4)
    if rows is None or rows.size == 1:
        return Blocks(1, warps=1)
    block = min(max(_power(count // _PROGRAMS), 128), 1024)
    return Blocks(block, warps=max(1, min(4, block // 128)))


def _crosses(builder: Builder, nest: Nest) -> bool:
    """Whether something steps by one along axis p: a transposed tile, not rows."""
    rows = nest.axis("p")
    assert rows is not None
    offsets = [load.offset for load in builder.loads()]
    offsets += [store.offset for store in builder.stores]
    columns = nest.axis("q")
    assert columns is not None
    inner = columns.dims[0].symbol
    return any(
        _step(offset, dim.symbol) == 1 and near_step(offset, inner) not in (None, 0)
        for offset in map(nest.rewritten, offsets)
        for dim in rows.dims
    )


def _reduction_blocks(
    builder: Builder, nest: Nest, count: int, reduced: Axis, hint: Hint
) -> Blocks:
    length = hint(reduced.size)
    # Neighbouring lanes should read neighbouring elements, of what is read element by element.
    along = across = 0
    for load in builder.loads():
        offset = nest.rewritten(load.offset)
        if offset.free_symbols.isdisjoint(dim.symbol for dim in reduced.dims):
            continue
        along += any(_step(offset, dim.symbol) == 1 for dim in reduced.dims)
        rows = nest.axis("p")
        across += rows is not None and any(_step(offset, dim.symbol) == 1 for dim in rows.dims)
    whole = reduced.size.is_Integer and length <= _LONGEST_WHOLE_ROW
    if across > along:
        inner = min(_power(length), 32)
        block = min(64, _power(count))
        return Blocks(block, inner, looped=not (whole and _power(length) <= 32), warps=4)
    inner = _power(length) if whole else min(_power(length), 2048)
    block = max(1, 1024 // inner)
    while block > 1 and -(-count // block) < _PROGRAMS:
        block //= 2
    warps = min(max(_power(block * inner // 512), 1), 16)
    return Blocks(block, inner, looped=not whole, warps=warps)
