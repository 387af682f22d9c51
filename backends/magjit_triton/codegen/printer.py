"""A kernel's instructions as Triton source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from magjit.plugin.virtual_tensors.indexing import FloorDiv, Mod
from magjit_triton.codegen.ir import Builder, Instruction, Store, sorted_symbols
from magjit_triton.codegen.nest import Axis, Nest
from magjit_triton.codegen.operators import SCALAR

__all__ = ["HEADER", "TRITON_DTYPES", "Blocks", "Printer", "expression", "kernel_source"]

HEADER = """import triton
import triton.language as tl

from magjit_triton.codegen import helpers as h

"""

TRITON_DTYPES = {
    torch.bool: "tl.int1",
    torch.uint8: "tl.uint8",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
}

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a kernel is cut: elements of each axis a program has at once.

    Attributes:
        p, inner: of axis p, and of axis q or r.
        looped: whether axis r takes several steps.
        wide: whether addresses need 64 bits.
    """

    p: int
    inner: int = 1
    looped: bool = False
    wide: bool = False
    warps: int = 4
    stages: int = 2


def expression(expr: sympy.Expr) -> str:
    """An index expression as Python text."""
    if expr.is_Integer or expr.is_Symbol:
        return str(expr) if not str(expr).startswith("-") else f"({expr})"
    if isinstance(expr, FloorDiv):
        return f"({expression(expr.args[0])} // {expression(expr.args[1])})"
    if isinstance(expr, Mod):
        return f"({expression(expr.args[0])} % {expression(expr.args[1])})"
    if expr.is_Add:
        return "(" + " + ".join(expression(one) for one in expr.as_ordered_terms()) + ")"
    if expr.is_Mul:
        return "(" + " * ".join(expression(one) for one in expr.as_ordered_factors()) + ")"
    if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0:
        return "(" + " * ".join([expression(expr.base)] * int(expr.exp)) + ")"
    raise NotImplementedError(f"index expression {expr}")


