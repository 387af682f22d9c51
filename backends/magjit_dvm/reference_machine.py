"""The machine of ``csrc/vm.cpp`` in plain Python: what bytecode means.

``run_bytecode`` executes what ``Fused.encode`` returns, tile by tile and step by step over bytes,
and checks what C++ cannot: each access lies within its memory, inputs are only read, and nothing
is read from local memory that the tile has not written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from magjit_dvm.instructions import DTYPES, INSTRUCTIONS, DType, Kind
from magjit_dvm.reference_reductions import identity, joined_moments

__all__ = ["BytecodeError", "run_bytecode"]

_BY_NAME = {one.name: one for one in INSTRUCTIONS}
_COMBINED: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


class BytecodeError(Exception):
    """A program of bytecode does what none may do."""


class SlotKind(IntEnum):
    """As in ``csrc/bytecode.h``."""

    GLOBAL = 0
    STEP = 1
    TILE = 2
    KEPT = 3
    CONSTANT = 4


ROWS, COLS, TILE = 1, 2, 4
COLUMNS_REDUCED = 1
NO_SLOT = 0xFFFF
_POISON = 0xFF


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a value is."""

    kind: int
    dtype: DType
    shape: int
    argument: int
    local: int
    row: int
    col: int
    outer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Insn:
    """One decoded instruction."""

    op: str
    kind: Kind
    dtype: DType
    shape: int
    aux: int
    dst: int
    operands: tuple[int, int, int]


@dataclass(slots=True)
class Memory:
    """Bytes that a program may touch; ``written`` marks those of local memory that a tile wrote."""

    data: np.ndarray[Any, Any]
    writable: bool
    written: np.ndarray[Any, Any] | None = None

    def checked(self, offsets: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
        """The places of the bytes of elements at ``offsets``."""
        if offsets.size and (offsets.min() < 0 or offsets.max() + size > len(self.data)):
            raise BytecodeError("an access out of bounds")
        places: np.ndarray[Any, Any] = offsets[..., None] + np.arange(size)
        return places


@dataclass(slots=True)
class State:
    """The place of a value while a block runs, as in ``csrc/bytecode.h``."""

    memory: Memory | None
    p: int
    rs: int
    cs: int

    def offsets(self, rows: int, cols: int, size: int, cs: int) -> np.ndarray[Any, Any]:
        """Of the elements of a block."""
        r, c = np.arange(rows)[:, None], np.arange(cols)[None, :]
        offsets: np.ndarray[Any, Any] = self.p + r * self.rs + c * (size * cs)
        return offsets


def read(memory: Memory | None, offsets: np.ndarray[Any, Any], dtype: DType) -> torch.Tensor:
    """The elements at ``offsets``, in their shape."""
    if memory is None:
        raise BytecodeError("a slot is read before it is bound")
    places = memory.checked(offsets, dtype.size)
    if memory.written is not None and not memory.written[places].all():
        raise BytecodeError("local memory is read before it is written")
    raw = torch.from_numpy(memory.data[places].reshape(-1))
    if dtype is DType.BOOL:
        return (raw != 0).reshape(offsets.shape)
    return raw.view(dtype.torch).reshape(offsets.shape)


def write(
    memory: Memory | None, offsets: np.ndarray[Any, Any], dtype: DType, value: torch.Tensor
) -> None:
    """Write ``value``, of the shape of ``offsets``."""
    if memory is None:
        raise BytecodeError("a slot is written before it is bound")
    if not memory.writable:
        raise BytecodeError("an input or a constant is written")
    places = memory.checked(offsets, dtype.size)
    line = torch.empty(value.numel(), dtype=dtype.torch).copy_(value.reshape(-1))
    memory.data[places] = line.view(torch.uint8).numpy().reshape(places.shape)
    if memory.written is not None:
        memory.written[places] = True


def run_bytecode(
    encoded: Mapping[str, Any],
    arguments: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    extents: Sequence[tuple[int, int]] | None = None,
    initialised: bool = True,
) -> None:
    """Execute a program of bytecode, which writes ``outputs``.

    Args:
        encoded: from ``Fused.encode``.
        arguments: those of the call.
        outputs: tensors of the results' shapes and strides.
        extents: bytes below and above each argument's address that belong to it; without
            them, those of its storage.
        initialised: whether local memory must be written before it is read.

    Raises:
        BytecodeError: the program reads or writes what it may not.
        IndexError: a position is out of bounds.
    """
    if "empty" in encoded:
        return
    given = [*arguments, *outputs]
    memories, bases = [], []
    for number, one in enumerate(given):
        writable = number >= len(arguments)
        memory, base = _memory(one, writable, extents[number] if extents else None)
        memories.append(memory)
        bases.append(base)
    _Core(encoded, memories, bases, initialised).run()


def _memory(one: Any, writable: bool, extent: tuple[int, int] | None) -> tuple[Memory | None, int]:
    if not isinstance(one, torch.Tensor):
        return None, 0
    whole = torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage())
    base = int(one.storage_offset()) * one.element_size()
    data = whole.numpy()
    if extent is not None:
        data, base = data[base + extent[0] : base + extent[1]], -extent[0]
    return Memory(data, writable), base


