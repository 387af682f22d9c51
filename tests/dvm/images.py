"""The bytes of a program, as ``csrc/bytecode.h`` and ``csrc/program.h`` lay them out."""

from __future__ import annotations

import ctypes
import random
from typing import Any

MAX_DIMS, MAX_SLOTS, MAX_PHASES, MAX_CONSTANTS = 8, 400, 8, 96


class Slot(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint8),
        ("dtype", ctypes.c_uint8),
        ("shape", ctypes.c_uint8),
        ("argument", ctypes.c_uint8),
        ("local", ctypes.c_uint32),
        ("row", ctypes.c_int64),
        ("col", ctypes.c_int64),
    ]


class Phase(ctypes.Structure):
    _fields_ = [
        ("prologue", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
        ("end", ctypes.c_uint32),
        ("step_rows", ctypes.c_int64),
        ("step_cols", ctypes.c_int64),
    ]


class Header(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("reduces", ctypes.c_uint8),
        ("flat", ctypes.c_uint8),
        ("n_outer", ctypes.c_uint8),
        ("n_inner", ctypes.c_uint8),
        ("n_slots", ctypes.c_uint16),
        ("n_phases", ctypes.c_uint16),
        ("n_constants", ctypes.c_uint16),
        ("n_arguments", ctypes.c_uint16),
        ("n_inputs", ctypes.c_uint16),
        ("code_words", ctypes.c_uint32),
        ("local_bytes", ctypes.c_uint32),
        ("tiles", ctypes.c_int64),
        ("outer", ctypes.c_int64 * MAX_DIMS),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("tile_rows", ctypes.c_int64),
        ("tile_cols", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("phases", Phase * MAX_PHASES),
    ]


class Insn(ctypes.Structure):
    _fields_ = [
        ("op", ctypes.c_uint16),
        ("dtype", ctypes.c_uint8),
        ("length", ctypes.c_uint8),
        ("shape", ctypes.c_uint8),
        ("aux", ctypes.c_uint8),
        ("dst", ctypes.c_uint16),
        ("a", ctypes.c_uint16),
        ("b", ctypes.c_uint16),
        ("c", ctypes.c_uint16),
        ("unused", ctypes.c_uint16),
    ]


class Image(ctypes.Structure):
    _fields_ = [
        ("header", Header),
        ("slots", Slot * MAX_SLOTS),
        ("outer", ctypes.c_int64 * MAX_DIMS * MAX_SLOTS),
        ("constants", ctypes.c_uint64 * MAX_CONSTANTS),
        ("code", Insn * (4 * MAX_SLOTS)),
    ]


_SIZES = ("rows", "cols", "tile_rows", "tile_cols", "tiles", "elements")
_COUNTS = ("reduces", "flat", "n_outer", "n_inner", "local_bytes", "code_words")


def decode(image: bytes) -> dict[str, Any]:
    """What ``Fused.encode`` says of the program."""
    code = Image.from_buffer_copy(image)
    h = code.header
    n = h.n_outer + h.n_inner
    found = {name: getattr(h, name) for name in (*_SIZES, *_COUNTS)}
    found["outer"] = list(h.outer[:n])
    found["slots"] = [
        (one.kind, one.dtype, one.shape, one.argument, one.local, one.row, one.col)
        + (tuple(code.outer[k][:n]),)
        for k, one in enumerate(code.slots[: h.n_slots])
    ]
    found["phases"] = [
        (one.prologue, one.step, one.end, one.step_rows, one.step_cols)
        for one in h.phases[: h.n_phases]
    ]
    found["constants"] = list(code.constants[: h.n_constants])
    found["insns"] = [
        (2 * k, one.op, one.dtype, one.length, one.shape, one.aux, one.dst, one.a, one.b, one.c)
        for k, one in enumerate(code.code[: h.code_words // 2])
    ]
    return found


def used(image: bytes) -> list[tuple[int, int]]:
    """The ranges of bytes that mean something, header first."""
    h = Image.from_buffer_copy(image).header
    n = max(h.n_slots, 1)
    sizes = {
        "header": Header.phases.offset + h.n_phases * ctypes.sizeof(Phase),
        "slots": n * ctypes.sizeof(Slot),
        "outer": n * 8 * MAX_DIMS,
        "constants": 8 * max(h.n_constants, 1),
        "code": 8 * h.code_words,
    }
    return [(getattr(Image, name).offset, size) for name, size in sizes.items()]


def mutated(image: bytes, chosen: random.Random) -> bytes:
    """The image with some of its bytes changed: more often the low ones of small numbers."""
    made = bytearray(image)
    for _ in range(chosen.choice((1, 1, 1, 2, 3))):
        first, size = chosen.choice(used(image))
        at = first + chosen.randrange(size)
        kind = chosen.randrange(5)
        if kind == 0:
            made[at] = chosen.randrange(256)
        elif kind == 1:
            made[at] ^= 1 << chosen.randrange(8)
        elif kind == 2:
            made[at] = (made[at] + chosen.choice((-1, 1, 2, 4, 8))) % 256
        elif kind == 3:
            width = chosen.choice((1, 2, 4, 8))
            at -= at % width
            value = chosen.choice((0, 1, 2, 2**31, 2 ** (8 * width) - 1, chosen.randrange(64)))
            made[at : at + width] = (value % 2 ** (8 * width)).to_bytes(width, "little")
        else:
            other = first + chosen.randrange(size)
            width = chosen.choice((2, 4, 8, 16))
            at, other = at - at % width, other - other % width
            made[at : at + width] = image[other : other + width]
    return bytes(made[: len(image)])
