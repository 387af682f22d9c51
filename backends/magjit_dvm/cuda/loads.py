"""Cases of the inner loop that load: a tile from a stage, global memory or scratch, or a number."""

from __future__ import annotations

from collections.abc import Iterator

from magjit_dvm.cuda.adding import Adding
from magjit_dvm.cuda.cases import QUADS, vector
from magjit_dvm.cuda.elements import (
    BYTES,
    CONVERT,
    from_global,
    from_shared,
    one_from_global,
)
from magjit_dvm.cuda.ptx import single
from magjit_dvm.philox import FACTORS, ROUNDS, WEYL

__all__ = ["Loads"]

_ROUNDS_OF_TURN = 2
assert ROUNDS % _ROUNDS_OF_TURN == 0


class Loads(Adding):
    """The words ``lt``, ``la`` and ``lk``, and addresses through descriptors."""

    def load(self, bank: str, name: str) -> None:
        """Fill a tile from a stage, global memory, scratch or a number."""
        how, _, what = name.partition(".")
        if how in ("scratch", "w"):
            if how == "w":
                self.kept()
            else:
                self.put("add.u32 ad,{SCR},i1;")
            for j in range(self.J):
                a = vector([f"{bank}{4 * j + i}" for i in range(4)])
                self.put(f"ld.shared.v4.b32 {a},[ad+{512 * j}];")
        elif how in ("k", "r"):
            if how == "r":
                self.row_register("F0", 20)
            self.put(*(f"mov.b32 {bank}{r},F0;" for r in range(self.R)))
        elif how in ("s", "u"):
            self.from_stage(bank, what, how == "s")
        elif how == "e":
            self.each_global(bank, what)
        elif how == "c":
            self.of_columns(bank, what)
        elif how == "row":
            self.row_of_table(bank, what)
        elif how == "col":
            self.put("cvt.u32.u64 c0,{EL}; mul.lo.u32 c1,{ROW},i1; sub.u32 c0,c0,c1;")
            places = (128 * j + i for j in range(self.J) for i in range(4))
            self.put(*(f"add.u32 {bank}{r},c0,{at};" for r, at in enumerate(places)))
        elif how == "draw":
            self.drawn(bank)
        elif how == "n":
            self.near_global(bank, what)
        elif how == "t":
            self.transposed_global(bank, what)
        else:
            self.four_global(bank, what, how == "v")
            return
        self.second_or_next()

    def kept(self) -> None:
        """Where the lane's part is of the vector at i1 to ``ad``; of one at 0 to ``c0``."""
        # The row registers' address tells the lane.
        self.put(
            f"bfe.u32 c0,{{GW}},8,8; and.b32 c1,{{ROWS}},124; shl.b32 c1,c1,2; "
            f"mad.lo.u32 c0,c0,{128 * self.R},c1; mov.u32 c1,mj_shared; add.u32 c0,c0,c1; "
            "add.u32 ad,c0,i1;"
        )

    def affine(self) -> None:
        """A ← A · the vector at i1 + the one at F0, both kept; T is lost."""
        self.kept()
        self.put("add.u32 k0,c0,F0;")
        for j in range(self.J):
            elements = range(4 * j, 4 * j + 4)
            t = vector([f"T{r}" for r in elements])
            added = QUADS[j % len(QUADS)]
            self.put(
                f"ld.shared.v4.b32 {t},[ad+{512 * j}]; "
                f"ld.shared.v4.b32 {vector(added)},[k0+{512 * j}];"
            )
            self.put(*(f"fma.rn.f32 A{r},A{r},T{r},{added[r % 4]};" for r in elements))
        self.fetch()

    def scale(self) -> None:
        """A ← A · the vector at i1, which is kept."""
        self.kept()
        quads = [QUADS[j % len(QUADS)] for j in range(self.J)]
        ahead = len(QUADS) - 1
        for j in range(self.J + ahead):
            if j < self.J:
                self.put(f"ld.shared.v4.b32 {vector(quads[j])},[ad+{512 * j}];")
            if j >= ahead:
                pairs = enumerate(quads[j - ahead], 4 * (j - ahead))
                self.put(*(f"mul.rn.f32 A{r},A{r},{one};" for r, one in pairs))
        self.fetch()

    def load_number(self) -> None:
        """F0 ← S[y]."""
        self.row_register("F0", 20)
        self.second()

    def from_stage(self, bank: str, what: str, aligned: bool) -> None:
        """Four elements at a time of what the producer has copied, from its 16-byte boundary on."""
        size = BYTES[what]
        self.put(
            f"cvt.u32.u64 ad,{{EL}}; sub.u32 ad,ad,{{LOC}}; mad.lo.u32 ad,ad,{size},F0; "
            f"and.b32 ad,ad,15; add.u32 ad,ad,i1; add.u32 ad,ad,{{STAGE}}; "
            f"mad.lo.u32 ad,{{LOC}},{size},ad;"
        )
        if not aligned and size < 4:
            self.put("and.b32 k0,ad,3; shl.b32 k0,k0,3; and.b32 ad,ad,-4;")
        for j in range(self.J):
            to = [f"{bank}{4 * j + i}" for i in range(4)]
            at = self.across * size * j
            if size >= 4:
                self.put(from_shared(what, to, at, aligned))
            elif aligned:
                vector = "v2.b32 {{{{u0,u1}}}}" if size == 2 else "b32 u0"
                self.put(f"ld.shared.{vector.format()},[ad+{at}];", CONVERT[what].format(*to))
            else:
                words = 3 if size == 2 else 2
                self.put("".join(f"ld.shared.b32 u{w},[ad+{at + 4 * w}]; " for w in range(words)))
                self.put(
                    "".join(f"shf.r.wrap.b32 u{w},u{w},u{w + 1},k0; " for w in range(words - 1))
                )
                self.put(CONVERT[what].format(*to))

    def of_columns(self, bank: str, what: str) -> None:
        """Elements that are side by side and the same in all rows, of i1 columns."""
        self.put("mov.b64 p,{{F0,F1}};")
        self.side_by_side(bank, what, "i1")

    def side_by_side(self, bank: str, what: str, columns: str) -> None:
        """A row's elements, which begin at P."""
        size, tail, head = BYTES[what], self.label("TAIL"), self.label("HEAD")
        self.put(
            f"cvt.u32.u64 c0,{{EL}}; mul.lo.u32 c1,{{ROW}},{columns}; sub.u32 c0,c0,c1;",
            f"mul.wide.u32 e,c0,{size}; add.u64 p,p,e; @!full bra.uni {tail};",
        )
        for guarded in (False, True):
            if guarded:
                self.from_lane()
            for j in range(self.J):
                to = [f"{bank}{4 * j + i}" for i in range(4)]
                if guarded:
                    self.put(f"setp.gt.s32 q,nvl,{self.across * j}; mov.b32 u0,0; mov.b32 u1,0;")
                    self.put("".join(f"mov.b32 {one},0; " for one in to))
                self.put(*from_global(what, to, f"p+{self.across * size * j}", "@q " * guarded))
            self.put(f"bra.uni {head};" if guarded else f"{head}:")
            if not guarded:
                self.second_or_next()
                self.put(f"{tail}:")

    def four_global(self, bank: str, what: str, vector: bool) -> None:
        """Four elements side by side have one address: of the first one.

        Where the innermost dimension is no shorter than a warp's slice, two addresses make all.
        """
        short, made = self.label("SHORT"), self.label("MADE")
        self.from_lane()
        self.runs_or(short)
        self.four_of_two_runs(bank, what, vector)
        self.put(f"{made}:")
        self.second_or_next()
        self.put(f"{short}:")
        for k, j in self.addresses_of_fours():
            to = [f"{bank}{4 * j + i}" for i in range(4)]
            self.put(f"setp.gt.s32 q,nvl,{self.across * j}; mov.b32 u0,0; mov.b32 u1,0;")
            self.put("".join(f"mov.b32 {one},0; " for one in to))
            if vector:
                self.put(*from_global(what, to, f"o{k}", "@q "))
            else:
                self.put(*one_from_global(what, to[0], f"o{k}", "q"))
                self.put("".join(f"mov.b32 {one},{to[0]}; " for one in to[1:]))
        self.put(f"bra.uni {made};")

    def runs_or(self, short: str) -> None:
        """To ``short`` where a run of the innermost dimension is shorter than a warp's slice.

        c0 is the lane's first element; w0 to w2 are the size of a run and how to divide by it.
        """
        self.put(
            "cvt.u32.u64 c0,{EL}; mov.u32 ad,mj_shared; add.u32 ad,ad,i1;",
            "ld.shared.v4.b32 {{w0,w1,w2,w3}},[ad+16];",
            f"setp.gt.u32 q,{self.slice},w0; @q bra.uni {short};",
        )

    def addresses_of_fours(self) -> Iterator[tuple[int, int]]:
        """The register o<k> has the address of the lane's j-th four elements: (k, j) of each."""
        for first in range(0, self.J, 4):
            group = range(first, min(first + 4, self.J))
            self.addresses([(f"n{j - first}", f"o{j - first}", self.across * j) for j in group])
            yield from ((j - first, j) for j in group)

    def four_of_two_runs(self, bank: str, what: str, vector: bool) -> None:
        """A slice has parts of two runs of the innermost dimension at most."""
        size = BYTES[what]
        self.two_runs()
        if not vector:
            self.put("setp.gt.s32 q,nvl,0; mov.b32 S0,0;", *one_from_global(what, "S0", "o0", "q"))
            self.put("setp.gt.s32 q,nvl,c1; mov.b32 S1,0;", *one_from_global(what, "S1", "o1", "q"))
            for j in range(self.J):
                self.put(f"setp.gt.s32 q,c1,{self.across * j}; selp.b32 {bank}{4 * j},S0,S1,q;")
                self.put("".join(f"mov.b32 {bank}{4 * j + i},{bank}{4 * j}; " for i in (1, 2, 3)))
            return
        self.put(f"mad.wide.s32 o1,c1,-{size},o1;")
        for j in range(self.J):
            to = [f"{bank}{4 * j + i}" for i in range(4)]
            apart = self.across * j
            at = f"p+{size * apart}"
            self.put(self.of_either_run(apart))
            if size == 8:  # each element has an offset of its own
                self.put(f"add.u64 p,p,{size * apart};")
                at = "p"
            self.put(f"setp.gt.s32 q,nvl,{apart}; mov.b32 u0,0; mov.b32 u1,0;")
            self.put("".join(f"mov.b32 {one},0; " for one in to))
            self.put(*from_global(what, to, at, "@q "))

    def two_runs(self) -> None:
        """C1 ← how many elements are left of the run that the lane's first one is in.

        o0 leads on within that run, o1 to the beginning of the next.
        """
        self.put(
            "mul.hi.u32 k1,c0,w1; add.u32 k1,k1,c0; shr.u32 k1,k1,w2; mul.lo.u32 k1,k1,w0; "
            "sub.u32 c1,c0,k1; sub.u32 c1,w0,c1;"
        )
        self.addresses([("n0", "o0", 0), ("n1", "o1", "c1")])

    def of_either_run(self, apart: int) -> str:
        """P ← o0 or o1, whichever has the element so far from the lane's first one."""
        return f"setp.gt.s32 q1,c1,{apart}; mov.b64 p,o1; @q1 mov.b64 p,o0;"

    def of_square(self, step: int, leave: str = "") -> None:
        """P ← the address of the lane's first element, e ← the stride of that dimension.

        The descriptor has 32 elements, 4 and R / 4 rows first, then three more dimensions or more.
        ``leave`` are instructions that go elsewhere where slice c0 needs no address.
        """
        loop, done = self.label("DIM"), self.label("ALL")
        strides = "".join(f"ld.shared.b32 f{k},[ad+{28 + 16 * k}]; " for k in range(3))
        dims = [("w", 64), ("n", 80), ("y", 96)]
        self.put(
            "mov.u32 ad,mj_shared; add.u32 ad,ad,i1; ld.shared.b32 k0,[ad]; mov.b64 p,{{F0,F1}};",
            strides,
            *(f"ld.shared.v4.b32 {{{{{r}0,{r}1,{r}2,{r}3}}}},[ad+{at}];" for r, at in dims),
            f"cvt.u32.u64 c0,{{EL}}; shr.u32 c0,c0,{(32 * self.R).bit_length() - 1};",
            leave,
            # The row registers' address tells the lane.
            "and.b32 u0,{ROWS},28; mad.wide.s32 p,u0,f0,p; "
            "bfe.u32 u0,{ROWS},5,2; mad.wide.s32 p,u0,f1,p;",
            f"cvt.s64.s32 e,f{step};",
        )
        for r, _ in dims:
            self.put(self.divided(r))
        self.put(
            f"add.u32 ad,ad,96; setp.eq.u32 q1,k0,6; @q1 bra.uni {done};",
            f"{loop}:",
            f"add.u32 ad,ad,16; ld.shared.v4.b32 {{{{w0,w1,w2,w3}}}},[ad]; {self.divided('w')}",
            f"sub.u32 k0,k0,1; setp.ne.u32 q1,k0,6; @q1 bra.uni {loop};",
            f"{done}:",
        )

    def divided(self, r: str) -> str:
        """One dimension of a descriptor: p leads to the place along it, c0 is what is left."""
        return (
            f"mul.hi.u32 k1,c0,{r}1; add.u32 k1,k1,c0; shr.u32 k1,k1,{r}2; mul.lo.u32 c1,k1,{r}0; "
            f"sub.u32 c1,c0,c1; mad.wide.s32 p,c1,{r}3,p; mov.b32 c0,k1;"
        )

    def near_global(self, bank: str, what: str) -> None:
        """A square's row after row, four elements at a time: rows are equally far apart."""
        self.of_square(2)
        for j in range(self.J):
            self.put(*from_global(what, [f"{bank}{4 * j + i}" for i in range(4)], "p", ""))
            self.put("add.u64 p,p,e;" * (j + 1 < self.J))

    def ask_ahead(self, how: str) -> None:
        """What ``near_global`` or ``transposed_global`` will read, to the L2 cache.

        Of what two slices below one another read of the same 128 bytes of a column, the first asks.
        """
        behind = self.label("BEHIND")
        second = f"and.b32 k1,c0,1; setp.ne.u32 q1,k1,0; @q1 bra.uni {behind};"
        self.of_square(2 if how == "n" else 0, second if how == "t" else "")
        for k in range(self.J if how == "n" else 4):
            self.put("add.u64 p,p,e; " * (k > 0) + "prefetch.global.L2 [p];")
        self.put(f"{behind}:")
        self.fetch()

    def transposed_global(self, bank: str, what: str) -> None:
        """What a lane has of one column of a square is side by side in memory."""
        self.of_square(0)
        size, words = BYTES[what], self.J * BYTES[what] // 4
        for i in range(4):
            column = [f"{bank}{4 * j + i}" for j in range(self.J)]
            for first in range(0, words, 4):
                count = min(words - first, 4)
                to = column[first : first + count] if size == 4 else [f"w{k}" for k in range(count)]
                vector = f"v{count}.b32 {{{{{','.join(to)}}}}}" if count > 1 else f"b32 {to[0]}"
                self.put(f"ld.global.{vector},[p+{4 * first}];")
                for k in range(0, count if size == 2 else 0, 2):
                    more = k + 1 < count
                    self.put(f"mov.b32 u0,w{k}; " + f"mov.b32 u1,w{k + 1};" * more)
                    places = column[2 * (first + k) : 2 * (first + k) + 4]
                    self.put(CONVERT[what].format(*places, *["f0", "f1"] * (not more)))
            self.put("add.u64 p,p,e;" * (i < 3))

    def each_global(self, bank: str, what: str) -> None:
        """Each element has an address of its own."""
        self.from_lane()
        with self.turning(bank):
            self.of_turn()
            self.addresses([(f"n{i}", f"o{i}", i) for i in range(4)], "u3")
            for i in range(4):
                if what == "at":
                    self.put(f"cvt.u32.u64 {bank}{i},o{i};")
                    continue
                self.put(f"setp.gt.s32 q,u2,{i}; mov.b32 {bank}{i},0;")
                self.put(*one_from_global(what, f"{bank}{i}", f"o{i}", "q"))

    def of_turn(self) -> None:
        """Within ``turning``: u3 ← the first of four elements, u2 ← how many are there from it."""
        by = self.lanes.bit_length() - 1  # c1 counts elements of the lane
        self.put(f"shl.b32 c0,c1,{by}; cvt.u32.u64 u3,{{EL}}; add.u32 u3,u3,c0; sub.s32 u2,nvl,c0;")

    def drawn(self, bank: str) -> None:
        """Uniform in (0, 1], four elements by one block of Philox4x32-10: see ``philox.py``.

        Where a row does not begin with a block, a lane's four are parts of its own and the next's.
        """
        ways, done = [self.label("FROM") for _ in range(3)], self.label("DRAWN")
        self.put("mov.u32 ad,mj_shared; add.u32 ad,ad,i1; cvt.u32.u64 nvl,{EL};")
        for j in range(self.J):
            self.block(j)
            self.put(*(f"mov.b32 {bank}{4 * j + i},u{i};" for i in range(4)))
        self.put(f"and.b32 nvl,nvl,3; setp.eq.u32 q,nvl,0; @q bra.uni {done};")
        self.put("cvt.u32.u64 nvl,{EL};")
        self.block(self.J)
        # Which lane is the first, and the number of the next one: the row registers' address tells.
        self.put(
            "and.b32 nvl,nvl,3; and.b32 c1,{ROWS},124; setp.eq.u32 whole,c1,0; "
            "shr.u32 c1,c1,2; add.u32 c1,c1,1; and.b32 c1,c1,31;"
        )
        self.put(*(f"setp.eq.u32 q,nvl,{by}; @q bra.uni {ways[by - 1]};" for by in (2, 3)))
        for by, label in enumerate(ways, 1):
            self.put(f"{label}:")
            for j in range(self.J):
                self.shift(bank, j, by)
            self.put(f"bra.uni {done};" if by < 3 else f"{done}:")
        for r in range(self.R):
            self.put(f"cvt.rn.f32.u32 {bank}{r},{bank}{r};")
            self.put(f"fma.rn.f32 {bank}{r},{bank}{r},{single(2.0**-32)},{single(2.0**-33)};")

    def shift(self, bank: str, j: int, by: int) -> None:
        """The lane's fours j ← those that begin ``by`` behind, in part the next lane's.

        What is next to the last lane's is the first's of the fours behind; u has those behind all.
        """
        fours = [f"{bank}{4 * j + i}" for i in range(4)]
        for i in range(by):
            behind = f"{bank}{4 * j + 4 + i}" if j + 1 < self.J else f"u{i}"
            self.put(f"selp.b32 f{i},{behind},{fours[i]},whole;")
            self.put(f"shfl.sync.idx.b32 f{i},f{i},c1,31,-1;")
        found = [*fours[by:], *(f"f{i}" for i in range(by))]
        self.put(*(f"mov.b32 {to},{one};" for to, one in zip(fours, found, strict=True)))

    def block(self, j: int) -> None:
        """u0 to u3 ← the block that the element nvl + 128 j is of; f4 and f5 are lost.

        The counter is u0 and u2 (u1 and u3 are 0 before the first round), the key f4 and f5; the
        word's descriptor is at ``ad``.
        """
        self.put(
            f"shr.u32 c0,nvl,2; add.u32 c0,c0,{32 * j}; "
            "ld.shared.v4.b32 {{w0,w1,w2,w3}},[ad]; ld.shared.v4.b32 {{n0,n1,n2,n3}},[ad+16];"
        )
        self.put(
            "sub.u32 k1,n3,1; and.b32 u0,c0,k1; shr.u32 u1,c0,k1; "
            "mul.hi.u32 k0,u1,n1; add.u32 k0,k0,u1; shr.u32 k0,k0,n2; mul.lo.u32 u2,k0,n0; "
            "sub.u32 u2,u1,u2; shl.b32 k0,k0,k1; add.u32 u0,u0,k0; add.u32 u0,u0,w3; "
            "mov.b32 u1,0; mov.b32 u3,0; mov.b32 f4,w1; mov.b32 f5,w2;"
        )
        again = self.label("ROUNDS")  # a loop: the keys of all rounds would take registers at once
        self.put("mov.b32 k0,0;", f"{again}:")
        for _ in range(_ROUNDS_OF_TURN):
            self.put(
                f"mul.wide.u32 o0,u0,{FACTORS[0]}; mul.wide.u32 o1,u2,{FACTORS[1]}; "
                "mov.b64 {{y0,y1}},o0; mov.b64 {{y2,y3}},o1; "
                "xor.b32 u0,y3,u1; xor.b32 u0,u0,f4; xor.b32 u2,y1,u3; xor.b32 u2,u2,f5; "
                f"mov.b32 u1,y2; mov.b32 u3,y0; add.u32 f4,f4,{WEYL[0]}; add.u32 f5,f5,{WEYL[1]};"
            )
        self.put(
            f"add.u32 k0,k0,{_ROUNDS_OF_TURN}; setp.ne.u32 q1,k0,{ROUNDS}; @q1 bra.uni {again};"
        )

    # -- tables: positions beyond them end the launch, as in eager mode --

    def table(self) -> None:
        """Registers w1 to w3 ← the positions that the table has, bytes between them, columns."""
        self.put("mov.u32 ad,mj_shared; add.u32 ad,ad,i1; ld.shared.v4.b32 {{w0,w1,w2,w3}},[ad];")

    def row_of_table(self, bank: str, what: str) -> None:
        """The table's row at position S[y]."""
        self.element_of_row("p")
        self.side_by_side(bank, what, "w3")

    def element_of_row(self, to: str) -> None:
        """The address of the row's element, or first element, at position S[y]."""
        self.row_register("S0", 20)
        self.addresses([("n0", "o0", 0)], "{ROW}")
        self.table()
        self.put(f"setp.ge.u32 q,S0,w1; @q trap; mad.wide.s32 {to},S0,w2,o0;")

    def from_table(self, what: str) -> None:
        """A ← the table's elements at positions A, each by itself; T is lost."""
        self.from_lane()
        with self.turning("A"):
            self.of_turn()
            self.addresses([(f"n{i}", f"o{i}", i) for i in range(4)], "u3")
            self.table()
            for i in range(4):
                self.put(
                    f"setp.gt.s32 q,u2,{i}; setp.ge.and.u32 q1,A{i},w1,q; @q1 trap; "
                    f"mad.wide.s32 o{i},A{i},w2,o{i}; mov.b32 A{i},0;"
                )
                self.put(*one_from_global(what, f"A{i}", f"o{i}", "q"))
        self.put(*(f"mov.b32 T{r},0;" for r in range(8)))  # until here they are free
        self.fetch()

    def addresses(self, elements: list[tuple[str, str, int | str]], of: str = "c0") -> None:
        """Addresses of elements ``of`` + offset through the word's descriptor, pointer included."""
        label = self.label("DIM")
        self.put(
            "mov.u32 ad,mj_shared; add.u32 ad,ad,i1; ld.shared.b32 k0,[ad]; mov.b64 p,{{F0,F1}};"
        )
        for n, o, offset in elements:
            self.put(f"add.u32 {n},{of},{offset}; mov.b64 {o},p;")
        done = self.label("ALL")
        self.put(f"setp.eq.u32 q1,k0,0; @q1 bra.uni {done};", f"{label}:")
        self.put("add.u32 ad,ad,16; ld.shared.v4.b32 {{w0,w1,w2,w3}},[ad];")
        for k, (n, o, _) in enumerate(elements):
            self.put(
                f"mul.hi.u32 y{k},{n},w1; add.u32 y{k},y{k},{n}; shr.u32 y{k},y{k},w2; "
                f"mul.lo.u32 k1,y{k},w0; sub.u32 k1,{n},k1; mad.wide.s32 {o},k1,w3,{o}; "
                f"mov.b32 {n},y{k};"
            )
        self.put(f"sub.u32 k0,k0,1; setp.ne.u32 q1,k0,0; @q1 bra.uni {label};", f"{done}:")
