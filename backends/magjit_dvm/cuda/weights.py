"""Vectors that all rows share, such as a norm's weights, kept in shared memory as float32.

A word that loads one from global memory takes addresses, guards and conversions, for each row anew.
Where a block has many rows, a *prologue* loads each vector once: a warp its part of the columns, in
the order in which lanes hold elements, for all warps that have the same part of other rows.  A
product with one and a sum with another then is one word.  A gradient's product with a norm's weight
leaves T as it is, so that it need not be normalized again.

``csrc/cuda_weights.cpp`` does the same.
"""

from __future__ import annotations

from dataclasses import replace

from magjit_dvm.cuda.backwards import READY
from magjit_dvm.cuda.machine import Machine
from magjit_dvm.cuda.plan import LEAST_TILES, reductions_of
from magjit_dvm.cuda.rows import MOST_WORDS
from magjit_dvm.cuda.words import Image, Word

__all__ = ["keep_weights", "place_weights"]

MOST = 4
"""Vectors that are kept."""


def keep_weights(image: Image, machine: Machine) -> None:
    """Words for what is kept in the place of loads, if there is room, and the prologue."""
    known: dict[tuple[str, int, int], int] = {}
    for word in image.words:
        if word.first.startswith("lt.c."):
            known.setdefault((word.first, word.pointer, word.offset), len(known))
    room = len(image.words) + 2 * len(known) + 1 <= MOST_WORDS
    many = image.by_rows and image.chunks == 1 and image.tiles >= LEAST_TILES * image.blocks
    if (
        not many
        or not room
        or not 0 < len(known) <= MOST
        or not _made_room(image, machine, len(known))
    ):
        return
    words: list[Word] = []
    moved: list[int] = []
    for word in image.words:
        moved.append(len(words))
        number = known.get((word.first, word.pointer, word.offset), -1)
        if number < 0:
            words.append(word)
        elif words and words[-1].first == "lt.w" and (words[-1].second, word.second) == _AFFINE:
            words[-1] = Word("w.affine", w1=words[-1].w1, w2=number)
        else:
            words.append(Word("lt.w", word.second, y=word.y, w1=number))
    words = _normalized_once(words)
    image.first = [moved[one] for one in image.first]
    image.rest = [moved[one] for one in image.rest]
    image.prologue = len(words)
    for (first, pointer, offset), number in known.items():
        words.append(Word(first, "take", w1=image.cols, pointer=pointer, offset=offset))
        words.append(Word("save", w1=number * image.weight_bytes))
    words.append(Word("end"))
    image.words = words


_AFFINE = ("f.mul", "f.add")


def _normalized_once(words: list[Word]) -> list[Word]:
    """T as ``acc.norm`` leaves it, for a gradient behind it."""
    for at, (load, adds, scales, again, back) in enumerate(
        zip(*(words[k:] for k in range(5)), strict=False)
    ):
        if (scales.first, scales.second) != ("lt.w", "f.mul") or again != load:
            continue
        same = (adds.x, adds.y, adds.w3) == (back.x, back.y, back.w3)
        if adds.first == "acc.norm" and back.first == "row.f.back" and same:
            scale = Word("w.scale", w1=scales.w1)
            ready = replace(back, w3=back.w3 | READY)
            return [*words[: at + 2], scale, ready, *words[at + 5 :]]
    return words


def _made_room(image: Image, machine: Machine, count: int) -> bool:
    """Whether vectors are kept, in the place of up to half of the rows where none is reduced.

    So it is of sums across rows.
    """
    rows, gives = image.warps // image.group, image.sums or not reductions_of(image)
    while not machine.has_room(image, count):
        if not gives or 2 * (image.warps // image.group - 1) < rows:
            return False
        machine.shrink(image)
    return True


def place_weights(image: Image) -> None:
    """Numbers of vectors become offsets in shared memory."""
    for word in image.words:
        if word.first in ("lt.w", "w.affine", "w.scale"):
            word.w1 = image.weights_at + word.w1 * image.weight_bytes
        if word.first == "w.affine":
            word.w2 = image.weights_at + word.w2 * image.weight_bytes
