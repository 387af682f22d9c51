"""Tiles of the GPU's encoder: computed in A when they are asked for, with T for the other operand.

That goes from outputs and reductions backwards.  A tile that is used more than once, or has to
wait, is saved in scratch memory; loads are repeated.
"""

from __future__ import annotations

from magjit_dvm.cuda.functions import FLOATS, INTS, is_binary
from magjit_dvm.cuda.rows import REVERSED, WRAPS
from magjit_dvm.cuda.sums import SumsEncoder
from magjit_dvm.cuda.support import may_be_short
from magjit_dvm.cuda.words import BY, RUNNING, WITH_IMMEDIATE
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind
from magjit_dvm.vm import NotEncodable

__all__ = ["TileEncoder"]


class TileEncoder(SumsEncoder):
    """Words for tiles."""

    def available(self, n: int) -> bool:
        """Whether one word brings a value into A or T."""
        n = self.canonical[n]
        return self.is_number(n) or self.in_row(n) or self.is_load(n) or n in self.saved

    def made(self, n: int) -> bool:
        """Whether a tile has been computed and is still there."""
        n = self.canonical[n]
        return self.held == n or n in self.saved

    def bring(self, n: int, bank: str, second: str = "nop", y: int = 0) -> None:
        """An available value into A or T; then ``second``, which may work with row register y."""
        n = self.canonical[n]
        if second in BY:
            self.bring(n, bank, y=y)
            self.put(second)
        elif self.is_number(n):
            second = second if bank == "t" else "take"
            self.put("lt.k", second, w2=self.bits(n))
        elif n in self.saved:
            self.put(f"l{bank}.scratch", second, y=y, w1=self.slot_at(self.saved[n]))
        elif self.in_row(n):
            self.put(f"l{bank}.r", second, y=self.register[n])
        else:
            self.bring_load(n, bank, second, y)

    def bring_load(self, n: int, bank: str, second: str, y: int = 0) -> None:
        if self.nodes[n].kind is NodeKind.IOTA:
            (how, place), what = self.placed_line(self.nodes[n].aux), "at"
        elif self.nodes[n].kind is NodeKind.DRAW:
            how, what, place = "draw", "f", self.placed_draw(self.nodes[n])
        else:
            number, what = self.loaded(n)
            how, place = self.placed(number)
        if bank == "a" and (how != "s" or what not in ("32", "f16", "bf16")):
            assert second == "nop"
            bank, second = "t", "take"
        self.put(f"l{bank}.{how}.{what}", second, y=y, place=place)

    def done_with(self, n: int) -> None:
        """One use of a value is behind it."""
        n = self.canonical[n]
        self.left[n] -= 1
        if self.left[n] <= 0 and n in self.saved:
            self.free.append(self.saved.pop(n))

    def save(self, n: int) -> None:
        """Keep A in scratch memory as the value ``n``."""
        slot = self.free.pop() if self.free else self.slots
        self.slots = max(self.slots, slot + 1)
        self.saved[n] = slot
        self.put("save", w1=self.slot_at(slot))

    def keep(self, n: int) -> None:
        """A waits for another tile to be computed, even if it could be made again."""
        if self.is_made_again(n) and not self.available(n):
            self.save(n)

    def give_up(self, uses: int = 0) -> None:
        """Before A changes: save what it holds if it has more uses left than these."""
        n = self.held
        if n >= 0 and self.left[n] > uses and not self.available(n) and not self.is_made_again(n):
            self.save(n)
        self.held = -1

    def generate(self, n: int) -> None:
        """The value into A."""
        n = self.canonical[n]
        if self.held == n:
            return
        if self.available(n):
            self.give_up()
            self.bring(n, "a")
        else:
            self.compute(n)
        self.held = n
        self.add_up(n)

    def compute(self, n: int) -> None:
        """A ← the node's operator of its operands."""
        node = self.nodes[n]
        if node.kind is NodeKind.BROADCAST or node.op == "copy":
            self.generate(node.args[0])
            self.give_up(1)
            self.done_with(node.args[0])
        elif node.kind is NodeKind.CAST:
            self.generate(node.args[0])
            self.give_up(1)
            for op in self.cast_ops(n):
                self.put(op, w2=255 if op == "ik.bitwise_and" else 0)
            self.done_with(node.args[0])
        elif node.kind is NodeKind.INDEX:
            self.look_up(node)
            self.done_with(node.args[0])
        elif node.kind is NodeKind.SCAN:
            self.run_along(node)
        elif node.op == "select":
            self.compute_select(node)
        else:
            kind = self.kind(node.args[0])
            known = FLOATS if kind == "f" else INTS
            if node.op not in known:
                raise NotEncodable(f"no words for {node.op} of {self.dtype(node.args[0]).text}")
            if is_binary(node.op, kind):
                self.compute_binary(node.op, kind, *node.args)
            elif node.op == "exp" and self.difference(node.args[0]) and not self.made(node.args[0]):
                left, right = self.nodes[self.canonical[node.args[0]]].args
                small = self.below_largest(left, right) or may_be_short(self.program, n)
                name = "sub_exp_small" if small else "sub_exp"
                self.compute_binary(name, "f", left, right)
                self.done_with(node.args[0])
            else:
                self.generate(node.args[0])
                self.give_up(1)
                name = node.op
                if f"{name}_short" in known and may_be_short(self.program, n):
                    name = f"{name}_short"
                if name == "bitwise_not" and self.dtype(n) is DType.BOOL:
                    name = "logical_not"
                self.put(f"{kind}.{name}")
                self.done_with(node.args[0])
            if node.op in WRAPS and self.dtype(n) is DType.U8:
                self.put("ik.bitwise_and", w2=255)

    def run_along(self, node: Node) -> None:
        """A ← each element of a row with all before it."""
        (arg,) = node.args
        if (name := f"{self.kind(arg)}.{node.op}") not in RUNNING:
            raise NotEncodable(f"no words for {node.op} of {self.dtype(arg).text}")
        if self.image.chunks > 1:
            raise NotEncodable("running results of a long row")
        self.generate(arg)
        self.give_up(1)
        self.put(f"row.{name}")
        self.done_with(arg)

    def compute_binary(self, op: str, kind: str, left: int, right: int) -> None:
        x, y = self.canonical[left], self.canonical[right]
        product = self.scaled_by_row(op, kind, x, y)
        if product >= 0:
            self.add_scaled(op, y if product == x else x, product)
        elif x == y:
            self.generate(x)
            self.give_up(2)
            self.put("keep")
            self.put(f"{kind}.{op}")
        elif self.available(y) and not (self.held == y and self.available(x)):
            self.generate(x)
            self.give_up(1)
            self.apply(op, kind, y)
        else:
            self.generate(y)
            if self.available(x):  # perhaps since A gave it up
                self.give_up(1)
                self.apply_reversed(op, kind, x)
            else:
                self.keep(y)
                self.generate(x)
                self.give_up(1)
                self.apply(op, kind, y)
        self.done_with(x)
        self.done_with(y)

    def scaled_by_row(self, op: str, kind: str, x: int, y: int) -> int:
        """Of x + y or x − y, the operand that is a tile times a row value, made for this; or −1."""
        if kind != "f" or op not in ("add", "sub"):
            return -1
        for n in (y, x) if op == "add" else (y,):
            node = self.nodes[n]
            if node.op != "mul" or self.uses[n] != 1 or self.in_row(n) or self.made(n) or x == y:
                continue
            tile, row = self.factors(n)
            if self.in_row(row) and not self.is_number(row) and not self.in_row(tile):
                if not self.is_number(tile) and self.available(tile):
                    return n
        return -1

    def add_scaled(self, op: str, x: int, product: int) -> None:
        """A ← x ± tile · row value."""
        tile, row = self.factors(product)
        self.generate(x)
        self.give_up(1)
        self.bring(tile, "t", "nmad.r" if op == "sub" else "mad.r", self.register[row])
        self.done_with(tile)
        self.done_with(row)

    def apply(self, op: str, kind: str, y: int) -> None:
        """A ← op(A, y), y being available."""
        if op in WITH_IMMEDIATE[kind]:
            if self.is_number(y):
                self.put_immediate(kind, op, self.bits(y))
                return
            if self.in_row(y) and y not in self.saved:
                self.put("lk.r", f"{kind}k.{op}", y=self.register[y])
                return
        self.bring(y, "t", f"{kind}.{op}")

    def apply_reversed(self, op: str, kind: str, x: int) -> None:
        """A ← op(x, A)."""
        if REVERSED.get(op) in (FLOATS if kind == "f" else INTS):
            self.apply(REVERSED[op], kind, x)
            return
        self.bring(x, "t", "swap")
        self.put(f"{kind}.{op}")

    def compute_select(self, node: Node) -> None:
        """The mask is made last: what the operands need may have masks of its own."""
        condition, yes, no = (self.canonical[arg] for arg in node.args)
        for one in (yes, no):
            if not self.available(one):
                self.generate(one)
                self.keep(one)
                self.give_up()
        self.generate(condition)
        self.put("mask")
        self.give_up(1)
        self.bring(yes, "a")
        self.bring(no, "t", "select")
        for one in (condition, yes, no):
            self.done_with(one)
