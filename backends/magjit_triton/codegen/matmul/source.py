"""The source of a matmul kernel: the loop over tiles, the sums, what follows them.

kernel ::= for each tile: order, sums over k, stores      stores: for all columns of a tile, or
for each half of them
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
import torch

from magjit_triton.codegen.ir import Builder, Instruction, Store
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.codegen.matmul.described import order_of_tiles, step_along
from magjit_triton.codegen.matmul.family import SPLIT, Family, Operand, is_load, nest_of_tiles
from magjit_triton.codegen.matmul.points import rounded_tiles
from magjit_triton.codegen.nest import Nest
from magjit_triton.codegen.printer import TRITON_DTYPES, Blocks, Printer, expression

__all__ = ["TilePrinter", "matmul_source", "tiles_of"]


def tiles_of(size: sympy.Expr, block: int) -> str:
    if size.is_Integer:
        return str(-(-int(size) // block))
    return f"(({expression(size)} + {block - 1}) // {block})"


class TilePrinter(Printer):
    """Writes the part of a kernel that makes a tile of an operand, or that stores one."""

    def __init__(
        self, builder: Builder, nest: Nest, blocks: Blocks, indent: str, piece: str = ""
    ) -> None:
        super().__init__(builder, nest, blocks)
        self.indent = indent
        self.piece = piece
        self.short = False
        self.columns = ""
        self.held: int | None = None

    def text(self, number: int, instruction: Instruction) -> str:
        if self.short and instruction.op == "round_to":
            (operand,) = instruction.args
            if self.builder.instructions[operand].op == "given":
                return f"v{operand}"  # It is rounded as a tile.
        if instruction.op != "given":
            return super().text(number, instruction)
        name, _, distance = instruction.attribute.partition("_by")
        text = f"{name}{self.piece}"
        if distance:
            text = f"h.exchanged({text}, {distance})"
        return f"{text}.to(tl.float32)" if self.short else text

    def condition(self, number: int | None) -> str | None:
        """Nothing where a whole tile is known to be inside."""
        return None if number == self.held else super().condition(number)

    def store_all(self, stores: Sequence[Store]) -> None:
        """What is stored for some of a product's columns is computed for their tiles only."""
        spans, others = self.spans(stores)
        super().store_all(others)
        for mask, group in spans.items():
            first, end = self.builder.spans[mask]
            begin = f"{self.columns}0"
            self.write(f"if ({begin} >= {first}) & ({begin} < {end}):")
            before, self.held = (set(self.done), set(self.checked)), mask
            self.indent += "    "
            if len(group) == 1:  # Nothing that is read later can be written before.
                self.store(group[0])
            else:
                super().store_all(group)
            self.indent = self.indent[:-4]
            (self.done, self.checked), self.held = before, None

    def spans(self, stores: Sequence[Store]) -> tuple[dict[int, list[Store]], list[Store]]:
        """Stores by the interval of columns that they are for, where tiles do not cross its ends;
        and all others.
        """
        found: dict[int, list[Store]] = {}
        others = []
        for store in stores:
            span = self.builder.spans.get(store.mask) if store.mask is not None else None
            if span is None or span[0] % self.blocks.inner or self._is_cut(span[1]):
                others.append(store)
            else:
                assert store.mask is not None
                found.setdefault(store.mask, []).append(store)
        return found, others

    def _is_cut(self, end: int) -> bool:
        axis = self.nest.axis("q")
        assert axis is not None
        return bool(end % self.blocks.inner) and axis.size != end

    def zero_to_store(self) -> str:
        """Every lane of a tile has an address: which of them store is in the masks."""
        return f"tl.zeros([{self.blocks.p}, {self.blocks.inner}], tl.int32)"

    def begin(self, rows: str, columns: str) -> None:
        """The indices of the tile's elements, from those of its first one."""
        self.columns = columns
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
        if is_load(operand, dtype):
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
    parameters += sizes
    if configuration.described:
        parameters += [f"d{k}" for k in range(len(family.descriptions))]
    lines = [f"    {one} = tl.cast({one}, tl.int64)" for one in sizes if wide]
    lines += _body(family, configuration, wide)
    return "\n".join(["@triton.jit", f"def {name}({', '.join(parameters)}):", *lines, ""])


