"""Cases of the inner loop that store tiles which are side by side in memory, aligned or not.

Where a row does not begin at an address of four elements, what a lane has is written in part with
what the lane before it has: the elements of four aligned places are the last of one's and the first
of the other's.  One by one, each would be a request of its own to the same 32 bytes.
"""

from __future__ import annotations

from magjit_dvm.cuda.cases import vector
from magjit_dvm.cuda.elements import BYTES, one_to_global, packed, to_global
from magjit_dvm.cuda.forms import NORMS, SQUARES
from magjit_dvm.cuda.loads import Loads
from magjit_dvm.cuda.words import NUMBER, WARP

__all__ = ["Storing"]

_FULL = (NORMS, SQUARES)
"""Forms whose registers are all in use, and whose programs seldom store what is not aligned."""


class Storing(Loads):
    """The words ``st.g`` and ``st.u``, once the lane's place is in P."""

    form: int

    def store_aligned(self, what: str) -> None:
        """Four elements at a time, but for those of the last block that is there."""
        tail, done, narrow = self.label("TAIL"), self.label("STORED"), self.lanes < WARP
        parts = [self.label("PART") for _ in range(self.J)]
        tiles = [[f"A{4 * j + i}" for i in range(4)] for j in range(self.J)]
        self.put(f"@!full bra.uni {tail};")
        self.next_word()  # behind stores it would wait until they are under way
        for j, a in enumerate(tiles):
            self.put(*to_global(what, a, self.across * j, ""))
        self.jump()
        self.own_table = False  # a tail is rare
        self.put(f"{tail}:")
        self.from_lane()
        for j, a in enumerate(tiles):
            self.put(f"setp.lt.u32 q,{{NV}},{self.across * (j + 1)}; @q bra.uni {parts[j]};")
            self.put(f"setp.gt.s32 q,nvl,{self.across * j};" * narrow)
            self.put(*to_global(what, a, self.across * j, "@q " * narrow))
        for j, a in enumerate(tiles):
            self.put(f"{parts[j]}: setp.gt.s32 whole,nvl,{self.across * j + 3};")
            self.put(*to_global(what, a, self.across * j, "@whole "))
            self.put(f"and.b32 k0,{{NV}},3; setp.eq.u32 q,k0,0; @q bra.uni {done};")
            self.store_each(what, j, unless=",!whole")
            self.put(f"bra.uni {done};")
        self.put(f"{done}:")
        self.fetch()

    def store_viewed(self, what: str) -> None:
        """Through the word's descriptor; y says whether four elements have one address."""
        each = self.label("EACH")
        self.from_lane()
        if BYTES[what] < 8:
            self.put(f"bfe.u32 k0,i0,20,4; setp.eq.u32 q,k0,0; @q bra.uni {each};")
            self.store_fours(what)
            self.fetch()
            self.put(f"{each}:")
        with self.turning("A"):
            self.of_turn()
            self.addresses([(f"n{i}", f"o{i}", i) for i in range(4)], "u3")
            for i in range(4):
                self.put(f"setp.gt.s32 q,u2,{i};")
                self.put(*one_to_global(what, f"A{i}", f"o{i}", "@q "))
        self.fetch()

    def store_fours(self, what: str) -> None:
        """As ``Loads.four_global`` finds them."""
        short, made = self.label("SHORT"), self.label("MADE")
        tiles = [[f"A{4 * j + i}" for i in range(4)] for j in range(self.J)]
        self.runs_or(short)
        self.two_runs()
        self.put(f"mad.wide.s32 o1,c1,-{BYTES[what]},o1;")
        for j, a in enumerate(tiles):
            apart = self.across * j
            self.put(self.of_either_run(apart), f"setp.gt.s32 q,nvl,{apart};")
            self.put(*to_global(what, a, apart, "@q "))
        self.put(f"bra.uni {made};", f"{short}:")
        for k, j in self.addresses_of_fours():
            self.put(f"setp.gt.s32 q,nvl,{self.across * j}; mov.b64 p,o{k};")
            self.put(*to_global(what, tiles[j], 0, "@q "))
        self.put(f"{made}:")

    def store_each(self, what: str, j: int, unless: str = "") -> None:
        """The elements of a lane's four that are there, one by one."""
        also = ".and" if unless else ""
        for i in range(3 if unless else 4):
            self.put(f"setp.gt{also}.s32 q,nvl,{self.across * j + i}{unless};")
            at = f"p+{BYTES[what] * (self.across * j + i)}"
            self.put(*one_to_global(what, f"A{4 * j + i}", at, "@q "))

    def store_unaligned(self, what: str) -> None:
        """Four aligned places at a time; one by one, those before the first and behind the last."""
        size = BYTES[what]
        if size == 8 or self.R > 32 or self.form in _FULL:
            self.from_lane()
            for j in range(self.J):
                self.store_each(what, j)
            self.fetch()
            return
        part, narrow = self.label("PART"), self.lanes < WARP
        self.put(f"cvt.u32.u64 k0,p; and.b32 k0,k0,{4 * size - 1};")
        if not narrow:  # else rows of one warp begin in several ways
            self.put(f"setp.eq.u32 q,k0,0; @q bra.uni L{NUMBER[f'st.g.{what}']};")
        self.from_lane()
        # k0: bytes of the lane before; k1: elements that are there from its first of these on.
        # n3: elements from the first place of all; of several rows, as many as it may be.
        # The row registers' address tells the lane; c1 is the one before.
        last = 4 * self.lanes - 4
        self.put(
            f"shr.u32 k1,k0,{size.bit_length() - 1}; add.u32 n3,{{NV}},{3 if narrow else 'k1'}; "
            f"and.b32 c0,{{ROWS}},{last}; "
            f"setp.eq.u32 q1,c0,0; setp.eq.u32 whole,c0,{last}; "
            f"add.u32 c1,c0,{last}; and.b32 c1,c1,{last}; "
            f"and.b32 c0,{{ROWS}},{124 - last}; or.b32 c1,c1,c0; shr.u32 c1,c1,2;",
            "setp.ne.and.u32 q1,k0,0,q1;" * narrow,
            # Elements before the first aligned place, which the first lane has.
            "sub.u32 c0,4,k1; min.s32 c0,c0,nvl; selp.b32 c0,c0,0,q1;",
        )
        for i in range(3):
            self.put(f"setp.gt.s32 q,c0,{i};")
            self.put(*one_to_global(what, f"A{i}", f"p+{size * i}", "@q "))
        self.put("cvt.u64.u32 e,k0; sub.u64 p,p,e; add.s32 k1,k1,nvl; selp.b32 nvl,0,k1,q1;")
        self.put(self.turned(what))
        for j in range(self.J + 1):
            found = self.places(what, j)
            if j < self.J:
                behind = self.across * (j + 1)
                self.put(f"setp.lt.u32 q,n3,{behind}; @q bra.uni {part};")
                self.put("setp.gt.s32 q,nvl,3;", _four(what, found, "@q "))
                if narrow:  # what the last lane of some rows has here others have behind it
                    all_there = self.label("PLACES")
                    self.put(f"setp.ge.u32 q,{{NV}},{behind}; @q bra.uni {all_there};")
                    self.put(*(_one(what, found, i) for i in range(3)), f"{all_there}:")
                self.put(f"add.s32 nvl,k1,{-behind}; add.u64 p,p,{self.across * size};")
        self.put(f"{part}: setp.gt.s32 q,nvl,3;", _four(what, found, "@q "))
        self.put(*(_one(what, found, i) for i in range(3)))
        self.fetch()

    def turned(self, what: str) -> str:
        """How far the places begin before what a lane has, by k0: q1, q2 and c0 for ``places``."""
        if what == "32":
            return "setp.lt.u32 q1,k0,8; and.b32 c0,k0,4; setp.eq.u32 q2,c0,0;"
        if BYTES[what] == 2:
            even = "setp.eq.u32 q,k0,0; selp.b32 c0,32,c0,q;" * (self.lanes < WARP)
            return f"setp.lt.u32 q1,k0,6; and.b32 c0,k0,2; shl.b32 c0,c0,3; {even}"
        return "sub.u32 c0,4,k0; shl.b32 c0,c0,3;"

    def places(self, what: str, j: int) -> list[str]:
        """Registers with what four aligned places have: the last of the lane before, then own ones.

        The first lane's are behind the last one's of the four before; behind all, there are those.
        """
        here, there = min(j, self.J - 1), max(j - 1, 0)
        if what == "32":
            own, last = ([f"A{4 * at + i}" for i in range(4)] for at in (here, there))
            before = self.from_before(j, own[1:], last[1:], ["f0", "f1", "f2"])
            by_two = [*before, *own]
            self.put(*(f"selp.b32 y{i},{by_two[i + 2]},{by_two[i]},q1;" for i in range(4)))
            self.put(f"selp.b32 u0,{by_two[6]},{by_two[4]},q1;")
            by_one = ["y0", "y1", "y2", "y3", "u0"]
            self.put(*(f"selp.b32 w{i},{by_one[i + 1]},{by_one[i]},q2;" for i in range(4)))
            return ["w0", "w1", "w2", "w3"]
        own, last = (["u0", "u1"], ["w0", "w1"]) if BYTES[what] == 2 else (["u0"], ["w0"])
        if j:
            self.put(*(f"mov.b32 {to},{one};" for to, one in zip(last, own, strict=True)))
        if j < self.J:
            self.put(packed(what, [f"A{4 * j + i}" for i in range(4)]))
        if BYTES[what] == 1:
            before = self.from_before(j, own, last, ["f0"])
            self.put(f"shf.r.clamp.b32 y0,{before[0]},u0,c0;")
            return ["y0"]
        f0, f1 = self.from_before(j, own, last, ["f0", "f1"])
        self.put(
            f"selp.b32 n0,{f1},{f0},q1; selp.b32 n1,u0,{f1},q1; selp.b32 n2,u1,u0,q1; "
            "shf.r.clamp.b32 y0,n0,n1,c0; shf.r.clamp.b32 y1,n1,n2,c0;"
        )
        return ["y0", "y1"]

    def from_before(self, j: int, own: list[str], last: list[str], to: list[str]) -> list[str]:
        """What the lane before, c1, has; the last one (``whole``) gives what it has of ``last``."""
        for one, before, found in zip(own, last, to, strict=True):
            given = one if j == 0 else found
            if j:
                self.put(f"selp.b32 {found},{before},{one},whole;")
            self.put(f"shfl.sync.idx.b32 {found},{given},c1,31,-1;")
        return to


def _four(what: str, found: list[str], guard: str) -> str:
    """Four places to P."""
    kind = {4: "v4.b32", 2: "v2.b32", 1: "b32"}[BYTES[what]]
    return f"{guard}st.global.{kind} [p],{vector(found) if len(found) > 1 else found[0]};"


def _one(what: str, found: list[str], i: int) -> str:
    """One of four places, of which not all are there."""
    size = BYTES[what]
    test = f"setp.gt.s32 q,nvl,{i}; setp.lt.and.s32 q,nvl,4,q;"
    if size == 4:
        return f"{test} @q st.global.b32 [p+{4 * i}],{found[i]};"
    if size == 2:
        pair = vector(["h0", "h1"])
        return f"{test} mov.b32 {pair},{found[i // 2]}; @q st.global.b16 [p+{2 * i}],h{i % 2};"
    return f"{test} shr.u32 u1,{found[0]},{8 * i}; @q st.global.u8 [p+{i}],u1;"
