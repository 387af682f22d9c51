"""The inner loop's PTX, statement by statement, for the 32 lanes of each warp of a row.

The simulator says what words mean; this runs what the kernel will run, over the same tiles.  Warps
take turns at named barriers.  The shell around the loop (producer, tiles) is the simulator's.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import cache
from typing import Any

import numpy as np
import torch

from magjit_dvm.cuda.cases import ABSENT
from magjit_dvm.cuda.forms import LANES
from magjit_dvm.cuda.functions import tables
from magjit_dvm.cuda.interpreter import inner_loop
from magjit_dvm.cuda.ptx import outcome
from magjit_dvm.cuda.simulate import ImageError, Memory, _Kernel, memory_of

Array = Any
_LANES = np.arange(32)
_WIDTH = {"b16": 2, "u8": 1, "f64": 8, "b64": 8, "b32": 4}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_STATEMENT = re.compile(r"(?:@(!?)(\w+) )?([\w.]+) ?(.*)")
_CONSTANT_BASE = 1 << 60
_ANYTHING = 0xFFC0DEAD
_ALL = np.ones(32, bool)
"""The mask of a statement without a guard: compared by identity, as all others are by value."""


@cache
def program(each: int, lanes: int) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    """Statements (negated, guard, opcode, its parts, operands), and where labels are."""
    statements: list[tuple[Any, ...]] = []
    labels: dict[str, int] = {}
    narrow = [form for form, count in LANES.items() if count == lanes]
    for line in inner_loop(each, form=narrow[0]) if narrow else inner_loop(each):
        text = line.partition(" // ")[0].strip()
        for part in text.split(";"):
            rest = part.strip()
            while found := re.match(r"(\w+):\s*", rest):
                labels[found[1]] = len(statements)
                rest = rest[found.end() :]
            if not rest or rest in "{}" or rest.startswith((".reg", ".branchtargets")):
                continue
            match = _STATEMENT.fullmatch(rest)
            assert match is not None, rest
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", match[4])
            opcode = match[3]
            statements.append((bool(match[1]), match[2], opcode, opcode.split("."), operands))
    return statements, labels


def run_ptx(
    image: bytes, each: int, shared_bytes: int, inputs: Any, outputs: Any, blocks: int = 1
) -> None:
    """As ``run_image``, by PTX."""
    memories = [memory_of(one, True) for one in outputs]
    memories += [memory_of(one, False) for one in inputs if isinstance(one, torch.Tensor)]
    _PtxKernel(image, each, shared_bytes, memories).run(blocks)


class _PtxKernel(_Kernel):
    def __init__(self, image: bytes, each: int, shared_bytes: int, memories: list[Memory]) -> None:
        super().__init__(image, each, shared_bytes, memories)
        h = self.h
        self.shared = np.full(shared_bytes, 0xA5, np.uint8)
        raw = self.program.view(np.uint8).reshape(-1)
        assert len(raw) <= h["barriers_at"]
        self.shared[: len(raw)] = raw
        self.ring = h["ring_at"] + (h["stages"] - 1) * h["stage_bytes"]  # whose end is the end
        self.kept_at = h["scratch_at"] + h["warps"] * h["scratch_bytes"]
        self.lanes = self.slice // each
        self.each_rows = 128 * (1 + h["numbers"] + 2 * h["accumulators"])
        self.batches: dict[int, list[tuple[int, list[int]]]] = {}
        self.rows: Array | None = None

    def run(self, blocks: int = 1) -> None:
        super().run(blocks)
        for group in list(self.batches):
            self.run_tail(group)

    def end_row(self, group: int, row: int) -> None:
        """As the loop does: rows of a batch are in lanes of the first of their warps."""
        numbers = [int(self.register(k)[0]) for k in range(self.rest[-1])]
        self.batches.setdefault(group, []).append((row, numbers))
        if len(self.batches[group]) == 32:
            self.run_tail(group)

    def run_tail(self, group: int) -> None:
        batch, waiting = self.batches.pop(group), self.rest[-1]
        self.begin_row(1, batch[0][0])
        self.rows = np.array([row for row, _ in batch])
        for k in range(waiting):
            found = [numbers[k] for _, numbers in batch]
            self.register(waiting + k)[:] = [*found, *found[:1] * (32 - len(batch))]
        self.run_words(self.first[-1], 0, 0, np.zeros(1, int), 0, True)
        self.rows = None

    def register(self, k: int) -> Array:
        """A row register of a row's first warp."""
        at = self.h["rows_at"] + 128 * (1 + k)
        return self.shared[at : at + 128].view(np.uint32)

    def run_row(self, tile: int, group: int, row: int, rows_of_tile: int, blocks: int) -> None:
        """A warp that has several rows runs them together."""
        if group % (32 // self.lanes) == 0:
            super().run_row(tile, group, row, rows_of_tile, blocks)

    def begin_row(self, group: int, row: int) -> None:
        super().begin_row(group, row)
        h = self.h
        self.shared[h["rows_at"] : self.kept_at] = 0xA5
        for member in range(group):
            at = h["rows_at"] + member * self.each_rows
            self.shared[at : at + 128].view(np.uint32)[:] = h["partials_at"]

    def open_sums(self, place: int, group: int) -> None:
        for part in self.parts_of_sums():
            part[:] = 0
        for part, known in zip(self.parts_of_sums(), self.sums.get((place, group), ())):
            part[:] = known

    def close_sums(self, place: int, group: int) -> None:
        self.sums[place, group] = [part.copy() for part in self.parts_of_sums()]

    def values_of_sums(self, kept: Any) -> list[Array]:
        whole = np.array([part.view(np.uint32).reshape(self.h["sums"], -1) for part in kept])
        return list(whole.swapaxes(0, 1))

    def parts_of_sums(self) -> list[Array]:
        """Of each warp of a row, the scratch memory that outlives it."""
        h = self.h
        firsts = [h["scratch_at"] + k * h["scratch_bytes"] for k in range(h["group"])]
        return [self.shared[at : at + h["sums"] * 128 * self.each] for at in firsts]

    def stage(self, start: int, count: int, row: int = 0) -> None:
        super().stage(start, count, row)
        ring = self.ring
        self.shared[ring : ring + self.h["stage_bytes"]] = 0xA5
        for at, (low, high, size, address) in self.staged.items():
            low, high = low // 16 * 16, -(-high // 16) * 16
            for one in self.memories:
                end = one.address + len(one.data)
                if one.address <= address < end:
                    wanted = np.arange(low, high)
                    if period := self.periods.get(at, 0) or self.repeats.get(at, 0):
                        wanted = address + (wanted - address) % (period * size)
                    there = (wanted >= one.address) & (wanted < end)
                    to = ring + at + np.flatnonzero(there)
                    self.shared[to] = one.data[wanted[there] - one.address]
                    break

    def run_words(
        self, word: int, start: int, local: int, there: Array, more: int, owner: bool
    ) -> None:
        h = self.h
        warps = []
        scratch_at, scratch_bytes = h["scratch_at"], h["scratch_bytes"]
        if word == h["prologue"]:
            scratch_at, scratch_bytes = self.kept_at, 128 * self.each
        for member, count in enumerate(there):
            of_row, apart = _LANES % self.lanes, _LANES // self.lanes
            own = local + member * self.slice + 4 * of_row + apart * h["cols"]
            row = self.row + apart
            owns = (of_row == 0) & (member == 0) & bool(owner) & (row < h["rows"])
            group = 0
            if h["by_rows"]:
                group = local // h["cols"] if h["chunks"] == 1 else self.row % h["by_rows"]
            facts = len(there) | member << 8 | (group + apart) << 16
            facts |= h["numbers"] << 24 | (more != 0) << 30
            if word != h["prologue"]:
                facts |= (row >= h["rows"]) * ABSENT
                row = np.where(row < h["rows"], row, self.row)
            else:
                row, own = np.full(32, self.row), own - apart * h["cols"]
            if self.rows is not None:
                there_too = len(self.rows)
                row = np.append(self.rows, np.full(32 - there_too, self.rows[0]))
                facts, owns = facts & ~ABSENT, _LANES < there_too
            operands = [
                np.full(32, 16 * word),
                np.full(32, self.ring),
                own,
                start + own,
                np.full(32, count),
                h["rows_at"] + member * self.each_rows + 128 + 4 * _LANES,
                facts | owns.astype(np.int64) << 31,
                row,
                scratch_at + member * scratch_bytes + 16 * _LANES,
            ]
            warps.append(_Warp(self, operands).run())
        waiting = warps
        while waiting:
            with np.errstate(all="ignore"):
                still = [one for one in waiting if next(one, "done") != "done"]
            assert len(still) in (0, len(waiting)), "warps of a row that wait without the others"
            waiting = still


_WORDWISE = frozenset({"add", "sub", "mul", "fma", "and", "or", "xor", "shl", "shr", "selp"})
_WORDS = frozenset({"b32", "f32", "s32", "u32"})
"""What most statements are: of 32 bits, and without a meaning of their own below."""

_CASES = {"TABLE": "L", "BY": "B", "BY_TILE": "O"}
"""What the labels of a table's cases begin with."""


@cache
def _literal(name: str) -> Array:
    """The bits of a number, or of an address that has a name."""
    named = {"mj_shared": 0, "mj_powers": _CONSTANT_BASE}
    base = 16 if name[:2] in ("0f", "0d", "0x") else 10
    bits = named[name] if name in named else int(name[2:] if base == 16 else name, base)
    made = np.full(32, bits % (1 << 64), np.uint64)
    made.flags.writeable = False
    return made


class _Warp:
    def __init__(self, kernel: _PtxKernel, operands: list[Array]) -> None:
        self.kernel = kernel
        self.state = {f"%{k}": one.astype(np.uint64) for k, one in enumerate(operands)}
        # Tiles begin with anything: what turns one moves elements that are still to come.
        for register in (f"{bank}{r}" for bank in "AT" for r in range(kernel.each)):
            self.state[register] = np.full(32, _ANYTHING, np.uint64)

    def run(self) -> Generator[str, None, None]:
        statements, labels = program(self.kernel.each, self.kernel.lanes)
        at = 0
        while at < len(statements):
            negated, guard, opcode, parts, operands = statements[at]
            at += 1
            mask = self.state[guard] ^ negated if guard else _ALL
            if opcode == "bra.uni":
                assert mask.all() or not mask.any(), "a branch that lanes do not take together"
                at = labels[operands[0]] if mask.all() else at
            elif opcode == "brx.idx.uni":
                index = self.get(operands[0])
                assert (index == index[0]).all(), "a jump that lanes do not take together"
                at = labels[f"{_CASES[operands[1]]}{index[0]}"]
            elif opcode == "bar.sync":
                yield "waits"
            else:
                self.step(opcode, parts, operands, mask)
            if "DONE" in labels and at == labels["DONE"]:
                return

    def get(self, name: str) -> Array:
        """A register's or a literal's bits."""
        found = self.state.get(name)
        return _literal(name) if found is None else found

    def set(self, name: str, value: Array, mask: Array) -> None:
        if value.dtype != bool:
            value = value.astype(np.uint64, copy=False)
        if mask is not _ALL and not mask.all():
            before = self.state.get(name)
            assert before is not None, f"{name} has no value yet"
            value = np.where(mask, value, before)
        self.state[name] = value

    def address(self, text: str) -> Array:
        name, _, offset = text.strip("[]").partition("+")
        return self.get(name).astype(np.int64) + int(offset or 0)

    def step(self, opcode: str, parts: list[str], operands: list[str], mask: Array) -> None:
        if opcode == "trap":
            if mask.any():
                raise IndexError("a position beyond its table")
            return
        if parts[0] == "prefetch":
            self.kernel.places(self.address(operands[0])[mask], 1)
            return
        if parts[0] in ("ld", "st"):
            self.move(parts, operands, mask)
            return
        if opcode.startswith("mov.") and "{" in "".join(operands):
            self.pack(operands, 32 if opcode.endswith("64") else 16)
            return
        to, *given = operands
        if parts[0] == "mov":
            self.set(to, self.get(given[0]), mask)
            return
        values = [self.get(one.lstrip("!")) for one in given]
        to, _, there = to.partition("|")
        if there:  # of a shuffle: whether a lane's number comes from another
            self.set(there, _LANES >= int(values[1][0]), mask)
        self.set(to, self.computed(parts, values, given), mask)

    def pack(self, operands: list[str], half: int) -> None:
        to, of = (one.strip("{}").split(",") for one in operands)
        everything = np.ones(32, bool)
        if len(to) == 2:
            value = self.get(of[0]).astype(np.uint64)
            low = np.uint64((1 << half) - 1)
            self.set(to[0], value & low, everything)
            self.set(to[1], value >> np.uint64(half) & low, everything)
        else:
            low, high = (self.get(one) & 0xFFFFFFFF for one in of)
            self.set(to[0], low | high << np.uint64(32), everything)

    def computed(self, parts: list[str], values: list[Array], given: list[str]) -> Array:
        name, kind = parts[0], parts[-1]
        if name in _WORDWISE and kind in _WORDS and parts[1] not in ("hi", "wide"):
            return self.evaluated(parts, values, given)
        low = [one.astype(np.uint32) if one.dtype != bool else one for one in values]
        if name == "setp" and "and" in parts:
            parts, both = [one for one in parts if one != "and"], values[2]
            first = self.computed(parts, values[:2], given)
            return first & (both ^ given[2].startswith("!"))
        if name == "setp" and kind == "u32":
            compare = {"eq": np.equal, "ne": np.not_equal, "le": np.less_equal, "gt": np.greater}
            compare |= {"ge": np.greater_equal, "lt": np.less}
            return compare[parts[1]](low[0], low[1])
        if name == "bfe":
            return low[0] >> low[1] & ((1 << low[2].astype(np.uint64)) - 1)
        if name == "prmt":
            both = low[0].astype(np.uint64) | low[1].astype(np.uint64) << np.uint64(32)
            picks = [int(low[2][0]) >> 4 * k & 15 for k in range(4)]
            made = [
                (both >> np.uint64(8 * one) & 255) << np.uint64(8 * k)
                for k, one in enumerate(picks)
            ]
            return np.bitwise_or.reduce(made)
        if name == "shf":
            both = low[0].astype(np.uint64) | low[1].astype(np.uint64) << np.uint64(32)
            by = np.minimum(values[2], 32) if "clamp" in parts else values[2] & 31
            return both >> by & 0xFFFFFFFF
        if name == "shfl" and parts[2] == "up":
            return low[0][np.maximum(_LANES - int(low[1][0]), 0)]
        if name == "shfl" and parts[2] == "idx":
            return low[0][low[1] & 31]
        if name == "shfl":
            return low[0][_LANES ^ int(low[1][0])]
        if name == "vote":
            return np.full(32, bool(values[0].all() if "all" in parts else values[0].any()))
        if name == "mul" and parts[1] == "hi":
            return values[0].astype(np.uint32).astype(np.uint64) * low[1] >> np.uint64(32)
        if parts == ["mul", "wide", "u32"]:
            return low[0].astype(np.uint64) * low[1]
        if parts == ["cvt", "rn", "f32", "u32"]:
            return low[0].astype(np.float32).view(np.uint32)
        if name == "mad" and parts[1] == "wide":
            signed = [one.view(np.int32).astype(np.int64) for one in low[:2]]
            return (signed[0] * signed[1] + values[2].view(np.int64)).view(np.uint64)
        if name == "mad":
            return low[0] * low[1] + low[2]
        if kind == "u64" and name in ("add", "sub", "mul"):
            by = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
            return by[name](values[0], values[1])
        if name == "cvt" and parts[-2:] in (["u64", "u32"], ["u32", "u16"], ["u32", "u64"]):
            return low[0]
        if name == "cvt" and parts[-2:] == ["s64", "s32"]:
            return low[0].view(np.int32).astype(np.int64).view(np.uint64)
        if parts == ["cvt", "sat", "s32", "s64"]:
            near = values[0].view(np.int64).clip(-(2**31), 2**31 - 1)
            return near.astype(np.int32).view(np.uint32)
        if name == "cvt" and parts[-2:] == ["f32", "s64"]:
            return values[0].view(np.int64).astype(np.float32).view(np.uint32)
        if name == "cvt" and parts[2][:4] in ("bf16", "f16x"):
            return self.rounded(parts[2], low)
        return self.evaluated(parts, values, given)

    def rounded(self, to: str, low: list[Array]) -> Array:
        def half(one: Array) -> Array:
            dtype = torch.bfloat16 if to.startswith("bf16") else torch.float16
            line = torch.from_numpy(one.view(np.float32).copy()).to(dtype)
            return line.view(torch.int16).numpy().view(np.uint16).astype(np.uint64)

        if to.endswith("x2"):  # the first operand is the upper half
            return half(low[0]) << np.uint64(16) | half(low[1])
        return half(low[0])

    def evaluated(self, parts: list[str], values: list[Array], given: list[str]) -> Array:
        """As functions of elements are."""
        kind = parts[-1].replace("u32", "s32").replace("u64", "s64")
        wide = kind in ("f64", "s64", "b64")
        shift = parts[0] in ("shl", "shr")
        fitted = []
        for k, one in enumerate(values):
            narrow = not wide or (shift and k) or one.dtype == bool
            if given[k].startswith("0f"):
                narrow = True
            bits = one if one.dtype == bool else one.astype(np.uint32 if narrow else np.uint64)
            fitted.append(bits.astype(np.uint16) if kind == "f16" else bits)
        if parts[0] == "shr" and parts[-1] == "u32":
            return fitted[0] >> np.minimum(fitted[1], 31)
        return outcome(".".join([*parts[:-1], kind]), fitted)

    def move(self, parts: list[str], operands: list[str], mask: Array) -> None:
        size = _WIDTH[parts[-1]]
        count = int(parts[2][1]) if parts[2][:1] == "v" else 1
        where = operands[1] if parts[0] == "ld" else operands[0]
        registers = (operands[0] if parts[0] == "ld" else operands[1]).strip("{}").split(",")
        assert len(registers) == count
        addresses = self.address(where)
        if (addresses[mask] % (size * count)).any():
            raise ImageError("an access that is not aligned")
        for k, register in enumerate(registers):
            places = addresses + k * size if k else addresses
            if parts[0] == "ld":
                beyond = 0 if parts[1] != "global" else k * size
                self.set(register, self.loaded(parts[1], places, size, mask, beyond), mask)
            elif mask.any():
                self.stored(parts[1], places[mask], size, self.get(register)[mask])

    def loaded(self, space: str, places: Array, size: int, mask: Array, beyond: int = 0) -> Array:
        """Elements of memory; ``beyond`` bytes before them are aligned bytes that share a tensor's.

        What lies beyond the end of a tensor and within the same aligned bytes is anything.
        """
        made = np.zeros(32, np.uint64)
        if mask is not _ALL and not mask.any():
            return made
        if space == "const":
            (table,) = tables().values()
            return table.view(np.uint64)[(places - _CONSTANT_BASE) // 8]
        if space == "shared":
            if places.min() < 0 or places.max() + size > len(self.kernel.shared):
                raise ImageError("shared memory that is not there")
            raw = self.kernel.shared[places[mask][:, None] + np.arange(size)]
        else:
            memory, at = self.kernel.places(places[mask] - beyond, 1)
            at = at + np.arange(beyond, beyond + size)
            raw = memory.data[np.minimum(at, len(memory.data) - 1)]
        made[mask] = np.ascontiguousarray(raw).view(_BITS[size])[:, 0]
        return made

    def stored(self, space: str, places: Array, size: int, values: Array) -> None:
        raw = values.astype(_BITS[size]).view(np.uint8).reshape(-1, size)
        if space == "shared":
            self.kernel.shared[places[:, None] + np.arange(size)] = raw
        else:
            memory, at = self.kernel.places(places, size, write=True)
            memory.data[at] = raw