class _Core:
    """One core that runs all tiles: ``Core`` of ``csrc/vm.cpp``."""

    def __init__(
        self,
        encoded: Mapping[str, Any],
        memories: Sequence[Memory | None],
        bases: Sequence[int],
        initialised: bool,
    ) -> None:
        self.h = encoded
        self.memories, self.bases = memories, bases
        self.slots = [_slot(one) for one in encoded["slots"]]
        self.code = {one[0]: _insn(one) for one in encoded["insns"]}
        self.n_outer: int = encoded["n_outer"]
        self.outer: list[int] = encoded["outer"]
        local = np.full(encoded["local_bytes"], _POISON, np.uint8)
        written = np.zeros(len(local), bool) if initialised else None
        self.local = Memory(local, True, written)
        constants = np.array(encoded["constants"], np.uint64)
        self.constants = Memory(constants.view(np.uint8), False)
        self.state = [self._first_state(slot) for slot in self.slots]
        self.base = [0] * len(self.slots)
        self.index = [0] * len(self.outer)
        self.tile_row = self.tile_col = self.tile_rows = self.tile_cols = 0
        self.row = self.col = self.rows = self.cols = self.inner_index = 0

    def _first_state(self, slot: Slot) -> State:
        if slot.kind == SlotKind.CONSTANT:
            return State(self.constants, 8 * slot.local, 0, 0)
        if slot.kind == SlotKind.GLOBAL:
            return State(None, 0, 0, 0)
        return State(self.local, slot.local, 0, 0)

    # -- tiles and steps --

    def run(self) -> None:
        """All tiles, in order."""
        h = self.h
        row_tiles = -(-h["rows"] // h["tile_rows"])
        col_tiles = -(-h["cols"] // h["tile_cols"])
        for tile in range(h["tiles"]):
            rest, at = divmod(tile, col_tiles)
            self.tile_col = at * h["tile_cols"]
            rest, at = divmod(rest, row_tiles)
            self.tile_row = at * h["tile_rows"]
            if not h["flat"]:
                self._enumerate(rest, 0, self.n_outer)
            self._enumerate(0, self.n_outer, len(self.outer))
            self.tile_rows = min(h["tile_rows"], h["rows"] - self.tile_row)
            self.tile_cols = min(h["tile_cols"], h["cols"] - self.tile_col)
            self.row, self.col, self.inner_index = self.tile_row, self.tile_col, 0
            for number, slot in enumerate(self.slots):
                if slot.kind == SlotKind.GLOBAL:
                    outer = zip(self.index, slot.outer[: self.n_outer], strict=False)
                    moved = 0 if h["flat"] else sum(i * stride for i, stride in outer)
                    self.base[number] = self.bases[slot.argument] + moved
            if self.local.written is not None:
                self.local.written[:] = False
            self._run_tile()

    def _enumerate(self, number: int, first: int, last: int) -> None:
        for i in reversed(range(first, last)):
            number, self.index[i] = divmod(number, self.outer[i])

    @property
    def inner(self) -> int:
        """How many blocks steps enumerate for each row and column."""
        return torch.Size(self.outer[self.n_outer :]).numel()

    @property
    def tile_length(self) -> int:
        """The size of the tile's own dimension."""
        return self.tile_rows if self.h["reduces"] == COLUMNS_REDUCED else self.tile_cols

    def _run_tile(self) -> None:
        for prologue, step, end, step_rows, step_cols in self.h["phases"]:
            if prologue != step:
                for number, slot in enumerate(self.slots):
                    if slot.kind == SlotKind.TILE:
                        self.state[number] = State(self.local, slot.local, 0, 1)
                self._run_block(prologue, step)
            if step != end:
                self._run_steps(step, end, step_rows, step_cols)

    def _run_steps(self, first: int, end: int, step_rows: int, step_cols: int) -> None:
        last_row, last_col = self.tile_row + self.tile_rows, self.tile_col + self.tile_cols
        steps = itertools.product(
            range(self.tile_row, last_row, step_rows),
            range(self.inner),
            range(self.tile_col, last_col, step_cols),
        )
        for row, inner, col in steps:
            self.row, self.inner_index, self.col = row, inner, col
            self.rows, self.cols = min(step_rows, last_row - row), min(step_cols, last_col - col)
            self._enumerate(inner, self.n_outer, len(self.outer))
            self._enter_step()
            self._run_block(first, end)

    def _enter_step(self) -> None:
        for slot, state in zip(self.slots, self.state, strict=True):
            if slot.kind == SlotKind.STEP:
                wide = bool(slot.shape & COLS)
                width = slot.dtype.size * (self.cols if wide else 1)
                state.rs, state.cs = (width if slot.shape & ROWS else 0), int(wide)

    def _run_block(self, first: int, end: int) -> None:
        at = first
        while at < end:
            insn = self.code[at]
            at += 2
            if insn.kind is Kind.MEMORY:
                self._memory(insn)
            elif insn.kind in (Kind.REDUCE, Kind.REDUCE2):
                self._reduce(insn)
            elif insn.kind is Kind.REDUCE3:
                self._moments(insn)
            elif insn.kind is Kind.SCAN:
                self._scan(insn)
            else:
                self._compute(insn)

    def _block(self, insn: Insn) -> tuple[int, int]:
        if insn.shape & TILE:
            return 1, self.tile_length
        return self.rows if insn.shape & ROWS else 1, self.cols if insn.shape & COLS else 1

    # -- addresses --

    def _at_step(self, number: int) -> int:
        slot = self.slots[number]
        p = self.base[number]
        if self.h["flat"]:
            return p + self.col * slot.col
        p += self.row * slot.row + self.col * slot.col
        inner = range(self.n_outer, len(self.outer))
        return p + sum(self.index[i] * slot.outer[i] for i in inner)

    def _bind(self, number: int) -> None:
        slot = self.slots[number]
        size, by_columns = slot.dtype.size, self.h["reduces"] == COLUMNS_REDUCED
        row, col = self.row - self.tile_row, self.col - self.tile_col
        if slot.kind == SlotKind.GLOBAL:
            rs = 0 if self.h["flat"] else slot.row
            memory = self.memories[slot.argument]
            self.state[number] = State(memory, self._at_step(number), rs, int(slot.col == size))
        elif slot.kind == SlotKind.TILE:
            p = slot.local + (row if by_columns else col) * size
            self.state[number] = State(self.local, p, size * by_columns, int(not by_columns))
        elif slot.kind == SlotKind.KEPT:
            if by_columns:
                width = self.inner * self.h["cols"]
                at = row * width + self.inner_index * self.h["cols"] + self.col
            else:
                width = self.tile_cols
                at = (self.inner_index * self.h["rows"] + self.row) * width + col
            self.state[number] = State(self.local, slot.local + at * size, width * size, 1)

    # -- instructions that compute --

    def _operand(self, number: int, rows: int, cols: int) -> torch.Tensor:
        state, dtype = self.state[number], self.slots[number].dtype
        return read(state.memory, state.offsets(rows, cols, dtype.size, state.cs), dtype)

    def _compute(self, insn: Insn) -> None:
        rows, cols = self._block(insn)
        count = insn.kind.operands
        args = [self._operand(number, rows, cols) for number in insn.operands[:count]]
        if insn.op == "cast":
            value = args[0].to(insn.dtype.torch)
        else:
            reference = _BY_NAME[insn.op].reference
            assert reference is not None
            value = torch.as_tensor(reference(*args))
        state, dtype = self.state[insn.dst], self.slots[insn.dst].dtype
        write(state.memory, state.offsets(rows, cols, dtype.size, 1), dtype, value)

    def _reduce(self, insn: Insn) -> None:
        rows, cols = self._block(insn)
        dtype = self.slots[insn.dst].dtype
        args = [
            self._operand(number, rows, cols).to(dtype.torch)
            for number in insn.operands[: insn.kind.operands]
        ]
        by_columns = self.h["reduces"] == COLUMNS_REDUCED
        reference = _BY_NAME[insn.op].reference
        assert reference is not None
        if insn.kind is Kind.REDUCE2:
            total = torch.stack([reference(*(arg[r] for arg in args)) for r in range(rows)])
        else:
            total = reference(args[0], dim=1 if by_columns else 0)
        combined = _COMBINED.get(insn.op, torch.add)
        accumulator = self.state[insn.dst]
        places = accumulator.p + np.arange(total.numel()) * dtype.size
        before = read(accumulator.memory, places, dtype)
        write(accumulator.memory, places, dtype, combined(before, total.to(dtype.torch)))

    def _moments(self, insn: Insn) -> None:
        rows, cols = self._block(insn)
        block = self._operand(insn.operands[0], rows, cols).double()
        before, into = [], []
        for number in (insn.dst, *insn.operands[1:]):
            into.append(self.state[number].p + np.arange(rows) * DType.F64.size)
            before.append(read(self.local, into[-1], DType.F64))
        for places, value in zip(into, joined_moments(before, block), strict=True):
            write(self.local, places, DType.F64, value)

    def _scan(self, insn: Insn) -> None:
        rows, cols = self._block(insn)
        along, dtype = self.h["reduces"] == COLUMNS_REDUCED, self.slots[insn.operands[1]].dtype
        given = self._operand(insn.operands[0], rows, cols).to(dtype.torch)
        acc = self.state[insn.operands[1]]
        step = acc.rs if along else dtype.size
        places = acc.p + np.arange(rows if along else cols) * step
        before = read(acc.memory, places, dtype).unsqueeze(int(along))
        reference = _BY_NAME[insn.op].reference
        assert reference is not None
        running = reference(torch.cat([before, given], int(along)), dim=int(along))
        write(acc.memory, places, dtype, running.select(int(along), -1))
        to, of = self.state[insn.dst], self.slots[insn.dst].dtype
        value = running[:, 1:] if along else running[1:]
        write(to.memory, to.offsets(rows, cols, of.size, 1), of, value.to(of.torch))

    # -- instructions that move --

    def _memory(self, insn: Insn) -> None:
        rows, cols = self._block(insn)
        match insn.op:
            case "load" | "store":
                self._bind(insn.dst)
            case "view_load":
                places = self._view(insn.operands[0], rows, cols, bool(insn.shape & TILE))
                slot = self.slots[insn.operands[0]]
                value = read(self.memories[slot.argument], places, insn.dtype)
                to = self.state[insn.dst]
                write(to.memory, self._in_block(to, insn, rows, cols), insn.dtype, value)
            case "view_store":
                places = self._view(insn.dst, rows, cols, bool(insn.shape & TILE))
                given = self.state[insn.operands[0]]
                value = read(given.memory, self._in_block(given, insn, rows, cols), insn.dtype)
                write(self.memories[self.slots[insn.dst].argument], places, insn.dtype, value)
            case "index_load":
                self._index_load(insn, rows, cols)
            case "iota":
                to = self.state[insn.dst]
                places = to.offsets(rows, cols, insn.dtype.size, 1)
                made = self._positions(insn.aux, rows, cols, bool(insn.shape & TILE))
                write(to.memory, places, insn.dtype, made)
            case "one_hot":
                given, to = self.state[insn.operands[0]], self.state[insn.dst]
                at = read(given.memory, given.offsets(rows, 1, DType.I64.size, 0), DType.I64)
                value = at == self.col + torch.arange(cols)
                write(to.memory, to.offsets(rows, cols, 1, 1), insn.dtype, value)
            case "fill":
                to = self.state[insn.dst]
                places = to.offsets(1, cols, insn.dtype.size, 1)
                first = identity(INSTRUCTIONS[insn.aux].name, insn.dtype)
                write(to.memory, places, insn.dtype, first.expand(1, cols))
            case "finish":
                given, to, source = self.state[insn.operands[0]], self.state[insn.dst], insn.aux
                places = given.offsets(1, cols, DTYPES[source].size, given.cs)
                value = read(given.memory, places, DTYPES[source])
                write(to.memory, to.offsets(1, cols, insn.dtype.size, 1), insn.dtype, value)

    def _in_block(self, state: State, insn: Insn, rows: int, cols: int) -> np.ndarray[Any, Any]:
        if self.h["flat"]:
            return state.p + np.arange(cols)[None, :] * insn.dtype.size
        return state.offsets(rows, cols, insn.dtype.size, state.cs)

    def _view(self, number: int, rows: int, cols: int, tile: bool) -> np.ndarray[Any, Any]:
        """Where the elements of a block are in global memory."""
        slot = self.slots[number]
        if self.h["flat"]:
            rest = self.col + np.arange(cols)
            places = np.full(cols, self.bases[slot.argument])
            for i in reversed(range(self.n_outer)):
                places = places + rest % self.outer[i] * slot.outer[i]
                rest = rest // self.outer[i]
            return places[None, :]
        by_columns = self.h["reduces"] == COLUMNS_REDUCED
        first = self.tile_row if by_columns else self.tile_col
        p = self.base[number] + first * slot.col if tile else self._at_step(number)
        return p + np.arange(rows)[:, None] * slot.row + np.arange(cols)[None, :] * slot.col

    def _positions(self, which: int, rows: int, cols: int, tile: bool) -> torch.Tensor:
        made = torch.zeros(rows, cols, dtype=torch.int64)
        if tile and which in (1, 2):
            by_columns = self.h["reduces"] == COLUMNS_REDUCED
            return made + (self.tile_row if by_columns else self.tile_col) + torch.arange(cols)
        if which == 1:
            return made + self.row + torch.arange(rows)[:, None]
        if which == 2:
            return made + self.col + torch.arange(cols)
        return made + (self.index[which - 3] if which else 0)

    def _index_load(self, insn: Insn, rows: int, cols: int) -> None:
        table, positions, constant = insn.operands
        slot, at, to = self.slots[table], self.state[positions], self.state[insn.dst]
        stride, limit = (np.int64(np.uint64(self.h["constants"][constant + k])) for k in (0, 1))
        of = DTYPES[insn.aux]
        index = read(at.memory, at.offsets(rows, cols, of.size, at.cs), of).long()
        if bool(((index < 0) | (index >= int(limit))).any()):
            raise IndexError("index out of range in self")
        places = self._view(table, rows, cols, bool(insn.shape & TILE)) + index.numpy() * stride
        value = read(self.memories[slot.argument], places, insn.dtype)
        write(to.memory, to.offsets(rows, cols, insn.dtype.size, 1), insn.dtype, value)


def _slot(given: Sequence[Any]) -> Slot:
    kind, dtype, shape, argument, local, row, col, outer = given
    return Slot(kind, DTYPES[dtype], shape, argument, local, row, col, tuple(outer))


def _insn(given: Sequence[int]) -> Insn:
    _, op, dtype, _, shape, aux, dst, a, b, c = given
    row = INSTRUCTIONS[op]
    return Insn(row.name, row.kind, DTYPES[dtype], shape, aux, dst, (a, b, c))
