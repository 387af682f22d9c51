"""Loops over a size of an input that are too long to be unrolled (MagPy §6.2.2).

    for t in range(x.shape[0]):      # 512 steps of 30 operators
        h = self.cell(x[t], h)

Unrolled, such a loop is a graph that takes its backend seconds or minutes, and another one for each
length. Already in the first capture the run is cut behind the first turn, so that the others are
one region that is replayed. Where the turns turn out to be unlike, the loop is unrolled after all
(`magjit.regions`).
"""

from __future__ import annotations

import operator
import types
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from magjit.bytecode import CodeInfo, Instr
from magjit.bytecode.optable import LOCAL_READS
from magjit.monitor.operators import OperatorRecorder
from magjit.refgraph.frames import FrameState
from magjit.refgraph.nodes import RefGraph

RANGE_ITERATOR: type = type(iter(range(0)))
FEWEST = 4
"""Turns of a loop that is worth a region of its own."""
MOST_TURNS = 2
"""Records of the first turns of a loop; if still another is unlike, the loop is unrolled."""
_IGNORED = frozenset({"PRECALL", "NOP", "EXTENDED_ARG", "CACHE", "KW_NAMES"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})


@dataclass(frozen=True, slots=True)
class LoopPlace:
    """A loop of the program, by its FOR_ITER."""

    code: types.CodeType
    offset: int

    @property
    def key(self) -> tuple[int, int]:
        return id(self.code), self.offset


class Recorder(Protocol):
    """What is asked of the recorder; see `magjit.refgraph.run_control`."""

    graph: RefGraph
    operators: OperatorRecorder

    def place(self, state: FrameState, offset: int) -> tuple[types.CodeType, int]: ...

    def try_cut(self, reason: str) -> bool: ...


class LongLoops:
    """The loops of one run.

    Args:
        limit: operators that an unrolled loop may have.
        unrolled: keys of loops whose turns are unlike.

    Attributes:
        cuts: a cut is being made behind the first turn of a loop.
        counted: the inputs that such loops go over, with which of their sizes they count.
    """

    def __init__(self, limit: int, unrolled: Collection[tuple[int, int]]) -> None:
        self.limit = limit
        self.unrolled = unrolled
        self.cuts = False
        self.counted: list[tuple[torch.Tensor, tuple[bool, ...]]] = []
        self._sized: dict[tuple[int, int], bool] = {}
        self._begun: dict[int, tuple[Any, int, int]] = {}
        """By identity of its iterator: that, its turns if it may be long, operators before."""

    def turn(self, rec: Recorder, state: FrameState, offset: int, iterator: Any) -> None:
        """The next turn of a loop over a range begins, or it ends."""
        done = len(rec.operators.graph.operators)
        known = self._begun.get(id(iterator))
        if known is None:
            turns = self._turns(rec, state, offset, iterator)
            self._begun[id(iterator)] = iterator, turns, done
            return
        _, turns, before = known
        if not turns:
            return
        self._begun[id(iterator)] = iterator, 0, 0
        count = (done - before) * turns
        if count > self.limit:
            self.cuts = True
            self.counted += _with_size(rec, _stop(iterator))
            try:
                rec.try_cut(f"{turns} turns of a loop over a size of an input: {count} operators")
            finally:
                self.cuts = False

    def _turns(self, rec: Recorder, state: FrameState, offset: int, iterator: Any) -> int:
        """How often a loop that may be long goes round; else 0."""
        turns = operator.length_hint(iterator)
        place = rec.place(state, offset)
        key = id(place[0]), place[1]
        if turns < FEWEST or key in self.unrolled:
            return 0
        if key not in self._sized:
            self._sized[key] = is_over_size(state.info, offset)
        return turns if self._sized[key] and _with_size(rec, _stop(iterator)) else 0


def _stop(iterator: Any) -> int:
    counted: range = iterator.__reduce__()[1][0]
    return counted.stop


def _with_size(rec: Recorder, number: int) -> list[tuple[torch.Tensor, tuple[bool, ...]]]:
    """Inputs that come with the call and have a size, and where they have it."""
    return [
        (node.obj, tuple(size == number for size in node.obj.shape))
        for node in rec.graph.nodes
        if type(node.obj) is torch.Tensor and node.structural and number in node.obj.shape
    ]


def is_over_size(info: CodeInfo, offset: int) -> bool:
    """Whether a FOR_ITER belongs to a loop over ``range`` of what the code reads as a size.

    It is read in the same function: ``x.shape[0]``, ``x.size(0)``, ``len(x)``, ``b, t = x.shape``.
    """
    until = [raw for raw in info.raw if 2 * raw.unit < offset]
    before = _instructions(info, [raw.unit for raw in until])
    names = [instr.opname for instr in before[-2:]]
    if names != ["CALL", "GET_ITER"]:
        return False
    end = len(before) - 2
    if before[end].arg == 3 and before[end - 1].opname in _CONSTANTS:
        end -= 1  # the step
    return _gives_size(before, end, _instructions(info, [raw.unit for raw in info.raw]))


def _instructions(info: CodeInfo, units: Sequence[int]) -> list[Instr]:
    found = [info.instrs[2 * unit] for unit in units]
    return [instr for instr in found if instr.opname not in _IGNORED]


def _gives_size(instrs: list[Instr], end: int, everything: list[Instr]) -> bool:
    """Whether the value that the instructions before a position leave is a size."""
    if end < 1:
        return False
    last = instrs[end - 1]
    if last.opname in LOCAL_READS:
        stores = [
            place
            for place, instr in enumerate(everything)
            if instr.opname == "STORE_FAST" and instr.argval == last.argval
        ]
        return bool(stores) and all(_stores_size(everything, place) for place in stores)
    if end < 3:
        return False
    first, index = instrs[end - 3], instrs[end - 2]
    if last.opname == "BINARY_SUBSCR" and index.opname in _CONSTANTS:
        return _gives_sizes(instrs, end - 2)
    if last.opname != "CALL" or last.arg != 1:
        return False
    if index.opname in _CONSTANTS:
        return first.opname in ("LOAD_METHOD", "LOAD_ATTR") and first.argval == "size"
    return first.opname == "LOAD_GLOBAL" and first.argval == "len"


def _gives_sizes(instrs: list[Instr], end: int) -> bool:
    """Whether it is all sizes of a tensor."""
    last, before = instrs[end - 1], instrs[end - 2] if end > 1 else None
    if last.opname == "LOAD_ATTR":
        return bool(last.argval == "shape")
    if last.opname != "CALL" or last.arg != 0 or before is None:
        return False
    return before.opname in ("LOAD_METHOD", "LOAD_ATTR") and before.argval == "size"


def _stores_size(instrs: list[Instr], place: int) -> bool:
    """Whether a store, perhaps one of several of an unpacking, stores a size."""
    start = place
    while start and instrs[start - 1].opname == "STORE_FAST":
        start -= 1
    if start and instrs[start - 1].opname == "UNPACK_SEQUENCE":
        return _gives_sizes(instrs, start - 1)
    return start == place and _gives_size(instrs, place, [])
