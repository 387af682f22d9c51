"""Records are dropped after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import magjit


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    yield
    magjit.reset()
