"""Shows fused operators as DVM's Figure 6 does: before tiling, after it, and as bytecode.

On a GPU, those are the program and the words of the image that is launched.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from magjit_dvm.instructions import DTYPES, INSTRUCTIONS, DType
from magjit_dvm.program import InputKind, Program
from magjit_dvm.vm import CudaFused, NotEncodable, observe

__all__ = ["disassemble", "observed", "text_of"]

_KERNELS = ("vec", "vec, reduces columns", "vec, reduces rows")
_PLACES = ("global", "step", "tile", "kept", "constant")
_NONE = 0xFFFF


@contextmanager
def observed() -> Iterator[list[tuple[Any, ...]]]:
    """The fused operators that run inside, as (operator, *arguments)."""
    seen: list[tuple[Any, ...]] = []
    observe(seen)
    try:
        yield seen
    finally:
        observe(None)


def disassemble(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call ``compiled`` once and show every fused operator that it ran, for these shapes.

    Args:
        compiled: what ``magjit.compile`` or ``torch.compile`` returned with this backend, or a
            fused operator itself.
        args: its arguments; so are ``kwargs``.
    """
    # The first call may be the one that is observed by the front end.
    compiled(*args, **kwargs)
    with observed() as seen:
        compiled(*args, **kwargs)
    parts = []
    for number, (fused, *arguments) in enumerate(seen):
        parts.append(f"===== fused operator {number} =====\n{text_of(fused, arguments)}")
    return "\n\n".join(parts) if parts else "no fused operator ran"


def text_of(fused: Any, arguments: Sequence[Any]) -> str:
    """One fused operator for these arguments."""
    on_gpu = isinstance(fused, CudaFused)
    program: Program = fused.program if on_gpu else fused.source
    try:
        code = fused.words(*arguments) if on_gpu else fused.encode(*arguments)
    except NotEncodable as reason:
        return f"{program}\n\n// runs operator by operator: {reason}"
    if on_gpu:
        before = ["***** program *****", _before(program, arguments), "", "***** words *****"]
        return "\n".join([*before, code])
    lines = ["***** before tiling *****", _before(program, arguments), ""]
    if code.get("empty"):
        return "\n".join([*lines, "// nothing to compute: a size is 0"])
    lines += ["***** after tiling *****", *_tiling(code), "", "***** bytecode *****"]
    return "\n".join([*lines, *_bytecode(code)])


def _before(program: Program, arguments: Sequence[Any]) -> str:
    sizes: dict[int, int] = {}
    for given, argument in zip(program.inputs, arguments, strict=True):
        if given.kind is InputKind.TENSOR and isinstance(argument, torch.Tensor):
            for dim, size in zip(given.dims, argument.shape, strict=True):
                if dim >= 0:
                    sizes[dim] = max(size, sizes.get(dim, 1))
    text = str(program)
    where = ", ".join(f"d{dim} = {size}" for dim, size in sorted(sizes.items()))
    return f"{text} // {where}" if where else text


def _tiling(code: dict[str, Any]) -> list[str]:
    outer = code["outer"][: code["n_outer"]] if not code["flat"] else []
    inner = code["outer"][code["n_outer"] :] if not code["flat"] else []
    shape = [*outer, code["rows"], code["cols"]]
    lines = [
        f"vgraph(tiles={code['tiles']}, {_KERNELS[code['reduces']]}) {{",
        f"  shape {shape}" + (f", reduced further along {inner}" if inner else ""),
        f"  tile  [{code['tile_rows']}, {code['tile_cols']}]",
    ]
    for number, phase in enumerate(code["phases"]):
        lines.append(f"  phase {number}: steps of [{phase[3]}, {phase[4]}]")
    if code["ahead"]:
        lines.append("  memory asked for ahead")
    if code["streams"]:
        lines.append("  results written past the caches")
    return [*lines, f"  local memory {code['local_bytes']} bytes a core", "}"]


def _bytecode(code: dict[str, Any]) -> Iterator[str]:
    kernel = _KERNELS[code["reduces"]]
    yield f"header: kernel={kernel}, code={code['code_words']} words, tiles={code['tiles']}"
    for number, (kind, dtype, _, argument, local, row, col, outer) in enumerate(code["slots"]):
        place = _PLACES[kind]
        if kind == 0:
            strides = [*outer, row, col]
            place = f"arg{argument}, strides {strides} bytes"
        elif kind == 4:
            place = f"constant {_number(code['constants'][local], DTYPES[dtype])}"
        else:
            place = f"{place} 0x{local:x}"
        yield f"  s{number}: {DTYPES[dtype].text} {place}"
    insns = iter(code["insns"])
    upcoming = next(insns, None)
    for number, (_, step, end, *_) in enumerate(code["phases"]):
        yield f"phase {number}"
        for part, limit in (("prologue", step), ("step", end)):
            shown = False
            while upcoming is not None and upcoming[0] < limit:
                if not shown:
                    yield f"  {part}:"
                    shown = True
                yield f"    {upcoming[0]:4}: {_instruction(upcoming)}"
                upcoming = next(insns, None)


def _instruction(insn: tuple[int, ...]) -> str:
    _, op, dtype, _, shape, aux, dst, *operands = insn
    one = INSTRUCTIONS[op]
    name = f"{one.name}.{DTYPES[dtype].text}"
    if one.name in ("cast", "finish"):
        name = f"{one.name}.{DTYPES[aux].text}.{DTYPES[dtype].text}"
    if one.name in ("load", "store"):
        return f"{name} s{dst}"
    if one.name == "fill":
        return f"{name} s{dst}, {INSTRUCTIONS[aux].name}"
    used = [f"s{slot}" for slot in operands if slot != _NONE]
    if one.name == "index_load":
        used = used[:2]
    block = "tile" if shape & 4 else "".join(("r" * (shape & 1), "c" * (shape >> 1 & 1))) or "1"
    return f"{name}.{block} {', '.join([f's{dst}', *used])}"


def _number(bits: int, dtype: DType) -> str:
    raw = struct.pack("<Q", bits)
    if dtype is DType.F32:
        value: float = struct.unpack("<f", raw[:4])[0]
        return f"{value:.9g}" if math.isfinite(value) else str(value)
    if dtype is DType.F64:
        return str(struct.unpack("<d", raw)[0])
    return str(struct.unpack("<q", raw)[0])
