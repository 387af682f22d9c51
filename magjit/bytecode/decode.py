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
from magjit.bytecode.optable import FILTERED, Give, Op, Read, count, op_for

#: ``mj_unit`` of tracer.h: kind, mode, depth, ninputs, nposts, operand, home, next.
UNIT_LAYOUT = struct.Struct("=BBHHHIII")
FILTER_BIT = 0x80
QUIET = 1  # mode of a unit without event that need not be seen at all

_CACHE = optable.OPCODE["CACHE"]
_EXTENDED_ARG = optable.OPCODE["EXTENDED_ARG"]


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
    """A decoded code object."""

    instrs: dict[int, Instr]
    plan: Plan
    loads: frozenset[str]
    stores: frozenset[str]
    depths: Depths
    raw: tuple[RawInstr, ...]

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
    n_units = len(units) // 2
    instrs = []
    first, unit, arg = 0, 0, 0
    while unit < n_units:
        opcode, low = units[2 * unit], units[2 * unit + 1]
        arg = arg << 8 | low
        if opcode == _EXTENDED_ARG:
            unit += 1
            continue
        end = unit + 1
        while end < n_units and units[2 * end] == _CACHE:
            end += 1
        name = optable.OPNAME[opcode]
        target = -1
        if name in optable.JUMPS:
            target = end - arg if "BACKWARD" in name else end + arg
        instrs.append(RawInstr(first, unit, opcode, name, arg, end, target))
        first = unit = end
        arg = 0
    return tuple(instrs)


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


class _Decoder:
    """Decodes one code object."""

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.raw = raw_instructions(code)
        self.names = fast_local_names(code)
        self.depths = depths(code, self.raw)
        self.loads: set[str] = set()
        self.stores: set[str] = set()

    def decode(self) -> CodeInfo:
        instrs = {instr.offset: instr for instr in self.instructions()}
        plan = Plan(self.plan_units())
        return CodeInfo(
            instrs, plan, frozenset(self.loads), frozenset(self.stores), self.depths, self.raw
        )

    # ---- instructions ----

    def instructions(self) -> Iterator[Instr]:
        lines = _lines(self.code, len(self.code.co_code) // 2)
        kwnames: tuple[str, ...] = ()
        constant: object = None
        for raw in self.raw:
            value = self.argval(raw)
            keywords: tuple[str, ...] = ()
            if raw.opname == "KW_NAMES":
                kwnames = value
            elif raw.opname == "CALL":
                keywords, kwnames = kwnames, ()
            elif raw.opname == "CALL_KW":
                assert isinstance(constant, tuple)
                keywords = constant
            constant = value
            yield Instr(2 * raw.unit, raw.opname, raw.arg, value, keywords, lines[raw.unit])

    def argval(self, raw: RawInstr) -> Any:
        name, arg = raw.opname, raw.arg
        if name in optable.LOCAL_READS or name in optable.CELL_READS:
            self.loads.add(self.names[arg])
            return self.names[arg]
        if name in optable.LOCAL_WRITES or name in optable.CELL_WRITES:
            self.stores.add(self.names[arg])
            return self.names[arg]
        if name in optable.PAIRS:
            return self.pair(name, arg)
        if name in optable.CONSTANTS:
            return self.code.co_consts[arg]
        if name in optable.NAMED:
            return self.code.co_names[optable.name_index(name, arg)]
        if raw.target >= 0:
            return 2 * raw.target
        if name == "BINARY_OP":
            return optable.BINARY_SYMBOLS[arg]
        if name == "COMPARE_OP":
            return optable.compare_symbol(arg)
        if name == "MAKE_CELL":
            return self.names[arg]
        return arg if raw.opcode >= optable.HAVE_ARGUMENT else None

    def pair(self, opname: str, arg: int) -> tuple[str, str]:
        pair = self.names[arg >> 4], self.names[arg & 15]
        for action, name in zip(optable.PAIRS[opname], pair, strict=True):
            (self.loads if action == "load" else self.stores).add(name)
        return pair

    # ---- plan ----

    def plan_units(self) -> bytes:
        before = self.depths.before
        size = UNIT_LAYOUT.size
        records = bytearray(len(before) * size)
        awake = self.awake()
        for index, raw in enumerate(self.raw):
            op = op_for(raw.opname, raw.arg)
            for unit in range(raw.first, raw.unit + 1):
                quiet = 0 if unit in awake else QUIET
                UNIT_LAYOUT.pack_into(
                    records, unit * size, *Unit(0, quiet, before[unit], 0, 0, 0, raw.unit, 0)
                )
            if op.kind is not None:
                at = raw.first if optable.PREFIX_HAS_EVENT else raw.unit
                record = self.record(op, op.kind, raw, self.next_event(index))
                UNIT_LAYOUT.pack_into(records, at * size, *record)
        return bytes(records)

    def record(self, op: Op, kind: optable.EventKind, raw: RawInstr, following: int) -> Unit:
        operand = 0
        if op.read is Read.CELL:
            operand = raw.arg
        elif op.give is Give.ITERATION:
            operand = optable.landing(raw.opname, raw.target)
        return Unit(
            kind=kind | (FILTER_BIT if kind in FILTERED else 0),
            mode=op.read | op.give,
            depth=self.depths.before[raw.unit],
            ninputs=count(op.inputs, raw.arg),
            nposts=count(op.posts, raw.arg),
            operand=operand,
            home=raw.unit,
            next=following,
        )

    def awake(self) -> set[int]:
        """Units that may follow an event, on the way or by an exception: there the tracer looks."""
        units = {row.target for row in exception_table(self.code)}
        for index, raw in enumerate(self.raw):
            if op_for(raw.opname, raw.arg).kind is not None:
                units.add(self.next_event(index))
                if raw.target >= 0:
                    units.add(optable.landing(raw.opname, raw.target))
        return units

    def next_event(self, index: int) -> int:
        """Unit of the event after instruction number ``index`` completes; RESUME makes none."""
        following = index + 1
        while following < len(self.raw) and self.raw[following].opname == "RESUME":
            following += 1
        return self.raw[following].first if following < len(self.raw) else self.raw[index].end


_cache: dict[int, tuple[weakref.ref[CodeType], CodeInfo]] = {}


def decode(code: CodeType) -> CodeInfo:
    """Decodes a code object; the result is kept as long as the code object lives.

    The cache goes by identity: equal code objects may come from different lines.
    """
    key = id(code)
    found = _cache.get(key)
    if found is not None and found[0]() is code:
        return found[1]
    info = _Decoder(code).decode()
    # the callback has no Python frame: it may run in the midst of an observed program
    _cache[key] = weakref.ref(code, functools.partial(_cache.pop, key)), info
    return info


def plan_for(code: CodeType) -> Plan:
    """The plan of a code object: what ``_C.Tracer`` takes as ``plan_for``."""
    return decode(code).plan
