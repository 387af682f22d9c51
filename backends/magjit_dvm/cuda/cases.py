"""What the cases of the inner loop are written with: lines, jumps, functions, row registers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from magjit_dvm.cuda.ptx import Body
from magjit_dvm.cuda.words import NUMBER, WARP

__all__ = ["ABSENT", "QUADS", "Cases", "vector"]

QUADS = [
    [f"{bank}{first + i}" for i in range(4)]
    for bank, first in (("w", 0), ("n", 0), ("y", 0), ("u", 0), ("f", 0), ("f", 4))
]
"""Registers that a case may load quads to, in turn."""


ABSENT = 1 << 29
"""Beside a lane's row's facts: there is no such row."""


class Cases:
    """Lines of PTX as they are made.

    Attributes:
        R, J: elements a lane, groups of four of them.
        lanes: of a warp that have parts of the same row.
        own_table: whether the case that is written jumps through a table of its own.
    """

    lanes = WARP

    def __init__(self, each: int, approximate: bool) -> None:
        self.R, self.J = each, each // 4
        self.approximate = approximate
        self.made: list[str] = []
        self.n = 0
        self.own_table = False

    @property
    def across(self) -> int:
        """Elements from a lane's four to its next four."""
        return 4 * self.lanes

    @property
    def slice(self) -> int:
        """Elements of a row that a warp has room for."""
        return self.lanes * self.R

    def put(self, *lines: str) -> None:
        self.made += lines

    def fetch(self) -> None:
        """The next word, whose operator this one names."""
        self.next_word()
        self.jump()

    def next_word(self) -> None:
        """It is loaded; what this one says is lost."""
        self.put("shr.u32 d,i0,24; add.u32 pc,pc,16; ld.shared.v4.b32 {{i0,i1,F0,F1}},[pc];")

    def second(self) -> None:
        """The word's other operator."""
        self.put("bfe.u32 d,i0,8,8;")
        self.jump()

    def second_or_next(self) -> None:
        """The word's other operator; if that is nothing, the next word, without a jump to ``nop``.

        With R = 64, words are in uniform registers, which would have to be filled anew.
        """
        if self.R == 64:
            self.second()
            return
        self.put(
            f"bfe.u32 d,i0,8,8; setp.eq.u32 q1,d,{NUMBER['nop']}; @q1 shr.u32 d,i0,24; "
            "@q1 add.u32 pc,pc,16; @q1 ld.shared.v4.b32 {{i0,i1,F0,F1}},[pc];"
        )
        self.jump()

    def jump(self) -> None:
        """To case d, through a table of this case's own or through the one that others share."""
        self.put("brx.idx.uni d,TABLE;" if self.own_table else "bra.uni NEXT;")

    @contextmanager
    def turning(self, banks: str, ways: int = 4) -> Iterator[None]:
        """Code for the first ``ways`` registers, run for all: tiles are turned under it.

        Counts elements of a lane in c1, but where one turn makes all.
        """
        if ways == self.R:
            yield
            return
        label = self.label("TURN")
        self.put("mov.b32 c1,0;", f"{label}:")
        yield
        for bank in banks:
            for first in range(ways):  # f0 → the last one → … → the first one → f0
                places = [f"{bank}{r}" for r in range(first, self.R, ways)]
                moves = zip(["f0", *places], [*places, "f0"], strict=True)
                self.put("".join(f"mov.b32 {to},{one}; " for to, one in moves))
        self.put(f"add.u32 c1,c1,{ways}; setp.ne.u32 q,c1,{self.R}; @q bra.uni {label};")

    def part(self) -> None:
        """What is before is not mixed with what is behind: a branch that is never taken.

        Each asks something else, since a compiler would drop what has been asked before.
        """
        self.n += 1
        self.put(f"setp.eq.u32 q,{{NV}},{32 * self.R + self.n}; @q bra.uni DONE;")

    def label(self, stem: str) -> str:
        """A name that is used once."""
        self.n += 1
        return f"{stem}_{self.n}"

    def apply(self, body: Body, places: list[tuple[str, str]]) -> None:
        """A body at each of several (A, T)."""
        kinds = {"r": ".b32", "d": ".b64", "p": ".pred", "h": ".b16"}
        once = self.label("")  # bodies have the same labels wherever they are
        self.put("{{")
        for number, (a, t) in enumerate(places):
            declared = "".join(
                f".reg {kinds[bank]} {bank}{number}_<{count}>; "
                for bank, count in body.counts.items()
                if count
            )
            self.put(declared)
            for opcode, *operands in body.lines:
                texts = [one.format(a=a, t=t, n=number) for one in operands]
                if opcode == "loop":
                    self.put(f"{texts[0]}{once}:")
                elif opcode == "again":
                    label, test = texts
                    self.put(f"vote.sync.any.pred {test},{test},-1; @{test} bra.uni {label}{once};")
                else:
                    self.put(_line(opcode, texts))
        self.put("}}")

    def from_lane(self) -> None:
        """The register nvl ← elements that are there from the lane's first one on, signed.

        Row registers' address tells the lane.
        """
        self.put(f"and.b32 nvl,{{ROWS}},{self.across - 4}; sub.s32 nvl,{{NV}},nvl;")
        if self.lanes < WARP:  # of a row that is not there, none
            self.put(f"and.b32 k1,{{GW}},{ABSENT}; sub.s32 nvl,nvl,k1;")

    def row_register(self, to: str, shift: int) -> None:
        self.put(f"bfe.u32 d,i0,{shift},4; shl.b32 d,d,7; add.u32 d,d,{{ROWS}};")
        self.put(f"ld.shared.b32 {to},[d];")

    def set_row_register(self, value: str) -> None:
        self.put("bfe.u32 d,i0,16,4; shl.b32 d,d,7; add.u32 d,d,{ROWS};")
        self.put(f"st.shared.b32 [d],{value};")


def _line(opcode: str, operands: list[str]) -> str:
    """A line of a body; constant memory is addressed from its table's address on."""
    if opcode.startswith("ld.const"):
        table, at = operands[1].strip("[]").split("+")
        return (
            f"mov.u64 z,{table}; cvt.u64.u32 e,{at}; add.u64 z,z,e; ld.const.f64 {operands[0]},[z];"
        )
    return f"{opcode} {', '.join(operands)};"


def vector(registers: Sequence[str]) -> str:
    """Registers side by side, as lines have them."""
    return f"{{{{{','.join(registers)}}}}}"
