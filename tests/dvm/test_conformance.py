"""What every backend must get right, for dvm."""

from __future__ import annotations

from magjit.plugin import conformance

test_conformance = conformance.pytest_suite("dvm")
