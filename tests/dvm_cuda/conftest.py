"""The machine for GPUs is asked for; words run in two ways."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dvm_cuda import checking
from tests.dvm_cuda.ptx_machine import run_ptx


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")


@pytest.fixture(params=["simulator", "PTX"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Words by what they mean, and by the kernel's own lines."""
    if request.param == "PTX":
        monkeypatch.setattr(checking, "run_image", run_ptx)
    return str(request.param)
