"""The GPU's encoder: a fused operator and its arguments to the words of one launch.

Values are of three places.  *Numbers* go into words.  *Row values*, which do not vary along what is
reduced (or along anything), are in row registers (``rows.py``).  The others are *tiles*
(``tiles.py``).

A pass computes what needs the reductions of the pass before.  Where a row fits a block's warps, all
passes run over the same stage; longer rows come in chunks, which are read again in each pass.

``csrc/cuda_encode.cpp`` does the same in the same order: words and layouts are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magjit_dvm.cuda.backwards import NormBackward
from magjit_dvm.cuda.batches import BatchEncoder
from magjit_dvm.cuda.gradients import place_sums
from magjit_dvm.cuda.machine import Crowded, Machine
from magjit_dvm.cuda.parts import MOST_SUMS
from magjit_dvm.cuda.plan import arrange, arrange_anew
from magjit_dvm.cuda.rows import MOST_WORDS, image_arguments
from magjit_dvm.cuda.shapes import laid_out
from magjit_dvm.cuda.space import Layout
from magjit_dvm.cuda.tiling import in_squares, is_near, is_transposed
from magjit_dvm.cuda.values import float_bits
from magjit_dvm.cuda.weights import keep_weights, place_weights
from magjit_dvm.cuda.words import MOST_REGISTERS, PARTS_AT, Image
from magjit_dvm.program import NodeKind, Program
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
    try:
        return _encoded(program, arguments, machine)
    except Crowded:  # such rows come in chunks
        return _encoded(program, arguments, machine, crowded=True)


def _encoded(
    program: Program, arguments: Sequence[Any], machine: Machine, crowded: bool = False
) -> Encoded:
    space = laid_out(program, arguments, machine, crowded)
    layouts = tuple(space.layouts)
    if space.empty:
        reducing = (one.dims for one in program.nodes if one.kind is NodeKind.REDUCE)
        if any(space.size[d] == 0 for dims in reducing for d in dims):
            raise NotEncodable("a reduction over nothing")
        return Encoded(None, layouts)
    in_squares(space)
    return Encoded(_Encoder(space, arguments, machine).run(), layouts)


class _Encoder(BatchEncoder):
    def run(self) -> Image:
        """The image of the launch."""
        self.survey()
        self.find_sums()
        self.image.once = self.is_read_once()
        self.find_batches()
        row_chunks = arrange(self.space, self.image, self.machine, self.late_inputs())
        if row_chunks and self.sums:
            raise NotEncodable("sums across long rows")
        if not self.sums:
            self.find_online(row_chunks)
        if row_chunks:
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
                if self.phase[n] == p and self.is_row_value(n) and n not in self.late:
                    self.emit_row_value(n)
            if p == passes and self.batches:
                self.emit_late()
            for k in stores:
                at = passes if self.batches else self.phase[self.program.outputs[k].node]
                if k not in tiles and at == p:
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

    # -- what is done with tiles --

    def emit_reduce(self, n: int, chunked: bool) -> None:
        (arg,) = self.nodes[n].args
        if not chunked and n not in self.online:
            self.reduce_row(n, arg)
            return
        if len(self.accumulator) == _MOST_ACCUMULATORS:
            raise NotEncodable("too many reductions")
        self.generate(arg)
        x = self.accumulator[n] = len(self.accumulator)
        self.image.accumulators = len(self.accumulator)
        self.put(f"red.{'f.softmax' if n in self.online else self.reduction(n)}", x=x)
        if not chunked:
            self.uncount(self.power_of(self.online[n]))
            self.emit_row_value(n)
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
        aligned = self.by_four and one.low % min(4 * one.size, 16) == 0
        if self.space.contiguous(one) and (aligned or one.size < 8):
            how = "g" if aligned else "u"
            self.put(f"st.{how}.{what}", place=(0, one.argument, one.offset))
        else:
            how = "n" if self.space.each else "e"
            place = self.viewed(one, self.space.order, apart=how == "n")
            fours = how == "e" and self.in_fours(one, place)
            self.put(f"st.{how}.{what}", y=int(fours), place=place)
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
