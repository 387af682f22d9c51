"""What the benchmarks share: alternating measurement, medians, a quiet machine, JSON and tables.

Compilers are compared in one run and in turns, so that a change of clock speed or load meets all of
them alike. A result is a list of rows; `--json FILE` writes them as

    {"machine": {...}, "versions": {...},
     "rows": [{"case", "metric", "unit", "magjit", "peers": {name: value}, "note"}]}

where `note` is left out when there is nothing to say. Times are medians over rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

Task = Callable[[], object]

# A core's share that other programs may use before a measurement is not worth making.
TOLERATED_LOAD = 0.15
FEW_CALLS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of MagJIT beside those of its peers."""

    case: str
    metric: str
    unit: str
    magjit: float | None
    peers: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(
        cls, case: str, metric: str, unit: str, values: Mapping[str, float], note: str = ""
    ) -> Row:
        """A row of values by name, of which "magjit" is ours."""
        peers = {name: value for name, value in values.items() if name != "magjit"}
        return cls(case, metric, unit, values.get("magjit"), peers, note)

    def as_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "case": self.case,
            "metric": self.metric,
            "unit": self.unit,
            "magjit": rounded(self.magjit),
            "peers": {name: rounded(value) for name, value in self.peers.items()},
        }
        return row | {"note": self.note} if self.note else row


def rounded(value: float | None) -> float | None:
    """Four significant digits: more would only be noise; counts as they are."""
    if value is None or value == int(value):
        return value
    return float(f"{value:.4g}")


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine, too")
    return parser


@dataclass(slots=True)
class Benchmark:
    """One run of a benchmark: collects rows, shows them, writes them."""

    json_file: Path | None
    busy: float
    console: Console = field(default_factory=lambda: Console(width=screen_width()))
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def start(cls, options: argparse.Namespace) -> Benchmark:
        """Refuses with exit status 3 when others use the processor, unless `--force` is given."""
        busy = load_of_others()
        if busy > TOLERATED_LOAD and not options.force:
            sys.stderr.write(
                f"other programs use {busy:.2f} cores: wait until the machine is quiet, "
                "or measure all the same with --force\n"
            )
            raise SystemExit(3)
        return cls(options.json, busy)

    def add(self, row: Row) -> None:
        """Takes a row, in place of an earlier run's of the same figure."""
        for at, known in enumerate(self.rows):
            if (known.case, known.metric) == (row.case, row.metric):
                self.rows[at] = row
                return
        self.rows.append(row)

    def finish(self) -> None:
        """Prints a table of the rows and writes the JSON file that was asked for."""
        self.console.print(table_of(self.rows))
        self.write()

    def write(self, *, quiet: bool = False) -> None:
        """Writes the JSON file that was asked for, if any; it is never half written."""
        if self.json_file is not None:
            self.json_file.parent.mkdir(parents=True, exist_ok=True)
            content = {
                "machine": machine() | {"load_of_others": round(self.busy, 2)},
                "versions": versions(),
                "rows": [row.as_json() for row in self.rows],
            }
            pending = self.json_file.with_name(f".{self.json_file.name}.{os.getpid()}")
            pending.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            pending.replace(self.json_file)
            if not quiet:
                self.console.print(f"written to {self.json_file}")


def screen_width() -> int | None:
    """The terminal's own width, or enough for a table where output goes elsewhere."""
    return None if sys.stdout.isatty() else 120


