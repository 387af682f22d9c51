"""The GPU's encoder: a fused operator and its arguments to the words of one launch.

Values are of three places.  *Numbers* go into words.  *Row values*, which do not vary along what is
reduced (or along anything), are in row registers.  The others are *tiles*: computed in A when they
are asked for, from outputs and reductions backwards, with T for the other operand.  A tile that is
used more than once, or has to wait, is saved in scratch memory; loads are repeated.

A pass computes what needs the reductions of the pass before.  Where a row fits a block's warps, all
passes run over the same stage; longer rows come in chunks, which are read again in each pass.

``csrc/cuda_encode.cpp`` does the same in the same order: words and layouts are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magjit_dvm.cuda.backwards import NormBackward
from magjit_dvm.cuda.functions import FLOATS, INTS, is_binary
from magjit_dvm.cuda.gradients import place_sums
from magjit_dvm.cuda.parts import MOST_SUMS
from magjit_dvm.cuda.plan import Machine, arrange, arrange_anew
from magjit_dvm.cuda.rows import MOST_REGISTERS, MOST_WORDS, REVERSED, WRAPS, image_arguments
from magjit_dvm.cuda.shapes import Layout, laid_out
from magjit_dvm.cuda.sums import SumsEncoder
from magjit_dvm.cuda.support import may_be_short
from magjit_dvm.cuda.tiling import in_squares, is_near, is_transposed
from magjit_dvm.cuda.values import float_bits
from magjit_dvm.cuda.weights import keep_weights, place_weights
from magjit_dvm.cuda.words import BY, PARTS_AT, RUNNING, WITH_IMMEDIATE, Image
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from magjit_dvm.vm import NotEncodable

__all__ = ["LIMITS", "Encoded", "Machine", "encode"]

_MOST_ACCUMULATORS = 16
_DESCRIBED = (
    *("lt.v", "lt.b", "lt.e", "lt.n", "lt.t", "lt.row", "st.e", "st.n", "pf"),
    *("lt.draw", "at.", "s.ld", "s.at", "s.st"),
)
LIMITS = (MOST_REGISTERS, _MOST_ACCUMULATORS, MOST_WORDS, PARTS_AT, MOST_SUMS)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One call: ``image`` is None where there is nothing to compute.

    Attributes:
        layouts: of all outputs; those that are no part of another are allocated.
    """

    image: Image | None
    layouts: tuple[Layout, ...]


def encode(program: Program, arguments: Sequence[Any], machine: Machine) -> Encoded:
    """The words for these arguments.

    Raises:
        NotEncodable: there are none; the message says why.
    """
    space = laid_out(program, arguments)
    layouts = tuple(space.layouts)
    if space.empty:
        reducing = (one.dims for one in program.nodes if one.kind is NodeKind.REDUCE)
        if any(space.size[d] == 0 for dims in reducing for d in dims):
            raise NotEncodable("a reduction over nothing")
        return Encoded(None, layouts)
    in_squares(space)
    return Encoded(_Encoder(space, arguments, machine).run(), layouts)


