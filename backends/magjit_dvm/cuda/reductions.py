"""Cases of the inner loop that reduce: a warp's tile, then what the warps of a row have found.

``red`` and ``fin`` work over chunks, through accumulators; of ``softmax``, these are each lane's
largest element and its sum of exponentials, of a row in one stage as well.  Where a row is in one
stage, ``row`` does both at once, and ``row.f.stat`` finds a sum and the squares about the mean in
one word, with one barrier.  ``row.f.norm`` and ``row.f.softmax`` go on to what norms and softmaxes
make of it, ``row.f.back`` to the gradient of a norm.  Running sums and products are ``row`` as
well.
"""

from __future__ import annotations

import math

from magjit_dvm.cuda.cases import Cases
from magjit_dvm.cuda.elements import COMBINE, IDENTITY
from magjit_dvm.cuda.ptx import single
from magjit_dvm.cuda.words import RUNNING

__all__ = ["Reductions"]

_LOG2E = single(math.log2(math.e))
_FEW = 4
"""Warps of a row up to which two exchanges between lanes join what they have found."""


def _power(to: str, of: str, beyond: str) -> str:
    """The exponential of a difference: off by |difference| · 2^-24 of itself."""
    away = f"sub.rn.f32 {to},{of},{beyond}; mul.rn.f32 {to},{to},{_LOG2E};"
    return f"{away} ex2.approx.ftz.f32 {to},{to};"


