"""Elements of memory to registers and back, in PTX.

Texts pass through ``str.format`` once more: braces of PTX are doubled.
"""

from __future__ import annotations

from collections.abc import Iterator

from magjit_dvm.cuda.ptx import single

__all__ = [
    "BYTES",
    "COMBINE",
    "CONVERT",
    "IDENTITY",
    "from_global",
    "from_long",
    "from_shared",
    "one_from_global",
    "one_to_global",
    "packed",
    "to_global",
]

CONVERT = {
    "f16": "mov.b32 {{{{h0,h1}}}},u0; mov.b32 {{{{h2,h3}}}},u1; "
    "cvt.f32.f16 {0},h0; cvt.f32.f16 {1},h1; cvt.f32.f16 {2},h2; cvt.f32.f16 {3},h3;",
    "bf16": "shl.b32 {0},u0,16; and.b32 {1},u0,0xffff0000; "
    "shl.b32 {2},u1,16; and.b32 {3},u1,0xffff0000;",
    "u8": "and.b32 {0},u0,255; bfe.u32 {1},u0,8,8; bfe.u32 {2},u0,16,8; shr.u32 {3},u0,24;",
}
BYTES = {"32": 4, "f16": 2, "bf16": 2, "u8": 1, "i64": 8, "i64f": 8, "i64s": 8}

COMBINE = {
    "f.sum": "add.rn.f32",
    "f.squares": "add.rn.f32",
    "f.prod": "mul.rn.f32",
    "f.max": "max.NaN.f32",
    "f.min": "min.NaN.f32",
    "i.max": "max.s32",
    "i.min": "min.s32",
    "i.sum": "add.s32",
}
IDENTITY = {
    "f.sum": single(0.0),
    "f.squares": single(0.0),
    "f.prod": single(1.0),
    "f.max": single(float("-inf")),
    "f.min": single(float("inf")),
    "i.max": str(-(2**31)),
    "i.min": str(2**31 - 1),
    "i.sum": "0",
}


def from_shared(what: str, to: list[str], at: int, aligned: bool) -> str:
    """Four elements of 4 or 8 bytes in shared memory at ``ad`` + at."""
    if what == "32":
        if aligned:
            return f"ld.shared.v4.b32 {{{{{','.join(to)}}}}},[ad+{at}];"
        return "".join(f"ld.shared.b32 {one},[ad+{at + 4 * i}]; " for i, one in enumerate(to))
    return "".join(
        f"ld.shared.b64 e,[ad+{at + 8 * i}]; {from_long(what, one)} " for i, one in enumerate(to)
    )


def from_long(what: str, to: str) -> str:
    """The int64 in ``e`` as a register has it."""
    if what == "i64":
        return f"cvt.u32.u64 {to},e;"
    if what == "i64f":
        return f"cvt.rn.f32.s64 {to},e;"
    return f"cvt.sat.s32.s64 {to},e;"


def from_global(what: str, to: list[str], at: str, guard: str) -> Iterator[str]:
    """Four elements side by side in global memory, where ``q`` if that is the guard."""
    if what == "32":
        yield f"{guard}ld.global.v4.b32 {{{{{','.join(to)}}}}},[{at}];"
    elif what in CONVERT:
        vector = "b32 u0" if what == "u8" else "v2.b32 {{u0,u1}}"
        yield f"{guard}ld.global.{vector},[{at}];"
        yield CONVERT[what].format(*to)
    else:
        for i, one in enumerate(to):
            yield from one_from_global(what, one, f"{at}+{8 * i}", "q")


def one_from_global(what: str, to: str, at: str, test: str) -> Iterator[str]:
    """One element of global memory, where ``test``; else ``to`` is 0 of what it converts."""
    size = BYTES[what]
    if what == "32":
        yield f"@{test} ld.global.b32 {to},[{at}];"
    elif what == "u8":
        yield f"@{test} ld.global.u8 {to},[{at}];"
    elif size == 2:
        yield f"mov.b16 h0,0; @{test} ld.global.b16 h0,[{at}];"
        yield (
            f"cvt.f32.f16 {to},h0;"
            if what == "f16"
            else f"cvt.u32.u16 {to},h0; shl.b32 {to},{to},16;"
        )
    else:
        yield f"mov.b64 e,0; @{test} ld.global.b64 e,[{at}];"
        yield from_long(what, to)


def packed(what: str, a: list[str]) -> str:
    """Four elements of 1 or 2 bytes to u0, or u0 and u1."""
    if what in ("f16", "bf16"):
        pair = f"cvt.rn.{what}x2.f32"
        return f"{pair} u0,{a[1]},{a[0]}; {pair} u1,{a[3]},{a[2]};"
    return (
        f"prmt.b32 u0,{a[0]},{a[1]},0x0040; prmt.b32 u1,{a[2]},{a[3]},0x0040; "
        "prmt.b32 u0,u0,u1,0x5410;"
    )


def to_global(what: str, a: list[str], apart: int, guard: str) -> Iterator[str]:
    """Four elements to so many behind ``p``, in one piece but for those of 8 bytes."""
    at = BYTES[what] * apart
    if what == "32":
        yield f"{guard}st.global.v4.b32 [p+{at}],{{{{{','.join(a)}}}}};"
    elif BYTES[what] == 8:
        for half in (0, 2):
            yield _to_long(what, a[half], "e") + " " + _to_long(what, a[half + 1], "z")
            yield f"{guard}st.global.v2.b64 [p+{at + 8 * half}],{{{{e,z}}}};"
    else:
        yield packed(what, a)
        vector = "b32 [p+{}],u0" if what == "u8" else "v2.b32 [p+{}],{{{{u0,u1}}}}"
        yield f"{guard}st.global.{vector.format(at)};"


def _to_long(what: str, a: str, to: str) -> str:
    return f"cvt.s64.s32 {to},{a};" if what == "i64" else f"cvt.rzi.s64.f32 {to},{a};"


def one_to_global(what: str, a: str, at: str, guard: str) -> Iterator[str]:
    """One element to an address."""
    if what == "32":
        yield f"{guard}st.global.b32 [{at}],{a};"
    elif what == "u8":
        yield f"{guard}st.global.u8 [{at}],{a};"
    elif BYTES[what] == 2:
        yield f"cvt.rn.{what}.f32 h0,{a}; {guard}st.global.b16 [{at}],h0;"
    else:
        yield f"{_to_long(what, a, 'e')} {guard}st.global.b64 [{at}],e;"
