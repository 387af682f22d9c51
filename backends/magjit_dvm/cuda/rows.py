"""Row values of the GPU's encoder: what is one number for a row is computed in row registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magjit_dvm.cuda.backwards import Backwards
from magjit_dvm.cuda.machine import Machine
from magjit_dvm.cuda.space import Operand, Space
from magjit_dvm.cuda.tiling import is_near, is_transposed
from magjit_dvm.cuda.values import WHAT, exact_inverse
from magjit_dvm.cuda.words import (
    BY,
    BY_ROW,
    MOST_REGISTERS,
    NO_WORD,
    NUMBER,
    OF_COLUMNS,
    OF_STAGE,
    Descriptor,
    Image,
    Word,
)
from magjit_dvm.instructions import DType
from magjit_dvm.philox import FOURS
from magjit_dvm.program import DRAWN, Node, NodeKind
from magjit_dvm.vm import NotEncodable

__all__ = [
    "MOST_WORDS",
    "REVERSED",
    "WRAPS",
    "Place",
    "RowEncoder",
    "image_arguments",
]

REVERSED = {
    "sub": "rsub",
    "div": "rdiv",
    "pow": "rpow",
    "lt": "gt",
    "le": "ge",
    "gt": "lt",
    "ge": "le",
    **{name: name for name in ("add", "mul", "minimum", "maximum", "eq", "ne", "sub_square")},
    **{name: name for name in ("bitwise_and", "bitwise_or", "bitwise_xor")},
}
"""Operators by what they are with their operands exchanged."""
WRAPS = frozenset({"neg", "add", "sub", "mul", "pow", "shift_left", "bitwise_not"})
"""Results that may leave the 8 bits of a uint8."""
MOST_WORDS = 224

Place = tuple[int, int, int]
"""Of an operand: its descriptor's number, its argument, bytes from there."""


_SIGN = 1 << 31


