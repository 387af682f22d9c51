"""The word format of the GPU's interpreter, and the image of a launch.

Grammar::

    image   = header word* descriptor*          all of it is the kernel's one parameter
    word    = first:8 second:8 x:4 y:4 next:8 | w1:32 | w2:32 w3:32        16 bytes
    first   = operator | load        a load fills T or A (or F0), then ``second`` runs
    next    = the ``first`` of the word behind it: its jump need not wait for the fetch
    w1      = offset in shared memory: of an operand in a stage, a slot of scratch, a descriptor,
              a vector that is kept
    w2, w3  = two immediates (F0 is w2), or a pointer
    descriptor = n dimensions, table, then (size, magic, shift, stride) of each, innermost first
    table   = positions that there are, bytes between them, columns; 0 of what is no table
    draw    = of what is drawn: 1, the seed's two halves, place, then (threads, magic, shift, fours)

A warp holds two tiles in registers, the accumulator A and T, of R elements a lane, and a mask M of
one bit an element.  Element 128·j + 4·lane + i of a warp's slice is the (4·j + i)-th of a lane.
Beside them are row registers S, one number for a warp's row, accumulators of reductions, and
scratch memory of whole tiles.

Names of operators: ``f.`` and ``i.`` are elementwise over A (and T) of floats and of ints, ``fk.``
and ``ik.`` have F0 for T, ``s.`` works on row registers: S[x] from S[y] and S[w1]; of ``sk.`` F0 is
the second.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magjit_dvm.cuda.functions import FLOATS, INTS
from magjit_dvm.cuda.parts import Parts

__all__ = [
    "BY",
    "BY_ROW",
    "COUNTER_AT",
    "FORM",
    "HEADER_BYTES",
    "IMAGE_BYTES",
    "INPUTS_AT",
    "KEEPS",
    "LOADED",
    "LOOKED_UP",
    "MAX_DRAWING",
    "MAX_INPUTS",
    "MAX_PASSES",
    "MOST_REGISTERS",
    "NO_WORD",
    "NUMBER",
    "OF_COLUMNS",
    "OF_POSITIONS",
    "OF_ROWS",
    "OF_STAGE",
    "OPCODES",
    "PARTS_AT",
    "PERIOD_SHIFT",
    "REDUCTIONS",
    "SCALARS",
    "STORED",
    "WITH_IMMEDIATE",
    "Descriptor",
    "Image",
    "Word",
    "code",
    "divisor",
]

LOADED = ("32", "f16", "bf16", "u8", "i64", "i64f", "i64s")
"""What loads make of memory: ``i64`` its low 32 bits, ``i64f`` a float, ``i64s`` the nearest int32;
all loads know the first four, the others come from stages or each by itself."""
NARROW = LOADED[:4]
STORED = ("32", "f16", "bf16", "u8", "i64", "i64f")
"""What stores make of A: ``i64`` is an int32 extended, ``i64f`` a float truncated."""
OF_COLUMNS = ("32", "f16", "bf16")
"""What loads of vectors that all rows share know, and of rows; loads and stores of squares."""
LOOKED_UP = (*NARROW, "i64s")
"""What there are tables of."""
REDUCTIONS = ("f.sum", "f.prod", "f.max", "f.min", "i.max", "i.min", "i.sum")
ROW_REDUCTIONS = (*REDUCTIONS, "f.squares", "f.stat", "f.norm", "f.softmax", "f.back")
"""Of a row in one stage, all at once."""
RUNNING = ("f.cumsum", "f.cumprod", "i.cumsum")
"""Of such a row, each element with all before it."""
SCALARS = ("add", "sub", "mul", "div", "rsqrt", "log")
"""Float operators on row registers that have a word of their own."""
BY = (
    *(f"f.{name}" for name in ("exp2", "expm1", "log2", "log10", "tan", "asin", "acos", "atan")),
    *(f"f.{name}" for name in ("sinh", "cosh", "floor_div", "fmod", "remainder")),
    *(f"i.{name}" for name in ("floor_div", "trunc_div", "fmod", "remainder", "pow")),
    *("i.sign", "i.relu"),
)
"""What ``by`` does to tiles: operators that are long or seldom, and no load's second one."""

