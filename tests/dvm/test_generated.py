"""What is generated from the table of instructions is fresh."""

from __future__ import annotations

from pathlib import Path

from magjit_dvm.generate import header, with_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_header_is_fresh() -> None:
    committed = ROOT / "backends" / "magjit_dvm" / "csrc" / "instructions.inc"
    assert committed.read_text() == header(), "run python -m magjit_dvm.generate"


def test_the_table_of_the_docs_is_fresh() -> None:
    page = (ROOT / "docs" / "dvm.md").read_text()
    assert page == with_table(page), "run python -m magjit_dvm.generate"