def literal(value: bool | int | float) -> str:
    """A number as Python text."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _identity(kind: str, dtype: torch.dtype) -> str:
    if kind in ("sum", "any"):
        return "0"
    if kind in ("product", "all"):
        return "1"
    low = kind in ("maximum", "argmax")
    if dtype.is_floating_point:
        return 'float("-inf")' if low else 'float("inf")'
    limits = torch.iinfo(dtype)
    return str(limits.min if low else limits.max)


_COMBINE = {
    "sum": "{0} + {1}",
    "product": "{0} * {1}",
    "any": "{0} | {1}",
    "all": "{0} & {1}",
    "maximum": "h.maximum({0}, {1})",
    "minimum": "h.minimum({0}, {1})",
}


class Printer:
    """Writes the lines of a kernel, or of a part of one."""

    def __init__(self, builder: Builder, nest: Nest, blocks: Blocks) -> None:
        self.builder = builder
        self.nest = nest
        self.blocks = blocks
        self.second = nest.axis("q") or nest.axis("r")
        self.rank = 1 if self.second is None else 2
        # A program of one row computes its index, and what it reads once for it, as scalars.
        self.single_row = self.rank == 2 and blocks.p == 1
        self.live = builder.live()
        self.lines: list[str] = []
        self.indent = "    "
        self.done: set[int] = set()
        self.checked: set[tuple[sympy.Symbol, str]] = set()
        self.users: dict[int, set[str]] = {}
        self.known_axes: dict[int, set[str]] = {}
        for number in self.live:
            for operand in builder.operands(number):
                op = builder.instructions[number].op
                self.users.setdefault(operand, set()).add(op)
        for store in builder.stores:
            for operand in builder.store_operands(store):
                self.users.setdefault(operand, set()).add("store")

    def write(self, line: str) -> None:
        self.lines.append(self.indent + line)

    # Axes.

    def exact(self, axis: Axis) -> bool:
        """Whether no lane of a block is ever beyond the end."""
        size = axis.size
        if axis.name == "g":
            return True
        block = self.blocks.p if axis.name == "p" else self.blocks.inner
        factor, _ = size.as_coeff_Mul()
        return bool(factor.is_Integer) and int(factor) % block == 0

    def axis_begin(self, axis: Axis, start: str) -> None:
        block = self.blocks.p if axis.name == "p" else self.blocks.inner
        lanes = f"tl.arange(0, {block})"
        if axis.name == "p" and self.single_row:
            lanes = "0"
        elif self.rank == 2:
            lanes += "[:, None]" if axis.name == "p" else "[None, :]"
        self.write(f"{axis.name} = {start}{lanes}")
        if not self.exact(axis):
            self.write(f"{axis.name}_mask = {axis.name} < {expression(axis.size)}")
        inner: sympy.Expr = sympy.Integer(1)
        for position, dim in reversed(list(enumerate(axis.dims))):
            text = axis.name if inner == 1 else f"{axis.name} // {expression(inner)}"
            if position:
                text = f"{text} % {expression(dim.size)}"
            self.write(f"{dim.symbol} = {text}")
            inner = sympy.expand(inner * dim.size)

    def program(self, axis: Axis) -> str:
        number = 0 if axis.name == "p" else 1
        block = self.blocks.p if axis.name == "p" else self.blocks.inner
        wide = ".to(tl.int64)" if self.blocks.wide else ""
        return f"tl.program_id({number}){wide} * {block} + "

    def axes_of(self, expr: sympy.Expr) -> set[str]:
        """The axes that an expression varies over, through indices read from memory too."""
        found = set()
        for symbol in expr.free_symbols:
            if symbol in self.builder.indirect:
                number = self.builder.indirect[symbol]
                found |= self.varies(number)
        for axis in self.nest.axes:
            if any(dim.symbol in expr.free_symbols for dim in axis.dims):
                found.add(axis.name)
        return found

    def varies(self, number: int) -> set[str]:
        """The axes of this kernel that a value varies over."""
        if number not in self.known_axes:
            self.known_axes[number] = self._varies(number)
        return self.known_axes[number]

    def _varies(self, number: int) -> set[str]:
        instruction = self.builder.instructions[number]
        found: set[str] = set()
        for operand in self.builder.operands(number):
            found |= self.varies(operand)
        if instruction.op == "load":
            found |= self.axes_of(self.nest.rewritten(instruction.attribute.offset))
        elif instruction.op == "index":
            found |= self.axes_of(self.nest.rewritten(instruction.attribute))
        elif instruction.op == "given":
            found |= {"p", "r"}
        elif instruction.op == "reduce":
            found -= {"r"}
        return found

    def mask_for(self, axes: set[str], extra: str | None) -> str:
        parts = [
            f"{axis.name}_mask"
            for axis in self.nest.axes
            if axis.name in axes and not self.exact(axis)
        ]
        return " & ".join(parts + ([extra] if extra else []))

    # Instructions.

    def emit(self, number: int) -> None:
        """One instruction, after those that it needs, unless it stands already."""
        if number in self.done:
            return
        for operand in self.builder.operands(number):
            self.emit(operand)
        self.done.add(number)
        instruction = self.builder.instructions[number]
        if instruction.op == "reduce":
            self.whole_reduction(number, instruction)
        else:
            if instruction.op == "load":
                offset = instruction.attribute.offset
                self.check_indices(offset, self.mask_of_load(instruction))
            self.write(f"v{number} = {self.text(number, instruction)}")
        symbol = next((s for s, n in self.builder.indirect.items() if n == number), None)
        if symbol is not None:
            self.write(f"{symbol} = v{number}")

    def check_indices(self, offset: sympy.Expr, mask: str) -> None:
        """Raise where memory would be read or written at an index that is none of its own.

        What is not read may have any index: that of a border, or of lanes beyond the end.
        """
        for symbol in sorted_symbols(offset):
            if symbol not in self.builder.indirect or (symbol, mask) in self.checked:
                continue
            self.checked.add((symbol, mask))
            size = self.builder.ranges[symbol]
            if size.is_Integer and size >= 2**62:
                continue
            inside = f"({symbol} >= 0) & ({symbol} < {expression(size)})"
            if mask:
                inside = f"({inside}) | ~({mask})"
            self.write(f'tl.device_assert({inside}, "index out of bounds")')

    def text(self, number: int, instruction: Instruction) -> str:
        operands = [f"v{one}" for one in instruction.args]
        dtype = TRITON_DTYPES[instruction.dtype]
        match instruction.op:
            case "const":
                ones = ", ".join(["1"] * self.rank)
                return f"tl.full([{ones}], {literal(instruction.attribute)}, {dtype})"
            case "index":
                expr = self.nest.rewritten(instruction.attribute)
                compared = self.users.get(number, set()) <= set(_COMPARISONS)
                if not self.axes_of(expr) and not (compared and expr.is_Integer):
                    ones = ", ".join(["1"] * self.rank)
                    return f"tl.full([{ones}], 0, tl.int64) + {expression(expr)}"
                if compared:
                    return expression(expr)
                return f"({expression(expr)}).to(tl.int64)"
            case "given":
                return str(instruction.attribute)
            case "load":
                return self.load(instruction)
            case "cast":
                if instruction.dtype == torch.bool:
                    return f"{operands[0]} != 0"
                return f"{operands[0]}.to({dtype})"
            case "round_to":
                if instruction.attribute == torch.bfloat16:
                    return f"h.round_bfloat16({operands[0]})"
                short = TRITON_DTYPES[instruction.attribute]
                return f"{operands[0]}.to({short}).to({dtype})"
        text = SCALAR[instruction.op].format(*operands)
        if instruction.op in ("add", "sub", "mul", "neg", "abs") and instruction.dtype in (
            torch.uint8,
            torch.int8,
            torch.int16,
        ):
            return f"({text}).to({dtype})"
        return text

    def condition(self, number: int | None) -> str | None:
        """Text of what a load or a store depends on, if it depends on something."""
        return None if number is None else f"v{number}"

    def load(self, instruction: Instruction) -> str:
        return self.widened(self.loaded(instruction), instruction.attribute.dtype)

    def mask_of_load(self, instruction: Instruction) -> str:
        """For which lanes something is read; empty: for all."""
        extra = self.condition(instruction.args[0] if instruction.args else None)
        axes = self.axes_of(self.nest.rewritten(instruction.attribute.offset))
        return self.mask_for(axes, extra)

    def loaded(self, instruction: Instruction) -> str:
        """A value in the dtype of its memory."""
        load = instruction.attribute
        offset = self.nest.rewritten(load.offset)
        mask = self.mask_of_load(instruction)
        if self.single_row and self.axes_of(offset) <= {"p"} and not mask:
            return f"tl.broadcast_to(tl.load({load.buffer} + {expression(offset)}), [1, 1])"
        # A row's index is a number where a program has one row; the mask may be a block.
        if not self.axes_of(offset) or (self.single_row and self.axes_of(offset) <= {"p"}):
            place = f"{load.buffer} + {expression(offset)} + {self.zero()}"
        else:
            place = f"{load.buffer} + {expression(offset)}"
        return f"tl.load({place})" if not mask else f"tl.load({place}, {mask}, other=0)"

    @staticmethod
    def widened(text: str, dtype: torch.dtype) -> str:
        """A value as it is computed with."""
        return f"{text}.to(tl.float32)" if dtype in (torch.float16, torch.bfloat16) else text

    def zero_to_store(self) -> str:
        """Gives an address as many elements as its value has."""
        return self.zero()

    def zero(self) -> str:
        return f"tl.full([{', '.join(['1'] * self.rank)}], 0, tl.int32)"

    def lanes(self, number: int, kind: str) -> str:
        """An operand of a reduction as a whole block, the lanes beyond the end neutral."""
        instruction = self.builder.instructions[number]
        block = f"[{self.blocks.p}, {self.blocks.inner}]"
        assert self.second is not None
        whole = f"tl.broadcast_to(v{number}, {block})"
        if self.exact(self.second):
            return whole
        neutral = _identity(kind, instruction.dtype)
        return f"tl.where(r_mask, {whole}, {neutral})"

    def whole_reduction(self, number: int, instruction: Instruction) -> None:
        kind = instruction.attribute
        lanes = [self.lanes(instruction.args[0], kind)]
        if kind in ("argmax", "argmin"):
            block = f"[{self.blocks.p}, {self.blocks.inner}]"
            place = f"tl.broadcast_to(v{instruction.args[1]}, {block})"
            assert self.second is not None
            exact = self.exact(self.second)
            lanes.append(place if exact else f"tl.where(r_mask, {place}, {2**62})")
        self.write(f"v{number} = h.reduce_{kind}({', '.join(lanes)})")

    def store_all(self, stores: Sequence[Store]) -> None:
        """Stores, after all that is read: a result may be written over what another one reads."""
        waiting = [one for store in stores for one in self.builder.store_operands(store)]
        needed: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number not in needed and number not in self.done:
                needed.add(number)
                waiting.extend(self.builder.operands(number))
        for number in sorted(needed):
            if self.builder.instructions[number].op == "load":
                self.emit(number)
        for store in stores:
            self.store(store)

    def store(self, store: Store) -> None:
        for operand in self.builder.store_operands(store):
            self.emit(operand)
        offset = self.nest.rewritten(store.offset)
        axes = self.axes_of(offset)
        extra = self.condition(store.mask)
        # Every lane writes an element of its own: beyond the end of any axis there is none.
        mask = self.mask_for({axis.name for axis in self.nest.axes if axis.name != "r"}, extra)
        if "r" in axes:
            mask = self.mask_for({"p", "r"}, extra)
        self.check_indices(store.offset, mask)
        place = f"{store.buffer} + {expression(offset)}"
        if axes != {axis.name for axis in self.nest.axes}:
            place += f" + {self.zero_to_store()}"
        value = f"v{store.value}"
        if store.dtype == torch.bool:
            value += ".to(tl.int8)"
        self.write(f"tl.store({place}, {value}{', ' + mask if mask else ''})")

    # Passes.

    def body(self) -> None:
        for axis in self.nest.axes:
            if axis.name != "r":
                self.axis_begin(axis, self.program(axis))
        loop = self.nest.axis("r")
        if loop is None:
            self.store_all(self.builder.stores)
        elif not self.blocks.looped:
            self.axis_begin(loop, "")
            self.store_all(self.builder.stores)
        else:
            self.looped(loop)

    def looped(self, loop: Axis) -> None:
        instructions = self.builder.instructions
        reductions = [n for n in self.live if instructions[n].op == "reduce"]
        for level in sorted({instructions[n].level for n in reductions}):
            here = [n for n in reductions if instructions[n].level == level]
            self.outside([operand for n in here for operand in self.builder.operands(n)])
            for number in here:
                self.accumulator(number)
            kept = set(self.done)
            self.loop_begin(loop)
            for number in here:
                for operand in self.builder.operands(number):
                    self.emit(operand)
                self.accumulate(number)
            self.indent = "    "
            self.done = kept
            for number in here:
                self.finish(number)
                self.done.add(number)
        inside = [s for s in self.builder.stores if "r" in self._store_axes(s)]
        outside = [s for s in self.builder.stores if "r" not in self._store_axes(s)]
        self.outside([n for store in inside for n in self.builder.store_operands(store)])
        self.store_all(outside)
        if inside:
            self.loop_begin(loop)
            self.store_all(inside)
            self.indent = "    "

    def _store_axes(self, store: Store) -> set[str]:
        found = self.axes_of(self.nest.rewritten(store.offset))
        return found.union(*(self.varies(one) for one in self.builder.store_operands(store)))

    def loop_begin(self, loop: Axis) -> None:
        self.write(f"for r_start in range(0, {expression(loop.size)}, {self.blocks.inner}):")
        self.indent = "        "
        self.axis_begin(loop, "r_start + ")

    def outside(self, numbers: Sequence[int]) -> None:
        """What does not vary over r stands before the loop."""
        seen: set[int] = set()
        stack = list(numbers)
        while stack:
            number = stack.pop()
            if number not in seen:
                seen.add(number)
                stack.extend(self.builder.operands(number))
        for number in sorted(seen):
            if "r" not in self.varies(number):
                self.emit(number)

    def accumulator(self, number: int) -> None:
        instruction = self.builder.instructions[number]
        kind = instruction.attribute
        dtype = self.builder.instructions[instruction.args[0]].dtype
        block = f"[{self.blocks.p}, {self.blocks.inner}]"
        neutral = _identity(kind, dtype)
        self.write(f"a{number} = tl.full({block}, {neutral}, {TRITON_DTYPES[dtype]})")
        if kind in ("argmax", "argmin"):
            self.write(f"a{number}_place = tl.full({block}, {2**62}, tl.int64)")

    def accumulate(self, number: int) -> None:
        instruction = self.builder.instructions[number]
        kind = instruction.attribute
        lanes = self.lanes(instruction.args[0], kind)
        if kind in _COMBINE:
            self.write(f"a{number} = {_COMBINE[kind].format(f'a{number}', lanes)}")
            return
        choose = "h.first_greatest" if kind == "argmax" else "h.first_smallest"
        block = f"[{self.blocks.p}, {self.blocks.inner}]"
        place = f"tl.broadcast_to(v{instruction.args[1]}, {block})"
        assert self.second is not None
        if not self.exact(self.second):
            place = f"tl.where(r_mask, {place}, {2**62})"
        both = f"a{number}, a{number}_place"
        self.write(f"{both} = {choose}({both}, {lanes}, {place})")

    def finish(self, number: int) -> None:
        kind = self.builder.instructions[number].attribute
        places = f", a{number}_place" if kind in ("argmax", "argmin") else ""
        self.write(f"v{number} = h.reduce_{kind}(a{number}{places})")


def kernel_source(
    name: str, builder: Builder, nest: Nest, blocks: Blocks, parameters: Sequence[str]
) -> str:
    """The source of one kernel, without the header.

    Args:
        parameters: buffers' names, then names of size symbols.
    """
    printer = Printer(builder, nest, blocks)
    buffers = {store.buffer for store in builder.stores} | {one.buffer for one in builder.loads()}
    if blocks.wide:
        for parameter in parameters:
            if parameter not in buffers:
                printer.write(f"{parameter} = tl.cast({parameter}, tl.int64)")
    printer.body()
    head = ["@triton.jit", f"def {name}({', '.join(parameters)}):"]
    return "\n".join([*head, *printer.lines]) + "\n"
