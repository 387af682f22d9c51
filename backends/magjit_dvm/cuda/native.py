"""What the encoder in C++ is given: numbers of operators once, and each program as lists.

Facts stay in the tables of Python, which the Python encoder reads too.  Where those tables are not
the ones that C++ was written for, or a program is none that it knows, calls go by the Python one.
"""

from __future__ import annotations

from array import array
from typing import Any

from magjit_dvm.cuda import encode, rows, words
from magjit_dvm.cuda.forms import (
    OF_ADDING,
    OF_BATCHED,
    OF_CHUNKED,
    OF_FLAT,
    OF_NORMS,
    OF_READ_ONCE,
    OF_SEVERAL,
    OF_SQUARES,
    OF_WHOLE,
    ONLINE,
)
from magjit_dvm.cuda.functions import FLOATS, INTS, is_binary
from magjit_dvm.cuda.support import reduction_name
from magjit_dvm.instructions import INSTRUCTIONS, DType
from magjit_dvm.program import MAX_DIMS, Program
from magjit_dvm.vm import cuda_words

__all__ = ["as_lists"]

LIMITS = (
    words.FORM,
    *(words.HEADER_BYTES, words.IMAGE_BYTES, words.COUNTER_AT, words.INPUTS_AT),
    *(words.MAX_INPUTS, words.MAX_PASSES),
    *encode.LIMITS,
)
"""What both encoders have to agree on, besides the numbers of operators."""


def as_lists(program: Program) -> Any:
    """The program for C++; None where its calls are left to the Python encoder."""
    numbers = [node.number for node in program.nodes]
    wide = any(isinstance(one, int) and not -(1 << 63) <= one < 1 << 63 for one in numbers)
    if not _READY or wide or program.rank > MAX_DIMS:
        return None
    floats = bytes(isinstance(one, float) for one in numbers)
    return (program.rank, *program._as_lists(), floats)


def _rows() -> list[Any]:
    """Of each instruction: numbers for floats, ints, and row registers; whether it wraps; the
    number of its short function, 0 without one.
    """
    return [
        (
            _operators(one.name, "f", DType.F32),
            _operators(one.name, "i", DType.I32),
            words.NUMBER.get(f"s.{one.name}", 0) if one.name in words.SCALARS else 0,
            words.NUMBER.get(f"sk.{one.name}", 0),
            words.NUMBER.get(f"sk.{rows.REVERSED.get(one.name, '')}", 0),
            one.name in rows.WRAPS,
            words.NUMBER.get(f"f.{one.name}_short", 0),
        )
        for one in INSTRUCTIONS
    ]


def _operators(name: str, kind: str, dtype: DType) -> tuple[int, ...]:
    """Numbers of a function: plain, with an immediate, both reversed; if binary; reduction."""
    turned = rows.REVERSED.get(name, "")
    names = (f"{kind}.{name}", f"{kind}k.{name}", f"{kind}.{turned}", f"{kind}k.{turned}")
    known = name in (FLOATS if kind == "f" else INTS)
    numbers = [words.code(one) if known else 0 for one in names]
    reduction = reduction_name(name, dtype)
    number = words.REDUCTIONS.index(reduction) if reduction else -1
    return (*numbers, int(known and is_binary(name, kind)), number)


_USES = array(
    "H",
    (
        (name in words.BY_ROW)
        | (name in OF_FLAT) << 1
        | (name in OF_WHOLE) << 2
        | (name in OF_ADDING) << 3
        | (name in OF_NORMS) << 4
        | (name.startswith("row.") or name in ONLINE) << 5
        | (name in OF_SQUARES) << 6
        | name.startswith("st.") << 7
        | (name in OF_SEVERAL) << 8
        | (name in OF_CHUNKED) << 9
        | (name in OF_BATCHED) << 10
        | (name in OF_READ_ONCE) << 11
        for name in words.OPCODES
    ),
).tobytes()
"""``Use`` of ``csrc/cuda_encoder.h``, of each operator."""


def _handed_over() -> bool:
    try:
        cuda_words(words.NUMBER, _rows(), LIMITS, _USES)
    except ValueError:
        return False
    return True


_READY = _handed_over()
