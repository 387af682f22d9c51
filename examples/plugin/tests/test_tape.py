"""All that a third party has to write."""

from magjit.plugin import conformance

test_conformance = conformance.pytest_suite("tape")
