"""The report of a run as files: Markdown, JSON, one HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paritybench_runner import figures
from paritybench_runner.figures import Cause, Summary
from paritybench_runner.page import html
from paritybench_runner.store import Store
from paritybench_runner.tables import CAUSE_HEADER, by_kind, cause_row, coverage_rows, steps_told

MOST_CAUSES = 60
MOST_REASONS = 25


def write_report(store: Store, folder: Path) -> list[Path]:
    """Write report.md, report.json and report.html; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = figures.summarise(store)
    causes = {name: figures.causes(store, name) for name in summary.coverage}
    contents = {
        "report.md": markdown(summary, causes),
        "report.json": json.dumps(as_json(store, summary, causes), indent=1) + "\n",
        "report.html": html(summary, causes),
    }
    for name, text in contents.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in contents]


def as_json(store: Store, summary: Summary, causes: dict[str, list[Cause]]) -> dict[str, Any]:
    """The figures, the causes and each case's outcome, which `compare` reads."""
    found = summary.as_json()
    found["causes"] = {
        name: [
            {
                "outcome": c.outcome,
                "cause": c.text,
                "cases": c.count,
                "static": c.static,
                "files": c.files,
                "example": c.example,
                "place": c.place,
            }
            for c in rows
        ]
        for name, rows in causes.items()
    }
    found["outcomes"] = figures.outcomes_by_case(store)
    return found


def markdown(summary: Summary, causes: dict[str, list[Cause]]) -> str:
    """The report as Markdown."""
    return "\n".join(_markdown(summary, causes)) + "\n"


def _markdown(summary: Summary, causes: dict[str, list[Cause]]) -> Iterator[str]:
    about = summary.about
    yield "# Coverage of programs"
    yield ""
    yield (
        f"{summary.files} files ({summary.files_failed} fail to import); **{summary.cases} cases "
        f"in {summary.programs} programs run in eager mode**, {summary.static_cases} of them are "
        "static."
    )
    yield ""
    yield (
        f"{about.get('date', '')}, torch {about.get('torch', '')}, Python "
        f"{about.get('python', '')}, {about.get('device', '')}, backend "
        f"{about.get('backend', '')}, {steps_told(about.get('steps', ''))}, "
        f"{about.get('timeout_s', '')} s for a call."
    )
    for title, found in by_kind(summary):
        yield from ("", f"## {title.capitalize()}", "")
        yield from _rows(["", *found], coverage_rows(found))
    if medians := summary.medians():
        yield from ("", "## Capture time", "")
        rows = [
            [name, f"{ms:.1f}", str(len(summary.capture_ms[name]))] for name, ms in medians.items()
        ]
        yield from _rows(["compiler", "median, ms", "cases"], rows)
    for name, found_causes in causes.items():
        if found_causes:
            yield from ("", f"## {name}: why cases are not whole", "")
            yield from _rows(
                CAUSE_HEADER,
                [cause_row(c) for c in found_causes[:MOST_CAUSES]],
            )
    for title, reasons in (
        ("Cases that eager cannot run", summary.case_failures),
        ("Files that cannot be imported", summary.file_failures),
    ):
        if reasons:
            yield from ("", f"## {title.capitalize()}", "")
            rows = [[str(n), text, example] for text, n, example in reasons[:MOST_REASONS]]
            yield from _rows(["count", "reason", "example"], rows)
    if summary.dynamic:
        yield from ("", "## What makes cases dynamic", "")
        yield from _rows(
            ["operator or method", "cases"], [[k, str(n)] for k, n in summary.dynamic.items()]
        )
    if summary.nondeterministic:
        yield from ("", "## Cases that eager does not repeat", "")
        yield from (f"- {case}" for case in summary.nondeterministic)


def _rows(header: Sequence[str], rows: Iterator[list[str]] | list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        yield f"| {' | '.join(cells)} |"
