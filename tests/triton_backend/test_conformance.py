"""What every backend must get right, for triton."""

from __future__ import annotations

from magjit.plugin import conformance
from magjit_triton import backend

test_conformance = conformance.pytest_suite(backend)
