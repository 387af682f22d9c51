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
from magjit_dvm.cuda.machine import Machine
from magjit_dvm.cuda.plan import arrange_beside_adders
from magjit_dvm.cuda.rows import image_arguments
from magjit_dvm.cuda.sums import NO_SLOT
from magjit_dvm.cuda.words import OF_COLUMNS, Image, Word

__all__ = ["NONE", "give_to_adders", "norm_of_sums"]

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
    if len(sums) != 1 or sums[0].first != "acc.norm":
        return None
    (adds,) = sums
    at = words.index(adds)
    used = {word.first for word in words} | {word.second for word in words} - {"nop"}
    if at < 2 or not used - {"acc.norm"} <= OF_ADDING:
        return None
    norm = norm_of_sums(image, *words[at - 2 : at + 1])
    if norm is None:
        return None
    word = Word("add.rows", x=norm.gradient, y=norm.x, w1=norm.inputs)
    word.w3 = norm.sums | norm.what << 16
    return Found(at, word)


@dataclass(frozen=True, slots=True)
class NormOfSums:
    """Of a norm's gradients whose sums are added up, what is where.

    Attributes:
        what: the dtype's number among those of columns.
        gradient, x: places of G and x in a stage.
        inputs: which inputs of the stages have each row's mean, or none, and root: 8 bits for each.
        sums: which are added to, that of G · x and that of G or none: 8 bits for each.
    """

    what: int
    gradient: int
    x: int
    inputs: int
    sums: int


def norm_of_sums(image: Image, gradient: Word, x: Word, adds: Word) -> NormOfSums | None:
    """What ``acc.norm`` adds to sums, behind loads of G and x; if it is all, and all in stages."""
    both, what = adds.w2 != NO_SLOT, gradient.first.removeprefix("la.s.")
    if image.sums != 1 + both or image.scratch != image.sums or image.chunks > 1:
        return None
    if what not in OF_COLUMNS or (gradient.first, x.first) != (f"la.s.{what}", f"lt.s.{what}"):
        return None
    if (gradient.second, x.second) != ("nop", "nop"):
        return None
    place_of, slot = image_arguments(image).index, 128 * image.each
    given = [word for word in image.words if word.first == "s.in" and not word.y]
    rows = {word.x: place_of(word.pointer) for word in given}
    mean, root = rows.get(adds.x) if adds.w3 else NONE, rows.get(adds.y)
    if mean is None or root is None:
        return None
    return NormOfSums(
        what=OF_COLUMNS.index(what),
        gradient=place_of(gradient.pointer),
        x=place_of(x.pointer),
        inputs=mean | root << 8,
        sums=adds.w1 // slot | (adds.w2 // slot if both else NONE) << 8,
    )
