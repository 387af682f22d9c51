"""Decodes a code object once: its instructions by offset, and the plan that the tracer follows.

    info   ::= CodeInfo instrs plan loads stores
    instrs ::= { offset: Instr }     offset of the instruction, not of its EXTENDED_ARG prefix
    plan   ::= Plan units            one record for each code unit (UNIT_LAYOUT), read in C
    unit   ::= kind mode depth ninputs nposts operand home next

The offsets, the kinds and the layouts are the same whatever the version: EXTENDED_ARG, PRECALL,
KW_NAMES and the order of NULL are gone after this module.
"""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from magjit.bytecode import optable
from magjit.bytecode.depths import UNREACHABLE, Depths, RawInstr, depths, exception_table
from magjit.bytecode.optable import FILTERED, Op, Read, count, op_for

#: ``mj_unit`` of tracer.h: kind, mode, depth, ninputs, nposts, operand, home, next.
UNIT_LAYOUT = struct.Struct("=BBHHHIII")
FILTER_BIT = 0x80
QUIET = 1  # mode of a unit without event that need not be seen at all

_CACHE = optable.OPCODE["CACHE"]
_EXTENDED_ARG = optable.OPCODE["EXTENDED_ARG"]
_STORE_ATTR = optable.OPCODE["STORE_ATTR"]


class Instr(NamedTuple):
    """An instruction as a recorder sees it.

    ``argval`` is the name, constant, cell name, operator symbol or jump target (an offset) that the
    argument stands for, ``kwnames`` the keyword names of a call, which are not on the value stack.
    """

    offset: int
    opname: str
    arg: int
    argval: Any
    kwnames: tuple[str, ...]
    line: int


class Unit(NamedTuple):
    """A record of a plan, unpacked."""

    kind: int
    mode: int
    depth: int
    ninputs: int
    nposts: int
    operand: int
    home: int
    next: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the tracer does at each code unit: UNIT_LAYOUT records in one bytes object."""

    units: bytes

    def unit(self, index: int) -> Unit:
        """The record of one code unit."""
        return Unit(*UNIT_LAYOUT.unpack_from(self.units, index * UNIT_LAYOUT.size))


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """A decoded code object.

    Attributes:
        instrs: the instructions by offset, each made when it is first asked for.
        plan: what the tracer follows.
        depths: static stack depths.
        raw: the instructions as they stand, in order.
        loads: names of the locals, cells and free variables that are ever read.
        stores: those that are ever written or deleted.
    """

    instrs: InstrTable
    plan: Plan
    depths: Depths
    raw: tuple[RawInstr, ...]

    @property
    def loads(self) -> frozenset[str]:
        return self.instrs.used("load")

    @property
    def stores(self) -> frozenset[str]:
        return self.instrs.used("store")

    def __str__(self) -> str:
        lines = []
        for raw in self.raw:
            instr = self.instrs[2 * raw.unit]
            unit = self.plan.unit(raw.unit)
            depth = "-" if unit.depth == UNREACHABLE else unit.depth
            kind = optable.EventKind(unit.kind & ~FILTER_BIT).name if unit.kind else ""
            keywords = f" {'='.join((*instr.kwnames, ''))}" if instr.kwnames else ""
            value = "" if instr.argval is None else f"{instr.argval!r:.40}"
            lines.append(f"{instr.offset:5} {depth:>3} {instr.opname:24} {value}{keywords} {kind}")
        return "\n".join(line.rstrip() for line in lines)


def raw_instructions(code: CodeType) -> tuple[RawInstr, ...]:
    """The instructions of a code object with prefixes folded in and jumps resolved."""
    units = code.co_code
    opcodes, lows = units[::2], units[1::2]
    n_units = len(opcodes)
    names, jumps = optable.OPNAME, optable.JUMP_DIRECTION
    instrs = []
    first = unit = arg = 0
    while unit < n_units:
        opcode = opcodes[unit]
        arg = arg << 8 | lows[unit]
        end = unit + 1
        if opcode == _EXTENDED_ARG:
            unit = end
            continue
        while end < n_units and opcodes[end] == _CACHE:
            end += 1
        direction = jumps.get(opcode)
        target = -1 if direction is None else end + direction * arg
        instrs.append(RawInstr(first, unit, opcode, names[opcode], arg, end, target))
        first = unit = end
        arg = 0
    return tuple(instrs)


def stored_attributes(code: CodeType) -> set[str]:
    """Names of the attributes that a code object stores to; fast, without decoding it."""
    units = code.co_code
    opcodes, lows = units[::2], units[1::2]
    names = set()
    unit = opcodes.find(_STORE_ATTR)
    while unit >= 0:
        arg, prefix = lows[unit], unit - 1
        while prefix >= 0 and opcodes[prefix] == _EXTENDED_ARG:
            arg |= lows[prefix] << 8 * (unit - prefix)
            prefix -= 1
        names.add(code.co_names[arg])
        unit = opcodes.find(_STORE_ATTR, unit + 1)
    return names


def fast_local_names(code: CodeType) -> tuple[str, ...]:
    """Names of the fast locals in the interpreter's order: locals, other cells, free variables."""
    cells = tuple(name for name in code.co_cellvars if name not in code.co_varnames)
    return code.co_varnames + cells + code.co_freevars


