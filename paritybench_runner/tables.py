"""What commands print: tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table

from paritybench_runner import figures
from paritybench_runner.differing import Comparison
from paritybench_runner.figures import Cause, Coverage, Summary
from paritybench_runner.protocol import OUTCOMES
from paritybench_runner.store import Store

MOST_ROWS = 15


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "–"


def coverage_rows(found: dict[str, Coverage]) -> Iterator[list[str]]:
    """One row a figure, one column a compiler; nothing on wholeness where it was not tested."""
    rows = list(found.values())
    tested = any("2" in row.steps for row in rows)

    def shares(label: str, counts: list[tuple[int, int]]) -> list[str]:
        return [label, *(f"{n}  {percent(n, of)}" for n, of in counts)]

    yield ["cases", *(str(row.cases) for row in rows)]
    if tested:
        yield shares(LABELS["whole"], [(row.outcomes.get("whole", 0), row.cases) for row in rows])
        yield shares("whole from the second call on", [(row.settled, row.cases) for row in rows])
    for outcome in OUTCOMES[1:]:
        counts = [(row.outcomes.get(outcome, 0), row.cases) for row in rows]
        if any(count for count, _ in counts):
            label = "correct" if outcome == "splits" and not tested else LABELS[outcome]
            yield shares(label, counts)
    yield ["programs", *(str(row.programs) for row in rows)]
    if tested:
        yield shares("whole programs", [(row.programs_whole, row.programs) for row in rows])
        yield shares(
            "programs whole from the second call on",
            [(row.programs_settled, row.programs) for row in rows],
        )
    yield shares("correct programs", [(row.programs_correct, row.programs) for row in rows])
    if tested:
        yield ["graphs a case", *(f"{row.graphs:.2f}" for row in rows)]
    if any(row.in_graphs for row in rows):
        label = "operators of later calls that run in graphs"
        yield [label, *(percent(row.in_graphs, row.dispatched) for row in rows)]
    for step, label in STEP_LABELS.items():
        if any(step in row.steps for row in rows):
            yield [label, *(_held(row.steps.get(step, {})) for row in rows)]


def _held(counts: dict[str, int]) -> str:
    able = sum(counts.values()) - counts.get("n/a", 0)
    return f"{counts.get('held', 0)} of {able}"


def steps_told(steps: int | str) -> str:
    """What a run's description says of its steps."""
    first, _, last = str(steps).rpartition("-")
    return f"steps 1 and {first}–{last}" if first else f"steps 1–{last}"


STEP_LABELS = {
    "4": "another instance: right",
    "5": "training and its gradients: right",
    "6": "another batch size: right",
}

LABELS = {
    "whole": "whole",
    "splits": "correct, not whole",
    "refused": "refused",
    "wrong": "wrong",
    "crashed": "crashed",
    "timeout": "timed out",
}


def by_kind(summary: Summary) -> Iterator[tuple[str, dict[str, Coverage]]]:
    """Titles and coverage of the kinds of cases that there are."""
    yield "all cases", summary.coverage
    yield "static cases", summary.static
    if summary.dynamic:
        yield "dynamic cases", summary.moving


def coverage(summary: Summary) -> Group:
    """Coverage over all cases, over static and over dynamic ones."""
    tables = []
    for title, found in by_kind(summary):
        table = Table(title=title, title_justify="left")
        table.add_column("")
        for name in found:
            table.add_column(name, justify="right")
        for row in coverage_rows(found):
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def _table(title: str, header: list[str], rows: list[list[Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    return table


def all_tables(summary: Summary, store: Store) -> Iterator[Any]:
    """Everything that `report` prints."""
    yield (
        f"{summary.files} files, {summary.files_failed} fail to import; {summary.cases} cases in "
        f"{summary.programs} programs run in eager mode, {summary.static_cases} of them static"
    )
    yield coverage(summary)
    if medians := summary.medians():
        rows = [[name, f"{ms:.1f}", len(summary.capture_ms[name])] for name, ms in medians.items()]
        yield _table("capture time", ["compiler", "median, ms", "cases"], rows)
    if summary.not_run:
        rows = [list(row) for row in summary.case_failures[:MOST_ROWS]]
        yield _table("cases that eager cannot run", ["reason", "cases", "example"], rows)
    if summary.file_failures:
        rows = [list(row) for row in summary.file_failures[:MOST_ROWS]]
        yield _table("files that cannot be imported", ["reason", "files", "example"], rows)
    for name in summary.coverage:
        if found := figures.causes(store, name):
            yield causes(found[:MOST_ROWS], name)


def causes(found: list[Cause], compiler: str) -> Table:
    """Failures of a compiler by cause."""
    rows = [
        [c.count, c.static, c.files, LABELS[c.outcome], f"{c.text}\n  {c.example} {c.place}"]
        for c in found
    ]
    header = ["cases", "static", "files", "outcome", "cause, example"]
    return _table(f"{compiler}: why cases are not whole", header, rows)


CAUSE_HEADER = ["cases", "static", "files", "outcome", "cause", "example"]


def cause_row(cause: Cause) -> list[str]:
    """A cause under `CAUSE_HEADER`."""
    counts = (cause.count, cause.static, cause.files)
    return [*map(str, counts), LABELS[cause.outcome], cause.text, f"{cause.example} {cause.place}"]


def comparison(found: Comparison) -> Group:
    """Gains and losses."""
    header = ["case", "before", "after"]
    parts: list[Any] = [
        f"{found.compiler}: {found.common} cases in both runs; {len(found.gained)} gained, "
        f"{len(found.lost)} lost, {len(found.other)} changed otherwise"
    ]
    for title, rows in (("gained", found.gained), ("lost", found.lost), ("other", found.other)):
        if rows:
            parts.append(_table(title, header, [list(row) for row in rows]))
    return Group(*parts)
