"""What one run gained and lost over another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paritybench_runner.figures import outcomes_by_case
from paritybench_runner.store import Store, StoreError


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cases that both runs have and whose outcome changed: case, before, after."""

    compiler: str
    common: int
    gained: list[tuple[str, str, str]]
    lost: list[tuple[str, str, str]]
    other: list[tuple[str, str, str]]


def outcomes(source: str | Path, compiler: str) -> dict[str, str]:
    """`file:index` → outcome, from a folder of results or from a report's JSON.

    Raises:
        StoreError: it is neither, or has nothing of this compiler.
    """
    path = Path(source)
    if path.is_file():
        found = json.loads(path.read_text())["outcomes"]
    else:
        found = outcomes_by_case(Store(path))
    if compiler not in found:
        raise StoreError(f"{source} has no results of {compiler}")
    by_case: dict[str, str] = found[compiler]
    return by_case


def compare(before: str | Path, after: str | Path, compiler: str) -> Comparison:
    """Compare two runs over the cases that both have; files need not be the same."""
    old, new = outcomes(before, compiler), outcomes(after, compiler)
    common = sorted(old.keys() & new.keys())
    changed = [(key, old[key], new[key]) for key in common if old[key] != new[key]]
    gained = [row for row in changed if row[2] == "whole"]
    lost = [row for row in changed if row[1] == "whole"]
    other = [row for row in changed if row not in gained and row not in lost]
    return Comparison(compiler, len(common), gained, lost, other)