def _lines(code: CodeType, n_units: int) -> list[int]:
    lines = [code.co_firstlineno] * n_units
    for start, end, line in code.co_lines():
        if line is not None:
            lines[start // 2 : end // 2] = [line] * (end // 2 - start // 2)
    return lines


class InstrTable(dict[int, Instr]):
    """The instructions of a code object by offset, each made when it is first asked for.

    It keeps what the code object refers to, but not the code object.
    """

    def __init__(self, code: CodeType, raw: tuple[RawInstr, ...]) -> None:
        super().__init__()
        self._raw = raw
        self._index = {2 * instr.unit: index for index, instr in enumerate(raw)}
        self._names = code.co_names
        self._consts = code.co_consts
        self._locals = fast_local_names(code)
        self._lines = _lines(code, len(code.co_code) // 2)

    def __missing__(self, offset: int) -> Instr:
        index = self._index[offset]
        raw = self._raw[index]
        instr = Instr(
            offset,
            raw.opname,
            raw.arg,
            self._argval(raw),
            self._kwnames(index),
            self._lines[raw.unit],
        )
        self[offset] = instr
        return instr

    def __iter__(self) -> Iterator[int]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, offset: object) -> bool:
        return offset in self._index

    def values(self) -> Any:
        """All instructions in order."""
        return [self[offset] for offset in self._index]

    def items(self) -> Any:
        """All offsets and instructions in order."""
        return [(offset, self[offset]) for offset in self._index]

    def keys(self) -> Any:
        """All offsets in order."""
        return self._index.keys()

    def used(self, action: str) -> frozenset[str]:
        """Names of the fast locals that some instruction loads ("load") or stores ("store")."""
        return frozenset(
            self._locals[index]
            for raw in self._raw
            for does, index in optable.local_uses(raw.opname, raw.arg)
            if does == action
        )

    def _argval(self, raw: RawInstr) -> Any:
        name, arg = raw.opname, raw.arg
        if name in optable.FAST_LOCALS:
            return self._locals[arg]
        if name in optable.PAIRS:
            return self._locals[arg >> 4], self._locals[arg & 15]
        if name in optable.CONSTANTS:
            return self._consts[arg]
        if name in optable.NAMED:
            return self._names[optable.name_index(name, arg)]
        if raw.target >= 0:
            return 2 * raw.target
        if name == "BINARY_OP":
            return optable.BINARY_SYMBOLS[arg]
        if name == "COMPARE_OP":
            return optable.compare_symbol(arg)
        return arg if raw.opcode >= optable.HAVE_ARGUMENT else None

    def _kwnames(self, index: int) -> tuple[str, ...]:
        """Keyword names of a call: of KW_NAMES before it or, on 3.13, the constant before it."""
        opname = self._raw[index].opname
        if opname not in ("CALL", "CALL_KW"):
            return ()
        before = index - 1
        if self._raw[before].opname == "PRECALL":
            before -= 1
        named = self._raw[before].opname == "KW_NAMES" or opname == "CALL_KW"
        names: tuple[str, ...] = self._consts[self._raw[before].arg] if named else ()
        return names


class _Planner:
    """Writes the plan of one code object."""

    def __init__(self, code: CodeType, raw: tuple[RawInstr, ...], before: list[int]) -> None:
        self.raw = raw
        self.before = before
        self.awake = {row.target for row in exception_table(code)}
        self.records = [_NO_RECORD] * len(before)

    def plan(self) -> Plan:
        """Records of the events first: after those the tracer must look."""
        for index, raw in enumerate(self.raw):
            op = op_for(raw.opname, raw.arg)
            if op.kind is not None:
                at = raw.first if optable.PREFIX_HAS_EVENT else raw.unit
                self.records[at] = self.event(op, op.kind, raw, self.next_event(index))
        for raw in self.raw:
            for unit in range(raw.first, raw.unit + 1):
                if self.records[unit] is _NO_RECORD:
                    self.records[unit] = _no_event(self.before[unit], unit in self.awake)
        return Plan(b"".join(self.records))

    def event(self, op: Op, kind: optable.EventKind, raw: RawInstr, following: int) -> bytes:
        self.awake.add(following)
        operand = 0
        if raw.target >= 0:
            operand = optable.landing(raw.opname, raw.target)
            self.awake.add(operand)
        elif op.read is Read.CELL:
            operand = raw.arg
        elif op.read is Read.FILL:
            operand = 2 if raw.opname == "MAP_ADD" else 1
        return UNIT_LAYOUT.pack(
            kind | (FILTER_BIT if kind in FILTERED else 0),
            op.read | op.give,
            self.before[raw.unit],
            count(op.inputs, raw.arg),
            count(op.posts, raw.arg),
            operand,
            raw.unit,
            following,
        )

    def next_event(self, index: int) -> int:
        """Unit of the event after instruction number ``index`` completes; RESUME makes none."""
        following = index + 1
        while following < len(self.raw) and self.raw[following].opname == "RESUME":
            following += 1
        return self.raw[following].first if following < len(self.raw) else self.raw[index].end


_NO_RECORD = bytes(UNIT_LAYOUT.size)


@functools.cache
def _no_event(depth: int, awake: bool) -> bytes:
    return UNIT_LAYOUT.pack(0, 0 if awake else QUIET, depth, 0, 0, 0, 0, 0)


_cache: dict[int, tuple[weakref.ref[CodeType], CodeInfo]] = {}


def decode(code: CodeType) -> CodeInfo:
    """Decodes a code object; the result is kept as long as the code object lives.

    The cache goes by identity: equal code objects may come from different lines.
    """
    key = id(code)
    found = _cache.get(key)
    if found is not None and found[0]() is code:
        return found[1]
    raw = raw_instructions(code)
    found_depths = depths(code, raw)
    plan = _Planner(code, raw, found_depths.before).plan()
    info = CodeInfo(InstrTable(code, raw), plan, found_depths, raw)
    # the callback has no Python frame: it may run in the midst of an observed program
    _cache[key] = weakref.ref(code, functools.partial(_cache.pop, key)), info
    return info


def plan_for(code: CodeType) -> Plan:
    """The plan of a code object: what ``_C.Tracer`` takes as ``plan_for``."""
    return decode(code).plan