BY_ROW = frozenset(
    (
        *(f"i.{name}" for name in INTS if f"i.{name}" not in BY),
        *(f"f.{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum")),
        *(f"f.{name}" for name in ("rsub", "rdiv", "neg", "abs", "sign", "relu", "reciprocal")),
        *(f"f.{name}" for name in ("sqrt", "exp", "is_nan", "is_inf", "is_finite")),
        *(f"f.{name}" for name in ("to_int", "to_byte", "to_bool", "to_half", "to_bfloat")),
        "select",
    )
)
"""What ``s.by`` does to row registers; all else goes through A."""
OF_STAGE = ("32", "i64s", "i64f", "i64")
"""What ``s.in`` makes of a row's number."""
WITH_IMMEDIATE = {
    "f": (
        *("add", "sub", "rsub", "mul", "div", "rdiv", "maximum", "minimum"),
        *("sub_exp", "sub_exp_small", "sub_square"),
    ),
    "i": ("add", "mul", "bitwise_and"),
}

_NEAR = (
    *("lt.v.32", "lt.v.bf16", "lt.v.f16"),
    *("f.gelu", "f.gelu_tanh", "f.tanh", "f.log", "f.erf", "f.silu", "f.sigmoid", "f.exp"),
    *("fk.sub_exp", "fk.sub_exp_small", "row.f.softmax", "row.f.norm", "row.f.squares"),
    *("sk.scaled_rsqrt", "row.f.max", "row.f.sum", "w.affine", "lt.w"),
    *("fk.minimum", "fk.maximum", "fk.rsub", "f.maximum", "f.minimum", "select", "mask", "swap"),
    *("keep", "save", "la.scratch", "lt.scratch", "lt.r", "la.r"),
    *("f.silu_slope", "f.sin_short", "f.gelu_tanh_short", "f.gelu_short", "f.silu_short"),
    *("f.tanh_short", "f.log_short", "f.sigmoid_short", "f.exp_short", "f.rsqrt"),
    *("lt.u.32", "lt.u.bf16", "lt.u.f16"),
    *("f.neg", "f.abs", "f.relu"),
    *("f.sub", "f.add", "f.mul", "fk.sub", "fk.add", "fk.mul", "fk.mad"),
    *("la.s.bf16", "lt.s.bf16", "st.g.bf16", "la.s.32", "lt.s.32", "st.g.32"),
    *("la.s.f16", "lt.s.f16", "st.g.f16", "nop", "end"),
)
"""What programs most often run, most often last: compilers put cases in the opposite order of their
numbers, behind one another.  A jump to where a kernel has not been yet waits for memory, and what a
program runs stays in the instruction cache best where it is side by side: short functions are next
to what loads, stores and adds, other functions next to one another."""

_ALL: tuple[str, ...] = (
    "by",
    "nop",
    "end",
    *(f"f.{name}" for name in FLOATS if f"f.{name}" not in BY),
    *(f"i.{name}" for name in INTS if f"i.{name}" not in BY),
    *(f"{kind}k.{name}" for kind, names in WITH_IMMEDIATE.items() for name in names),
    *("swap", "keep", "take", "mask", "select", "save", "acc", "acc.norm", "mad.r", "nmad.r"),
    *("w.affine", "w.scale", "fk.mad", "add.rows", "norm.back"),
    *(f"lt.{how}.{what}" for how in "suvbe" for what in NARROW),
    *(f"lt.{how}.{what}" for how in "se" for what in LOADED[4:]),
    *(f"lt.{how}.{what}" for how in ("c", "n", "t", "row") for what in OF_COLUMNS),
    *("lt.e.at", "lt.col.at", "lt.draw.f"),
    *("la.s.32", "la.s.f16", "la.s.bf16"),
    *("lt.scratch", "la.scratch", "lt.k", "lt.r", "la.r", "lk.r", "lt.w"),
    *(f"st.{how}.{what}" for how in "gue" for what in NARROW),
    *(f"st.{how}.{what}" for how in "ge" for what in STORED[4:]),
    *(f"st.n.{what}" for what in OF_COLUMNS),
    "pf.n",
    "pf.t",
    *(f"at.{what}" for what in LOOKED_UP),
    *(f"red.{name}" for name in REDUCTIONS),
    *(f"fin.{name}" for name in REDUCTIONS),
    *("red.f.softmax", "fin.f.softmax"),
    *(f"row.{name}" for name in (*ROW_REDUCTIONS, *RUNNING)),
    *(f"s.{name}" for name in SCALARS),
    *(f"sk.{name}" for name in SCALARS if name in WITH_IMMEDIATE["f"]),
    *("sk.scaled_rsqrt", "s.by", "sk.by", "s.k", "s.take", "s.in"),
    *(f"s.ld.{what}" for what in (*OF_COLUMNS, "i64s", "at")),
    *(f"s.at.{what}" for what in OF_COLUMNS),
    *(f"s.st.{what}" for what in STORED),
)
"""All operators; their places are their numbers.  Loads from stages are ``s`` where four elements
are aligned and ``u`` where not; from global memory through a descriptor, ``v`` four elements at a
time, ``b`` one element for four, ``e`` each by itself; ``c`` contiguous along columns and the same
in all rows, with the number of columns in w1; of squares, see ``tiling``, ``n`` four elements of a
row at a time, ``t`` those of a lane's column; ``w`` a vector that the prologue has kept, as
``w.affine``: A ← A · the vector at w1 + the one at w2, ``w.scale``: A ← A · the vector, and T
stays; ``fk.mad`` is A ← A · F0 + F1.  ``by`` is the word's second operator of A and T, which is
numbered by its place in ``BY``.
``e.at`` is no element but the low 32 bits of its address, which are a position where no
pointer is added, ``col.at`` the column of a row;
``draw`` are random numbers, of which a descriptor says how threads of eager mode share them;
``at`` is A ← the table's elements at positions A, ``s.at`` S[x] ← the one at S[y], ``lt.row`` its
row at S[y].  ``mad.r`` is A ← A + T · S[y], ``nmad.r`` A − T · S[y]; ``acc`` adds A to a slot of
scratch memory, and A stays; ``acc.norm`` adds A times T normalized, (T − S[x]) · S[y], or T · S[y]
where F1 is 0, leaves that in T, and adds A itself to the slot at F0, unless that is all ones;
``add.rows`` is what adders run instead, see ``adders.py``;
``s.by`` is S[x] ← the word's second operator of S[y], S[w1] and S[w2], ``sk.by`` of S[y] and F0;
``s.in`` is a row's number from a stage, of which y says what it is there.  Stores are ``g``
contiguous and aligned, ``u`` contiguous, ``e`` through a descriptor, ``n`` as loads.
``pf`` asks for what a load will read."""

