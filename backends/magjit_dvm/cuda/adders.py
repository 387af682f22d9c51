"""Warps that add up sums across rows, beside those that compute rows.

The gradient of a norm's weight is what G · X is across rows, that of its bias what G is, of the
gradient G that comes and of X = (x − mean) · root.  Nothing of it comes from a row's reductions:
what a stage has of G and x, and of each row's mean and root, is enough.  So a few warps, *adders*,
do nothing else.  Each has columns of its own, of all rows of each tile, and keeps their sums in
registers; the others are spared a tile of scratch memory for each sum and warp, which they would
load and store for each row, and which leaves wide rows little room for stages.

Adders run no words but one, which says what they add up: ``add.rows``.  Its x and y are G and x, by
their numbers among a stage's inputs; w1 says which of these have means, if any, and roots, w2 how
many times four columns a lane has, w3 which sums they are, and the dtype.  It is compiled code, a
loop over rows (``adder_code.py``).

``csrc/cuda_adders.cpp`` does the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from magjit_dvm.cuda.forms import OF_ADDING
from magjit_dvm.cuda.plan import Machine, arrange_beside_adders
from magjit_dvm.cuda.rows import image_arguments
from magjit_dvm.cuda.sums import NO_SLOT
from magjit_dvm.cuda.words import OF_COLUMNS, Image, Word

__all__ = ["NONE", "give_to_adders", "inputs_of_norm", "numbers_of_sums"]

NONE = 255
"""In the place of an input or a sum that there is not."""


@dataclass(frozen=True, slots=True)
class Found:
    """Where a row's sums are added to.

    Attributes:
        at: the place of ``acc.norm`` in the words, which a load of x is before, and that of G.
        word: what adders run.
    """

    at: int
    word: Word


def give_to_adders(image: Image, machine: Machine) -> None:
    """Have adders, if sums are a norm's gradients and rows are wide enough that it pays."""
    found = _found(image)
    if found is None or not (quads := arrange_beside_adders(image, machine)):
        return
    found.word.w2 = quads
    del image.words[found.at - 1 : found.at + 1]
    image.scratch = 0
    image.rest = [len(image.words)]
    image.words += found.word, Word("end")


def _found(image: Image) -> Found | None:
    words, sums = image.words, [word for word in image.words if word.first.startswith("acc")]
    if len(sums) != 1 or sums[0].first != "acc.norm" or image.scratch != image.sums:
        return None
    (adds,) = sums
    at, both = words.index(adds), adds.w2 != NO_SLOT
    if at < 2 or image.sums != 1 + both or image.chunks > 1:
        return None
    gradient, x = words[at - 2], words[at - 1]
    what = gradient.first.removeprefix("la.s.")
    if what not in OF_COLUMNS or (gradient.first, x.first) != (f"la.s.{what}", f"lt.s.{what}"):
        return None
    if (gradient.second, x.second) != ("nop", "nop"):
        return None
    used = {word.first for word in words} | {word.second for word in words} - {"nop"}
    if not used - {"acc.norm"} <= OF_ADDING:
        return None
    norm = inputs_of_norm(image, adds)
    if norm is None:
        return None
    place_of = image_arguments(image).index
    word = Word(
        "add.rows",
        x=place_of(gradient.pointer),
        y=place_of(x.pointer),
        w1=norm,
        w3=numbers_of_sums(image, adds) | OF_COLUMNS.index(what) << 16,
    )
    return Found(at, word)


def inputs_of_norm(image: Image, adds: Word) -> int | None:
    """Which inputs of the stages have each row's mean, or none, and root: 8 bits for each."""
    place_of, words = image_arguments(image).index, image.words
    rows = {word.x: place_of(word.pointer) for word in words if word.first == "s.in" and not word.y}
    mean, root = rows.get(adds.x) if adds.w3 else NONE, rows.get(adds.y)
    return None if mean is None or root is None else mean | root << 8


def numbers_of_sums(image: Image, adds: Word) -> int:
    """Which sums ``acc.norm`` adds to, that of G · X and that of G or none: 8 bits for each."""
    slot = 128 * image.each
    return adds.w1 // slot | (NONE if adds.w2 == NO_SLOT else adds.w2 // slot) << 8
