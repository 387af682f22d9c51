"""The kernels of attention of few rows: of a part of the positions, and of all parts together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch.fx import Node

from magjit.plugin.virtual_tensors.indexing import simplify
from magjit_triton.codegen.decoding import (
    Heads,
    dims_of_tiles,
    quotient,
    rest_of,
    symbols_of_tiles,
)
from magjit_triton.codegen.ir import Builder, Dim, Load, Store
from magjit_triton.codegen.kernel import (
    WIDE_FROM,
    Kernel,
    make_kernel,
)
from magjit_triton.codegen.layout import Layout
from magjit_triton.codegen.matmul.family import (
    WORKSPACE,
    Operand,
    nest_of_tiles,
    taken_parameters,
)
from magjit_triton.codegen.matmul.precision import float32_precision
from magjit_triton.codegen.matmul.source import TilePrinter
from magjit_triton.codegen.operators import constant
from magjit_triton.codegen.printer import HEADER, TRITON_DTYPES, Blocks, expression

__all__ = ["DecodingKernel", "decoding_kernels"]

Hint = Callable[[sympy.Expr], int]

_SHORTEST_PART = 256
_MOST_PARTS = 64
_PART = sympy.Symbol("i900", integer=True, nonnegative=True)


@dataclass(frozen=True)
class DecodingKernel(Kernel):
    """The kernel of one part, or of all.

    Attributes:
        tiles: query, keys, values, scores.
        length: positions.
        splits: how many parts they are cut into.
        block: positions of a step.
    """

    tiles: Mapping[str, Operand]
    dtype: torch.dtype
    length: sympy.Expr
    splits: int
    block: int

    @property
    def checks(self) -> bool:
        """Whether it asserts that indices read from memory are in range."""
        return any(one.builder.indirect for one in self.tiles.values())

    @cached_property
    def source(self) -> str:
        """Triton source with its imports."""
        return HEADER + self.text(self.blocks)

    def grid(self) -> tuple[str, str]:
        """A program for each matrix of keys and each part."""
        return f"{expression(self.builder.dims[0].size)} * {self.splits}", "1"

    def text(self, blocks: Blocks) -> str:
        """Source: the query has a function of its own, so that its names are not the loop's."""
        parameters = ", ".join(self.parameters)
        casts = [
            f"    {symbol.name} = tl.cast({symbol.name}, tl.int64)"
            for symbol in self.symbols
            if blocks.wide
        ]
        rows, width = blocks.p, blocks.inner
        depth = _power(self.tiles["query"].builder.dims[2].size)
        query = self._tile("query", "r", rows, depth, "", "", blocks.wide, "    ")
        start = "tl.program_id(0).to(tl.int64)" if blocks.wide else "tl.program_id(0)"
        lines = [f"    program = {start}"]
        lines.append(
            f"    i0 = program // {self.splits}" if self.splits > 1 else "    i0 = program"
        )
        if self.splits > 1:
            lines.append(f"    {_PART} = program % {self.splits}")
        lines += [
            f"    query = {self.name}_query({parameters}{', ' if parameters else ''}i0)",
            f'    top = tl.full([{rows}, 1], float("-inf"), tl.float32)',
            f"    total = tl.zeros([{rows}, 1], tl.float32)",
            f"    sums = tl.zeros([{rows}, {width}], tl.float32)",
            *self._loop(),
            *self._step(rows, depth, width, blocks.wide),
            *self._results(rows, width, blocks.wide),
        ]
        return "\n".join(
            [
                "@triton.jit",
                f"def {self.name}_query({parameters}{', ' if parameters else ''}i0):",
                *casts,
                *query,
                "    return query",
                "",
                "",
                "@triton.jit",
                f"def {self.name}({parameters}):",
                *casts,
                *lines,
                "",
            ]
        )

    def _loop(self) -> Iterator[str]:
        if self.splits == 1:
            yield f"    for step in range(0, {expression(self.length)}, {self.block}):"
            return
        steps = f"(({expression(self.length)} + {self.block - 1}) // {self.block})"
        share = f"({steps} + {self.splits - 1}) // {self.splits} * {self.block}"
        yield f"    begin = {_PART} * ({share})"
        yield f"    end = tl.minimum(begin + {share}, {expression(self.length)})"
        yield f"    for step in range(begin, end, {self.block}):"

    def _tile(
        self,
        label: str,
        inner: str,
        rows: int,
        columns: int,
        first: str,
        second: str,
        wide: bool,
        indent: str,
    ) -> list[str]:
        operand = self.tiles[label]
        blocks = Blocks(rows, columns, wide=wide)
        printer = TilePrinter(operand.builder, operand.nest, blocks, indent)
        printer.begin(first, second)
        printer.tile(label, operand, self.dtype, inner)
        return printer.lines

    def _step(self, rows: int, depth: int, width: int, wide: bool) -> list[str]:
        along = "tl.full([1, 1], 0, tl.int64) + step + " if wide else "step + "
        short, precision = TRITON_DTYPES[self.dtype], float32_precision()
        indent = " " * 8
        lines = self._tile("keys", "p", depth, self.block, "", along, wide, indent)
        zeros = f"tl.zeros([{rows}, {self.block}], tl.float32)"
        lines.append(f'{indent}scores = h.accumulate(query, keys, {zeros}, {short}, "{precision}")')
        scores = self.tiles["scores"]
        blocks = Blocks(rows, self.block, wide=wide)
        printer = TilePrinter(scores.builder, scores.nest, blocks, indent)
        printer.begin("", along)
        printer.emit(scores.value)
        lines += [*printer.lines, f"{indent}scores = v{scores.value}"]
        axis = scores.nest.axis("r")
        assert axis is not None
        if not printer.exact(axis):
            lines.append(f'{indent}scores = tl.where(r_mask, scores, float("-inf"))')
        lines += [
            f"{indent}higher = h.maximum(top, h.reduce_maximum(scores))",
            f'{indent}base = tl.where(higher == float("-inf"), 0.0, higher)',
            f"{indent}weights = h.exp(scores - base)",
            f"{indent}shrink = h.exp(top - base)",
            f"{indent}total = total * shrink + h.reduce_sum(weights)",
        ]
        lines += self._tile("values", "p", self.block, width, along, "", wide, indent)
        lines += [
            f'{indent}sums = h.accumulate(weights, values, sums * shrink, {short}, "{precision}")',
            f"{indent}top = higher",
        ]
        return lines

    def _results(self, rows: int, width: int, wide: bool) -> list[str]:
        lines = []
        if self.splits == 1:
            lines.append("    result = tl.where(total == 0.0, 0.0, h.div(sums, total))")
        blocks = Blocks(rows, width, wide=wide)
        printer = TilePrinter(self.builder, self.nest, blocks, "    ")
        printer.begin("", "")
        printer.store_all(self.builder.stores)
        return lines + printer.lines


