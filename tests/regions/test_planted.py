"""Generated programs find what is wrong: each planted fault shows in one of them."""

from __future__ import annotations

import pytest

from .planted import FAULTS, ROOT, search


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_planted(name: str) -> None:
    """Its place is there, once, in the files as they are."""
    fault = FAULTS[name]
    assert (ROOT / "magjit" / fault.file).read_text().count(fault.right) == 1


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    """By as many programs as are tried without one; most by the first hundred."""
    assert search(name, programs=20_000, seconds=2900) is not None
