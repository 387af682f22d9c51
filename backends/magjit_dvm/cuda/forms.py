"""Forms of the kernel: which cases each has, which of them jump on through tables of their own.

All run the same words.  What a form leaves out, programs that it runs have no need of: cases, and
with them registers, and what a block does before its first tile and beside each.

A jump through a shared table costs a branch more, and its entry is read late.  Tables are in
constant memory, which has room for about 70; beyond it, ptxas makes jumps to jumps of them, each on
a line of code of its own.
"""

from __future__ import annotations

from magjit_dvm.cuda.parts import MOST_EACH
from magjit_dvm.cuda.words import (
    MAX_DRAWING,
    NARROW,
    NO_WORD,
    OF_COLUMNS,
    OF_POSITIONS,
    OPCODES,
    WARP,
    Image,
)

__all__ = [
    "ADDING",
    "ALONE",
    "BATCHED",
    "CHUNKED",
    "EIGHTH",
    "FLAT",
    "FORMS",
    "GRADIENTS",
    "HALF",
    "LANES",
    "NORMS",
    "OF_ADDING",
    "OF_BATCHED",
    "OF_CHUNKED",
    "OF_FLAT",
    "OF_NORMS",
    "OF_READ_ONCE",
    "OF_SEVERAL",
    "OF_SQUARES",
    "OF_WHOLE",
    "ONLINE",
    "QUARTER",
    "READ_ONCE",
    "SQUARES",
    "STACKED",
    "SUMMING",
    "WHOLE",
    "form_of",
    "has_case",
    "kernel_name",
    "lanes_of",
    "may_be_several",
    "own_tables",
    "said_of",
    "words_of_tiles",
]

FORMS = range(15)
ALONE, STACKED, SUMMING, FLAT, WHOLE, ADDING, NORMS, GRADIENTS, SQUARES = FORMS[:9]
EIGHTH, QUARTER, HALF, CHUNKED, BATCHED, READ_ONCE = FORMS[9:]
"""Kernels of one image, of several, of one with sums across rows, of one that has no rows, of one
whose rows are in no chunks, of one with warps that add up sums, of one whose rows, in no chunks,
have little but what norms and softmaxes have, of norms' gradients, of one without rows whose
operands may lie across one another, of narrow rows, each of which has a part of a warp, of long
ones, in chunks, with what norms, softmaxes and losses have, and of rows, in no chunks and in chunks
that are read once, of which nothing but a few numbers is stored, for many of them at once.  Code
that writes sums would make all others slower, and so do cases that a norm does not run.  What comes
straight from global memory wants more warps than what is in stages, and these fewer registers than
all functions have use for."""

LANES = {EIGHTH: 4, QUARTER: 8, HALF: 16}
"""Of a row, by forms whose warps have several."""

_NAMES = {
    ALONE: ("", ""),
    STACKED: ("stack_", " of stacks"),
    SUMMING: ("summing_", " of sums"),
    FLAT: ("flat_", " of no rows"),
    WHOLE: ("whole_", " of rows"),
    ADDING: ("adding_", " of sums beside rows"),
    NORMS: ("norms_", " of norms and softmaxes"),
    GRADIENTS: ("gradients_", " of norms' gradients"),
    SQUARES: ("squares_", " of squares"),
    EIGHTH: ("eighth_", " of eight rows a warp"),
    QUARTER: ("quarter_", " of four rows a warp"),
    HALF: ("half_", " of two rows a warp"),
    CHUNKED: ("chunked_", " of rows in chunks"),
    BATCHED: ("batched_", " of rows' results in batches"),
    READ_ONCE: ("read_once_", " of long rows' results in batches"),
}
"""In the name of an entry point, and in messages."""


def kernel_name(each: int, form: int = ALONE) -> str:
    """The entry point of R elements a lane."""
    return f"mj_dvm_{_NAMES[form][0]}{each}"


def said_of(form: int) -> str:
    """What messages say that an interpreter is of."""
    return _NAMES[form][1]


def form_of(image: Image) -> int:
    """That of the kernel which runs an image by itself; as ``Encoder::form`` has it."""
    if image.sums:
        whole = image.words[image.first[0]].first == "norm.back"
        return GRADIENTS if whole else ADDING if image.adders else SUMMING
    if image.tail != NO_WORD:
        return READ_ONCE if image.chunks > 1 else BATCHED
    used, by_tiles = _used(image), words_of_tiles(image)
    if image.chunks > 1:
        return CHUNKED if by_tiles <= OF_CHUNKED else ALONE
    if image.by_rows:
        if image.lanes < WARP:
            return next(form for form, lanes in LANES.items() if lanes == image.lanes)
        norms = by_tiles <= OF_NORMS and image.cols % 4 == 0
        return NORMS if norms else WHOLE if used <= OF_WHOLE else ALONE
    around = image.epilogue != NO_WORD or image.prologue != NO_WORD
    if around:
        return ALONE
    return FLAT if used <= OF_FLAT else SQUARES if used <= OF_SQUARES else ALONE