class Reductions(Cases):
    """The words ``red``, ``fin`` and ``row``: norms, softmaxes and gradients alone change A."""

    def reduce(self, name: str) -> None:
        """Accumulator x ← what it has and the reduction of the warp's elements that are there."""
        if name == "f.softmax":
            self.reduce_online()
            return
        opcode, done = COMBINE[name], self.label("ONLY")
        again = self.of_warp(name)
        self.accumulator(16)
        self.put("mov.b32 f1,0;")
        self.put(f"and.b32 k0,{{GW}},0x40000000; setp.eq.u32 q,k0,0; @q bra.uni {done};")
        self.put("ld.shared.b32 f2,[d]; ld.shared.b32 f3,[d+128];")
        if name == "f.sum":
            # What a sum rounds off is kept beside it.
            self.put(
                "add.rn.f32 f4,f2,f0; sub.rn.f32 f5,f4,f2; sub.rn.f32 f6,f4,f5;",
                "sub.rn.f32 f6,f2,f6; sub.rn.f32 f7,f0,f5; add.rn.f32 f6,f6,f7; "
                "add.rn.f32 f1,f3,f6; mov.b32 f0,f4;",
            )
        else:
            self.put(f"{opcode} f0,f2,f0;")
        self.put(f"{done}:", "st.shared.b32 [d],f0; st.shared.b32 [d+128],f1;")
        self.fetch()
        self.where_absent(again, IDENTITY[name])

    def finish(self, name: str) -> None:
        """S[x] ← accumulator y of all warps of the row."""
        if name == "f.softmax":
            self.finish_online()
            return
        self.accumulator(20)
        self.put("ld.shared.b32 f0,[d];")
        if name == "f.sum":
            # Of an infinite sum, what was rounded off is no number.
            self.put("ld.shared.b32 f1,[d+128]; abs.f32 f2,f0; setp.lt.f32 q,f2,0f7F800000;")
            self.put("@q add.rn.f32 f0,f0,f1;")
        self.of_row(name)
        self.set_row_register("f0")
        self.fetch()

    def row(self, name: str) -> None:
        """S[x] ← the reduction of a row; ``f.stat`` also has S[y] ← the squares about its mean.

        ``f.norm`` has the mean and the inverse deviation, and normalizes A; ``f.softmax`` and
        ``f.back`` have nothing but A.
        """
        if name in ("f.stat", "f.norm"):
            self.statistics(normalizes=name == "f.norm")
            return
        if name == "f.softmax":
            self.softmax()
            return
        if name == "f.back":
            self.norm_backward()
            return
        if name in RUNNING:
            self.running(name.replace("cum", ""))
            return
        again = self.of_warp(name)
        self.of_row(name)
        self.set_row_register("f0")
        self.fetch()
        self.where_absent(again, IDENTITY[name])

    # -- parts --

    @property
    def distances(self) -> tuple[int, ...]:
        """Of the exchanges between the lanes of a row."""
        return tuple(by for by in (16, 8, 4, 2, 1) if by < self.lanes)

    def of_warp(self, name: str) -> tuple[str, str]:
        """f0 ← the reduction of the warp's elements; labels for ``where_absent``."""
        labels = self.filled()
        self.of_all(COMBINE[name], squares=name == "f.squares")
        return labels

    def filled(self) -> tuple[str, str]:
        """Elements that are not there have a value from here on; labels for ``where_absent``."""
        labels = self.label("TAIL"), self.label("HEAD")
        self.put(f"@!full bra.uni {labels[0]};", f"{labels[1]}:")
        return labels

    def of_all(self, opcode: str, squares: bool = False) -> None:
        """f0 ← the reduction of A, or of its squares, in all lanes."""
        self.in_lane(opcode, squares)
        self.exchange("f0", "f1", opcode, self.distances)

    def in_lane(self, opcode: str, squares: bool = False) -> None:
        """f0 ← the reduction of a lane's elements, or of their squares."""
        ways = 4
        if squares:
            self.put(*(f"mul.rn.f32 f{i},A{i},A{i};" for i in range(ways)))
            self.put(*(f"fma.rn.f32 f{r % 4},A{r},A{r},f{r % 4};" for r in range(ways, self.R)))
        else:
            self.put(*(f"{opcode} f{i},A{i},A{i + ways};" for i in range(ways)))
            self.put(*(f"{opcode} f{r % 4},f{r % 4},A{r};" for r in range(2 * ways, self.R)))
        self.put(f"{opcode} f0,f0,f1; {opcode} f2,f2,f3; {opcode} f0,f0,f2;")

    def where_absent(self, labels: tuple[str, str], value: str, banks: str = "A") -> None:
        """Put a value into the elements of A, or of several tiles, that are not there; go back."""
        self.put(f"{labels[0]}:")
        self.from_lane()
        for j in reversed(range(self.J)):  # all before a block that is there are, too
            self.put(f"setp.ge.u32 q,{{NV}},{self.across * (j + 1)}; @q bra.uni {labels[1]};")
            for i in range(4):
                self.put(f"setp.gt.s32 q,nvl,{self.across * j + i};")
                self.put("".join(f"@!q mov.b32 {bank}{4 * j + i},{value}; " for bank in banks))
        self.put(f"bra.uni {labels[1]};")

    def exchange(self, one: str, other: str, opcode: str, distances: tuple[int, ...]) -> None:
        """Every lane gets what all have."""
        for by in distances:
            self.put(f"shfl.sync.bfly.b32 {other},{one},{by},31,-1; {opcode} {one},{one},{other};")

    def exchange_of_warps(self, few: str, one: str, other: str, opcode: str) -> None:
        """As ``exchange``, what warps have left; those that jump to ``few`` need the rest alone."""
        self.exchange(one, other, opcode, (16, 8, 4))
        self.put(f"{few}:")
        self.exchange(one, other, opcode, (2, 1))

    def of_row(self, name: str) -> None:
        """f0 ← f0 of all warps of the row."""
        opcode, one, few = COMBINE[name], self.label("ONE"), self.label("FEW")
        self.put(f"and.b32 k0,{{GW}},255; setp.le.u32 q,k0,1; @q bra.uni {one};")
        self.meet("st.shared.b32 [u0],f0;")
        self.put(
            "ld.shared.b32 f0,[u3]; shr.u32 c1,c1,3; setp.gt.u32 q,k0,c1; "
            f"selp.b32 f0,f0,{IDENTITY[name]},q; @q1 bra.uni {few};"
        )
        self.exchange_of_warps(few, "f0", "f1", opcode)
        self.put(f"{one}:")

    def meet(self, store: str) -> None:
        """Leave 8 bytes at u0 and wait for the row's warps.

        Then u3 is the place of one of them, c1 is 8 times its number, and q1 says whether all of
        them are among the first four lanes' ones.
        """
        # Two sets of places in turn: who is a barrier ahead does not write what others still read.
        self.put(
            "ld.shared.b32 ad,[{ROWS}+-128]; xor.b32 k1,ad,256; st.shared.b32 [{ROWS}+-128],k1;",
            f"bfe.u32 u0,{{GW}},8,8; shl.b32 u0,u0,3; add.u32 u0,u0,ad; {store}",
            "bfe.u32 u1,{GW},16,8; add.u32 u1,u1,1; shl.b32 u2,k0,5;",
            # The row registers' address tells the lane.
            f"setp.le.u32 q1,k0,{_FEW}; selp.b32 u3,{4 * _FEW - 4},124,q1; "
            "and.b32 c1,{ROWS},u3; shl.b32 c1,c1,1; add.u32 u3,c1,ad; bar.sync u1,u2;",
        )

    def statistics(self, normalizes: bool) -> None:
        """S[x] ← the row's sum, S[y] ← squares about its mean; F0 is 1 / columns, i1 columns.

        Or A ← A normalized, see ``normalize``: then A has what is beyond the warp's mean meanwhile.

        Each warp has squares about a mean of its own; of several warps, Chan, Golub and LeVeque
        (1983) add to them the squares of how far these means are from the row's.
        """
        one, few, less = self.label("ONE"), self.label("FEW"), self.label("LESS")
        again = self.of_warp("f.sum")
        self.put("cvt.rn.f32.u32 f3,{NV}; rcp.approx.ftz.f32 f2,f3; mul.rn.f32 f4,f0,f2;")
        if normalizes:
            self.divided_well("f4", "f2", "f3")
            self.put("mov.b32 f6,f4;")
        absent = self.filled()
        places = ("f1", "f2", "f3", "f5")
        for r in range(self.R):
            to, away = places[r % 4], f"A{r}" if normalizes else "c0"
            self.put(f"sub.rn.f32 {away},A{r},f4; ")
            self.put(
                f"mul.rn.f32 {to},{away},{away};"
                if r < 4
                else f"fma.rn.f32 {to},{away},{away},{to};"
            )
        self.put("add.rn.f32 f1,f1,f2; add.rn.f32 f3,f3,f5; add.rn.f32 f1,f1,f3;")
        self.exchange("f1", "f2", "add.rn.f32", self.distances)
        self.put(f"and.b32 k0,{{GW}},255; setp.le.u32 q,k0,1; @q bra.uni {one};")
        self.meet("st.shared.v2.b32 [u0],{{f0,f1}};")
        # Of the warp whose place it is: f2 elements, about f3.
        self.put(
            f"ld.shared.v2.b32 {{{{f0,f1}}}},[u3]; mul.lo.u32 c1,c1,{4 * self.R}; "
            f"sub.s32 c1,i1,c1; min.s32 c1,c1,{32 * self.R}; max.s32 c1,c1,0; "
            "setp.eq.s32 q,c1,0; selp.b32 f0,0,f0,q; selp.b32 f1,0,f1,q; cvt.rn.f32.s32 f2,c1; "
            f"rcp.approx.ftz.f32 f3,f2; mul.rn.f32 f3,f0,f3; @q1 bra.uni {less};"
        )
        self.exchange_of_warps(less, "f0", "f4", "add.rn.f32")
        self.put(
            "mul.rn.f32 f5,f0,F0; sub.rn.f32 f3,f3,f5; selp.b32 f3,0,f3,q; "
            f"mul.rn.f32 f5,f3,f2; fma.rn.f32 f1,f5,f3,f1; @q1 bra.uni {few};"
        )
        self.exchange_of_warps(few, "f1", "f4", "add.rn.f32")
        self.put(f"{one}:")
        if normalizes:
            self.normalize()
        self.set_row_register("f0")
        self.put("bfe.u32 d,i0,20,4; shl.b32 d,d,7; add.u32 d,d,{ROWS}; st.shared.b32 [d],f1;")
        self.fetch()
        self.where_absent(again, IDENTITY["f.sum"])
        self.where_absent(absent, "f4")

    def softmax(self) -> None:
        """A ← exp(A − the row's largest) / the row's sum of that.

        Each warp's exponentials are of what is beyond a largest of its own; with one barrier, each
        has a factor of them (Milakov and Gimelshein 2018, "Online normalizer calculation").
        """
        one, few, none = self.label("ONE"), self.label("FEW"), IDENTITY["f.max"]
        again = self.of_warp("f.max")
        # Of a warp whose elements all are infinitely small, exponentials are 0, not NaN.
        self.put(f"mov.b32 f6,f0; setp.eq.f32 q,f0,{none}; selp.b32 f4,0,f0,q;")
        self.put(*(_power(f"A{r}", f"A{r}", "f4") for r in range(self.R)))
        self.of_all("add.rn.f32")
        self.put("mov.b32 f4,0f3F800000;")
        self.put(f"and.b32 k0,{{GW}},255; setp.le.u32 q,k0,1; @q bra.uni {one};")
        self.meet_online()
        self.put(
            f"{_power('f1', 'f1', 'f2')} mul.rn.f32 f0,f0,f1; {_power('f4', 'f6', 'f2')} "
            f"@q1 bra.uni {few};"
        )
        self.exchange_of_warps(few, "f0", "f3", "add.rn.f32")
        self.put(f"{one}:", "rcp.approx.ftz.f32 f0,f0; mul.rn.f32 f4,f4,f0;")
        self.put(*(f"mul.rn.f32 A{r},A{r},f4;" for r in range(self.R)))
        self.fetch()
        self.where_absent(again, none)

    def meet_online(self) -> None:
        """f2 ← the largest f6 of the row's warps; f1, f0 ← f6 and the sum f0 of one of them."""
        less, none = self.label("LESS"), IDENTITY["f.max"]
        self.meet("st.shared.v2.b32 [u0],{{f6,f0}};")
        self.put(
            "ld.shared.v2.b32 {{f1,f0}},[u3]; shr.u32 c1,c1,3; setp.gt.u32 q,k0,c1; "
            f"selp.b32 f1,f1,{none},q; selp.b32 f0,f0,0,q; mov.b32 f2,f1; @q1 bra.uni {less};"
        )
        self.exchange_of_warps(less, "f2", "f3", COMBINE["f.max"])

    def reduce_online(self) -> None:
        """Accumulator x ← the lane's largest, and its sum of exponentials of what is beyond it.

        Where a larger one comes, what has been summed is scaled, as of ``softmax``.
        """
        first, places = self.label("FIRST"), ("f0", "f1", "f2", "f3")
        none, maximum = IDENTITY["f.max"], COMBINE["f.max"]
        absent = self.filled()
        self.in_lane(maximum)
        self.accumulator(16)
        self.put(
            f"mov.b32 f5,{none}; mov.b32 f6,0;",
            f"and.b32 k0,{{GW}},0x40000000; setp.eq.u32 q,k0,0; @q bra.uni {first};",
            f"ld.shared.b32 f5,[d]; ld.shared.b32 f6,[d+128]; {maximum} f0,f0,f5;",
            # Of elements that all are infinitely small, exponentials are 0, not NaN.
            f"{first}: mov.b32 f7,f0; setp.eq.f32 q,f0,{none}; selp.b32 f4,0,f0,q;",
            _power("f5", "f5", "f4"),
            "mul.rn.f32 f6,f6,f5;",
        )
        for r in range(self.R):
            to = places[r] if r < 4 else "c0"
            self.put(_power(to, f"A{r}", "f4"))
            self.put(f"add.rn.f32 {places[r % 4]},{places[r % 4]},c0;" * (r >= 4))
        self.put("add.rn.f32 f0,f0,f1; add.rn.f32 f2,f2,f3; add.rn.f32 f0,f0,f2;")
        self.put("add.rn.f32 f6,f6,f0; st.shared.b32 [d],f7; st.shared.b32 [d+128],f6;")
        self.fetch()
        self.where_absent(absent, none)

    def finish_online(self) -> None:
        """S[x], S[w1] ← the row's largest, and the sum of exponentials of what is beyond it.

        Of a row whose elements all are infinitely small, the sum is no number, as in eager mode.
        """
        few, done = self.label("FEW"), self.label("JOINED")
        none, maximum, total = IDENTITY["f.max"], COMBINE["f.max"], COMBINE["f.sum"]
        self.accumulator(20)
        self.put("ld.shared.b32 f1,[d]; ld.shared.b32 f0,[d+128]; mov.b32 f6,f1;")
        self.exchange("f6", "f2", maximum, self.distances)
        self.put(f"setp.eq.f32 q,f6,{none}; selp.b32 f4,0,f6,q;", _power("f1", "f1", "f4"))
        self.put("mul.rn.f32 f0,f0,f1;")
        self.exchange("f0", "f1", total, self.distances)
        self.put("mov.b32 f2,f6; and.b32 k0,{GW},255;")
        self.put("setp.le.u32 q,k0,1; @q sub.rn.f32 f1,f6,f6; @q add.rn.f32 f0,f0,f1;")
        self.put(f"@q bra.uni {done};")
        self.meet_online()
        self.put(_power("f1", "f1", "f2"), f"mul.rn.f32 f0,f0,f1; @q1 bra.uni {few};")
        self.exchange_of_warps(few, "f0", "f3", total)
        self.put(f"{done}:")
        self.set_row_register("f2")
        self.put("shl.b32 d,i1,7; add.u32 d,d,{ROWS}; st.shared.b32 [d],f0;")
        self.fetch()

    def standardize(self) -> None:
        """T ← (T − S[x]) · S[y]; where F1 is 0, T · S[y]."""
        scaled = self.label("SCALED")
        self.row_register("f7", 20)
        self.put(f"setp.eq.u32 q,F1,0; @q bra.uni {scaled};")
        self.row_register("f6", 16)
        self.put(*(f"sub.rn.f32 T{r},T{r},f6;" for r in range(self.R)))
        self.put(f"{scaled}:", *(f"mul.rn.f32 T{r},T{r},f7;" for r in range(self.R)))

    def norm_backward(self) -> None:
        """A ← (A − sum(A) · F0 − X · sum(A · X) · F0) · S[y], X being T normalized: a gradient.

        Without the first sum where F1 is even, as of X that has no mean subtracted; from 2 on, T is
        normalized already. Both sums take the same exchanges, and of several warps one barrier.
        """
        one, few, alone = self.label("ONE"), self.label("FEW"), self.label("ALONE")
        ready = self.label("READY")
        self.put(f"setp.gt.u32 q,F1,1; @q bra.uni {ready};")
        self.standardize()
        self.put(f"{ready}:")
        self.row_register("f7", 20)
        self.put("and.b32 k0,F1,1; setp.eq.u32 q1,k0,0;")
        absent = self.filled()
        products, sums = ("f0", "f2", "f3", "f4"), ("f1", "f5", "f6", "u0")
        for r in range(self.R):
            to = products[r % 4]
            self.put(f"mul.rn.f32 {to},A{r},T{r};" if r < 4 else f"fma.rn.f32 {to},A{r},T{r},{to};")
        self.put("add.rn.f32 f0,f0,f2; add.rn.f32 f3,f3,f4; add.rn.f32 f0,f0,f3; mov.b32 f1,0;")
        self.put(f"@q1 bra.uni {alone};")
        self.put(*(f"add.rn.f32 {sums[i]},A{i},A{i + 4};" for i in range(4)))
        self.put(*(f"add.rn.f32 {sums[r % 4]},{sums[r % 4]},A{r};" for r in range(8, self.R)))
        self.put("add.rn.f32 f1,f1,f5; add.rn.f32 f6,f6,u0; add.rn.f32 f1,f1,f6;")
        self.put(f"{alone}:")
        self.exchange_both(self.distances)
        self.put(f"and.b32 k0,{{GW}},255; setp.le.u32 q,k0,1; @q bra.uni {one};")
        self.meet("st.shared.v2.b32 [u0],{{f0,f1}};")
        self.put(
            "ld.shared.v2.b32 {{f0,f1}},[u3]; shr.u32 c1,c1,3; setp.gt.u32 q,k0,c1; "
            f"selp.b32 f0,f0,0,q; selp.b32 f1,f1,0,q; @q1 bra.uni {few};"
        )
        self.exchange_both((16, 8, 4))
        self.put(f"{few}:")
        self.exchange_both((2, 1))
        self.put(
            f"{one}:",
            "mul.rn.f32 f4,f7,F0; neg.f32 f4,f4; mul.rn.f32 f0,f0,f4; mul.rn.f32 f1,f1,f4;",
        )
        self.put(*(f"fma.rn.f32 A{r},A{r},f7,f1;" for r in range(self.R)))
        self.put(*(f"fma.rn.f32 A{r},T{r},f0,A{r};" for r in range(self.R)))
        self.fetch()
        self.where_absent(absent, "0", "AT")

    def exchange_both(self, distances: tuple[int, ...]) -> None:
        """As ``exchange``, sums of f0 and of f1."""
        for by in distances:
            self.put(
                f"shfl.sync.bfly.b32 f2,f0,{by},31,-1; shfl.sync.bfly.b32 f3,f1,{by},31,-1; "
                "add.rn.f32 f0,f0,f2; add.rn.f32 f1,f1,f3;"
            )

    def normalize(self) -> None:
        """f0 ← the mean, f1 ← 1 / √(squares / columns + F1), A ← (A + f6 − mean) · f1.

        f0 and f1 were the row's sum and squares; f6 is the mean that A is about, near to the row's:
        little is lost of elements that are far from 0 and near to each other.
        """
        self.put("mul.rn.f32 f2,f0,F0; mul.rn.f32 f1,f1,F0; add.rn.f32 f1,f1,F1; mov.b32 f7,f2;")
        self.put("cvt.rn.f32.u32 f3,i1; rsqrt.approx.f32 f1,f1;")
        self.divided_well("f2", "F0", "f3")
        # Of an infinite mean, what is left is no number.
        self.put("sub.rn.f32 f4,f6,f2; mul.rn.f32 f4,f4,f1; abs.f32 f5,f7;")
        self.put("setp.lt.f32 q,f5,0f7F800000; selp.b32 f0,f2,f7,q;")
        self.put(*(f"fma.rn.f32 A{r},A{r},f1,f4;" for r in range(self.R)))

    def divided_well(self, quotient: str, inverse: str, by: str) -> None:
        """A quotient, f0 · inverse, that is rounded to nearest but for rare cases."""
        self.put(
            f"neg.f32 f5,{quotient}; fma.rn.f32 f5,f5,{by},f0; "
            f"fma.rn.f32 {quotient},f5,{inverse},{quotient};"
        )

    def running(self, name: str) -> None:
        """A ← each element of the row with all before it.

        Of four elements of a lane, then of the lanes of each 128 elements, then of the warps.
        """
        opcode, none, one, few = COMBINE[name], IDENTITY[name], self.label("ONE"), self.label("FEW")
        self.put(f"mov.b32 f6,{none};")
        for j in range(self.J):
            a = [f"A{4 * j + i}" for i in range(4)]
            self.put(*(f"{opcode} {a[i]},{a[i - 1]},{a[i]};" for i in (1, 2, 3)))
            self.put(f"mov.b32 f0,{a[3]};")
            for by in (1, 2, 4, 8, 16):
                self.put(f"shfl.sync.up.b32 f1|q,f0,{by},0,-1; @q {opcode} f0,f1,f0;")
            self.put(
                f"shfl.sync.up.b32 f1|q,f0,1,0,-1; selp.b32 f1,f1,{none},q; {opcode} f1,f6,f1; "
                f"shfl.sync.idx.b32 f2,f0,31,31,-1; {opcode} f6,f6,f2;"
            )
            self.put(*(f"{opcode} {r},f1,{r};" for r in a))
        self.put(f"and.b32 k0,{{GW}},255; setp.le.u32 q,k0,1; @q bra.uni {one};")
        self.meet("st.shared.b32 [u0],f6;")
        self.put(
            "ld.shared.b32 f0,[u3]; shr.u32 c1,c1,3; bfe.u32 u1,{GW},8,8; setp.lt.u32 q,c1,u1; "
            f"selp.b32 f0,f0,{none},q; @q1 bra.uni {few};"
        )
        self.exchange_of_warps(few, "f0", "f1", opcode)
        self.put(*(f"{opcode} A{r},f0,A{r};" for r in range(self.R)), f"{one}:")
        self.fetch()

    def accumulator(self, shift: int) -> None:
        """The address of an accumulator, which come behind the row registers."""
        self.put(
            f"bfe.u32 k0,{{GW}},24,5; shl.b32 k0,k0,7; bfe.u32 d,i0,{shift},4; shl.b32 d,d,8;",
            "add.u32 d,d,k0; add.u32 d,d,{ROWS};",
        )
