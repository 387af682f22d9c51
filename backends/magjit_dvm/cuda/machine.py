"""A GPU's sizes: how many blocks a launch has, its stages, and its places in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from magjit_dvm.cuda.words import HEADER_BYTES, IMAGE_BYTES, MAX_PASSES, Image
from magjit_dvm.vm import NotEncodable

__all__ = ["STAGES", "Crowded", "Machine", "count"]

STAGES, _MOST_STAGES, _UNDER_WAY = 3, 6, 96 << 10
"""Of a ring; more where stages are so small that fewer bytes would be under way, and each block has
as many tiles."""
_STAGES_OF_ROWS, _UNDER_WAY_OF_ROWS = 2, 80 << 10
"""The same where a tile has several rows and no sums across them: these are served best when little
more is asked for ahead than hides the way from memory."""


class Crowded(NotEncodable):
    """A row does not fit shared memory whole, with all that is saved of it."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A GPU.

    Attributes:
        multiprocessors: how many blocks run at once.
        shared_bytes: of one block.
        widest: the largest R; before sm_90, a compiler takes a minute for that of 64.
    """

    multiprocessors: int = 132
    shared_bytes: int = 232448
    widest: int = 64

    def place(self, image: Image) -> None:
        """Two stages, then fewer warps, then one stage, until everything fits into shared memory.

        Raises:
            NotEncodable: a single warp, or row, does not fit; ``Crowded`` where it may otherwise.
        """
        if HEADER_BYTES + image.program_bytes > IMAGE_BYTES:
            raise NotEncodable("too many words")
        if len(image.first) > MAX_PASSES:
            raise NotEncodable("too many passes over long rows")
        while True:
            image.keeps = self.keeps_rows(image)
            fewest = image.chunks if image.keeps else 2 if _may_shrink(image) else 1
            for stages in range(_wanted_stages(image), fewest - 1, -1):
                image.stages = stages
                _measure(image, image.program_bytes)
                if image.shared_bytes <= self.shared_bytes:
                    return
            if not _may_shrink(image):
                whole = image.by_rows and image.chunks == 1 and not image.sums
                kind = Crowded if whole else NotEncodable
                raise kind("values of a row that shared memory has no room for")
            self.shrink(image)

    def keeps_rows(self, image: Image) -> bool:
        """Whether stages have room for a whole row, where several passes would read it."""
        if image.chunks == 1 or len(image.first) == 1 or not image.inputs:
            return False
        image.stages = image.chunks
        _measure(image, image.program_bytes)
        return image.shared_bytes <= self.shared_bytes

    def shrink(self, image: Image) -> None:
        """Fewer warps."""
        if image.warps > image.group:
            image.warps -= image.group
        else:
            image.group -= 1
            image.warps = image.group
        count(image, self)

    def has_room(self, image: Image, weights: int) -> bool:
        """Whether so many vectors are kept beside two stages, as they are from then on if so."""
        stages, words = image.stages, 2 * weights + 1  # of the prologue
        program_bytes = image.program_bytes + 16 * words
        image.stages, image.weights = min(stages, 2), weights
        _measure(image, program_bytes)
        fits = image.shared_bytes <= self.shared_bytes
        fits = fits and HEADER_BYTES + program_bytes <= IMAGE_BYTES
        image.stages, image.weights = stages, weights if fits else 0
        return fits


def count(image: Image, machine: Machine) -> None:
    """Chunks, tiles and blocks for these warps."""
    if image.by_rows:
        image.chunks = -(-image.cols // (image.group * image.slice))
        image.tiles = -(-image.rows // image.rows_of_tile)
    else:
        image.tiles = -(-image.elements // (image.warps * image.slice))
    if image.tiles >= 1 << 31:
        raise NotEncodable("too many tiles")
    image.blocks = min(image.tiles, machine.multiprocessors)


def _wanted_stages(image: Image) -> int:
    """Of a ring; where nothing comes through one, what a block has for its places."""
    if not image.inputs:
        return 2
    _measure(image, image.program_bytes)
    if image.keeps:
        return 2 * image.chunks  # the next row on its way
    most = min(_MOST_STAGES, image.tiles // image.blocks * image.chunks)
    of_rows = image.rows_of_tile > 1 and image.chunks == 1 and not image.sums
    least = _STAGES_OF_ROWS if of_rows else STAGES
    under_way = _UNDER_WAY_OF_ROWS if of_rows else _UNDER_WAY
    return max(least, min(most, -(-under_way // image.stage_bytes)))


def _may_shrink(image: Image) -> bool:
    """Whether there may be fewer warps."""
    return image.warps > image.group or (image.chunks > 1 and image.group > 1)


def _measure(image: Image, program_bytes: int) -> None:
    """Places in shared memory for these warps and stages."""

    def rounded(at: int, to: int = 128) -> int:
        return -(-at // to) * to

    width = image.warps * image.slice
    if image.chunks > 1:
        width = image.group * image.slice  # of each row
    elif image.by_rows:
        width = image.rows_of_tile * image.cols
    at, inputs = 0, []
    tiles = len(image.inputs) - image.row_inputs
    for number, (argument, size, _) in enumerate(image.inputs):
        inputs.append((argument, size, at))
        there = width if number < tiles else image.rows_of_tile
        at = rounded(at + there * size + 48)  # to 16-byte boundaries, and what unaligned loads see
    image.row_bytes = at if image.chunks > 1 else 0
    apart = image.row_bytes * (image.rows_of_tile - 1)
    image.inputs, image.stage_bytes = inputs, apart + at
    image.barriers_at = rounded(program_bytes + 32)
    image.rows_at = rounded(image.barriers_at + 36 * image.stages)
    registers = 128 * (1 + image.numbers + 2 * image.accumulators)
    image.partials_at = rounded(image.rows_at + image.warps * registers, 512)
    image.scratch_at = image.partials_at + 512 * (image.warps // image.group)
    image.weights_at = image.scratch_at + image.warps * image.scratch * 128 * image.each
    image.ring_at = rounded(image.weights_at + image.weights * image.weight_bytes)
    # Loads read whole slices: of the last row of a tile, beyond the stage.
    reach = width
    if image.by_rows and image.chunks == 1:
        reach = (image.rows_of_tile - 1) * image.cols + image.group * image.slice
    seen = max((first + reach * size + 48 for _, size, first in inputs[:tiles]), default=0)
    last = image.ring_at + (image.stages - 1) * image.stage_bytes
    image.shared_bytes = rounded(last + apart + max(at, seen))
