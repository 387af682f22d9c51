"""What the commands do."""

from __future__ import annotations

import argparse
import platform
import signal
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from paritybench_runner import corpus, differing, figures, one_case, tables
from paritybench_runner.report import write_report
from paritybench_runner.scheduler import Scheduler
from paritybench_runner.store import Store
from paritybench_runner.worker import Settings


def settings_of(options: argparse.Namespace) -> Settings:
    return Settings(
        compilers=options.compilers,
        backend=options.backend,
        device=options.device,
        steps=options.steps[1],
        first_step=options.steps[0],
        timeout_s=options.timeout,
        memory_gib=options.memory,
        threads=options.threads,
    )


def _steps_of(settings: Settings) -> int | str:
    """As a run's description has them: the last, or also the first where that is not the second."""
    first, last = settings.first_step, settings.steps
    return last if first == 2 else f"{first}-{last}"


def run(options: argparse.Namespace, console: Console) -> int:
    """Run all files that have no results yet."""
    settings = settings_of(options)
    files = corpus.list_files(
        options.corpus, sample=options.sample, seed=options.seed, part=options.part
    )
    left_out = None if options.dynamic_of is None else static_cases(options.dynamic_of)
    if left_out is not None:
        files = [path for path in files if path.name in left_out]
    store = Store(options.out, create=True)
    fixed: dict[str, Any] = {
        "compilers": list(settings.compilers),
        "backend": settings.backend,
        "device": settings.device,
        "steps": _steps_of(settings),
        "cases": "all" if left_out is None else "dynamic",
    }
    store.describe(fixed, _free(options, settings, len(files)))
    done = {row.file for row in store.files()}
    left = [path for path in files if path.name not in done]
    if len(left) < len(files):
        console.print(f"{len(files) - len(left)} of {len(files)} files are done already")
    # Being told to end is as good as Ctrl-C, and a shell's background jobs ignore that.
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.default_int_handler)
    try:
        if left:
            scheduler = Scheduler(left, store, settings, jobs=options.jobs, left_out=left_out or {})
            folder = corpus.folder_of(options.corpus)
            _run_files(scheduler, len(left), len(files), folder, console)
    except KeyboardInterrupt:
        console.print("\nInterrupted. The same command goes on from here.")
        return 130
    finally:
        store.close()
    store = Store(options.out)
    console.print(tables.coverage(figures.summarise(store)))
    return 0


def static_cases(folder: str) -> dict[str, set[int]]:
    """Of each file with a dynamic case that runs, the cases that are not.

    Raises:
        StoreError: the folder has no results.
    """
    cases = Store(folder).cases()
    dynamic = {case.key for case in cases if case.eager.dynamic and case.eager.status == "runs"}
    found: dict[str, set[int]] = {file: set() for file, _ in dynamic}
    for case in cases:
        if case.file in found and case.key not in dynamic:
            found[case.file].add(case.index)
    return found


def _free(options: argparse.Namespace, settings: Settings, files: int) -> dict[str, Any]:
    return {
        "files": files,
        "sample": options.sample,
        "seed": options.seed,
        "timeout_s": settings.timeout_s,
        "memory_gib": settings.memory_gib,
        "threads": settings.threads,
        "jobs": options.jobs,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def _run_files(scheduler: Scheduler, left: int, total: int, folder: Path, console: Console) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loading libraries", total=total, completed=total - left)

        def advance(file: str) -> None:
            progress.update(task, advance=1, description=file.removesuffix(".py")[:40])

        scheduler.progress = advance
        scheduler.warm_up(folder)
        scheduler.run()


def report(options: argparse.Namespace, console: Console) -> int:
    """Print the figures and write Markdown, JSON and HTML."""
    store = Store(options.folder)
    summary = figures.summarise(store)
    for table in tables.all_tables(summary, store):
        console.print(table)
    for path in write_report(store, Path(options.to or options.folder)):
        console.print(f"wrote {path}")
    return 0


def compare(options: argparse.Namespace, console: Console) -> int:
    """Print what changed between two runs."""
    found = differing.compare(options.before, options.after, options.compiler)
    console.print(tables.comparison(found))
    return int(options.fail_on_loss and bool(found.lost))


def case(options: argparse.Namespace, console: Console) -> int:
    """Run one case, print each step and the report of its capture."""
    return one_case.show(options.corpus, options.case, settings_of(options), console)


def reasons(options: argparse.Namespace, console: Console) -> int:
    """Print the failures by cause."""
    found = figures.causes(Store(options.folder), options.compiler)
    if options.static:
        found = [cause for cause in found if cause.static]
    console.print(tables.causes(found[: options.top], options.compiler))
    return 0


def merge(options: argparse.Namespace, console: Console) -> int:
    """Put parts together."""
    into = Store(options.folder, create=True)
    for part in options.parts:
        other = Store(part)
        about = other.about()
        fixed = {key: about[key] for key in ("compilers", "backend", "device", "steps")}
        into.describe(fixed, {key: about[key] for key in about.keys() - fixed.keys()})
        into.merge(other)
        other.close()
    console.print(f"{len(into.files())} files in {options.folder}")
    into.close()
    return 0
