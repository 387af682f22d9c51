"""The machine for GPUs is asked for, and waited for."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")
    monkeypatch.setenv("MAGJIT_DVM_WAIT", "1")
