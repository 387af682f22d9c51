"""Gradients of norms whose sums across rows the same warps add up.

A word ``row.f.back`` makes a row's gradient in A, and ``acc.norm`` adds up what the weight's and
the bias's gradients are sums of.  Where a program is these and nothing else, one word is the whole
of it, ``norm.back``: its x and y are G and x, by their numbers among a stage's inputs; w1 says
which of these have means, if any, and roots, and which sums are added up; w2 is 1 / N, w3 the
dtype.  Behind it are the store of the result and the load of the weights that are kept, which are
read, but not run.

It is compiled code (``gradient_code.py``).  Each lane has columns of its own, of all the rows that
its warp computes, and keeps their sums in registers.  It reads a row's part of the stage twice,
for the row's sums and for its result: no tile is in registers, so that there is room for the sums
of rows of 16384 columns, and for loads that are under way.

``csrc/cuda_gradients.cpp`` does the same.
"""

from __future__ import annotations

from magjit_dvm.cuda.adders import give_to_adders, norm_of_sums
from magjit_dvm.cuda.machine import Machine
from magjit_dvm.cuda.parts import MOST_EACH
from magjit_dvm.cuda.plan import arrange_gradients
from magjit_dvm.cuda.words import OF_COLUMNS, Image, Word
from magjit_dvm.vm import NotEncodable

__all__ = ["place_sums"]


def place_sums(image: Image, machine: Machine) -> None:
    """Say who adds up sums across rows, if there are any.

    Raises:
        NotEncodable: a block has no room for them.
    """
    if not image.sums or _give_to_gradients(image, machine):
        return
    give_to_adders(image, machine)
    if image.each > MOST_EACH and not image.adders:
        raise NotEncodable("sums across rows that a block has no room for")


def _give_to_gradients(image: Image, machine: Machine) -> bool:
    """Have one word for all, if that is what the words are; whether it is so."""
    words = _found(image)
    if words is None or not arrange_gradients(image, machine):
        return False
    image.words = words
    image.first, image.rest = [0], []
    return True


def _found(image: Image) -> list[Word] | None:
    at = 0
    while at < len(image.words) and image.words[at].first == "s.in":
        at += 1
    words = image.words[at:]
    if len(words) != 8:
        return None
    gradient, x, adds, weight, again, back, store, end = words
    norm = norm_of_sums(image, gradient, x, adds)
    if norm is None or weight.first not in (f"lt.c.{one}" for one in OF_COLUMNS):
        return None
    expected = [gradient.first, x.first, "acc.norm", weight.first]
    expected += [x.first, "row.f.back", f"st.g.{OF_COLUMNS[norm.what]}", "end"]
    if [word.first for word in words] != expected:
        return None
    if [word.second for word in words] != ["nop"] * 3 + ["f.mul"] + ["nop"] * 4:
        return None
    if again != x or (adds.x, adds.y, adds.w3) != (back.x, back.y, back.w3):
        return None
    word = Word("norm.back", x=norm.gradient, y=norm.x, w1=norm.inputs | norm.sums << 16)
    word.w2, word.w3 = back.w2, norm.what
    return [word, store, weight, end]
