"""Writes what follows from the table of instructions: the C++ header and the page of the docs.

``python -m magjit_dvm.generate`` writes ``csrc/instructions.inc`` and the table in
``docs/dvm.md``; a test compares both with what this module would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from magjit_dvm.instructions import DTYPES, INSTRUCTIONS, DType, Instruction, Kind

__all__ = ["HEADER", "header", "table"]

HEADER = Path(__file__).parent / "csrc" / "instructions.inc"
_BEGIN, _END = "<!-- instructions: begin -->", "<!-- instructions: end -->"

_FIRST = """\
// Generated from instructions.py by `python -m magjit_dvm.generate`: do not edit.
// MJ_OP(name, number), MJ_UNARY/MJ_BINARY/...(name, number, T, result, dtype, expression).
"""


def header() -> str:
    """The X-macros that ``kernels.inc`` and ``bytecode.h`` expand."""
    return _FIRST + "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    yield "#ifdef MJ_DTYPE"
    for dtype in DTYPES:
        yield f"MJ_DTYPE({dtype.text}, {dtype.code}, {dtype.ctype}, {dtype.size})"
    yield "#endif"
    yield "#ifdef MJ_OP"
    for number, one in enumerate(INSTRUCTIONS):
        yield f"MJ_OP({one.name}, {number}, {one.kind.value}, {int(one.to_bool)})"
    yield "#endif"
    for kind in list(Kind)[1:]:
        macro = f"MJ_{kind.value.upper()}"
        yield f"#ifdef {macro}"
        for number, one in enumerate(INSTRUCTIONS):
            if one.kind is kind and one.expression:
                yield from _rows(macro, number, one)
        yield "#endif"
    functions = sorted({_function(one) for one in INSTRUCTIONS} - {""})
    yield "#ifdef MJ_FUNCTION"
    for name in functions:
        yield f"MJ_FUNCTION({name})"
    yield "#endif"


def _function(one: Instruction) -> str:
    """The function of one float that the row stands for."""
    simple = one.kind is Kind.UNARY and one.expression == f"FN({one.name})(a)"
    return one.name if simple and one.name != "abs" else ""


def _rows(macro: str, number: int, one: Instruction) -> Iterator[str]:
    for dtype in one.dtypes:
        last = one.identity if one.kind is Kind.REDUCE else one.result(dtype).ctype
        facts = f"{one.name}, {number}, {dtype.ctype}, {last}, {dtype.code}"
        yield f"{macro}({facts}, {one.expression})"


def table() -> str:
    """Markdown: one row for each instruction."""
    lines = ["| instruction | kind | dtypes | |", "|---|---|---|---|"]
    for one in INSTRUCTIONS:
        doc = one.doc.replace("|", "\\|")
        lines.append(f"| `{one.name}` | {one.kind.value} | {_dtypes(one.dtypes)} | {doc} |")
    return "\n".join(lines)


def _dtypes(dtypes: tuple[DType, ...]) -> str:
    return "all" if dtypes == DTYPES else ", ".join(one.text for one in dtypes)


def with_table(page: str) -> str:
    """``page`` with the table between its marks made anew."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


def main() -> None:
    """Write the header, and the table where the docs are at hand."""
    HEADER.write_text(header())
    page = Path(__file__).resolve().parents[2] / "docs" / "dvm.md"
    if page.is_file():
        page.write_text(with_table(page.read_text()))


if __name__ == "__main__":
    main()
