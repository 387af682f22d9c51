"""Cases of the inner loop that add to sums across rows, in scratch memory."""

from __future__ import annotations

from magjit_dvm.cuda.cases import vector
from magjit_dvm.cuda.reductions import Reductions

__all__ = ["Adding"]


class Adding(Reductions):
    """The words ``acc`` and ``acc.norm``."""

    def add_to_sum(self) -> None:
        """The slot at i1 ← what it has and A; T is lost."""
        self.put("add.u32 ad,{SCR},i1;")
        self.add_to_slot([[f"T{4 * j + i}" for i in range(4)] for j in range(self.J)], self.J, "")

    def add_norm_to_sum(self) -> None:
        """The slot at i1 ← what it has and A times T normalized; that at F0 ← what it has and A."""
        once = self.label("ONCE")
        quads = [[f"{'wn'[j % 2]}{i}" for i in range(4)] for j in range(self.J)]
        self.standardize()
        self.put("add.u32 ad,{SCR},i1;")
        self.add_to_slot(quads, 2, "T")
        self.put(f"setp.eq.u32 q,F0,-1; @q bra.uni {once};", "add.u32 ad,{SCR},F0;")
        self.add_to_slot(quads, 2, "")
        self.put(f"{once}:")

    def add_to_slot(self, quads: list[list[str]], together: int, factor: str) -> None:
        """Scratch memory at ``ad`` ← what it has and A, or A times a tile; quads together."""
        for first in range(0, self.J, together):
            if first:
                self.part()
            group = range(first, min(first + together, self.J))
            self.put(*(f"ld.shared.v4.b32 {vector(quads[j])},[ad+{512 * j}];" for j in group))
            for j in group:
                for r, to in enumerate(quads[j], 4 * j):
                    times = f"fma.rn.f32 {to},A{r},{factor}{r},{to};"
                    self.put(times if factor else f"add.rn.f32 {to},{to},A{r};")
                self.put(f"st.shared.v4.b32 [ad+{512 * j}],{vector(quads[j])};")
