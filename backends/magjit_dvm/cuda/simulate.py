"""The interpreter in plain Python: what the image of a launch means.

``run_image`` executes the bytes that a kernel would get, row by row (or warp by warp), over the
memory of CPU tensors, and checks what a GPU does not say: each access lies within an argument,
inputs are only read, addresses are aligned as their instructions want them, and scratch memory and
row registers are written before they are read.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from magjit_dvm.cuda.backwards import READY
from magjit_dvm.cuda.functions import elementwise, is_binary, tables
from magjit_dvm.cuda.ptx import evaluate
from magjit_dvm.cuda.short_functions import LARGEST
from magjit_dvm.cuda.simulate_memory import BYTES, HEADER_FIELDS, ImageError, Memory, memory_of
from magjit_dvm.cuda.simulate_rows import (
    FOLD,
    Accumulators,
    fused,
    identity,
    norm_gradient,
    normalized,
    softmax,
    standardized,
)
from magjit_dvm.cuda.simulate_sums import KeptSums
from magjit_dvm.cuda.sums import NO_SLOT
from magjit_dvm.cuda.words import (
    BY,
    BY_ROW,
    HEADER_BYTES,
    INPUTS_AT,
    KEEPS,
    NO_WORD,
    OF_ROWS,
    OPCODES,
    PARTS_AT,
    PERIOD_SHIFT,
    WHOLE_ROWS,
)

__all__ = ["ImageError", "run_image"]

Array = Any
_POISON = 0xFFC0DEAD


def run_image(
    image: bytes,
    each: int,
    shared_bytes: int,
    inputs: Sequence[Any],
    outputs: Sequence[torch.Tensor],
    blocks: int = 1,
) -> None:
    """Execute an image whose addresses are those of these tensors.

    Args:
        image: as the kernel gets it.
        each: R, elements a lane.
        shared_bytes: of a block.
        inputs: of the call; numbers are passed over.
        outputs: what it writes.
        blocks: of the launch.

    Raises:
        ImageError: it does what none may do.
    """
    memories = [memory_of(one, True) for one in outputs]
    memories += [memory_of(one, False) for one in inputs if isinstance(one, torch.Tensor)]
    _Kernel(image, each, shared_bytes, memories).run(blocks)


class _Kernel(KeptSums, Accumulators):
    def __init__(self, image: bytes, each: int, shared_bytes: int, memories: list[Memory]) -> None:
        if len(image) > 4096:
            raise ImageError("an image of more than 4 KB")
        values = struct.unpack_from("<32I3Q", image)
        self.h = dict(zip(HEADER_FIELDS, values, strict=True))
        self.find_sums()
        (self.h["parts"],) = struct.unpack_from("<Q", image, PARTS_AT)
        self.inputs = [
            struct.unpack_from("<QII", image, INPUTS_AT + 16 * k) for k in range(self.h["n_in"])
        ]
        self.program = np.frombuffer(image[HEADER_BYTES:], np.uint32).reshape(-1, 4)
        if 16 * len(self.program) != self.h["program_bytes"]:
            raise ImageError("a program of another length")
        if self.h["ring_at"] + self.h["stages"] * self.h["stage_bytes"] > shared_bytes:
            raise ImageError("stages beyond shared memory")
        rows_of_warp = max(self.h["by_rows"] * self.h["group"] // self.h["warps"], 1)
        self.each, self.slice, self.memories = each, 32 * each // rows_of_warp, memories
        self.first = [self.h[f"first{k}"] for k in range(4)]
        self.rest = [self.h[f"rest{k}"] for k in range(4)]
        self.weights: dict[int, Array] = {}
        self.staged: dict[int, Any] = {}
        self.weights_at = 0
        self.sums: dict[tuple[int, int], dict[int, Array]] = {}
        self.added: dict[int, Array] = {}
        of_rows = [(at, size) for _, size, at in self.inputs if size & OF_ROWS]
        self.periods = {at: size >> PERIOD_SHIFT for at, size in of_rows if not size & WHOLE_ROWS}
        self.repeats = {
            at: (size >> PERIOD_SHIFT) * self.h["cols"] for at, size in of_rows if size & WHOLE_ROWS
        }

    # -- tiles --

    def run(self, blocks: int = 1) -> None:
        """All tiles, in order."""
        h = self.h
        if h["warps"] % h["group"]:
            raise ImageError("warps that are in no group")
        if h["prologue"] != NO_WORD:
            self.keep_weights()
        rows_of_tile = h["by_rows"] or 1
        for tile in range(h["tiles"]):
            if h["by_rows"]:
                for group in range(rows_of_tile):
                    row = tile * rows_of_tile + group
                    if row < h["rows"]:
                        self.run_row(tile, group, row, rows_of_tile, blocks)
            else:
                for warp in range(h["warps"]):
                    start = tile * h["warps"] * self.slice
                    self.stage(start, min(h["warps"] * self.slice, h["elements"] - start))
                    there = min(max(h["elements"] - start - warp * self.slice, 0), self.slice)
                    if there:
                        self.begin_row(1, 0)
                        owner = start == 0 and warp == 0
                        counts = np.array([there])
                        self.run_words(self.first[0], start, warp * self.slice, counts, 0, owner)
        places = self.place_of(h["tiles"] - 1, blocks) + 1 if h["fixed"] < h["tiles"] else blocks
        for place in range(places if h["sums"] else 0):
            self.write_sums(place, places)

    def keep_weights(self) -> None:
        """The prologue, as warps of one row; what it saves is there for all."""
        h = self.h
        self.begin_row(h["group"], 0)
        self.staged = {}
        there = np.clip(h["cols"] - np.arange(h["group"]) * self.slice, 0, self.slice)
        self.weights_at = h["scratch_at"] + h["warps"] * h["scratch_bytes"]
        self.room = h["ring_at"] - self.weights_at
        self.run_words(h["prologue"], 0, 0, there, 0, False)
        self.weights = self.scratch

    def kept(self, at: int) -> Array:
        """A vector that the prologue has saved."""
        found = self.weights.get(at - self.weights_at)
        if found is None:
            raise ImageError("a vector that was not kept")
        return found

    def run_row(self, tile: int, group: int, row: int, rows_of_tile: int, blocks: int) -> None:
        h = self.h
        width, cols = h["group"] * self.slice, h["cols"]
        members = np.arange(h["group"]) * self.slice
        self.begin_row(h["group"], row)
        if h["chunks"] == 1:
            if cols > width:
                raise ImageError("a row that does not fit")
            start = tile * rows_of_tile * cols
            self.stage(start, min(rows_of_tile * cols, h["elements"] - start), row - group)
            there = np.clip(cols - members, 0, self.slice)
            place = self.place_of(tile, blocks)
            if self.is_whole:
                self.back_row(place, start + group * cols)
            elif h["adders"]:
                self.add_row(place, start + group * cols)
                self.run_words(self.first[0], start, group * cols, there, 0, True)
            else:
                self.open_sums(place, group)
                self.run_words(self.first[0], start, group * cols, there, 0, True)
                self.close_sums(place, group)
        else:
            if h["fixed"] & KEEPS and h["chunks"] > h["stages"]:
                raise ImageError("stages that cannot keep a row")
            for p in range(h["passes"]):
                for c in range(h["chunks"]):
                    start = row * cols + c * width
                    self.stage(start, min(width, cols - c * width), row - group)
                    there = np.clip(cols - c * width - members, 0, self.slice)
                    word = self.rest[p] if c else self.first[p]
                    self.run_words(word, start, 0, there, c, True)
        none = np.zeros(h["group"], int)
        if h["epilogue"] != NO_WORD:
            self.run_words(h["epilogue"], row * cols, 0, none, 0, True)
        if h["passes"] == 1 and self.first[-1]:
            if 2 * self.rest[-1] + 2 > h["numbers"]:
                raise ImageError("a batch that has no row registers")
            self.end_row(group, row)

    def begin_row(self, group: int, row: int) -> None:
        shape = (group, self.slice)
        self.row, self.group = row, group
        self.numbers: dict[int, Array] = {}
        self.accumulators: dict[int, tuple[Array, Array]] = {}
        self.scratch: dict[int, Array] = {}
        self.room = self.h["scratch_bytes"]
        self.empty = np.full(shape, _POISON, np.uint32)

    def end_row(self, group: int, row: int) -> None:
        """The tail of a row, in a batch of one."""
        waiting, none = self.rest[-1], np.zeros(self.h["group"], int)
        self.staged = {}
        self.numbers = {k + waiting: one for k, one in self.numbers.items() if k < waiting}
        self.run_words(self.first[-1], row * self.h["cols"], 0, none, 0, True)

    def stage(self, start: int, count: int, row: int = 0) -> None:
        """The producer's copies: each input's place, from the 16-byte boundary below on."""
        self.staged = {}
        for address, size, at in self.inputs:
            low, high = address + start * size, address + (start + count) * size
            if size & OF_ROWS:
                size %= WHOLE_ROWS
                a_row = self.h["cols"] * size if at in self.repeats else size
                rows = min(self.h["by_rows"], self.h["rows"] - row)
                low, high = address + row * a_row, address + (row + rows) * a_row
                period = self.repeats[at] if at in self.repeats else self.periods[at]
                if period * size % 16 or (period and address % 16):
                    raise ImageError("numbers that come again where 16 bytes do not begin")
            room = self.h["fixed"] & ~KEEPS if self.h["chunks"] > 1 else self.h["stage_bytes"]
            if at + (-(-high // 16) * 16 - low // 16 * 16) > room:
                raise ImageError("a stage that is too small")
            self.staged[at] = (low, high, size, address)

    # -- words --

    def run_words(
        self, word: int, start: int, local: int, there: Array, more: int, owner: bool
    ) -> None:
        """From a word to the next ``end``; registers do not outlive it."""
        self.A, self.T = self.empty.copy(), self.empty.copy()
        self.M = np.zeros(self.empty.shape, bool)
        self.local = local + np.arange(len(there))[:, None] * self.slice + np.arange(self.slice)
        self.element, self.start = start + self.local, start
        self.valid = np.arange(self.slice) < there[:, None]
        self.more, self.owner = more, owner
        named = int(self.program[word][0]) & 255
        while True:
            head, w1, w2, w3 = (int(one) for one in self.program[word])
            first = OPCODES[head & 255]
            if head & 255 != named:
                raise ImageError("a word that is not the one that was announced")
            if first == "end":
                return
            if word + 1 >= self.h["n_words"]:
                raise ImageError("words without an end")
            named = head >> 24
            self.x, self.y, self.w1 = head >> 16 & 15, head >> 20 & 15, w1
            self.F0, self.F1, self.pointer = w2, w3, w2 | w3 << 32
            if first.startswith(("lt.", "la.", "lk.")):
                self.load(first)
                self.operate(OPCODES[head >> 8 & 255])
            elif first == "by":
                self.operate(BY[head >> 8 & 255])
            elif first in ("s.by", "sk.by"):
                self.by_row(OPCODES[head >> 8 & 255], first)
            else:
                self.operate(first)
            word += 1

    def load(self, name: str) -> None:
        bank, how, *rest = name.split(".")
        if bank == "lk":
            self.F0 = int(self.number(self.y)[0])
            return
        if how == "scratch":
            if self.w1 not in self.scratch or self.w1 + 128 * self.each > self.h["scratch_bytes"]:
                raise ImageError("scratch memory is read before it is written")
            value = self.scratch[self.w1].copy()
        elif how == "w":
            value = self.kept(self.w1).copy()
        elif how == "k":
            value = np.full(self.empty.shape, self.F0, np.uint32)
        elif how == "r":
            value = np.repeat(self.number(self.y)[:, None], self.slice, 1)
        elif how in ("s", "u"):
            value = self.from_stage(rest[0], how == "s")
        elif how == "c":
            value = self.from_columns(rest[0])
        elif how == "col":
            value = (self.element - self.row * self.w1).astype(np.uint32)
        elif how == "draw":
            value = self.drawn()
        elif how == "row":
            value = self.row_of_table(rest[0], self.number(self.y))
        else:
            value = self.from_global(how, rest[0])
        setattr(self, "A" if bank == "la" else "T", value)

    def number(self, k: int) -> Array:
        if k not in self.numbers or k >= self.h["numbers"]:
            raise ImageError("a row register is read before it is written")
        return self.numbers[k]

    def operate(self, name: str) -> None:
        head, _, rest = name.partition(".")
        if head in ("f", "i"):
            self.apply(rest, head, self.T)
        elif name == "fk.mad":
            self.A = fused(self.A, *(np.full_like(self.A, one) for one in (self.F0, self.F1)))
        elif head in ("fk", "ik"):
            self.apply(rest, head[0], np.full_like(self.A, self.F0))
        elif head == "st":
            self.store(*rest.split("."))
        elif head == "at":
            self.A = self.from_table(rest, self.A)
        elif head == "pf":
            self.places(self.described(self.element), 1)
        elif head == "red":
            self.reduce(rest)
        elif head == "fin":
            self.finish(rest)
        elif head == "row":
            self.row_reduction(rest)
        elif head == "s":
            self.scalar(rest)
        elif head == "sk":
            self.scalar_and_number(rest)
        elif name == "w.scale":
            with np.errstate(all="ignore"):
                scaled = self.A.view(np.float32) * self.kept(self.w1).view(np.float32)
            self.A = scaled.view(np.uint32)
        elif head == "w":
            self.A = fused(self.A, self.kept(self.w1), self.kept(self.F0))
        elif name in ("mad.r", "nmad.r"):
            number = np.repeat(self.number(self.y)[:, None], self.slice, 1)
            number = number ^ np.uint32(1 << 31) if name == "nmad.r" else number
            self.A = fused(self.T, number, self.A)
        elif name == "swap":
            self.A, self.T = self.T, self.A
        elif name == "keep":
            self.T = self.A.copy()
        elif name == "take":
            self.A = self.T.copy()
        elif name == "mask":
            self.M = self.A != 0
        elif name == "select":
            self.A = np.where(self.M, self.A, self.T)
        elif name == "save":
            if self.w1 + 128 * self.each > self.room:
                raise ImageError("scratch memory that is not there")
            self.scratch[self.w1] = self.A.copy()
        elif name == "acc":
            self.add_to_slot(self.w1, self.A.view(np.float32))
            self.T = self.empty.copy()
        elif name == "acc.norm":
            norm = self.norm()
            with np.errstate(all="ignore"):
                self.add_to_slot(self.w1, self.A.view(np.float32) * norm)
            if self.F0 != NO_SLOT:
                self.add_to_slot(self.F0, self.A.view(np.float32))
            self.T = norm.view(np.uint32)
        elif name != "nop":
            raise ImageError(f"{name} is no second operator")

    def apply(self, name: str, kind: str, t: Array) -> None:
        operands = {"a": self.A, "t": t}
        found = evaluate(elementwise(name, kind).lines, operands, tables())["a"]
        if name in LARGEST:  # a warp with a large element goes to the function itself
            large = (np.abs(self.A.view(np.float32)) >= LARGEST[name]).any(1, keepdims=True)
            whole = elementwise(name.removesuffix("_short"), kind).lines
            found = np.where(large, evaluate(whole, operands, tables())["a"], found)
        self.A = found

    def store(self, how: str, what: str) -> None:
        size = BYTES[what]
        if how == "n":
            addresses = self.of_squares(how, size)
        elif how == "e":
            addresses = self.described(self.element)
            if self.y:
                self.check_fours(addresses, size)
        else:
            addresses = self.pointer + self.element * size
            if how == "g" and (addresses[:, ::4] % min(4 * size, 16)).any():
                raise ImageError("four elements that are not aligned")
        self.write(addresses[self.valid], what, self.A[self.valid])

    def row_reduction(self, name: str) -> None:
        """As ``reduce`` and ``finish``, of a row in one stage."""
        if self.h["chunks"] > 1:
            raise ImageError("a row that is not in one stage")
        kind, op = name.split(".")
        parts = [v[m] for v, m in zip(self.A, self.valid, strict=True)]
        whole = np.concatenate(parts).view(np.float32 if kind == "f" else np.int32)
        with np.errstate(all="ignore"):
            if op == "norm":
                if self.w1 != len(whole):
                    raise ImageError("statistics of another row")
                given = (np.uint32(one).view(np.float32) for one in (self.F0, self.F1))
                total, root, made = normalized(whole, *given)
                self.set_number(self.y, np.full(self.group, root).view(np.uint32))
                self.replace_row(made)
            elif op == "softmax":
                self.replace_row(softmax(whole))
                return
            elif op in ("cumsum", "cumprod"):
                self.replace_row(FOLD[op.removeprefix("cum")].accumulate(whole, dtype=whole.dtype))
                return
            elif op == "back":
                share = np.uint32(self.F0).view(np.float32)
                root = self.number(self.y)[:1].view(np.float32)
                norm = self.T.view(np.float32) if self.F1 & READY else self.norm()
                made = norm_gradient(whole, norm[self.valid], share, root, bool(self.F1 & 1))
                self.replace_row(made)
                self.T = self.empty.copy()
                return
            elif op == "stat":
                if self.w1 != len(whole):
                    raise ImageError("statistics of another row")
                total = whole.sum(dtype=np.float32)
                mean = total * np.uint32(self.F0).view(np.float32)
                about = np.square(whole - mean).sum(dtype=np.float32)
                self.set_number(self.y, np.full(self.group, about).view(np.uint32))
            elif op == "squares":
                total = np.square(whole).sum(dtype=np.float32)
            else:
                total = FOLD[op].reduce(whole, initial=identity(name), dtype=whole.dtype)
        self.set_number(self.x, np.full(self.group, total, whole.dtype).view(np.uint32))

    def norm(self) -> Array:
        """T normalized by row registers; without a mean where F1 is 0."""
        mean = self.number(self.x).view(np.float32)[:, None] if self.F1 else None
        root = self.number(self.y).view(np.float32)[:, None]
        with np.errstate(all="ignore"):
            return standardized(self.T.view(np.float32), mean, root)

    def replace_row(self, row: Array) -> None:
        """A ← a row; what is not there has nothing of use."""
        self.A = self.empty.copy()
        self.A[self.valid] = row.view(np.uint32)

    def scalar_and_number(self, name: str) -> None:
        t = np.full(self.group, self.F0, np.uint32)
        if name == "scaled_rsqrt":
            number = np.uint32(self.F1).view(np.float32)
            with np.errstate(all="ignore"):
                total = self.number(self.y).view(np.float32) * t.view(np.float32) + number
                value = (1 / np.sqrt(total.astype(np.float64))).astype(np.float32).view(np.uint32)
        else:
            value = self.scalars(name, t)
        self.set_number(self.x, value)

    def by_row(self, name: str, how: str) -> None:
        """The second operator, of row registers or of one and a number."""
        if name not in BY_ROW:
            raise ImageError(f"{name} is none of row registers")
        first = self.number(self.y)
        if name == "select":
            self.set_number(self.x, np.where(first, self.number(self.w1), self.number(self.F0)))
            return
        kind, _, op = name.partition(".")
        t = np.full(self.group, self.F0, np.uint32)
        if how == "s.by" and is_binary(op, kind):
            t = self.number(self.w1)
        made = evaluate(elementwise(op, kind).lines, {"a": first, "t": t}, tables())["a"]
        self.set_number(self.x, made)

    def scalars(self, name: str, t: Array) -> Array:
        operands = {"a": self.number(self.y), "t": t}
        return evaluate(elementwise(name, "f").lines, operands, tables())["a"]

    def set_number(self, k: int, value: Array) -> None:
        if k >= self.h["numbers"]:
            raise ImageError("a row register that is not there")
        self.numbers[k] = value

    def scalar(self, name: str) -> None:
        head, _, rest = name.partition(".")
        row = np.array([self.row])
        if rest == "at":
            value = np.repeat(self.described(row), self.group).astype(np.uint32)
        elif head == "ld":
            value = np.repeat(self.read(self.described(row), rest), self.group)
        elif head == "at":
            value = self.read(self.row_at(self.number(self.y)), rest)
        elif head == "st":
            if self.owner:
                self.write(self.described(row), rest, self.number(self.y)[:1])
            return
        elif name == "in":
            value = np.repeat(self.from_row_of_stage(), self.group)
        elif name == "k":
            value = np.full(self.group, self.F0, np.uint32)
        elif name == "take":
            value = self.A[:, 0].copy()
        else:
            second = self.w1 if is_binary(name, "f") else self.y
            value = self.scalars(name, self.number(second))
        self.set_number(self.x, value)
