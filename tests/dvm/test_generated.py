"""What is generated from the table of instructions is fresh."""

from __future__ import annotations

from magjit_dvm.generate import HEADER, header


def test_the_header_is_fresh() -> None:
    assert HEADER.read_text() == header(), "run python -m magjit_dvm.generate"
