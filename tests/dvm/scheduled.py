"""What the backend is about to run, for tests that look at graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.fx import GraphModule

from magjit_dvm.backend import DvmBackend


@contextmanager
def scheduled() -> Iterator[list[GraphModule]]:
    """Within it, the ATen graphs that have been scheduled so far."""
    found: list[GraphModule] = []
    schedule = DvmBackend._schedule

    def watched(self: DvmBackend, gm: GraphModule, context: Any) -> Any:
        found.append(gm)
        return schedule(self, gm, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DvmBackend, "_schedule", watched)
        yield found
