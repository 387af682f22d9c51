"""The HTML page: well formed, complete, without anything from outside, safe."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch

from magjit.reporting.content import GuardLine, ObjectView, OperatorCall, Role, Split
from magjit.reporting.explaining import explain
from magjit.reporting.report import Report

from . import programs

VOID = {"meta", "br", "rect", "path"}


class Checker(HTMLParser):
    """Follows the nesting of elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("program", "headings"),
    [
        (programs.doubles, ["Time", "Guards", "Reference graph", "Operators", "Code"]),
        (
            programs.decides,
            [
                *("Where it is cut into regions", "Time", "Guards", "Reference graph"),
                *("Operators", "Code"),
            ],
        ),
    ],
)
def test_the_page_has_its_parts(program, headings) -> None:
    report = explain(program)(torch.ones(2))
    page = report.to_html()
    checker = Checker(page)
    found = re.findall(r"<h2>([^<:]+)", page)
    assert found == headings
    assert report.verdict in checker.text
    for split in report.cuts + report.splits:
        assert split.reason in checker.text and (split.remedy or "") in checker.text
    assert checker.seen["svg"] == 1


def test_the_page_needs_nothing_else() -> None:
    page = explain(programs.Counting())(torch.ones(2, 4)).to_html()
    assert not re.findall(r"<script|<link|<img|@import|url\(", page)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"\son\w+=", re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL))


def test_side_effects_are_a_section_of_their_own() -> None:
    checker = Checker(explain(programs.Counting())(torch.ones(2, 4)).to_html())
    assert "model.calls = model.calls + 1" in checker.text


def test_what_the_program_says_is_escaped() -> None:
    evil = "<script>alert('&')</script>"
    report = Report(name=evil, backend=evil, notes=[evil])
    report.operator_calls.append(OperatorCall(evil))
    report.guard_lines.append(GuardLine(evil, evil))
    report.guards[evil] = 1
    report.side_effects.append(evil)
    report.splits.append(Split(evil, evil, 1, evil, evil))
    report.mock_text = report.mock_source = evil
    report.objects.append(ObjectView(0, 0, evil, evil, Role.OUTSIDE, evil))
    report.objects.append(ObjectView(1, 0, evil, evil, Role.OBJECT, evil, facts=(evil,)))
    report.backend_dumps[evil] = evil
    checker = Checker(report.to_html())
    assert "script" not in checker.seen
    assert checker.text.count(evil) >= 10


def test_a_report_of_nothing_is_a_page_too() -> None:
    Checker(Report(name="empty", backend="eager").to_html())