def has_case(name: str, each: int, form: int) -> bool:
    """Whether a kernel has a case for an operator; if not, it is a trap."""
    if name in ("add.rows", "norm.back"):  # have code of their own
        return False
    if name.startswith("lt.draw.") and each > MAX_DRAWING:
        return False
    if name.startswith(_SELDOM) and each not in OF_POSITIONS:
        return False
    if name in _OF_SUMS and (form not in (STACKED, SUMMING) or each > MOST_EACH):
        return False
    return name in _OF.get(form, OPCODES)


def lanes_of(form: int) -> int:
    """Lanes of a warp that have parts of the same row."""
    return LANES.get(form, WARP)


def may_be_several(image: Image) -> bool:
    """Whether the kernel of several rows a warp has all of an image's words; as C++ has it."""
    return form_of(image) in (NORMS, WHOLE) and _used(image) <= OF_SEVERAL


def words_of_tiles(image: Image) -> set[str]:
    """Operators of all words, without what is done to row registers by a second one.

    These have cases of their own in all kernels.
    """
    return _used(image, but=("by", "s.by", "sk.by"))


def _used(image: Image, but: tuple[str, ...] = ("by",)) -> set[str]:
    """Operators of all words; the second ones of some have cases of their own."""
    used = {word.first for word in image.words}
    return used | {word.second for word in image.words if word.first not in but}


def own_tables(form: int) -> frozenset[str]:
    """Operators that programs of a form often have."""
    return _OWN_OF.get(form, _OWN)


_OF_SUMS = ("acc", "acc.norm", "w.scale")
_IN_SQUARES = ("lt.t.", "lt.n.", "st.n.", "pf.")
_SELDOM = ("lt.e.at", "lt.col.at", "s.ld.at", "at.", "lt.row.", "s.at.", *_IN_SQUARES)
"""What a program has with ``OF_POSITIONS`` alone: encoders choose one of these for squares and
tables.  With more cases, fewer registers are left for what goes from tile to tile, which is slow
where R is 64, and a kernel begins later, which is much of its time where R is 8.  Random numbers
have no case beyond ``MAX_DRAWING``, sums across rows none beyond ``MOST_EACH``."""

_OWN = frozenset(
    f"{head}.{name}"
    for head, names in {
        "f": "neg abs relu add sub mul minimum maximum rsqrt exp sub_exp",
        "fk": "add sub rsub mul mad sub_exp sub_exp_small",
        "lt": "s.32 s.f16 s.bf16 u.32 u.f16 u.bf16 scratch k r w",
        "la": "s.32 s.f16 s.bf16 scratch r",
        "lk": "r",
        "w": "affine scale",
        "st": "g.32 g.f16 g.bf16",
        "row": "f.sum f.max f.squares f.norm f.softmax",
        "red": "f.sum f.max",
        "fin": "f.sum",
        "s": "add sub mul rsqrt by",
        "sk": "add mul scaled_rsqrt",
    }.items()
    for name in names.split()
) | {"swap", "keep", "mask", "select", "save"}
_OF_SOFTMAX = {"row.f.softmax", "row.f.max", "red.f.max", "fk.sub_exp", "fk.sub_exp_small"}
_OWN_OF_SUMS = _OWN - _OF_SOFTMAX | {"acc.norm", "row.f.back", "s.in"}
"""Sums across rows are of gradients, not of softmaxes."""

