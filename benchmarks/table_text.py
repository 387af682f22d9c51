"""What a JSON file of results has, and how tables say it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

NOTHING = "–"

Values = Mapping[str, float | None]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Results:
    """One JSON file: values by case and metric, in the file's order."""

    rows: Mapping[tuple[str, str], Values]
    notes: Mapping[tuple[str, str], str]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> Results:
        content = json.loads(path.read_text(encoding="utf-8"))
        keyed = {(row["case"], row["metric"]): row for row in content["rows"]}
        return cls(
            {key: {"magjit": row["magjit"], **row["peers"]} for key, row in keyed.items()},
            {key: row["note"] for key, row in keyed.items() if row.get("note")},
            content["machine"],
            content["versions"],
        )

    def cases(self, metric: str) -> list[str]:
        """The cases that have a metric."""
        return [case for case, other in self.rows if other == metric]

    def value(self, case: str, metric: str, name: str = "magjit") -> float | None:
        return self.rows.get((case, metric), {}).get(name)

    def part(self, name: str) -> Results:
        """The cases that begin with a part's name, without it."""
        rows, notes = _part(self.rows, f"{name}: "), _part(self.notes, f"{name}: ")
        return Results(rows, notes, self.machine, self.versions)

    def caption(self) -> str:
        """What the figures were measured on."""
        machine, versions = self.machine, self.versions
        place = machine.get("gpu") or f"{machine.get('cpu')}, {machine.get('cores')} cores"
        parts = [str(place), f"{machine['threads']} CPU thread{'s' * (machine['threads'] != 1)}"]
        parts += [f"CPython {versions['python']}", f"torch {versions['torch']}"]
        parts += [f"CUDA {versions['cuda']}"] if "cuda" in versions else []
        busy = machine.get("load_of_others", 0)
        parts += [f"other programs used {busy} cores"] if busy > 0.15 else []
        return f"Measured on: {'; '.join(parts)}."


def _part(table: Mapping[tuple[str, str], Value], start: str) -> dict[tuple[str, str], Value]:
    return {
        (case.removeprefix(start), metric): value
        for (case, metric), value in table.items()
        if case.startswith(start)
    }


def number(value: float | None, digits: int = 3) -> str:
    """Some significant digits, never an exponent; integers in full."""
    if value is None:
        return NOTHING
    if value == int(value) or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{value:.{digits}f}"


def ratio(value: float | None, reference: float | None) -> str:
    return NOTHING if value is None or not reference else f"{value / reference:.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and the others figures; empty without rows."""
    if not rows:
        return ""
    rules = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rules, *rows))


def compared(
    results: Results,
    metrics: Mapping[str, str],
    *,
    eager: bool = True,
    case_ends: str = "",
    digits: int = 3,
) -> str:
    """A row for each case and metric: MagJIT, torch.compile, their ratio, perhaps eager."""
    header = ["case", "metric", "MagJIT", "torch.compile", "ratio"] + ["eager"] * eager
    rows = []
    for metric, title in metrics.items():
        for case in results.cases(metric):
            if not case.endswith(case_ends):
                continue
            ours, theirs = (results.value(case, metric, n) for n in ("magjit", "torch.compile"))
            cells = [case, title, number(ours, digits), number(theirs, digits)]
            cells.append(ratio(ours, theirs))
            rows.append(cells + [number(results.value(case, metric, "eager"))] * eager)
    return markdown(header, rows)


def by_metric(
    results: Results, what: str, titles: Mapping[str, str], peers: Mapping[str, str]
) -> str:
    """A row for each metric and case, with MagJIT's figure and each peer's.

    Args:
        what: the title of the cases.
        titles, peers: titles of metrics and of peers, by their names.
    """
    names = {"magjit": "MagJIT", **peers}
    rows = [
        [case, title, *(number(results.value(case, metric, name)) for name in names)]
        for metric, title in titles.items()
        for case in results.cases(metric)
    ]
    return markdown([what, "metric", *names.values()], rows)
