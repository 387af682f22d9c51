"""Results in SQLite, written as they come; what a resumed run need not do again.

about(key, value)                     how the run was made
files(file, status, reason, seconds)  `load` or `loaded`; a row means that the file is done
cases(file, case_index, name, status, reason, deterministic, difference, dynamic, eager_ms)
results(file, case_index, compiler, outcome, whole, step, reason, location, capture_ms, graphs,
        operators, steps, dispatched, in_graphs)
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paritybench_runner.protocol import Eager, Result

NAME = "results.sqlite"
_SCHEMA = """
create table if not exists about(key text primary key, value text);
create table if not exists files(file text primary key, status text, reason text, seconds real);
create table if not exists cases(
    file text, case_index integer, name text, status text, reason text, deterministic integer,
    difference text, dynamic text, eager_ms real, primary key(file, case_index));
create table if not exists results(
    file text, case_index integer, compiler text, outcome text, whole integer, step integer,
    reason text, location text, capture_ms real, graphs integer, operators integer, steps text,
    dispatched integer, in_graphs integer, primary key(file, case_index, compiler));
"""


class StoreError(Exception):
    """A folder holds no results, or those of another kind of run."""


@dataclass(frozen=True, slots=True)
class CaseRow:
    """What step 1 found for a case."""

    file: str
    index: int
    name: str
    eager: Eager

    @property
    def key(self) -> tuple[str, int]:
        return self.file, self.index


@dataclass(frozen=True, slots=True)
class FileRow:
    """How a file fared."""

    file: str
    status: str
    reason: str
    seconds: float


class Store:
    """The database in a folder of results."""

    def __init__(self, folder: str | Path, *, create: bool = False) -> None:
        self.folder = Path(folder)
        path = self.folder / NAME
        if create:
            self.folder.mkdir(parents=True, exist_ok=True)
        elif not path.is_file():
            raise StoreError(f"{self.folder} has no {NAME}; `run --out {self.folder}` makes it")
        self._db = sqlite3.connect(path)
        self._db.execute("pragma journal_mode=wal")
        self._db.executescript(_SCHEMA)
        self._add_columns()

    def _add_columns(self) -> None:
        """Those that results of earlier versions lack."""
        known = {row[1] for row in self._db.execute("pragma table_info(results)")}
        for name in ("dispatched", "in_graphs"):
            if name not in known:
                self._db.execute(f"alter table results add column {name} integer")

    def close(self) -> None:
        self._db.commit()
        self._db.close()

    # -- how the run was made --------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        rows = self._db.execute("select key, value from about")
        return {key: json.loads(value) for key, value in rows}

    def describe(self, fixed: dict[str, Any], free: dict[str, Any]) -> None:
        """Note how this run is made.

        Raises:
            StoreError: results are there already that were made otherwise.
        """
        known = self.about()
        changed = [key for key, value in fixed.items() if known.get(key, value) != value]
        if changed:
            told = ", ".join(f"{key} {known[key]!r}, not {fixed[key]!r}" for key in changed)
            raise StoreError(f"{self.folder} holds results of another run: {told}")
        rows = [(key, json.dumps(value)) for key, value in (fixed | free).items()]
        self._db.executemany("insert or replace into about values (?, ?)", rows)
        self._db.commit()

    # -- writing ---------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        yield
        self._db.commit()

    def forget(self, file: str) -> None:
        """Drop what an interrupted run left of a file."""
        for table in ("cases", "results", "files"):
            self._db.execute(f"delete from {table} where file = ?", (file,))
        self._db.commit()

    def add_file(self, row: FileRow) -> None:
        self._db.execute(
            "insert or replace into files values (?, ?, ?, ?)",
            (row.file, row.status, row.reason, row.seconds),
        )
        self._db.commit()

    def add_case(self, file: str, index: int, name: str, eager: Eager) -> None:
        values = (
            eager.status,
            eager.reason,
            eager.deterministic,
            eager.difference,
            eager.dynamic,
            eager.eager_ms,
        )
        self._db.execute(
            "insert or replace into cases values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (file, index, name, *values),
        )
        self._db.commit()

    def add_result(self, file: str, index: int, result: Result) -> None:
        row = result.as_row()
        row["steps"] = json.dumps(row["steps"])
        columns = [key for key in row if key != "compiler"]
        self._db.execute(
            f"insert or replace into results(file, case_index, compiler, {', '.join(columns)}) "
            f"values (?, ?, ?{', ?' * len(columns)})",
            (file, index, result.compiler, *(row[key] for key in columns)),
        )
        self._db.commit()

    def merge(self, other: Store) -> None:
        """Take over everything from another store; what both have, the other's counts."""
        for table in ("files", "cases", "results"):
            rows = other._db.execute(f"select * from {table}").fetchall()
            if rows:
                marks = ", ".join("?" * len(rows[0]))
                self._db.executemany(f"insert or replace into {table} values ({marks})", rows)
        self._db.commit()

    # -- reading ---------------------------------------------------------------------------

    def files(self) -> list[FileRow]:
        rows = self._db.execute("select file, status, reason, seconds from files order by file")
        return [FileRow(*row) for row in rows]

    def cases(self) -> list[CaseRow]:
        rows = self._db.execute(
            "select file, case_index, name, status, reason, deterministic, difference, dynamic, "
            "eager_ms from cases order by file, case_index"
        )
        return [
            CaseRow(file, index, name, Eager(status, reason, bool(det), diff, dyn, ms))
            for file, index, name, status, reason, det, diff, dyn, ms in rows
        ]

    def results(self) -> dict[str, dict[tuple[str, int], Result]]:
        """Compiler → (file, index) → result."""
        found: dict[str, dict[tuple[str, int], Result]] = {}
        rows = self._db.execute(
            "select file, case_index, compiler, outcome, whole, step, reason, location, "
            "capture_ms, graphs, operators, steps, dispatched, in_graphs "
            "from results order by file, case_index"
        )
        for file, index, *columns, steps, dispatched, in_graphs in rows:
            told = {int(key): value for key, value in json.loads(steps).items()}
            result = _result(columns, told)
            result.dispatched, result.in_graphs = dispatched or 0, in_graphs or 0
            found.setdefault(result.compiler, {})[file, index] = result
        return found


def _result(columns: list[Any], steps: dict[int, str]) -> Result:
    compiler, outcome, whole, step, *others = columns
    reason, location, capture_ms, graphs, operators = others
    return Result(
        compiler,
        outcome,
        bool(whole),
        step,
        reason,
        location,
        capture_ms,
        graphs,
        operators,
        steps,
    )