OF_ADDING = frozenset(
    {
        *("end", "nop", "take", "save", "mad.r", "nmad.r", "lt.k", "lt.w", "fk.mad"),
        *(f"f.{name}" for name in ("neg", "add", "sub", "mul")),
        *(f"fk.{name}" for name in ("add", "sub", "rsub", "mul")),
        *(f"{load}.{what}" for load in ("la.s", "lt.s", "lt.c", "st.g") for what in OF_COLUMNS),
        *("lk.r", "lt.r", "row.f.back", "row.f.sum", "s.k", "s.in"),
        *(f"{head}.{name}" for head in ("s", "sk") for name in ("add", "sub", "mul")),
    }
)
"""What the kernel of norms' gradients has whose sums across rows are added up apart."""
OF_FLAT = frozenset(
    {
        *("end", "nop", "swap", "keep", "take", "mask", "select", "save", "fk.mad"),
        *("lt.scratch", "la.scratch", "lt.k"),
        *(name for name in OPCODES if name.startswith(("f.", "i.", "fk.", "ik.", "la.s."))),
        *(f"lt.{how}.{what}" for how in "suvb" for what in NARROW),
        *(f"st.{how}.{what}" for how in "gue" for what in NARROW),
    }
)
"""What the kernel of programs without rows has."""
_ACROSS = frozenset(name for name in OPCODES if name.startswith(_IN_SQUARES))
OF_SQUARES = OF_FLAT | _ACROSS
"""What that of programs has whose operands lie across one another."""
ONLINE = ("red.f.softmax", "fin.f.softmax")
"""The largest of a row and the sum of exponentials of what is beyond it."""
OF_WHOLE = frozenset(
    name for name in OPCODES if name in ONLINE or not name.startswith(("red.", "fin."))
)
"""What that of rows in no chunks has, beside sums."""
OF_NORMS = OF_ADDING | frozenset(
    {
        *("swap", "keep", "mask", "select", "lt.scratch", "la.scratch", "la.r", "w.affine"),
        *(
            f"f.{name}"
            for name in ("abs", "relu", "minimum", "maximum", "rsub", "div", "sub_square")
        ),
        *(f"f.{name}" for name in ("sqrt", "rsqrt", "exp", "sub_exp", "sigmoid", "silu")),
        *("f.silu_short", "f.silu_slope", "f.to_half", "f.to_bfloat"),
        *(f"fk.{name}" for name in ("minimum", "maximum", "div", "sub_square")),
        *("fk.sub_exp", "fk.sub_exp_small"),
        *(f"lt.{how}.{what}" for how in "uvb" for what in OF_COLUMNS),
        *("lt.s.u8", "lt.u.u8", "lt.v.u8", "st.g.u8", "st.u.u8"),
        *(f"st.u.{what}" for what in OF_COLUMNS),
        *(f"row.f.{name}" for name in ("max", "stat", "squares", "norm", "softmax")),
        *(f"s.{how}.{what}" for how in ("ld", "st") for what in OF_COLUMNS),
        *ONLINE,
        *("s.take", "s.rsqrt", "s.log", "s.div", "sk.div", "sk.scaled_rsqrt", "s.by", "sk.by"),
    }
)
"""What that of norms and softmaxes has: also what often stands before and behind them, as far as
there are registers for it.  Elements that do not come by four want more of these."""
OF_SEVERAL = OF_NORMS | OF_FLAT | {f"lt.e.{what}" for what in NARROW}
"""What that of rows has of which a warp has several: also masks that are not aligned."""
OF_CHUNKED = frozenset(
    {
        *(one for one in OF_NORMS if not one.startswith(("row.", "w.", "lt.w"))),
        *(f"{how}.f.{name}" for how in ("red", "fin") for name in ("sum", "max", "softmax")),
        *(f"s.at.{what}" for what in OF_COLUMNS),
        *(f"f.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge")),
        "s.ld.i64s",
    }
)
"""What that of rows in chunks has."""
_TO_TILES = ("st.", "w.", "lt.w", "red.", "fin.", "row.f.norm", "row.f.softmax", "row.f.back")
"""How words begin that make or store tiles of rows, keep vectors for them, or work over chunks."""
OF_BATCHED = frozenset(
    {
        *(one for one in OF_NORMS | OF_CHUNKED if not one.startswith(_TO_TILES)),
        *(name for name in OPCODES if name.startswith(("s.", "sk."))),
        *ONLINE,
    }
)
"""What that of rows' results in batches has."""
OF_READ_ONCE = frozenset(
    one for one in OF_CHUNKED | OF_BATCHED if not one.startswith(("st.", "row."))
)
"""What that of long rows' results in batches has."""
_SHORT = "exp log tanh sigmoid silu gelu gelu_tanh sin cos"
_OWN_OF_FLAT = (
    _OWN
    | {f"f.{name}_short" for name in _SHORT.split()}
    | {"nop", "f.exp_short", "f.sigmoid", "f.silu", "f.rsub", "fk.maximum", "fk.minimum"}
    | {f"lt.v.{what}" for what in NARROW}
) & OF_FLAT

_OF_GRADIENTS = frozenset({"end", "nop", "take", "save", *(f"lt.c.{what}" for what in OF_COLUMNS)})
"""What that of norms' gradients has, beside code of its own: a prologue's."""

_OF = {
    FLAT: OF_FLAT,
    WHOLE: OF_WHOLE,
    ADDING: OF_ADDING,
    NORMS: OF_NORMS,
    GRADIENTS: _OF_GRADIENTS,
    SQUARES: OF_SQUARES,
    CHUNKED: OF_CHUNKED,
    BATCHED: OF_BATCHED,
    READ_ONCE: OF_READ_ONCE,
    **dict.fromkeys(LANES, OF_SEVERAL),
}
_OWN_OF = {
    STACKED: _OWN - {"lk.r", "w.scale"},
    SUMMING: _OWN_OF_SUMS,
    FLAT: _OWN_OF_FLAT,
    WHOLE: _OWN & OF_WHOLE | {"nop"},
    ADDING: OF_ADDING,
    NORMS: _OWN & OF_NORMS | {"nop"},
    GRADIENTS: frozenset(),
    SQUARES: _OWN & OF_SQUARES | {"nop", *_ACROSS},
    CHUNKED: _OWN & OF_CHUNKED | {"nop", "red.f.softmax"},
    BATCHED: _OWN & OF_BATCHED | {"nop", *ONLINE},
    READ_ONCE: _OWN & OF_READ_ONCE | {"nop", *ONLINE},
    **dict.fromkeys(LANES, _OWN & OF_SEVERAL | {"nop"}),
}
