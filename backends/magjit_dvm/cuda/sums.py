"""Sums across rows: in each warp's scratch memory over all its tiles, then over all blocks.

A warp has the same columns in each of its tiles, so that a sum across rows is one tile more that
it keeps: ``acc`` adds to it, as soon as what it is a sum of is computed for whatever reason.
Once a block has no more tiles of its own, and after each run of others, it adds up what its warps
have and writes it to the *parts*::

    parts  = sum number, block or run, column        float32

A second kernel adds up all rows of these, column by column, and stores results.  Most tiles are
shared out evenly, the others drawn in runs, each of which has a row of its own (``shell.py``): each
sum has its terms in the same order each time.

``csrc/cuda_sums.cpp`` does the same.
"""

from __future__ import annotations

from magjit_dvm.cuda.backwards import Standardized
from magjit_dvm.cuda.parts import MOST_SUMS, WHAT, Parts
from magjit_dvm.cuda.rows import RowEncoder
from magjit_dvm.program import ACROSS, NodeKind
from magjit_dvm.vm import NotEncodable

__all__ = ["NO_SLOT", "SumsEncoder"]

_SHARE, _RUNS, _ROWS = 8, 3, 12
"""Of so many tiles one is drawn; runs of them that a block draws, about, and the fewest rows of a
run for each sum: it is written to memory and read again."""
NO_SLOT = 0xFFFFFFFF
"""Where ``acc.norm`` has no second sum."""


class SumsEncoder(RowEncoder):
    """Words for sums across rows.

    Attributes:
        sums: of each output that is one, which of them it is: its slot of scratch memory.
        pending: of what they are sums of, the slots that it has not been added to yet.
        beside: of what is a tile times a norm, made for such a sum alone: these two, and the norm's
            parts.
    """

    sums: dict[int, int]
    pending: dict[int, list[int]]
    beside: dict[int, tuple[int, int, Standardized]]

    def bring(self, n: int, bank: str, second: str = "nop", y: int = 0) -> None:
        raise NotImplementedError

    def done_with(self, n: int) -> None:
        raise NotImplementedError

    def slot_at(self, slot: int) -> int:
        """Bytes of scratch memory before a slot."""
        return slot * 128 * self.image.each

    def goes_across(self, n: int) -> bool:
        """Whether a value is a sum across rows."""
        node = self.nodes[self.canonical[n]]
        reduces = node.kind is NodeKind.REDUCE and node.aux == ACROSS
        return reduces and bool(node.dims & self.space.active)

    def is_made_again(self, n: int) -> bool:
        """Whether a tile is computed anew rather than saved: there is little room beside sums.

        It is one of a stage and a row value or number: two words.
        """
        node = self.nodes[n]
        if not self.sums or node.kind is not NodeKind.COMPUTE or len(node.args) != 2:
            return False
        args = [self.canonical[arg] for arg in node.args]
        loads = [one for one in args if self.is_load(one) and not self.in_row(one)]
        return len(loads) == 1 and sum(self.is_number(one) or self.in_row(one) for one in args) == 1

    def find_sums(self) -> None:
        """Give each its slot.

        Raises:
            NotEncodable: it is not only stored, lies otherwise than columns do, or is one too many.
        """
        self.sums, self.pending = {}, {}
        for n, node in enumerate(self.nodes):
            if self.canonical[n] == n and any(self.goes_across(arg) for arg in node.args):
                raise NotEncodable("a sum across rows that is computed with")
        for k, out in enumerate(self.program.outputs):
            if not self.goes_across(out.node):
                continue
            if not self.space.contiguous(self.space.outputs[k], self.space.reduced):
                raise NotEncodable("a sum across rows that lies otherwise")
            plain = out.allocated and out.along < 0
            if not plain or self.dtype(out.node) not in WHAT:
                raise NotEncodable("a sum across rows that is part of another result")
            n = self.canonical[out.node]
            if n in (self.canonical[self.program.outputs[one].node] for one in self.sums):
                self.uses[self.summed(k)] += 1  # a result more of the same sum
            self.pending.setdefault(self.summed(k), []).append(len(self.sums))
            self.sums[k] = len(self.sums)
            if len(self.sums) > MOST_SUMS:
                raise NotEncodable("too many sums across rows")
        self.slots = len(self.sums)
        self.image.sums = len(self.sums)
        self.find_products()

    def find_products(self) -> None:
        """Which of them are sums of a tile times a norm."""
        self.beside = {}
        for n in self.pending:
            node = self.nodes[n]
            if node.op != "mul" or self.uses[n] != 1:
                continue
            left, right = (self.canonical[arg] for arg in node.args)
            for tile, norm in ((left, right), (right, left)):
                parts = self.standardized(norm)
                if parts is not None and tile != norm and not self.in_row(tile):
                    self.beside[n] = tile, norm, parts
                    break

    def summed(self, k: int) -> int:
        """The value that an output is the sum of."""
        (arg,) = self.nodes[self.canonical[self.program.outputs[k].node]].args
        return self.canonical[arg]

    def add_up(self, n: int) -> None:
        """A has a value: it is added to the sums that it belongs to, if that is not done yet."""
        plain = self.pending.pop(n, [])
        products = [
            one for one, made in self.beside.items() if made[0] == n and one in self.pending
        ]
        joined = self.slot_at(plain.pop()) if plain and products else NO_SLOT
        for slot in plain:
            self.put("acc", w1=self.slot_at(slot))
            self.done_with(n)
        if joined != NO_SLOT:
            self.done_with(n)
        for product in products:
            (slot,), (_, norm, parts) = self.pending.pop(product), self.beside[product]
            self.put_with_norm("acc.norm", parts, w1=self.slot_at(slot), w2=joined)
            joined = NO_SLOT
            for one in (product, norm, n):
                self.done_with(one)

    def put_with_norm(self, word: str, norm: Standardized, w1: int = 0, w2: int = 0) -> None:
        """T ← x; the word behind normalizes it."""
        self.bring(norm.x, "t")
        x = self.register[norm.mean] if norm.centered else 0
        self.put(word, x=x, y=self.register[norm.root], w1=w1, w2=w2, w3=int(norm.centered))

    def sum_tile(self, k: int) -> None:
        """A tile more of a sum, unless it has been computed before."""
        n = self.summed(k)
        if n in self.pending and n in self.beside:
            self.generate(self.beside[n][0])
        if n in self.pending:
            self.generate(n)
            self.add_up(n)

    def place_parts(self) -> None:
        """What is left to add up, now that the number of blocks is known."""
        image, inputs, outputs = self.image, len(self.space.inputs), self.program.outputs
        if self.sums:
            results = tuple((inputs + k, WHAT[self.dtype(outputs[k].node)]) for k in self.sums)
            rows = image.blocks + self.share_out()
            image.parts = Parts(results, rows, image.cols, inputs + len(outputs))

    def share_out(self) -> int:
        """Which tiles are drawn, so that no block waits long for another; how many runs of them."""
        image = self.image
        image.fixed, image.shift = image.tiles, 0
        many, rows = image.tiles // image.blocks, image.warps // image.group
        drawn = many // _SHARE
        least = max(drawn // _RUNS, -(-_ROWS * image.sums // rows), 1)
        shift = (least - 1).bit_length()
        if drawn >= 2 << shift:
            image.fixed, image.shift = image.blocks * (many - drawn), shift
        return -(-(image.tiles - image.fixed) // (1 << image.shift))
