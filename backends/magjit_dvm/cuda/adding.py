"""Cases of the inner loop that add to sums across rows, in scratch memory."""

from __future__ import annotations

from collections.abc import Sequence

from magjit_dvm.cuda.cases import QUADS, vector
from magjit_dvm.cuda.reductions import Reductions

__all__ = ["Adding"]


class Adding(Reductions):
    """The words ``acc`` and ``acc.norm``."""

    def add_to_sum(self) -> None:
        """The slot at i1 ← what it has and A; T is lost."""
        self.put("add.u32 ad,{SCR},i1;")
        quads = [[f"T{4 * j + i}" for i in range(4)] for j in range(self.J)]
        self.from_slot("ad", 0, quads)
        self.add_to_slot("ad", "", 0, quads)

    def add_norm_to_sum(self) -> None:
        """The slot at i1 ← what it has and A times T normalized; that at F0 ← what it has and A.

        What comes next is loaded before what has come is added to, the first of it before T is
        normalized.  Three pairs of quads take turns: with two, a load would wait until the store
        before it has read its registers.
        """
        once, pairs = self.label("ONCE"), range(0, self.J, 2)
        self.put("add.u32 ad,{SCR},i1; setp.eq.u32 q1,F0,-1; selp.b32 k1,i1,F0,q1;")
        self.put("add.u32 k1,{SCR},k1;")
        steps = [(at, factor, j) for at, factor in (("ad", "T"), ("k1", "")) for j in pairs]
        quads = [QUADS[2 * (k % 3) : 2 * (k % 3) + 2] for k in range(len(steps))]

        def load(k: int) -> None:
            at, _, first = steps[k]
            self.from_slot(at, first, quads[k])

        load(0)
        self.standardize()
        for k, step in enumerate(steps):
            if k:
                self.part()
            if k + 1 < len(steps):
                load(k + 1)
            if k == len(pairs):
                self.put(f"@q1 bra.uni {once};")
            self.add_to_slot(*step, quads[k])
        self.put(f"{once}:")

    def from_slot(self, at: str, first: int, quads: Sequence[list[str]]) -> None:
        """What a slot has, from a quad on, to registers."""
        for j, quad in enumerate(quads, first):
            self.put(f"ld.shared.v4.b32 {vector(quad)},[{at}+{512 * j}];")

    def add_to_slot(self, at: str, factor: str, first: int, quads: Sequence[list[str]]) -> None:
        """A slot ← what has come of it and A, or A times a tile."""
        for j, quad in enumerate(quads, first):
            for r, to in enumerate(quad, 4 * j):
                times = f"fma.rn.f32 {to},A{r},{factor}{r},{to};"
                self.put(times if factor else f"add.rn.f32 {to},{to},A{r};")
            self.put(f"st.shared.v4.b32 [{at}+{512 * j}],{vector(quad)};")
