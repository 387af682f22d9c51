"""Reports: what a capture found out about a program, in words, numbers and pictures.

    Captured -> collect -> Content -> text, terminal, html (picture), dump, JSON

Nothing below this layer knows of it.
"""

from magjit.reporting.content import GuardLine, OperatorCall, Split
from magjit.reporting.explaining import explain
from magjit.reporting.report import Report

__all__ = ["GuardLine", "OperatorCall", "Report", "Split", "explain"]