class RowEncoder(Backwards):
    """Words for values of rows.

    Attributes:
        left: uses of each value that are to come.
        register, accumulator, saved: where values are: row registers, accumulators, scratch memory.
        free, slots: of scratch memory.
        held: the value that A has; −1 if it has none.
    """

    def __init__(self, space: Space, arguments: Sequence[Any], machine: Machine) -> None:
        super().__init__(space, arguments)
        self.machine = machine
        self.image = Image()
        self.left = list(self.uses)
        self.register: dict[int, int] = {}
        self.given_away: set[int] = set()  # row values whose registers others have
        self.emitted: set[int] = set()  # row values that have been found
        self.accumulator: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        self.free: list[int] = []
        self.slots = 0
        self.held = -1

    def put(
        self,
        first: str,
        second: str = "nop",
        x: int = 0,
        y: int = 0,
        w1: int = 0,
        w2: int = 0,
        w3: int = 0,
        place: Place = (0, -1, 0),
    ) -> None:
        if len(self.image.words) > MOST_WORDS:
            raise NotEncodable("too many words")
        if first in BY:
            first, second = "by", first
        at, pointer, offset = place
        self.image.words.append(Word(first, second, x, y, w1 or at, w2, w3, pointer, offset))

    def put_immediate(self, kind: str, op: str, number: int) -> None:
        """A ← op(A, number); with the word before, where that has been a product or a sign.

        It would not be the word before if anything else were done with what it leaves in A.
        """
        words = self.image.words
        last = words[-1].first if words and kind == "f" else ""
        if last == "f.neg" and op == "mul":
            words.pop()
            number ^= _SIGN
        elif last == "fk.mul" and op in ("add", "sub", "rsub"):
            factor = words.pop().w2 ^ (_SIGN if op == "rsub" else 0)
            self.put("fk.mad", w2=factor, w3=number ^ (_SIGN if op == "sub" else 0))
            return
        self.put(f"{kind}k.{op}", w2=number)

    def compute(self, n: int) -> None:
        raise NotImplementedError

    def give_up(self, uses: int = 0) -> None:
        raise NotImplementedError

    def generate(self, n: int) -> None:
        raise NotImplementedError

    def forget(self, asked: Sequence[int]) -> None:
        """Scratch memory and counts do not outlive a pass over chunks: all is computed again.

        Args:
            asked: what the pass that begins has tiles computed for.
        """
        self.free += self.saved.values()
        self.saved.clear()
        self.left = [0] * len(self.nodes)
        for n in asked:
            self.count_uses(n)
        self.held = -1

    def count_uses(self, n: int) -> None:
        """One more of a value, and of what it is computed from if it is the first."""
        n = self.canonical[n]
        self.left[n] += 1
        if self.left[n] == 1 and not self.in_row(n) and not self.is_number(n):
            for arg in () if self.is_load(n) else self.nodes[n].args:
                self.count_uses(arg)

    def uncount(self, n: int) -> None:
        """One use less of a value, and if it was the last of what it would have been made of."""
        n = self.canonical[n]
        self.left[n] -= 1
        if self.left[n] == 0 and not self.in_row(n) and not self.is_number(n):
            for arg in () if self.is_load(n) else self.nodes[n].args:
                self.uncount(arg)

    # -- row values --

    def emit_row_value(self, n: int) -> None:
        if n not in self.register:
            self.find_row_value(n)
        self.emitted.add(n)

    def find_row_value(self, n: int) -> None:
        node = self.nodes[n]
        if node.kind is NodeKind.IOTA:
            self.put("s.ld.at", x=self.new_register(n), place=self.row_view(self.line(node.aux)))
        elif self.is_load(n):
            self.load_row_value(n)
        elif node.kind is NodeKind.INDEX and WHAT[node.dtype] in OF_COLUMNS:
            self.look_up_row_value(n, node)
        elif n in self.online:
            x, w1 = self.new_register(n), self.new_register(self.online[n])
            self.put("fin.f.softmax", x=x, y=self.accumulator[n], w1=w1)
        elif node.kind is NodeKind.REDUCE:
            fin = f"fin.{self.reduction(n)}"
            self.put(fin, x=self.new_register(n), y=self.accumulator[n])
        elif not self.by_scalar_word(n):
            self.compute(n)
            self.put("s.take", x=self.new_register(n))
            self.held = -1

    def load_row_value(self, n: int) -> None:
        number, what = self.loaded(n)
        if number in image_arguments(self.image):
            y = OF_STAGE.index(what)
            self.put("s.in", x=self.new_register(n), y=y, place=(0, number, 0))
        elif what in (*OF_COLUMNS, "i64s"):
            place = self.row_view(self.operand(number))
            self.put(f"s.ld.{what}", x=self.new_register(n), place=place)
        else:
            self.give_up()
            place = self.viewed(self.operand(number), self.space.order)
            self.put(f"lt.e.{what}", "take", place=place)
            self.put("s.take", x=self.new_register(n))

    def by_scalar_word(self, n: int) -> bool:
        """One word on row registers, where there is one."""
        node = self.nodes[n]
        if node.kind is NodeKind.CAST:
            return self.cast_by_scalar_word(n)
        if node.kind is not NodeKind.COMPUTE or (node.op in WRAPS and node.dtype is DType.U8):
            return False
        if node.op == "rsqrt" and self.scaled(n):
            self.scaled_rsqrt(n)
            return True
        if len(node.args) == 2 and self.with_number(n, *node.args):
            return True
        first, second = self.scalar_word("s", n, node.op)
        if not first:
            return False
        y, w1, w2 = (*(self.register_of(arg) for arg in node.args), 0, 0)[:3]
        self.put(first, second, self.new_register(n), y, w1, w2)
        return True

    def scalar_word(self, head: str, n: int, op: str) -> tuple[str, str]:
        """The operators of a word on row registers, or on one and a number; empty without one."""
        node = self.nodes[n]
        kind = self.kind(node.args[0])
        if op == "bitwise_not" and node.dtype is DType.BOOL:
            op = "logical_not"
        if kind == "f" and f"{head}.{op}" in NUMBER:
            return f"{head}.{op}", "nop"
        name = op if op == "select" else f"{kind}.{op}"
        return (f"{head}.by", name) if name in BY_ROW else ("", "")

    def cast_by_scalar_word(self, n: int) -> bool:
        """A cast that is one operator."""
        ops = self.cast_ops(n)
        if len(ops) != 1:
            return False
        y = self.register_of(self.nodes[n].args[0])
        if ops[0] == "ik.bitwise_and":
            self.put("sk.by", "i.bitwise_and", self.new_register(n), y, w2=255)
        else:
            self.put("s.by", ops[0], self.new_register(n), y)
        return True

    def scaled_rsqrt(self, n: int) -> None:
        """rsqrt(s / number + number) in one word, by the quotient's inverse."""
        given, quotient, total = self.scaled(n)
        y, w3 = self.register_of(given), self.bits(self.nodes[total].args[1])
        w2 = self.inverse_bits(self.nodes[quotient].args[1])
        self.put("sk.scaled_rsqrt", x=self.new_register(n), y=y, w2=w2, w3=w3)

    def number_word(self, n: int) -> tuple[str, str]:
        """The operators of a word on a row register and a number; empty without one."""
        args, op = self.nodes[n].args, self.nodes[n].op
        numbers = [self.is_number(arg) for arg in args]
        if len(args) != 2 or numbers[0] == numbers[1]:
            return "", ""
        return self.scalar_word("sk", n, REVERSED.get(op, "") if numbers[0] else op)

    def with_number(self, n: int, left: int, right: int) -> bool:
        """One word on a row register and a number."""
        first, second = self.number_word(n)
        if not first:
            return False
        if self.is_number(left):
            left, right = right, left
        y, bits = self.register_of(left), self.bits(right)
        inverse = exact_inverse(bits) if first == "sk.div" else 0
        first, bits = ("sk.mul", inverse) if inverse else (first, bits)
        self.put(first, second, self.new_register(n), y, w2=bits)
        return True

    def register_of(self, n: int) -> int:
        """The row register of a row value, or a new one with a number."""
        n = self.canonical[n]
        if not self.is_number(n):
            if n in self.given_away:
                raise NotEncodable("too many values of a row")
            return self.register[n]
        if n not in self.register:
            bits, since = self.bits(n), 0 if self.image.tail == NO_WORD else self.image.tail
            same = (
                one for one in self.image.words[since:] if one.first == "s.k" and one.w2 == bits
            )
            known = next(same, None)
            if known is not None:
                self.register[n] = known.x
            else:
                self.put("s.k", x=self.new_register(n), w2=bits)
        return self.register[n]

    def new_register(self, n: int) -> int:
        """One that is free, or else that of a row value which nobody asks for any more."""
        if self.image.numbers < MOST_REGISTERS:
            self.register[n] = self.image.numbers
            self.image.numbers += 1
            return self.register[n]
        for over in range(len(self.nodes)):
            if over in self.register and self.is_over(over, self.emitted):
                self.given_away.add(over)
                self.register[n] = self.register[over]
                return self.register[n]
        raise NotEncodable("too many values of a row")

    def is_over(self, n: int, emitted: set[int]) -> bool:
        """Whether row values alone have asked for a row value, and all have been found."""
        if n in self.given_away or self.is_number(n):
            return False
        found = {self.canonical[u] for u in range(len(self.nodes)) if self.reads(u, n)} - {n}
        stored = any(self.canonical[out.node] == n for out in self.program.outputs)
        return bool(found) and not stored and emitted >= found

    def reads(self, user: int, n: int) -> bool:
        return any(self.canonical[arg] == n for arg in self.nodes[user].args)

    def row_view(self, one: Operand, cols: int = 0) -> Place:
        """Where a row's element of an operand is, or that of its first column."""
        dims = [d for d in self.space.order if d not in self.space.reduced]
        dims = dims if self.space.reduced else []
        return self.viewed(one, dims, cols=cols)

    def operand(self, number: int) -> Operand:
        inputs = self.space.inputs
        found = inputs[number] if number < len(inputs) else self.space.outputs[number - len(inputs)]
        assert found is not None
        return found

    def placed(self, number: int) -> tuple[str, Place]:
        """How a tensor's tile is loaded, and from where."""
        one, space, image = self.operand(number), self.space, self.image
        by_four = self.by_four
        if number in image_arguments(image):
            aligned = by_four and one.low % min(4 * one.size, 16) == 0
            return "s" if aligned or one.size == 8 else "u", (0, number, 0)
        if self.of_columns(one):
            return "c", (space.cols, one.argument, one.offset)
        if space.each and (is_near(space, one) or is_transposed(space, one)):
            how = "n" if is_near(space, one) else "t"
            return how, self.viewed(one, space.order, apart=True)
        place = self.viewed(one, space.order)
        inner, stride = image.descriptors[place[0]].dims[0]
        if by_four and inner % 4 == 0 and one.size < 8 and stride == 0:
            return "b", place
        return "v" if self.in_fours(one, place) else "e", place

    @property
    def by_four(self) -> bool:
        """Whether no row ends within four elements."""
        return not self.image.by_rows or self.space.cols % 4 == 0

    def in_fours(self, one: Operand, place: Place) -> bool:
        """Whether four elements of the space, side by side, are so in memory, and aligned."""
        dims = self.image.descriptors[place[0]].dims
        if not self.by_four or not dims or dims[0][0] % 4 or not dims[0][1] == one.size < 8:
            return False
        four = min(4 * one.size, 16)
        return one.low % four == 0 and all(stride % four == 0 for _, stride in dims[1:])

    def of_columns(self, one: Operand) -> bool:
        """Whether an operand is the same in all rows, and lies in memory as their columns do."""
        space = self.space
        by_four = one.size in (2, 4) and one.low % (4 * one.size) == 0
        return bool(space.reduced) and by_four and space.contiguous(one, space.reduced)

    def viewed(
        self, one: Operand, dims: Sequence[int], apart: bool = False, cols: int = 0
    ) -> Place:
        """Where an operand's elements are; of a table, with what a position means."""
        places = self.space.descriptor(one, dims, apart)
        if self.space.rows * self.space.cols >= 1 << 31:
            raise NotEncodable("a view of more than 31 bits")
        number = self.described(Descriptor(places, (one.bound, one.step, cols)))
        return number, one.argument, one.offset

    def described(self, one: Descriptor) -> int:
        """The number of a descriptor, made once."""
        if one not in self.image.descriptors:
            self.image.descriptors.append(one)
        return self.image.descriptors.index(one)

    def store_row(self, k: int) -> None:
        out = self.program.outputs[k]
        number = len(self.space.inputs) + k
        y = self.register_of(out.node)
        place = self.row_view(self.operand(number))
        self.put(f"s.st.{self.stored(out.node)}", y=y, place=place)

    # -- positions and tables --

    def line(self, d: int) -> Operand:
        """Of no argument: the address of an element is its position along a dimension."""
        strides = [int(k == d) for k in range(len(self.space.size))]
        return Operand(-1, strides, 0, 0, 1)

    def placed_line(self, d: int) -> tuple[str, Place]:
        """How positions along a dimension are made: of a row's columns, or anywhere."""
        if self.space.reduced == {d}:
            return "col", (self.space.cols, -1, 0)
        return "e", self.viewed(self.line(d), self.space.order)

    def placed_draw(self, node: Node) -> Place:
        """What says which numbers are drawn.

        Raises:
            NotEncodable: they are eager mode's by another kernel.
        """
        seed, place, shares = (int(self.arguments[node.aux + k]) for k in range(DRAWN))
        threads, fours = shares // FOURS, shares % FOURS
        known = 0 <= place < 1 << 31 and 0 < threads < 1 << 31 and fours in (1, 2)
        if not known or self.space.rows * self.space.cols >= 1 << 31:
            raise NotEncodable("numbers that are drawn in another way")
        high = (seed >> 32) + (1 << 31)
        key = seed & 0xFFFFFFFF, high % (1 << 32) - (1 << 31)
        return self.described(Descriptor(((threads, fours),), (*key, place))), -1, 0

    def look_up_row_value(self, n: int, node: Node) -> None:
        """One element for a row."""
        y, place = self.register_of(node.args[0]), self.row_view(self.operand(node.aux))
        self.put(f"s.at.{WHAT[node.dtype]}", x=self.new_register(n), y=y, place=place)

    def look_up(self, node: Node) -> None:
        """A ← elements of a table: rows of it where all columns share a position, else each."""
        one, what, (position,) = self.operand(node.aux), WHAT[node.dtype], node.args
        if self.space.reduced and self.in_row(position) and self.has_rows(one):
            y, place = self.register_of(position), self.row_view(one, self.space.cols)
            self.give_up()
            self.put(f"lt.row.{what}", "take", y=y, place=place)
            return
        self.generate(position)
        self.give_up(1)
        self.put(f"at.{what}", place=self.viewed(one, self.space.order))

    def has_rows(self, one: Operand) -> bool:
        """Whether columns of a table are side by side, and each row begins with four of them."""
        space, four = self.space, min(4 * one.size, 16)
        if one.size not in (2, 4) or space.cols % 4 or one.low % four or one.step % four:
            return False
        steps = [one.strides[d] for d in space.order if d not in space.reduced]
        return not any(step % four for step in steps) and space.rows_side_by_side(one)


def image_arguments(image: Image) -> list[int]:
    """The arguments that stages have parts of."""
    return [argument for argument, _, _ in image.inputs]
