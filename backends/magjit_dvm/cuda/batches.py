"""What is done with the numbers of a row once all of it has been read: for a batch of rows at once.

A word on row registers takes as long for the rows of all lanes as for one.  Where nothing but such
words comes behind a row's last reduction, as of a loss, a warp keeps what it has found of a row in
lane k of other row registers, the k-th row's, and its number with it::

    S[0] … S[n−1]         of the row that is read now, in all lanes
    S[n] … S[2n−1]        of the rows of a batch, each in a lane
    S[2n], S[2n+1]        the rows' numbers, how many there are

The words of the *tail* run once 32 rows are there, or no more tiles are.  What has a number for
each row is then loaded for all of them, by their numbers: it does not come through the stages.
``csrc/cuda_batches.cpp`` does the same.
"""

from __future__ import annotations

from magjit_dvm.cuda.forms import OF_BATCHED, OF_READ_ONCE, words_of_tiles
from magjit_dvm.cuda.rows import WRAPS
from magjit_dvm.cuda.tiles import TileEncoder
from magjit_dvm.cuda.values import WHAT
from magjit_dvm.cuda.warps import OF_BATCHES, part_of_warp
from magjit_dvm.cuda.words import MOST_REGISTERS, OF_COLUMNS
from magjit_dvm.instructions import DType
from magjit_dvm.program import NodeKind

__all__ = ["BatchEncoder"]

_LEAST_ROWS, _LEAST_WORDS = 32, 3
"""Of a multiprocessor, from which on warps have several of them; and of a tail, from which on it
takes less time than a row's numbers take on their way."""


class BatchEncoder(TileEncoder):
    """Words of tails.

    Attributes:
        batches: whether there may be one.
        late: row values that it makes.
    """

    batches = False
    late: frozenset[int] = frozenset()

    def find_batches(self) -> None:
        """Which row values are for results alone, if all of these are numbers of rows."""
        space = self.space
        many = space.rows >= _LEAST_ROWS * self.machine.multiprocessors
        apart = part_of_warp(space.cols) is None  # others share warps, and their words, already
        if not (space.reduced and many and apart) or self.sums or self.has_tiles():
            return
        early = self.early()
        found = [n for n in range(len(self.nodes)) if self.is_row_value(n) and n not in early]
        late = [n for n in found if self.nodes[n].kind is not NodeKind.REDUCE]
        words = len(late) + len(self.program.outputs)
        if words >= _LEAST_WORDS and all(self.is_of_any_row(n) for n in late):
            self.batches, self.late = True, frozenset(late)

    def early(self) -> set[int]:
        """Row values that tiles are made of, and what these are made of."""
        found = set[int]()
        for n in reversed(range(len(self.nodes))):
            if self.canonical[n] != n or not self.uses[n] or self.is_load(n):
                continue
            node = self.nodes[n]
            if node.kind is not NodeKind.REDUCE and (n in found or not self.in_row(n)):
                found.update(self.canonical[arg] for arg in node.args)
        return found

    def is_of_any_row(self, n: int) -> bool:
        """Whether a row value is made by words on row registers, whichever row a lane has."""
        node = self.nodes[n]
        if node.kind in (NodeKind.IOTA, NodeKind.DRAW):
            return node.kind is NodeKind.IOTA
        if self.is_load(n):
            return self.loaded(n)[1] in (*OF_COLUMNS, "i64s")
        if node.kind is NodeKind.INDEX:
            return WHAT[node.dtype] in OF_COLUMNS
        if node.kind is NodeKind.CAST:
            return len(self.cast_ops(n)) == 1
        wraps = node.op in WRAPS and node.dtype is DType.U8
        known = node.kind is NodeKind.COMPUTE and not wraps
        return known and bool(self.scalar_word("s", n, node.op)[0])

    def late_inputs(self) -> frozenset[int]:
        """Inputs that tails alone load."""
        late, others = set[int](), set[int]()
        for n, node in enumerate(self.nodes):
            if self.is_load(n) and node.kind in (NodeKind.LOAD, NodeKind.CAST) and self.uses[n]:
                (late if n in self.late else others).add(self.loaded(n)[0])
        return frozenset(late - others)

    def emit_late(self) -> None:
        """What is left to do with a row's numbers, as a tail if there are registers for it."""
        image, waiting = self.image, self.image.numbers
        if self.is_known() and len(image.first) == 1 and self.has_registers():
            self.put("end")
            image.tail, image.batched = len(image.words), waiting
            self.register = {n: x + waiting for n, x in self.register.items()}
            image.numbers = 2 * waiting + 2
        for n in sorted(self.late):
            self.emit_row_value(n)

    def is_known(self) -> bool:
        """Whether a kernel has all words up to here, and rows of this R."""
        used, image = words_of_tiles(self.image), self.image
        if image.chunks > 1:
            return image.once and used <= OF_READ_ONCE
        return image.each in OF_BATCHES and used <= OF_BATCHED

    def has_registers(self) -> bool:
        """Whether a batch has row registers for what a tail makes."""
        taken, over, known = 2 * self.image.numbers + 2, 0, set(self.register)
        made = self.emitted | {n for n in known if not self.is_number(n)}
        for n in sorted(self.late):
            apart = not self.number_word(n)[0]  # else the number is in the word
            numbers = {arg for arg in self.nodes[n].args if self.is_number(arg) and apart} - known
            known |= numbers
            taken += len(numbers) + 1
            if taken - over > MOST_REGISTERS:
                return False
            made.add(n)
            over = sum(self.is_over(one, made) for one in made)
        return True