def _body(family: Family, cut: Configuration, wide: bool) -> list[str]:
    batch, m, n, _ = family.sizes
    rows, columns = tiles_of(m, cut.block_m), tiles_of(n, cut.block_n)
    start = "tl.program_id(0).to(tl.int64)" if wide else "tl.program_id(0)"
    lines = [f"    rows = {rows}", f"    columns = {columns}"]
    indent = "    "
    if cut.programs:
        indent = "        "
    after = _after_products(family, cut, wide, indent)
    if cut.programs:
        total = f"{expression(batch)} * rows * columns * {cut.split_k}"
        loop = f"range({start}, {total}, tl.num_programs(0))"
        if cut.described and not (family.checks or _branches(after)):
            # One loop for all steps of all tiles: the next tile is loaded while this one is stored.
            loop = f"tl.{loop[:-1]}, flatten=True)"
        lines.append(f"    for program in {loop}:")
    else:
        lines.append(f"    program = {start}")
    if cut.described:
        lines += [indent + line for line in order_of_tiles(cut.group_m, rows)]
        lines += [indent + line for line in _described_products(family, cut)]
    else:
        lines += [indent + line for line in _tile_of_program(family, cut)]
        lines += _products(family, cut, wide, indent)
    return lines + after


def _after_products(family: Family, cut: Configuration, wide: bool, indent: str) -> list[str]:
    """What is computed of the products of a tile, and its stores."""
    lines = []
    piece = cut.piece(family.work)
    names = [""] if piece == cut.block_n else ["l", "r"]
    short = cut.described and rounded_tiles(family.epilogue, family.dtype)
    for number in range(len(family.rights)):
        product = f"product{number}"
        if short:
            lines.append(f"{indent}{product} = {product}.to({TRITON_DTYPES[family.dtype]})")
        if len(names) > 1:
            lines.append(f"{indent}{product}l, {product}r = h.halves({product})")
    for number, name in enumerate(names):
        blocks = Blocks(cut.block_m, piece, wide=wide)
        nest = nest_of_tiles(family.epilogue)
        printer = TilePrinter(family.epilogue, nest, blocks, indent, name)
        printer.short = short
        start = f"column * {cut.block_n} + " + (f"{number * piece} + " if number else "")
        printer.begin(f"row * {cut.block_m} + ", start)
        printer.store_all(family.epilogue.stores)
        lines += printer.lines
    return lines


def _branches(lines: Sequence[str]) -> bool:
    return any(line.lstrip().startswith("if ") for line in lines)


def _described_products(family: Family, cut: Configuration) -> list[str]:
    """Sums over ``k`` of tiles that descriptors load; beyond all ends there are zeros."""
    count = len(family.rights)
    lines = [
        f"product{number} = tl.zeros([{cut.block_m}, {cut.block_n}], tl.float32)"
        for number in range(count)
    ]
    loop, step = step_along(family.sizes[3], cut.block_k)
    row, column = f"(row * {cut.block_m}).to(tl.int32)", f"(column * {cut.block_n}).to(tl.int32)"
    left, *rights = family.descriptions
    lines += [loop, f"    {step}", f"    left = {left.tile('d0', row, 'step')}"]
    short = TRITON_DTYPES[family.dtype]
    for number, right in enumerate(rights):
        lines.append(f"    right = {right.tile(f'd{number + 1}', 'step', column)}")
        product = f"product{number}"
        made = f'h.accumulate(left, right, {product}, {short}, "{family.precision}")'
        lines.append(f"    {product} = {made}")
    return lines


def _tile_of_program(family: Family, cut: Configuration) -> list[str]:
    """Tiles in groups of rows: neighbours in time share operands (Triton's grouped order)."""
    lines = ["place = program % (rows * columns)"]
    batched = len(family.left.builder.dims) == 3
    if batched or cut.split_k > 1:
        lines.append("rest = program // (rows * columns)")
    if cut.split_k > 1:
        lines.append(f"{SPLIT} = rest % {cut.split_k}")
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
        share = f"({tiles_of(k, cut.block_k)} + {cut.split_k - 1}) // {cut.split_k} * {cut.block_k}"
        lines.append(f"{indent}begin = {SPLIT} * ({share})")
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