class _Encoder(SumsEncoder):
    def run(self) -> Image:
        """The image of the launch."""
        self.survey()
        self.find_sums()
        row_chunks = arrange(self.space, self.image, self.machine)
        if row_chunks and self.sums:
            raise NotEncodable("sums across long rows")
        if row_chunks:
            self.find_online()
            self.look_up_late()
        self.emit(chunked=row_chunks)
        self.image.scratch = self.slots
        self.place()
        return self.image

    # -- emission --

    def emit(self, chunked: bool) -> None:
        """All passes."""
        stores = range(len(self.program.outputs))
        reduces = [
            n
            for n, node in enumerate(self.nodes)
            if node.kind is NodeKind.REDUCE and self.canonical[n] == n and self.uses[n]
            if not self.goes_across(n) and n not in self.online.values()
        ]
        tiles = [k for k in stores if not self.in_row(self.program.outputs[k].node)]
        of_tiles = (self.phase[self.program.outputs[k].node] for k in tiles)
        passes = max([0, *(p + 1 for p in of_tiles), *(self.phase[n] for n in reduces)])
        self.left = list(self.uses)
        for p in range(passes + 1):
            if p == passes and p and chunked:
                self.put("end")
                self.image.epilogue = len(self.image.words)
            elif p < passes and (p == 0 or chunked):
                if p:
                    self.put("end")
                self.image.first.append(len(self.image.words))
            if chunked:
                asked = [self.nodes[n].args[0] for n in reduces if self.phase[n] == p + 1]
                stored = (self.program.outputs[k].node for k in tiles)
                self.forget([*asked, *(n for n in stored if self.phase[n] == p)])
            if self.space.each and p == 0:
                self.ask_ahead()
            for n in range(len(self.nodes)):
                if self.phase[n] == p and self.is_row_value(n):
                    self.emit_row_value(n)
            for k in stores:
                if k not in tiles and self.phase[self.program.outputs[k].node] == p:
                    self.store_row(k)
            if p == passes:
                break
            if p == 0 or chunked:
                self.image.rest.append(len(self.image.words))
                self.held = -1  # a row's later chunks begin here
            for n in reduces:
                if self.phase[n] == p + 1 and n not in self.register and n not in self.folded:
                    self.emit_reduce(n, chunked)
            for k in tiles:
                if self.phase[self.program.outputs[k].node] == p:
                    (self.sum_tile if k in self.sums else self.store_tile)(k)
        if not passes:
            self.image.first, self.image.rest = [0], [0]
        elif chunked and self.image.epilogue == len(self.image.words):
            self.image.words.pop()  # nothing is left to do
            self.image.epilogue = Image().epilogue
        self.put("end")

    def ask_ahead(self) -> None:
        """Squares of all operands but the first are on their way to the L2 cache meanwhile."""
        loads = sorted({node.aux for node in self.nodes if node.kind is NodeKind.LOAD})
        for number in loads[1:]:
            one = self.operand(number)
            if number in image_arguments(self.image):
                continue
            if is_near(self.space, one) or is_transposed(self.space, one):
                how, place = self.placed(number)
                self.put(f"pf.{how}", place=place)

    # -- tiles --

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
        elif self.available(x):
            self.generate(y)
            self.give_up(1)
            self.apply_reversed(op, kind, x)
        else:
            self.generate(y)
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

    # -- what is done with tiles --

    def emit_reduce(self, n: int, chunked: bool) -> None:
        (arg,) = self.nodes[n].args
        if not chunked:
            self.reduce_row(n, arg)
            return
        if len(self.accumulator) == _MOST_ACCUMULATORS:
            raise NotEncodable("too many reductions")
        self.generate(arg)
        x = self.accumulator[n] = len(self.accumulator)
        self.image.accumulators = len(self.accumulator)
        self.put(f"red.{'f.softmax' if n in self.online else self.reduction(n)}", x=x)
        self.done_with(arg)

    def reduce_row(self, n: int, arg: int) -> None:
        """Of a row in one stage: statistics in one word, or squares, or what it is."""
        parts = self.normalized(n)
        if parts:
            self.normalize(n, arg, parts)
            return
        back = self.norm_backward(n)
        if back is not None:
            self.put_norm_backward(back)
            return
        if parts := self.softmaxed(n):
            self.generate(arg)
            self.give_up(2)
            self.put("row.f.softmax")
            self.done_with(arg)
            self.done_with(arg)
            self.folded.update((n, *parts[:2]))
            self.held = parts[2]
            return
        squares = self.squares_about_mean(n)
        squared = self.squared(arg)
        if squares >= 0:
            self.generate(arg)
            x, y = self.new_register(n), self.new_register(squares)
            cols = self.space.cols
            self.put("row.f.stat", x=x, y=y, w1=cols, w2=float_bits(1.0 / cols))
            self.skip_squares(squares)
        elif squared >= 0 and self.reduction(n) == "f.sum":
            self.generate(squared)
            self.put("row.f.squares", x=self.new_register(n))
            self.done_with(squared)
            self.done_with(squared)
        else:
            self.generate(arg)
            self.put(f"row.{self.reduction(n)}", x=self.new_register(n))
        self.done_with(arg)

    def normalize(self, n: int, arg: int, parts: tuple[int, ...]) -> None:
        """A ← the row normalized: statistics and what is made of them in one word."""
        mean, squares, away, again, root, product = parts
        total = self.scaled(root)[2]
        uses = 2 if again == away else 3  # of the argument: the sum, and each difference
        self.generate(arg)
        self.give_up(uses)
        x, y = self.new_register(mean), self.new_register(root)
        cols, number = self.space.cols, self.bits(self.nodes[total].args[1])
        self.put("row.f.norm", x=x, y=y, w1=cols, w2=float_bits(1.0 / cols), w3=number)
        for _ in range(uses):
            self.done_with(arg)
        self.folded.update((n, squares))
        self.held = product

    def put_norm_backward(self, back: NormBackward) -> None:
        """A ← the gradient of a norm's input: both reductions and what is made of them."""
        uses = 2 + back.norm.centered
        self.generate(back.gradient)
        self.give_up(uses)
        self.put_with_norm("row.f.back", back.norm, w2=back.share)
        for _ in range(uses):
            self.done_with(back.gradient)
        for _ in range(2):
            self.done_with(back.normalized)
        self.folded.update(back.folded)
        self.held = back.result

    def skip_squares(self, n: int) -> None:
        """The sum of squares is known: what it is of is not computed for it."""
        (square,) = self.nodes[n].args
        away = self.squared(square)
        for one in (square, away, away):
            self.done_with(one)

    def store_tile(self, k: int) -> None:
        out = self.program.outputs[k]
        one = self.space.outputs[k]
        self.generate(out.node)
        what = self.stored(out.node)
        by_four = not self.image.by_rows or self.space.cols % 4 == 0
        aligned = by_four and one.low % min(4 * one.size, 16) == 0
        if self.space.contiguous(one) and (aligned or one.size < 8):
            how = "g" if aligned else "u"
            self.put(f"st.{how}.{what}", place=(0, one.argument, one.offset))
        else:
            how = "n" if self.space.each else "e"
            self.put(f"st.{how}.{what}", place=self.viewed(one, self.space.order, apart=how == "n"))
        self.done_with(out.node)

    # -- places --

    def place(self) -> None:
        """Offsets in shared memory, now that all words are there."""
        place_sums(self.image, self.machine)
        arrange_anew(self.space, self.image, self.machine)
        keep_weights(self.image, self.machine)
        for word in self.image.words:
            if word.first.startswith(_DESCRIBED):
                word.w1 = self.image.descriptor_at(word.w1)
        self.machine.place(self.image)
        stages = {argument: at for argument, _, at in self.image.inputs}
        for word in self.image.words:
            if word.first.startswith(("lt.s.", "lt.u.", "la.s.", "s.in")):
                word.w1 = stages[word.pointer]
        place_weights(self.image)
        self.place_parts()
