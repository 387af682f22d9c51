"""Records are dropped after each test, and a capture must leave the collector as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import magjit


@pytest.fixture(autouse=True)
def records_dropped() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    assert gc.isenabled() == enabled
    magjit.reset()
