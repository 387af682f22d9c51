"""The interpreter kernel's source: CUDA C++ around an inner loop in PTX, made from the tables.

The inner loop is one PTX block with a case for each operator of ``words``; a case ends with the
fetch of the next word and a jump through a table (``brx.idx.uni``), whose index came with the word
before.  A compiler makes trees of compares of a C++ switch, and copies the tiles at every join.
The tiles A and T are updated in place, R registers each.

Operands of the block, all of them of a lane: see ``_OPERANDS``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from magjit_dvm.cuda.adder_code import OF_STAGE as READS
from magjit_dvm.cuda.adder_code import adding
from magjit_dvm.cuda.cases import ABSENT, vector
from magjit_dvm.cuda.elements import (
    BYTES,
    from_long,
    one_from_global,
    one_to_global,
    to_global,
)
from magjit_dvm.cuda.entry import ENTRY, OF_CHAINS, OF_ONE, OF_STACK
from magjit_dvm.cuda.forms import (
    ADDING,
    ALONE,
    BATCHED,
    CHUNKED,
    FLAT,
    GRADIENTS,
    LANES,
    NORMS,
    READ_ONCE,
    SQUARES,
    STACKED,
    SUMMING,
    WHOLE,
    has_case,
    kernel_name,
    lanes_of,
    own_tables,
)
from magjit_dvm.cuda.functions import elementwise, is_binary, tables
from magjit_dvm.cuda.gradient_code import gradients
from magjit_dvm.cuda.parts import WRITE_SUMS
from magjit_dvm.cuda.ptx import single
from magjit_dvm.cuda.shell import SHELL
from magjit_dvm.cuda.short_functions import LARGEST
from magjit_dvm.cuda.storing import Storing
from magjit_dvm.cuda.warps import each_of, most_threads
from magjit_dvm.cuda.words import (
    BY,
    BY_ROW,
    NUMBER,
    OF_STAGE,
    OPCODES,
    WARP,
)

__all__ = [
    "CHAINED",
    "inner_loop",
    "source",
]

CHAINED = 8
"""That of the kernel of stacks whose blocks run several images; as in ``csrc/cuda_stacks.cpp``."""

_OPERANDS = {
    "PC": ("r", "pc", "address of the first word"),
    "STAGE": ("r", "stage", "address of the stage"),
    "LOC": ("r", "loc", "element within the stage's part of a tensor"),
    "EL": ("l", "el", "element in the whole"),
    "NV": ("r", "nv", "elements of the warp's slice that are there"),
    "ROWS": ("r", "rowfile", "address of the lane's row registers"),
    "GW": (
        "r",
        "group",
        "warps of a row | warp in the row << 8 | number of the row in the tile << 16 | row "
        "registers << 24 | whether the lane's row is not there << 29 | whether accumulators have a "
        "value << 30 | whether this lane stores what there is one of for a row << 31",
    ),
    "ROW": ("r", "row", "number of the row"),
    "SCR": ("r", "scratch", "address of the lane's part of scratch memory"),
}
_HEAVY, _LIGHT, _MEDIUM, _TOGETHER = 4, 9, 17, 8
"""Lines above which a function is not done for all R elements at once, but for 8 after 8, and those
above which it loops over some of them: ptxas would have so many under way that it spilled.  The
lines between are those of functions that choose, where R is 64."""
_OF_TURN = 16
"""Elements that a turn of such a loop has, a few after a few: all of a tile is moved at its end.
Slow functions, which wait for themselves, have a few alone; beside more of them, ptxas spills."""
_SLOW = ("div.rn", "div.s32", "sqrt.rn", "loop")
_ENTRIES, _CONSTANT_BYTES = 272, 1 << 16
"""Of a table of jumps, and what all tables may have.  Compilers make a copy of the table for each
case that jumps through it, one behind another.  With 256 entries, what different cases look up of
one operator would be multiples of 1 KB apart, and so in the same few places of the constant cache;
17 times 64 bytes apart it is not."""

_KNOWN = {
    ALONE: [],
    STACKED: ["MJ_SUMS", "MJ_OWN_SUMS"],
    SUMMING: ["MJ_SUMS", "MJ_OWN_SUMS", "MJ_WHOLE"],
    ADDING: ["MJ_SUMS", "MJ_ADDERS", "MJ_WHOLE", "MJ_ROWS"],
    FLAT: ["MJ_WHOLE", "MJ_FLAT"],
    WHOLE: ["MJ_WHOLE", "MJ_ROWS"],
    NORMS: ["MJ_WHOLE", "MJ_ROWS"],
    GRADIENTS: ["MJ_SUMS", "MJ_GRADIENTS", "MJ_WHOLE", "MJ_ROWS"],
    SQUARES: ["MJ_WHOLE", "MJ_FLAT"],
    CHUNKED: ["MJ_ROWS"],
    BATCHED: ["MJ_WHOLE", "MJ_ROWS", "MJ_BATCHES"],
    READ_ONCE: ["MJ_ROWS", "MJ_BATCHES"],
    **{form: ["MJ_WHOLE", "MJ_ROWS", "MJ_SEVERAL"] for form in LANES},
}
"""What each form knows when it is compiled; see ``shell.py``."""


def source(
    approximate: bool = False,
    each: tuple[int, ...] | None = None,
    checked: bool = False,
    form: int = ALONE,
) -> str:
    """CUDA C++ for NVRTC or nvcc; includes nothing.

    Args:
        approximate: the GPU's own tanh and quotients (about 11 and 22 bits).
        each: the values of R to make kernels for; all by default.
        checked: for checkers of races, see ``EMPTY_ARRIVALS``.
        form: ``ALONE`` or another of ``forms.py``.
    """
    known = ["MJ_CHECKED"] * checked + _KNOWN[form]
    defined = [f"#define {name}" for name in known]
    parts = [*defined, SHELL, WRITE_SUMS * ("MJ_OWN_SUMS" in known), _constants()]
    for one in each_of(form) if each is None else each:
        stacked = OF_CHAINS if one == CHAINED else OF_STACK
        around = stacked if form == STACKED else OF_ONE
        parts += [
            _block(one, approximate, form),
            READS * (form in (ADDING, GRADIENTS)),
            adding(one) if form == ADDING else "",
            gradients(one) * (form == GRADIENTS),
            ENTRY.format(
                each=one,
                lanes=lanes_of(form),
                name=kernel_name(one, form),
                threads=most_threads(one, form),
                **around,
            ),
        ]
    return "\n".join(parts)


def _constants() -> str:
    found = []
    for name, values in tables().items():
        bits = ", ".join(f"0x{int(one):x}ull" for one in values.view(np.uint64))
        found.append(f'extern "C" __constant__ unsigned long long {name}[] = {{{bits}}};')
    return "\n".join(found)


def _block(each: int, approximate: bool, form: int) -> str:
    """A function of one asm statement."""
    types = {"r": "unsigned", "l": "unsigned long long"}
    parameters = ", ".join(f"{types[kind]} {name}" for kind, name, _ in _OPERANDS.values())
    given = ", ".join(f'"{kind}"({name})' for kind, name, _ in _OPERANDS.values())
    lines = "\n".join(f'    "{line}\\n"' for line in inner_loop(each, approximate, form))
    return (
        f"DEV void run_words_{each}({parameters}) {{\n  asm volatile(\n"
        f'    "{{\\n"\n{lines}\n    "}}" :: {given} : "memory");\n}}\n'
    )


def inner_loop(each: int, approximate: bool = False, form: int = SUMMING) -> list[str]:
    """The PTX of the inner loop of a kernel of this form, a statement list a line."""
    loop = _Loop(each, approximate)
    loop.form, loop.lanes = form, lanes_of(form)
    return loop.lines()


class _Loop(Storing):
    made_by_row = False
    form = SUMMING

    def lines(self) -> list[str]:
        """All of it."""
        names = {name: f"%{k}" for k, name in enumerate(_OPERANDS)}
        tiles = " ".join(f".reg .b32 {bank}<{self.R}>;" for bank in "AT")
        self.put(
            tiles,
            ".reg .b32 pc,i0,i1,F0,F1,d,ad,nvl,k0,k1,c0,c1; .reg .b32 u<4>; .reg .b32 w<4>;",
            ".reg .b32 n<4>; .reg .b32 y<4>; .reg .b64 o<4>; .reg .b64 p,e,z; .reg .b16 h<4>;",
            ".reg .pred q,q1,q2,full,whole; .reg .b32 S0,S1,f<8>,M<2>;",
            f"setp.eq.u32 full,{{NV}},{self.slice}; mov.b32 pc,{{PC}};",
            f"and.b32 k0,{{GW}},{ABSENT}; setp.eq.and.u32 full,k0,0,full; "
            "vote.sync.all.pred full,full,-1;" * (self.lanes < WARP),
            "mov.b32 M0,0; mov.b32 M1,0; mov.b32 F1,0;",
            "ld.shared.v4.b32 {{i0,i1,F0,F1}},[pc]; and.b32 d,i0,255; brx.idx.uni d,TABLE;",
        )
        declared = len(self.made) - 1  # before what jumps
        for number, name in enumerate(OPCODES):
            self.put(f"L{number}: // {name}")
            if has_case(name, self.R, self.form):
                self.case(name)
            else:
                self.put("trap;")
        self.put("NEXT: brx.idx.uni d,TABLE;", "NOWHERE: trap;", "DONE:")
        self.made.insert(declared, f"TABLE: .branchtargets {', '.join(self._targets())};")
        return [self._named(line, names) for line in self.made]

    def _targets(self) -> list[str]:
        """Of the table, as many as all copies of it have room for."""
        copies = sum(line.count("brx.idx.uni d,TABLE;") for line in self.made)
        others = len(BY) + self.made_by_row * len(OPCODES)
        entries = min((_CONSTANT_BYTES // 4 - others) // copies, _ENTRIES)
        cases = [f"L{number}" for number in range(len(OPCODES))]
        return [*cases, *["NOWHERE"] * (entries - len(cases))]

    def _named(self, line: str, names: dict[str, str]) -> str:
        return line.format(**names)

    # -- control --

    def case(self, name: str) -> None:
        """One operator."""
        head, _, rest = name.partition(".")
        self.own_table = name in own_tables(self.form)
        table: dict[str, Callable[[str], None]] = {
            "end": lambda _: self.put("bra.uni DONE;"),
            "nop": lambda _: self.fetch(),
            "by": lambda _: self.by_tile(),
            "f": self.elementwise_f,
            "i": self.elementwise_i,
            "fk": self.with_numbers,
            "ik": lambda one: self.elementwise(one, "i", "F0"),
            "lt": lambda one: self.load("T", one),
            "la": lambda one: self.load("A", one),
            "lk": lambda _: self.load_number(),
            "st": self.store,
            "pf": self.ask_ahead,
            "at": self.from_table,
            "w": lambda one: self.affine() if one == "affine" else self.scale(),
            "mad": lambda _: self.add_scaled(),
            "nmad": lambda _: self.add_scaled("neg.f32 F0,F0;"),
            "red": self.reduce,
            "fin": self.finish,
            "row": self.row,
            "s": self.scalar,
            "sk": self.scalar_and_number,
        }
        if head in table:
            table[head](rest)
        else:
            self.move(name)

    def move(self, name: str) -> None:
        """Between tiles, the mask and scratch memory."""
        all_of = range(self.R)
        if name == "swap":
            for r in all_of:
                if r % 16 == 0 and r:
                    self.part()
                self.put(f"xor.b32 A{r},A{r},T{r}; xor.b32 T{r},T{r},A{r}; xor.b32 A{r},A{r},T{r};")
        elif name == "keep":
            self.put(*(f"mov.b32 T{r},A{r};" for r in all_of))
        elif name == "take":
            self.put(*(f"mov.b32 A{r},T{r};" for r in all_of))
        elif name == "mask":
            self.put("mov.b32 M0,0; mov.b32 M1,0;")
            for r in all_of:
                if r == 32:
                    self.part()
                m = f"M{r // 32}"
                self.put(f"setp.ne.s32 q,A{r},0; @q or.b32 {m},{m},{1 << r % 32};")
        elif name == "select":
            for r in all_of:
                if r == 32:
                    self.part()
                m = f"M{r // 32}"
                self.put(
                    f"and.b32 c0,{m},{1 << r % 32}; setp.ne.s32 q,c0,0; selp.b32 A{r},A{r},T{r},q;"
                )
        elif name == "acc":
            self.add_to_sum()
        elif name == "acc.norm":
            self.add_norm_to_sum()
        else:
            self.put("add.u32 ad,{SCR},i1;")
            for j in range(self.J):
                a = vector([f"A{4 * j + i}" for i in range(4)])
                self.put(f"st.shared.v4.b32 [ad+{512 * j}],{a};")
        self.fetch()

    def add_scaled(self, turned: str = "") -> None:
        """A ← A + T · S[y], or less that."""
        self.row_register("F0", 20)
        self.put(turned, *(f"fma.rn.f32 A{r},T{r},F0,A{r};" for r in range(self.R)))
        self.fetch()

    def with_numbers(self, name: str) -> None:
        """A ← op(A, F0), or A · F0 + F1."""
        if name != "mad":
            self.elementwise(name, "f", "F0")
            return
        self.put(*(f"fma.rn.f32 A{r},A{r},F0,F1;" for r in range(self.R)))
        self.fetch()

    def by_tile(self) -> None:
        """The word's second operator, by a table of its own."""
        self.put(
            f"BY_TILE: .branchtargets {', '.join(f'O{k}' for k in range(len(BY)))};",
            "bfe.u32 d,i0,8,8; brx.idx.uni d,BY_TILE;",
        )
        for number, name in enumerate(BY):
            kind, _, op = name.partition(".")
            self.put(f"O{number}: // {name}")
            self.elementwise(op, kind, "")

    # -- elementwise --

    def elementwise_f(self, name: str) -> None:
        self.elementwise(name, "f", "")

    def elementwise_i(self, name: str) -> None:
        self.elementwise(name, "i", "")

    def elementwise(self, name: str, kind: str, scalar: str) -> None:
        """A ← op(A, T), or op(A, scalar)."""
        body = elementwise(name, kind, self.approximate)
        if name in LARGEST:
            self.leave_large(name)
        slow = any(line[0].startswith(_SLOW) for line in body.lines)
        chooses = self.R == 64 and body.counts["p"] > 0 and len(body.lines) > _LIGHT
        if len(body.lines) <= _MEDIUM and not slow and not chooses:
            few = self.R if len(body.lines) <= _HEAVY else _TOGETHER
            for first in range(0, self.R, few):
                if first:
                    self.part()
                places = range(first, min(first + few, self.R))
                self.apply(body, [(f"A{r}", scalar or f"T{r}") for r in places])
        else:
            with_t = is_binary(name, kind) and not scalar
            few = slow or len(body.lines) > 18
            ways = 2 if body.counts["d"] > 4 else 4 if few else 8
            turn = ways if slow else min(_OF_TURN, self.R)
            with self.turning("AT" if with_t else "A", turn):
                for first in range(0, turn, ways):
                    if first:
                        self.part()
                    places = range(first, first + ways)
                    self.apply(body, [(f"A{r}", scalar or f"T{r}") for r in places])
        self.fetch()

    def leave_large(self, name: str) -> None:
        """To the function itself where an element is too large for the short one."""
        self.put("abs.f32 f0,A0;")
        self.put(*(f"abs.f32 f1,A{r}; max.f32 f0,f0,f1;" for r in range(1, self.R)))
        whole = NUMBER[f"f.{name.removesuffix('_short')}"]
        self.put(f"setp.ge.f32 q,f0,{single(LARGEST[name])}; vote.sync.any.pred q,q,-1;")
        self.put(f"@q bra.uni L{whole};")

    # -- stores --

    def store(self, name: str) -> None:
        """A to global memory, of what is there."""
        how, _, what = name.partition(".")
        size = BYTES[what]
        if how == "n":
            self.of_square(2)
            for j in range(self.J):
                self.put(*to_global(what, [f"A{4 * j + i}" for i in range(4)], 0, ""))
                self.put("add.u64 p,p,e;" * (j + 1 < self.J))
            self.fetch()
            return
        if how == "e":
            self.store_viewed(what)
            return
        self.put(f"mov.b64 p,{{{{F0,F1}}}}; mul.lo.u64 e,{{EL}},{size}; add.u64 p,p,e;")
        if how == "g":
            self.store_aligned(what)
        else:
            self.store_unaligned(what)

    # -- row registers --

    def scalar(self, name: str) -> None:
        """Operators on the numbers of a row."""
        head, _, rest = name.partition(".")
        if name == "by":
            self.row_register("S0", 20)
            self.put("shl.b32 d,i1,7; add.u32 d,d,{ROWS}; ld.shared.b32 S1,[d];")
            self.by_row()
            return
        if head in ("ld", "at"):
            if head == "at":
                self.element_of_row("o0")
            else:
                self.addresses([("n0", "o0", 0)], "{ROW}")
            if rest == "at":
                self.put("cvt.u32.u64 S0,o0;")
            else:
                self.put("setp.eq.u32 q,0,0; mov.b32 S0,0;")
                self.put(*one_from_global(rest, "S0", "o0", "q"))
        elif head == "st":
            self.row_register("S0", 20)
            self.addresses([("n0", "o0", 0)], "{ROW}")
            self.put("setp.lt.s32 q,{GW},0;", *one_to_global(rest, "S0", "o0", "@q "))
            self.fetch()
            return
        elif name == "in":
            self.from_row_of_stage()
        elif name == "k":
            self.put("mov.b32 S0,F0;")
        elif name == "take":
            self.put("mov.b32 S0,A0;")
        else:
            self.row_register("S0", 20)
            if is_binary(name, "f"):
                self.put("shl.b32 d,i1,7; add.u32 d,d,{ROWS}; ld.shared.b32 S1,[d];")
            self.apply(elementwise(name, "f", self.approximate), [("S0", "S1")])
        self.set_row_register("S0")
        self.fetch()

    def from_row_of_stage(self) -> None:
        """The row's number of what the producer has copied, from its 16-byte boundary on."""
        done = self.label("ROW")
        self.put(
            "bfe.u32 k0,i0,20,4; setp.ne.u32 q,k0,0; mov.b32 k1,2; @q mov.b32 k1,3; "
            "bfe.u32 c0,{GW},16,8; sub.u32 c1,{ROW},c0; shl.b32 c1,c1,k1; add.u32 c1,c1,F0; "
            "and.b32 c1,c1,15; shl.b32 c0,c0,k1; add.u32 c0,c0,c1; add.u32 c0,c0,i1; "
            f"add.u32 c0,c0,{{STAGE}}; ld.shared.b32 S0,[c0]; @!q bra.uni {done};",
            "ld.shared.b64 e,[c0];",
        )
        for y, what in enumerate(OF_STAGE[1:], 1):
            self.put(f"{from_long(what, 'S1')} setp.eq.u32 q,k0,{y}; @q mov.b32 S0,S1;")
        self.put(f"{done}:")

    def by_row(self) -> None:
        """S[x] ← the second operator of S0 and S1; of a choice, of another row register too.

        Cases are made once, for both words that come here.
        """
        if self.made_by_row:
            self.put("bra.uni BY_ROW;")
            return
        self.made_by_row = True
        targets = (f"B{k}" if name in BY_ROW else "BY_NONE" for k, name in enumerate(OPCODES))
        self.put(
            f"BY: .branchtargets {', '.join(targets)};",
            "BY_ROW: bfe.u32 d,i0,8,8; brx.idx.uni d,BY;",
            "BY_NONE: trap;",
        )
        for number, name in enumerate(OPCODES):
            if name not in BY_ROW:
                continue
            self.put(f"B{number}: // by row: {name}")
            if name == "select":
                self.put("shl.b32 d,F0,7; add.u32 d,d,{ROWS}; ld.shared.b32 F0,[d];")
                self.put("setp.ne.s32 q,S0,0; selp.b32 S0,S1,F0,q;")
            else:
                kind, _, op = name.partition(".")
                self.apply(elementwise(op, kind, self.approximate), [("S0", "S1")])
            self.put("bra.uni BY_DONE;")
        self.put("BY_DONE:")
        self.set_row_register("S0")
        self.fetch()

    def scalar_and_number(self, name: str) -> None:
        """S[x] ← op(S[y], F0)."""
        self.row_register("S0", 20)
        if name == "by":
            self.put("mov.b32 S1,F0;")
            self.by_row()
            return
        if name == "scaled_rsqrt":
            self.put("mul.rn.f32 S0,S0,F0; add.rn.f32 S0,S0,F1; rsqrt.approx.f32 S0,S0;")
        else:
            self.apply(elementwise(name, "f", self.approximate), [("S0", "F0")])
        self.set_row_register("S0")
        self.fetch()
