"""One call by both encoders of the GPU: the one in C++ and the reference in Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from magjit_dvm.cuda.encode import Encoded, Machine, encode
from magjit_dvm.cuda.forms import form_of
from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.program import Program
from magjit_dvm.vm import NotEncodable

_made: dict[int, tuple[Program, DeviceFused]] = {}


def operator_of(program: Program) -> DeviceFused:
    """The fused operator, made once for calls that follow one another."""
    found = _made.get(id(program))
    if found is None:
        _made.clear()
        found = _made[id(program)] = program, DeviceFused(program)
    return found[1]


def described(encoded: Encoded) -> Any:
    """As ``CudaFused.encode`` gives it."""
    layouts = [(one.sizes, one.strides) for one in encoded.layouts]
    image = encoded.image
    if image is None:
        return layouts, b"", b"", 32, (0, 0, 0), False, 0, [], (0, 0)
    launch = image.blocks, image.threads, image.shared_bytes
    parts = image.parts
    sums = (list(parts.results), (parts.rows, parts.cols)) if parts else ([], (0, 0))
    which = image.each, launch, image.draws, form_of(image)
    return layouts, image.template(), image.patches(), *which, *sums


def outcome(function: Any, *arguments: Any) -> Any:
    """A result, or the reason of a refusal."""
    try:
        return function(*arguments)
    except NotEncodable as refusal:
        return f"refused: {refusal}"


def check_encoders(program: Program, arguments: Sequence[Any], machine: Machine) -> str:
    """Both give the same image, patches, layouts and launch, or refuse for the same reason.

    Returns:
        "encoded", "left" (to the one in Python) or the reason.
    """
    fused = operator_of(program)
    native = outcome(fused.encode, astuple(machine), *arguments)
    if native is None:
        return "left"
    reference = outcome(lambda: described(encode(program, arguments, machine)))
    if native != reference:
        raise AssertionError(difference(program, arguments, native, reference, machine))
    return reference if isinstance(reference, str) else "encoded"


def difference(
    program: Program, arguments: Sequence[Any], native: Any, reference: Any, machine: Machine
) -> str:
    """What is not the same, for people."""
    lines = [str(program)]
    if isinstance(native, str) or isinstance(reference, str):
        lines += [f"C++: {native}", f"Python: {reference}"]
        return "\n".join(lines)
    lines.append(str(encode(program, arguments, machine).image))
    names = ("layouts", "image", "patches", "R", "launch", "draws", "form", "sums", "parts")
    for name, one, other in zip(names, native, reference, strict=True):
        if one != other and isinstance(one, bytes):
            where = [at for at in range(0, len(other), 4) if one[at : at + 4] != other[at : at + 4]]
            lines.append(f"{name}: {len(one)} and {len(other)} bytes, differing at {where}")
        elif one != other:
            lines.append(f"{name}: {one} and {other}")
    return "\n".join(lines)


def memory() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
