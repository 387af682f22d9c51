"""Which fast locals the rest of a frame may still use: what a resume function has to be given.

    live(i) = uses(i) | (live after i - stores(i)) | live(handler of i)

A cell is used by whatever touches it: a store goes into the cell, which others may share. Code
that can look at all its locals (``locals()``, ``eval`` ...) uses them all.
"""

from __future__ import annotations

import functools
from types import CodeType

from magjit.bytecode.decode import CodeInfo, decode, fast_local_names
from magjit.bytecode.depths import exception_table
from magjit.bytecode.optable import CELL_WRITES, TERMINATORS, local_uses

_LOOKERS = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe"})
_ALSO_USED = frozenset({"DELETE_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_AND_CLEAR"})


def live_locals(code: CodeType, offset: int) -> frozenset[int]:
    """Indices of the fast locals that execution from an instruction on may use."""
    if not _LOOKERS.isdisjoint(code.co_names):
        return frozenset(range(len(fast_local_names(code))))
    return frozenset(_live(_Held(code))[offset // 2]) | _of_super(code)


def _of_super(code: CodeType) -> frozenset[int]:
    """``super()`` looks at the first argument and at ``__class__``, wherever they are."""
    if "super" not in code.co_names:
        return frozenset()
    names = fast_local_names(code)
    found = {index for index, name in enumerate(names) if name == "__class__"}
    return frozenset(found | ({0} if code.co_argcount else set()))


class _Held:
    """A code object as a key: by identity, as equal ones may come from different lines."""

    def __init__(self, code: CodeType) -> None:
        self.code = code

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.code is self.code

    def __hash__(self) -> int:
        return id(self.code)


@functools.lru_cache(maxsize=512)
def _live(held: _Held) -> dict[int, set[int]]:
    """The live locals before each instruction, by unit: the least solution, backwards."""
    info = decode(held.code)
    before: dict[int, set[int]] = {raw.unit: set() for raw in info.raw}
    edges = _edges(held.code, info)
    changed = True
    while changed:
        changed = False
        for raw in reversed(info.raw):
            after, handler = edges[raw.unit]
            live: set[int] = set().union(*(before[unit] for unit in after))
            uses, stores = _uses(raw.opname, raw.arg)
            live = (live - stores) | uses
            if handler is not None:
                live |= before[handler]
            if live != before[raw.unit]:
                before[raw.unit] = live
                changed = True
    return before


def _uses(opname: str, arg: int) -> tuple[set[int], set[int]]:
    uses: set[int] = set()
    stores: set[int] = set()
    for does, index in local_uses(opname, arg):
        if does == "load" or opname in CELL_WRITES or opname in _ALSO_USED:
            if index not in stores:
                uses.add(index)
        else:
            stores.add(index)
    if opname in _ALSO_USED and opname != "LOAD_FAST_CHECK":
        stores |= uses
    return uses, stores


def _edges(code: CodeType, info: CodeInfo) -> dict[int, tuple[list[int], int | None]]:
    """For each instruction where execution goes next, and the handler of its exceptions."""
    home = {unit: raw.unit for raw in info.raw for unit in range(raw.first, raw.unit + 1)}
    rows = exception_table(code)
    edges: dict[int, tuple[list[int], int | None]] = {}
    for index, raw in enumerate(info.raw):
        after = [home[raw.target]] if raw.target >= 0 else []
        if raw.opname not in TERMINATORS and index + 1 < len(info.raw):
            after.append(info.raw[index + 1].unit)
        handler = next((home[r.target] for r in rows if r.start <= raw.unit < r.end), None)
        edges[raw.unit] = (after, handler)
    return edges