OPCODES = tuple(name for name in _ALL if name not in _NEAR) + _NEAR
NUMBER = {name: number for number, name in enumerate(OPCODES)}
assert len(NUMBER) == len(OPCODES) <= 256, "numbers of operators have 8 bits"

FORM = 38
"""Counts changes of what encoders make: of words, their order, places in memory.  The one in C++
has the same number (``FORM`` of ``csrc/cuda_words.h``) and stands back where it is another."""
MAX_INPUTS, MAX_PASSES, MOST_REGISTERS = 12, 4, 16  # a word has four bits for a register
MAX_DRAWING, OF_POSITIONS = 16, (16, 32)
"""The largest R that has registers for random numbers; those that have cases for positions, tables
and squares."""
WARP = 32
"""Lanes."""
HEADER_BYTES, IMAGE_BYTES, COUNTER_AT, INPUTS_AT, PARTS_AT = 352, 4096, 144, 152, 344
OF_ROWS, WHOLE_ROWS, PERIOD_SHIFT = 256, 128, 9
"""Added to the size of an element of which a row has one; added to both where rows have all their
columns of it; and where, beside that, the number of rows is after which it comes again, or 0."""
KEEPS = 1
"""Beside the bytes of a row in a stage: stages keep it until its last pass."""
_PATCH = "<IIq"
NO_WORD = 0xFFFFFFFF


@dataclass(slots=True)
class Word:
    """One word; ``next`` is filled in when an image is made.

    Attributes:
        pointer: number of the argument whose address is in w2 and w3, or −1.
        offset: bytes from that address.
    """

    first: str
    second: str = "nop"
    x: int = 0
    y: int = 0
    w1: int = 0
    w2: int = 0
    w3: int = 0
    pointer: int = -1
    offset: int = 0

    def __str__(self) -> str:
        text = self.first if self.second == "nop" else f"{self.first} {self.second}"
        given = [f"x{self.x}" * (self.x > 0), f"y{self.y}" * (self.y > 0)]
        given += [f"at 0x{self.w1:x}" * (self.w1 > 0), f"0x{self.w2:08x}" * (self.w2 != 0)]
        given += [f"arg{self.pointer}+{self.offset}" * (self.pointer >= 0)]
        return " ".join([text, *filter(None, given)])


class Descriptor(NamedTuple):
    """Where elements of the space are in an operand.

    Attributes:
        dims: (size, stride in bytes) of each dimension, innermost first.
        table: of what is looked up, the number of positions, the bytes between them, and the
            columns of a row that is one position's.
    """

    dims: tuple[tuple[int, int], ...]
    table: tuple[int, int, int] = (0, 0, 0)

    def __str__(self) -> str:
        text = str(self.dims)
        return text if not any(self.table) else f"{text} of a table {self.table}"