def table_of(rows: list[Row]) -> Table:
    """The rows with a column a peer, and MagJIT's share of the first peer's figure."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    table = Table()
    for column in ("case", "metric", "unit"):
        table.add_column(column)
    for column in ("magjit", *peers, "ratio"):
        table.add_column(column, justify="right")
    table.add_column("note", max_width=40)
    for row in rows:
        values = [row.magjit, *(row.peers.get(name) for name in peers)]
        reference = row.peers.get("torch.compile")
        ratio = row.magjit / reference if row.magjit is not None and reference else None
        texts = ["" if value is None else f"{value:.4g}" for value in values]
        shown = "" if ratio is None else f"{ratio:.3f}"
        table.add_row(row.case, row.metric, row.unit, *texts, shown, row.note)
    return table


def machine() -> dict[str, Any]:
    """What the figures depend on besides versions."""
    facts: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def versions() -> dict[str, str]:
    """Versions of the interpreter and of the installed packages that take part."""
    found = {"python": platform.python_version()}
    for package in ("magjit", "torch", "numpy", "triton", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # which names its build
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def load_of_others(seconds: float = 1.0) -> float:
    """Cores used by all programs but this one, on average over some time."""

    def used() -> float:
        ticks = [
            int(number) for number in Path("/proc/stat").read_text().split("\n")[0].split()[1:]
        ]
        user, nice, system, _idle, _wait, irq, softirq, steal = ticks[:8]
        total = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return total - own.user - own.system - own.children_user - own.children_system

    start, before = time.perf_counter(), used()
    time.sleep(seconds)
    return max(0.0, (used() - before) / (time.perf_counter() - start))


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector from running inside a measurement."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_calls(task: Task, calls: int) -> float:
    """Microseconds a call, over `calls` calls in a row."""
    repeat = range(calls)
    start = time.perf_counter_ns()
    for _ in repeat:
        task()
    return (time.perf_counter_ns() - start) / calls / 1000


def alternate(
    tasks: Mapping[str, Task], rounds: int = 21, seconds: float = 0.03
) -> dict[str, list[float]]:
    """Microseconds a call of each task, in each round.

    A round runs every task for about `seconds`; each round starts with another task. Of a task that
    is called a few times only in its turn, the first call does not count: memory that it has freed
    seconds ago may be the host's by now, and slow to come back.
    """
    for task in tasks.values():
        task()
    with no_collection():
        calls = {
            name: max(1, int(seconds * 1e6 / time_calls(task, 2))) for name, task in tasks.items()
        }
        results: dict[str, list[float]] = {name: [] for name in tasks}
        names = list(tasks)
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                if calls[name] < FEW_CALLS:
                    tasks[name]()
                results[name].append(time_calls(tasks[name], calls[name]))
    return results


def median_times(tasks: Mapping[str, Task], **options: Any) -> dict[str, float]:
    """Median microseconds a call of each task, measured in turns."""
    return {name: statistics.median(times) for name, times in alternate(tasks, **options).items()}


def median_differences(pairs: Mapping[str, tuple[Task, Task]], **options: Any) -> dict[str, float]:
    """Median microseconds that the first task of each pair takes longer than its second."""
    tasks: dict[str, Task] = {}
    for name, (whole, part) in pairs.items():
        tasks[f"{name}: whole"], tasks[f"{name}: part"] = whole, part
    times = alternate(tasks, **options)
    return {
        name: statistics.median(
            whole - part
            for whole, part in zip(times[f"{name}: whole"], times[f"{name}: part"], strict=True)
        )
        for name in pairs
    }


def in_fresh_process(script: str, *arguments: str, seconds: float | None = None) -> Any:
    """Runs a script with this interpreter and gives the JSON value on its last line of output.

    Raises:
        RuntimeError: the script failed; the text has the end of what it said.
        subprocess.TimeoutExpired: it took longer than the seconds that it has; it is stopped.
    """
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=seconds,
    )
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured_within(seconds: float | None, script: str, *arguments: str) -> dict[str, Any]:
    """The metrics that a script's process writes, or a note alone where it fails or takes long."""
    try:
        found: dict[str, Any] = in_fresh_process(script, *arguments, seconds=seconds)
    except subprocess.TimeoutExpired:
        found = {"notes": [f"not done after {seconds:g} s"]}
    except RuntimeError as error:
        found = {"notes": [f"failed: {str(error).splitlines()[-1][:160]}"]}
    return found


def add_medians(
    benchmark: Benchmark,
    case: str,
    found: dict[str, list[dict[str, Any]]],
    metrics: Sequence[tuple[str, str]],
    noted: str,
) -> None:
    """A row for each metric, with its unit, of what each compiler's processes have measured.

    The notes go to the metric ``noted``.
    """
    notes = dict.fromkeys(
        f"{compiler}: {note}"
        for compiler, runs in found.items()
        for run in runs
        for note in run["notes"]
    )
    for metric, unit in metrics:
        values = {
            compiler: statistics.median(run[metric] for run in runs)
            for compiler, runs in found.items()
            if all(metric in run for run in runs)
        }
        note = "; ".join(notes) if metric == noted else ""
        benchmark.add(Row.of(case, metric, unit, values, note))


def run_cases(
    options: argparse.Namespace,
    cases: Sequence[str],
    measure_case: Callable[[Benchmark, str, str, Any], None],
) -> None:
    """Every case with every backend, in a benchmark of its own; rows of other cases stay."""
    benchmark = Benchmark.start(options)
    measured = {f"{name}, {backend}" for name in cases for backend in options.backends}
    benchmark.rows += earlier_rows(options.json, lambda row: row["case"] not in measured)
    for backend in options.backends:
        for name in cases:
            with benchmark.console.status(f"{name}, {backend}"):
                measure_case(benchmark, name, backend, options)
            benchmark.write(quiet=True)
    benchmark.finish()


def earlier_rows(path: Path | None, stays: Callable[[dict[str, Any]], bool]) -> list[Row]:
    """Rows of an earlier run's file, if it is there, that stay beside those measured now."""
    if path is None or not path.is_file():
        return []
    return [Row(**row) for row in json.loads(path.read_text())["rows"] if stays(row)]
