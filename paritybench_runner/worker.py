"""One file in a process of its own, forked from a warm parent; results go through a pipe.

    message = ("file", status, reason) | ("begin", index, what) | ("case", index, name, Eager)
            | ("alive",) | ("result", index, Result) | ("again",) | ("done",)

The parent takes a worker that says nothing for too long for hung, and one that ends without
("done",) for crashed; a new one goes on behind the unit that it had begun. After ("again",) a new
one begins with that unit.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from paritybench_runner.compilers import Compiler
from paritybench_runner.corpus import Case, LoadError, load
from paritybench_runner.protocol import CompilerRun, Eager, Result, run_eagerly
from paritybench_runner.trial import Trial

Unit = tuple[int, str]
"""Case index and compiler; `eager` for step 1."""

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_MALLOC = {
    -3: 1 << 28,  # M_MMAP_THRESHOLD: all but the largest blocks come from the heap,
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: which keeps what is free
    -2: 1 << 26,  # M_TOP_PAD
}
_LIBC = ctypes.CDLL(None)
_TOO_LITTLE_MEMORY = (
    "MemoryError",
    "can't allocate memory",
    "Cannot allocate memory",
    "could not create a memory",
    "could not create a primitive",  # oneDNN
    "std::bad_alloc",
)
"""What errors say where a limit of memory is met."""


class StartAgain(Exception):
    """Memory that earlier cases have left in pieces does not do for this one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all files of a run have in common."""

    compilers: tuple[str, ...] = ("magjit",)
    backend: str = "eager"
    device: str = "cpu"
    steps: int = 6
    first_step: int = 2
    timeout_s: float = 60.0
    memory_gib: float = 6.0
    threads: int = 1


def work(
    path: Path,
    settings: Settings,
    compilers: Mapping[str, Compiler],
    skip: Iterable[Unit],
    pipe: Connection,
) -> None:
    """Run a file's cases; the target of a forked process."""
    _shield(settings)
    try:
        with tempfile.TemporaryDirectory(prefix="parity") as folder:
            os.chdir(folder)
            _redirect(Path(folder))
            try:
                run_file(path, settings, compilers, set(skip), pipe.send)
                last = "done"
            except StartAgain:
                last = "again"
            os.chdir("/")
        pipe.send((last,))
    except BrokenPipeError:
        pass
    finally:
        pipe.close()
        # Threads and exit handlers of the program are of no interest any more.
        os._exit(0)


def _shield(settings: Settings) -> None:
    """Limits, own process group, no signals of the terminal, death with the parent."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _LIBC.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + int(settings.memory_gib * (1 << 30))
    if settings.device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _keep_memory()
    torch.set_num_threads(settings.threads)
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 3000))


def _keep_memory() -> None:
    """What a case frees, the next call takes: pages from the kernel cost a sixth of a run."""
    for parameter, value in _MALLOC.items():
        _LIBC.mallopt(parameter, value)


def _give_memory_back() -> None:
    _LIBC.malloc_trim(0)


def _redirect(folder: Path) -> None:
    """A program's output goes to a file, where the protocol reads it; its errors nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.stdout = open(folder / "stdout", "w+", encoding="utf-8")  # noqa: SIM115


def run_file(
    path: Path,
    settings: Settings,
    compilers: Mapping[str, Compiler],
    skip: set[Unit],
    send: Any,
) -> None:
    """All cases of a file but the units that an earlier worker finished or fell over.

    Raises:
        StartAgain: a case has too little memory here that may have enough in a new process.
    """
    send(("begin", -1, "load"))
    try:
        cases = load(path)
    except LoadError as error:
        send(("file", "load", str(error)))
        return
    send(("file", "loaded", ""))
    is_new = True
    for case in cases:
        is_new &= not run_case(case, settings, compilers, skip, send, is_new)


def run_case(
    case: Case,
    settings: Settings,
    compilers: Mapping[str, Compiler],
    skip: set[Unit],
    send: Any,
    is_new: bool = True,
) -> bool:
    """Step 1, then each compiler's steps.

    Args:
        is_new: no case has run in this process.

    Returns:
        Whether there was anything to do.
    """
    units = [(case.index, name) for name in ("eager", *compilers)]
    left = [unit for unit in units if unit not in skip]
    if not left:
        return False
    trial = Trial(case, settings.device, lambda: send(("alive",)))
    if (case.index, "eager") in left:
        send(("begin", case.index, "eager"))
        eager = run_eagerly(trial)
        _check_memory(eager.reason, is_new)
        send(("case", case.index, case.name, eager))
        if eager.status != "runs":
            return True
        is_new = False
    for name, compiler in compilers.items():
        if (case.index, name) not in left:
            continue
        send(("begin", case.index, name))
        result = run_compiler(trial, compiler, settings)
        _check_memory(result.reason, is_new)
        send(("result", case.index, result))
        is_new = False
    del trial
    gc.collect()
    _give_memory_back()
    return True


def _check_memory(reason: str, is_new: bool) -> None:
    if not is_new and any(text in reason for text in _TOO_LITTLE_MEMORY):
        raise StartAgain


def run_compiler(trial: Trial, compiler: Compiler, settings: Settings) -> Result:
    """Steps 2 to 6 of one compiler."""
    run = CompilerRun(trial, compiler, settings.backend, settings.steps, settings.first_step)
    try:
        return run.run()
    except Exception as error:
        # The protocol's own steps raised, eager ones included: nothing was measured.
        run.result.outcome = "crashed"
        run.result.reason = f"outside of the compiled call: {type(error).__name__}: {error}"
        return run.result
    finally:
        compiler.reset()
        trial.ready = None


def timed_out(unit: Unit, name: str, seconds: float) -> tuple[Any, ...]:
    """The message in place of the one that a hung worker never sent."""
    reason = f"longer than {seconds:g} s"
    index, what = unit
    if what == "load":
        return ("file", "load", f"timed out: {reason}")
    if what == "eager":
        return ("case", index, name, Eager("timeout", reason))
    return ("result", index, Result(what, "timeout", reason=reason))


def crashed(unit: Unit, name: str, code: int | None) -> tuple[Any, ...]:
    """The message in place of the one that a dead worker never sent."""
    reason = f"the process ended with {_exit_text(code)}"
    index, what = unit
    if what == "load":
        return ("file", "load", reason)
    if what == "eager":
        return ("case", index, name, Eager("eager", reason))
    return ("result", index, Result(what, "crashed", reason=reason))


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit status {code}"