@dataclass(slots=True)
class Image:
    """What one launch needs: the kernel's parameter and its configuration.

    Attributes:
        each: elements a lane, R; says which kernel runs.
        warps: that compute; one more feeds them.
        adders: warps that add up sums across rows, beside these.
        group: warps of a row.
        lanes: of a warp that have parts of the same row.
        inputs: of the stages: argument, bytes an element, offset in the stage; the last of them,
            ``row_inputs``, have an element for a row.
        periods: of each of those last ones, the rows after which its elements come again, or 0.
        repeats: the same of the inputs before those, whole rows of which come again.
        first, rest: of each pass, the word that a row begins with, and that its later chunks do.
        prologue: the word that a block begins with, if any.
        tail: the word that is done for a batch of rows at once, if any; ``batched`` is how many row
            registers a batch has of each, see ``batches.py``.
        weights: vectors that it keeps.
        sums: across rows; ``parts`` is what is left to add up of them.
        once: whether rows are read once, if in chunks, and have results of one number each.
        row_bytes: of rows in chunks, those of one in a stage.
        keeps: whether stages keep such rows until their last pass, so that they are read once.
        fixed, shift: of tiles beside sums, how many blocks have for certain; the others are drawn
            in runs of 2^shift, each of which has a row of the parts.
    """

    each: int = 32
    warps: int = 1
    group: int = 1
    lanes: int = WARP
    stages: int = 1
    stage_bytes: int = 0
    cols: int = 1
    rows: int = 1
    elements: int = 1
    chunks: int = 1
    tiles: int = 1
    by_rows: bool = False
    first: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    epilogue: int = NO_WORD
    prologue: int = NO_WORD
    tail: int = NO_WORD
    batched: int = 0
    inputs: list[tuple[int, int, int]] = field(default_factory=list)
    periods: list[int] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    descriptors: list[Descriptor] = field(default_factory=list)
    numbers: int = 0
    accumulators: int = 0
    scratch: int = 0
    weights: int = 0
    sums: int = 0
    adders: int = 0
    once: bool = False
    row_bytes: int = 0
    keeps: bool = False
    fixed: int = 0
    shift: int = 0
    parts: Parts | None = None
    barriers_at: int = 0
    rows_at: int = 0
    partials_at: int = 0
    scratch_at: int = 0
    weights_at: int = 0
    ring_at: int = 0
    shared_bytes: int = 0
    blocks: int = 1

    @property
    def row_inputs(self) -> int:
        """How many of the inputs have an element for a row."""
        return len(self.periods)

    @property
    def draws(self) -> bool:
        """Whether blocks draw tiles from a counter: there are more of them than blocks.

        Beside sums across rows, see ``fixed``.
        """
        return self.tiles > (self.fixed if self.sums else self.blocks)

    @property
    def threads(self) -> int:
        """Of a block: of warps that compute, of adders, and of the one that feeds them."""
        return 32 * (self.warps + self.adders + 1)

    @property
    def rows_of_tile(self) -> int:
        """0 where tiles have no rows."""
        return self.warps * WARP // (self.group * self.lanes) if self.by_rows else 0

    @property
    def slice(self) -> int:
        """Elements of a warp, or of a row that a warp has room for."""
        return self.lanes * self.each

    @property
    def weight_bytes(self) -> int:
        """Of a vector that is kept."""
        return 128 * self.each * self.group

    @property
    def program_bytes(self) -> int:
        """Of words and descriptors."""
        return 16 * (len(self.words) + sum(1 + len(one.dims) for one in self.descriptors))

    def descriptor_at(self, number: int) -> int:
        """Where a descriptor is in shared memory, which the program begins."""
        before = self.descriptors[:number]
        return 16 * (len(self.words) + sum(1 + len(one.dims) for one in before))

    def pack(self, addresses: Sequence[int], counter: int = 0) -> bytes:
        """The kernel's parameter, given the addresses of arguments and of the tile counter."""
        packed = bytearray(self.template())
        struct.pack_into("<Q", packed, COUNTER_AT, counter)
        for at, argument, offset in struct.iter_unpack(_PATCH, self.patches()):
            address = (addresses[argument] + offset) % (1 << 64)
            struct.pack_into("<Q", packed, at, address)
        return bytes(packed)

    def template(self) -> bytes:
        """The parameter without any address."""
        parts = [self._header()]
        for number, word in enumerate(self.words):
            behind = self.words[number + 1].first if number + 1 < len(self.words) else "end"
            second = BY.index(word.second) if word.first == "by" else NUMBER[word.second]
            assert 0 <= (word.x | word.y) < 16, "numbers of registers have 4 bits"
            head = NUMBER[word.first] | second << 8 | word.x << 16 | word.y << 20
            parts.append(struct.pack("<4I", head | NUMBER[behind] << 24, word.w1, word.w2, word.w3))
        for one in self.descriptors:
            bound, step, cols = one.table
            parts.append(struct.pack("<2IiI", len(one.dims), bound, step, cols))
            for size, stride in one.dims:
                magic, shift = divisor(size)
                parts.append(struct.pack("<3Ii", size, magic, shift, stride))
        return b"".join(parts)

    def patches(self) -> bytes:
        """Where addresses go: (place, argument, bytes to add) of each, packed."""
        found = [(INPUTS_AT + 16 * k, one[0], 0) for k, one in enumerate(self.inputs)]
        found += [
            (HEADER_BYTES + 16 * number + 8, word.pointer, word.offset)
            for number, word in enumerate(self.words)
            if word.pointer >= 0
        ]
        if self.parts is not None:
            found.append((PARTS_AT, self.parts.argument, 0))
        return b"".join(struct.pack(_PATCH, *one) for one in found)

    def _header(self) -> bytes:
        passes = [(*one, 0, 0, 0, 0)[:MAX_PASSES] for one in (self.first, self.rest)]
        if self.tail != NO_WORD:  # where a fourth pass would be
            passes = [(*passes[0][:-1], self.tail), (*passes[1][:-1], self.batched)]
        packed = struct.pack(
            "<32I3Q",
            *(len(self.words), self.program_bytes, len(self.inputs), self.stages),
            *(self.stage_bytes, self.warps, self.group, self.cols),
            *(self.chunks, self.tiles, self.rows_of_tile, len(self.first)),
            self.epilogue,
            *passes[0],
            *passes[1],
            *(self.numbers, self.accumulators, self.barriers_at, self.rows_at),
            *(self.partials_at, self.scratch_at, self.ring_at),
            # What a block reads before its first tile is side by side: other parts of the
            # parameter are not in the constant cache yet.
            *(self.scratch * 128 * self.each, self.prologue),
            *(
                self.sums | self.shift << 8 | self.adders << 16,
                self.fixed | self.row_bytes | KEEPS * self.keeps,
            ),
            *(self.elements, self.rows, 0),
        )
        tiles = [0] * (len(self.inputs) - self.row_inputs - len(self.repeats))
        again = [OF_ROWS | WHOLE_ROWS | period << PERIOD_SHIFT for period in self.repeats]
        of_rows = tiles + again + [OF_ROWS | period << PERIOD_SHIFT for period in self.periods]
        for (_, size, at), more in zip(self.inputs, of_rows, strict=True):
            packed += struct.pack("<QII", 0, size | more, at)
        return packed + bytes(HEADER_BYTES - len(packed))

    def __str__(self) -> str:
        shape = f"rows {self.rows} x {self.cols}" if self.by_rows else f"{self.elements} elements"
        part = self.group if self.lanes == WARP else f"{self.lanes} lanes"
        lines = [
            f"image: {shape}, {self.tiles} tiles, {self.blocks} blocks of {self.warps} warps, "
            f"{part} a row, R = {self.each}, {self.shared_bytes} bytes shared",
        ]
        lines += [f"  stage: arg{a} at 0x{at:x}" for a, _, at in self.inputs]
        marks = {at: f"  pass {p}:" for p, at in enumerate(self.first)}
        for number, word in enumerate(self.words):
            lines += [marks[number]] if number in marks else []
            lines += ["  epilogue:"] * (number == self.epilogue)
            lines += ["  prologue:"] * (number == self.prologue)
            lines += ["  tail:"] * (number == self.tail)
            lines += ["  adders:"] * (self.adders > 0 and number == self.rest[0])
            lines.append(f"{number:6d}: {word}")
        lines += [f"  descriptor {k}: {one}" for k, one in enumerate(self.descriptors)]
        return "\n".join(lines)


def code(name: str) -> int:
    """The number of an operator on tiles; of those of ``BY``, 256 more than there."""
    return 256 + BY.index(name) if name in BY else NUMBER.get(name, 0)


def divisor(size: int) -> tuple[int, int]:
    """Magic and shift: n // size is (mulhi(n, magic) + n) >> shift for n below 2^31.

    Raises:
        ValueError: the size is not within 1 to 2^31 − 1.
    """
    if not 1 <= size < 1 << 31:
        raise ValueError("a size beyond 31 bits")
    shift = (size - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - size)) // size + 1, shift