def _power(size: Any) -> int:
    return max(16, 1 << (int(size) - 1).bit_length())


def decoding_kernels(
    name: str,
    node: Node,
    memory: Mapping[Node, Layout],
    reach: Mapping[str, sympy.Expr],
    hint: Hint,
    multiprocessors: int = 132,
    splits: int | None = None,
) -> tuple[list[Kernel], sympy.Expr]:
    """The kernels of an ``attend`` node of few rows, and the elements of their workspace.

    Args:
        name: of the first kernel.
        memory: nodes with memory, the result among them.
        reach: buffer → number of elements from its first to its last.
        hint: the likely value of a size.
        multiprocessors: of the device.
        splits: into how many parts the positions are cut; by default so many that the device has
            something to do.
    """
    heads = Heads.of(node)
    if splits is None:
        free = -(-2 * multiprocessors // max(1, hint(heads.count)))
        splits = max(1, min(free, hint(heads.length) // _SHORTEST_PART, _MOST_PARTS))
    tiles = node.meta["magjit_attention"].parts(node, memory)
    layout = memory[node]
    if splits == 1:
        builder = Builder(dims_of_tiles(heads.count, heads.lines, heads.width))
        value = builder.emit("given", (), "result", torch.float32)
        _store(builder, heads, layout, value)
        return [_kernel(name, node, tiles, heads, builder, reach, hint, 1)], sympy.S.Zero
    sizes = (heads.count, heads.lines, heads.width)
    rows = sympy.expand(splits * heads.count * heads.lines)
    total = sympy.expand(rows * (heads.width + 2))
    reach = {**reach, WORKSPACE: total}
    first = _kernel(name, node, tiles, heads, _partial(heads, splits), reach, hint, splits)
    second = make_kernel(f"{name}_sums", _joined(heads, splits, layout, sizes), hint, reach)
    return [first, second], total


def _kernel(
    name: str,
    node: Node,
    tiles: Mapping[str, Operand],
    heads: Heads,
    results: Builder,
    reach: Mapping[str, sympy.Expr],
    hint: Hint,
    splits: int,
) -> DecodingKernel:
    dtypes, written, symbols = taken_parameters(list(tiles.values()), results)
    dtype = node.meta["val"].dtype
    largest = max(_power(heads.depth), _power(heads.width))
    block = 64 if largest * dtype.itemsize <= 256 else 32
    exact = dtype == torch.float32 and float32_precision() == "ieee"
    wide = any(hint(reach[buffer]) >= WIDE_FROM for buffer in dtypes)
    blocks = Blocks(_power(heads.lines), _power(heads.width), wide=wide, warps=4, stages=2)
    if exact:
        block = 32
    nest = nest_of_tiles(results)
    return DecodingKernel(
        name,
        results,
        nest,
        blocks,
        tuple(dtypes),
        written,
        tuple(dtypes.values()),
        symbols,
        tuple(reach[buffer] for buffer in dtypes),
        tiles,
        dtype,
        heads.length,
        splits,
        block,
    )


def _store(builder: Builder, heads: Heads, layout: Layout, value: int) -> None:
    """Store an element of the result at its batch, head, row and column."""
    g, p, r = symbols_of_tiles()
    head = rest_of(g, heads.heads) * heads.times + quotient(p, heads.rows)
    place = (quotient(g, heads.heads), head, rest_of(p, heads.rows), r)
    if layout.dtype != torch.float32:
        value = builder.emit("round_to", (value,), layout.dtype, torch.float32)
    offset = simplify(layout.offset_at(place), builder.ranges)
    builder.stores.append(Store(layout.buffer, offset, value, None, layout.dtype))


def _places(heads: Heads, splits: int, part: sympy.Expr) -> tuple[sympy.Expr, ...]:
    """Where sums, the greatest score and the total weight of a part are in the workspace."""
    g, p, r = symbols_of_tiles()
    row = (part * heads.count + g) * heads.lines + p
    rows = splits * heads.count * heads.lines
    sums = row * heads.width + r
    top = rows * heads.width + row
    return tuple(sympy.expand(one) for one in (sums, top, top + rows))


def _partial(heads: Heads, splits: int) -> Builder:
    dims = dims_of_tiles(heads.count, heads.lines, heads.width)
    builder = Builder((*dims, Dim(_PART, sympy.Integer(splits), "g")))
    sums, top, total = _places(heads, splits, _PART)
    value = builder.emit("given", (), "sums", torch.float32)
    builder.stores.append(Store(WORKSPACE, sums, value, None, torch.float32))
    column = builder.emit("index", (), dims[2].symbol, torch.int64)
    zero = builder.emit("index", (), sympy.S.Zero, torch.int64)
    once = builder.emit("eq", (column, zero), None, torch.bool)
    for name, place in (("top", top), ("total", total)):
        value = builder.emit("given", (), name, torch.float32)
        builder.stores.append(Store(WORKSPACE, place, value, once, torch.float32))
    return builder


def _joined(heads: Heads, splits: int, layout: Layout, sizes: Sequence[sympy.Expr]) -> Builder:
    """The parts of each element put together: a reduction over them."""
    dims = dims_of_tiles(*sizes, axes="ppp")
    builder = Builder((*dims, Dim(_PART, sympy.Integer(splits), "r")))

    def load(place: sympy.Expr) -> int:
        return builder.emit("load", (), Load(WORKSPACE, place, torch.float32), torch.float32)

    def number(value: float) -> int:
        return constant(builder, value, torch.float32)

    sums, top, total = (load(place) for place in _places(heads, splits, _PART))
    highest = builder.emit("reduce", (top,), "maximum")
    nothing = builder.emit("eq", (highest, number(float("-inf"))), None, torch.bool)
    base = builder.emit("where", (nothing, number(0.0), highest))
    share = builder.emit("exp", (builder.emit("sub", (top, base)),))
    sums = builder.emit("reduce", (builder.emit("mul", (sums, share)),), "sum")
    total = builder.emit("reduce", (builder.emit("mul", (total, share)),), "sum")
    empty = builder.emit("eq", (total, number(0.0)), None, torch.bool)
    value = builder.emit("true_div", (sums, total))
    value = builder.emit("where", (empty, number(0.0), value))
    _store(builder, heads, layout, value)
    return builder
