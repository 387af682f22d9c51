"""All files of a run: which process works on which, for how long, and what is left to do."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from paritybench_runner import shims, worker
from paritybench_runner.compilers import COMPILERS, Compiler
from paritybench_runner.store import FileRow, Store
from paritybench_runner.worker import Settings, Unit

_FORK = multiprocessing.get_context("fork")
_POLL_S = 0.5
_MOST_WORKERS_A_FILE = 200


@dataclass(slots=True, eq=False)
class Job:
    """A file that is being worked on."""

    path: Path
    process: BaseProcess
    pipe: Connection
    started: float
    heard: float = field(default_factory=time.monotonic)
    unit: Unit = (-1, "load")
    finished: set[Unit] = field(default_factory=set)
    loaded: str = ""
    workers: int = 1


class Scheduler:
    """Runs files in forked processes and stores what they send.

    ``progress(file)`` is called after each file; ``left_out`` has cases of files that are not run.
    """

    progress: Callable[[str], None]

    def __init__(
        self,
        files: Sequence[Path],
        store: Store,
        settings: Settings,
        *,
        jobs: int = 1,
        progress: Callable[[str], None] = lambda file: None,
        left_out: Mapping[str, set[int]] | None = None,
    ) -> None:
        self._left = list(reversed(files))
        self._store = store
        self._settings = settings
        self._jobs = jobs
        self.progress = progress
        self._left_out = left_out or {}
        self._running: list[Job] = []
        self._compilers: dict[str, Compiler] = {}

    def warm_up(self, folder: Path) -> None:
        """Import and initialise in this process all that the forked ones then have for free."""
        # A process that ran operators in several threads cannot be forked.
        torch.set_num_threads(1)
        shims.install(folder)
        for name in self._settings.compilers:
            compiler = COMPILERS[name]()
            compiler.warm_up()
            self._compilers[name] = compiler
        # What lives now lives on in every process: their collections need not look at it.
        gc.collect()
        gc.freeze()

    def run(self) -> None:
        """Work until all files are done; kills its processes when it is interrupted."""
        try:
            while self._left or self._running:
                while self._left and len(self._running) < self._jobs:
                    path = self._left.pop()
                    self._store.forget(path.name)
                    self._running.append(self._start(path))
                pipes: list[Any] = [job.pipe for job in self._running]
                ready = set(map(id, wait(pipes, _POLL_S)))
                for job in list(self._running):
                    if id(job.pipe) in ready:
                        self._listen(job)
                    elif time.monotonic() - job.heard > self._settings.timeout_s:
                        self._give_up(job, timed_out=True)
        finally:
            for job in self._running:
                _kill(job.process)
            self._running.clear()

    def _start(self, path: Path, before: Job | None = None) -> Job:
        receiving, sending = _FORK.Pipe(duplex=False)
        finished = before.finished if before else self._skipped(path)
        process = _FORK.Process(
            target=worker.work,
            args=(path, self._settings, self._compilers, finished, sending),
            daemon=True,
        )
        process.start()
        sending.close()
        job = Job(path, process, receiving, time.monotonic(), finished=finished)
        if before is not None:
            job.started, job.workers = before.started, before.workers + 1
        return job

    def _skipped(self, path: Path) -> set[Unit]:
        indices = self._left_out.get(path.name, ())
        return {(i, what) for i in indices for what in ("eager", *self._settings.compilers)}

    def _listen(self, job: Job) -> None:
        try:
            while True:
                message = job.pipe.recv()
                job.heard = time.monotonic()
                if message[0] == "done":
                    self._finish(job)
                    return
                if message[0] == "again":
                    self._go_on(job)
                    return
                self._take(job, message)
                if not job.pipe.poll():
                    return
        except (EOFError, OSError):
            self._give_up(job, timed_out=False)

    def _take(self, job: Job, message: tuple[Any, ...]) -> None:
        file = job.path.name
        match message:
            case ("begin", int(index), str(what)):
                job.unit = (index, what)
            case ("file", str(status), str(reason)):
                job.loaded = status
                if status != "loaded":
                    self._store.add_file(FileRow(file, status, reason, 0.0))
            case ("case", int(index), str(name), eager):
                job.finished.add((index, "eager"))
                if eager.status != "runs":
                    job.finished |= {(index, name) for name in self._compilers}
                self._store.add_case(file, index, name, eager)
            case ("result", int(index), result):
                job.finished.add((index, result.compiler))
                self._store.add_result(file, index, result)

    def _give_up(self, job: Job, *, timed_out: bool) -> None:
        """Note what went wrong in the current unit and go on behind it in a new process."""
        _kill(job.process)
        if timed_out:
            message = worker.timed_out(job.unit, "", self._settings.timeout_s)
        else:
            message = worker.crashed(job.unit, "", job.process.exitcode)
        stuck = job.unit in job.finished or job.workers > _MOST_WORKERS_A_FILE
        if not stuck:
            self._take(job, message)
        if stuck or job.unit[1] == "load":
            self._finish(job)
            return
        self._go_on(job)

    def _go_on(self, job: Job) -> None:
        """Go on with a file in a new process."""
        _kill(job.process)
        job.pipe.close()
        self._running[self._running.index(job)] = self._start(job.path, before=job)

    def _finish(self, job: Job) -> None:
        self._running.remove(job)
        _kill(job.process)
        job.pipe.close()
        seconds = time.monotonic() - job.started
        if job.loaded == "loaded":
            self._store.add_file(FileRow(job.path.name, "loaded", "", seconds))
        self.progress(job.path.name)


def _kill(process: BaseProcess) -> None:
    """End a worker and all that it started: it leads a process group of its own."""
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.is_alive():
            process.kill()
    process.join()
