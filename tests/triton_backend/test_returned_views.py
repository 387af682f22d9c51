"""Returned views: eager mode's sizes, strides, offsets and shared memory, on the CPU.

The same programs go through the code generator in ``tests/triton_codegen/regressions.py``.
"""

from __future__ import annotations

import pytest
import torch

from tests.triton_backend.returned_views import VIEWS, run_beside_eager
from tests.triton_backend.running import compiled


@pytest.mark.parametrize("name", VIEWS)
def test_returned_views(name: str) -> None:
    with torch.no_grad():
        run_beside_eager(VIEWS[name], compiled(VIEWS[name]))
