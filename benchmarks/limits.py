"""Cases of a benchmark that may fail or take too long: the reason is a row, the next goes on."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from harness import Benchmark, Row

__all__ = ["Budget", "DeviceLostError", "OverTimeError", "attempted", "failed", "renewed", "within"]

_AGAIN = 5.0


class OverTimeError(BaseException):
    """A limit is over.  No ``Exception``: what is measured may catch those and go on."""


class DeviceLostError(RuntimeError):
    """The device takes no more work, so that nothing else can be measured in this process."""


@dataclass
class Budget:
    """Seconds of a part, shared by its cases.

    Attributes:
        seconds: of all cases together.
        cases: that are still to come.
    """

    seconds: float
    cases: int
    _begin: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self._begin + self.seconds - time.perf_counter())

    def share(self) -> float:
        """Seconds that the next case may take: less than twice its part of what is left."""
        found = 2.0 * self.left() / (max(1, self.cases) + 1)
        self.cases -= 1
        return found


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise ``OverTimeError`` in the main thread when the time is over."""

    def over(*_: Any) -> None:
        raise OverTimeError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    # Again and again: the first one may be caught where it is raised.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def attempted(
    benchmark: Benchmark,
    case: str,
    seconds: float,
    work: Callable[[], object],
    metric: str = "failed",
) -> bool:
    """Whether the work was done in time; why not is printed, and a row of the file.

    Args:
        metric: of that row.

    Raises:
        DeviceLostError: the device takes no more work.
    """
    try:
        with within(seconds):
            work()
    except (OverTimeError, Exception) as error:
        reason = failed(benchmark, case, error, metric)
    else:
        return True
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise DeviceLostError(f"{case}: {reason}") from error
    return False


def failed(benchmark: Benchmark, case: str, error: BaseException, metric: str = "failed") -> str:
    """Why a case failed, which is printed, and a row of the file."""
    where = "" if isinstance(error, OverTimeError) else "".join(traceback.format_exception(error))
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    benchmark.console.print(f"{case}, {metric}: {reason}\n{where[-4000:]}", markup=False)
    renewed(benchmark, [Row(case, metric, "", None, note=reason)])
    return reason


def renewed(benchmark: Benchmark, rows: list[Row]) -> None:
    """Rows in place of those of the same cases and metrics, written at once."""
    own = {(row.case, row.metric) for row in rows}
    benchmark.rows[:] = [row for row in benchmark.rows if (row.case, row.metric) not in own]
    benchmark.rows += rows
    benchmark.write(quiet=True)
