"""Times of what a graph could run, on the device, within a budget.

Two programs are timed in turns, so that what slows the machine slows both. On a GPU, events around
each run with a cold L2; on a processor, the clock. Medians are compared.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["BUDGET", "MARGIN", "Stopwatch", "example_inputs"]

logger = logging.getLogger(__name__)

BUDGET = 60.0
"""Seconds that measuring one graph may take."""
MARGIN = 0.03
"""By how much a program must be faster to be taken."""
_RESERVE = 0.25
_SHOWN_AFTER = 2.0
_TURNS = 15
_TURN_SECONDS = 0.4
_MOST_BYTES = 8 << 30

Run = Callable[..., Any]


@dataclass
class Stopwatch:
    """Compares programs on the inputs of one graph.

    Attributes:
        inputs: real tensors, which programs may change.
        budget: seconds in all, compiling what is compared included.
        runs: how many programs have been timed.
    """

    inputs: Sequence[Any]
    budget: float = BUDGET
    runs: int = 0
    _started: float = field(default_factory=lambda: time.perf_counter())  # noqa: PLW0108
    _flush: torch.Tensor | None = None
    _progress: Progress | None = None

    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def is_over(self) -> bool:
        """Whether nothing new should be begun."""
        return self.spent() > self.budget * (1 - _RESERVE)

    @property
    def on_gpu(self) -> bool:
        """Whether the inputs are on a GPU."""
        return any(isinstance(one, torch.Tensor) and one.is_cuda for one in self.inputs)

    def is_faster(self, one: Run, other: Run, *arguments: Any) -> bool:
        """Whether ``one`` takes less time than ``other`` by more than the margin.

        Args:
            one, other: called with the inputs, or with ``arguments`` where there are some.
        """
        given = arguments or tuple(self.inputs)
        self.runs += 2
        self._show()
        with quietly():
            first = self._timed(one, given)
            self._timed(other, given)
            if first > self.budget * _RESERVE / 8:
                return False  # Too slow to be measured.
            times: tuple[list[float], list[float]] = ([], [])
            until = time.perf_counter() + _TURN_SECONDS
            for turn in range(_TURNS):
                for program, found in zip((one, other), times, strict=True):
                    found.append(self._timed(program, given))
                if turn >= 4 and time.perf_counter() > until:
                    break
        new, old = map(statistics.median, times)
        logger.debug("measured %.1f µs beside %.1f µs", new * 1e6, old * 1e6)
        return new < old * (1 - MARGIN)

    def _timed(self, run: Run, arguments: Sequence[Any]) -> float:
        """Seconds of one call."""
        if not self.on_gpu:
            started = time.perf_counter()
            run(*arguments)
            return time.perf_counter() - started
        if self._flush is None:
            size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._flush = torch.empty(max(2 * size, 1 << 26), dtype=torch.int8, device="cuda")
        self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(*arguments)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _show(self) -> None:
        """A line that says so, once it has taken a while."""
        if self._progress is None and self.spent() > _SHOWN_AFTER:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            console = Console(stderr=True)
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("MagJIT measures programs: {task.completed} of this graph"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            )
            self._progress.start()
            self._progress.add_task("", total=None)
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=self.runs)

    def stop(self) -> None:
        """Take the line away, and let go of the inputs."""
        if self._progress is not None:
            self._progress.stop()
        self.inputs, self._flush = (), None


@contextmanager
def quietly() -> Iterator[None]:
    """Without gradients, modes or a trace in the random numbers."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices):
        yield


def example_inputs(gm: GraphModule) -> list[Any] | None:
    """Real tensors like a graph's fake inputs; None where there is no room for them.

    Numbers are random, indices and booleans are zero, sizes are those of the example.
    """
    values = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    try:
        with quietly():
            if sum(map(_bytes, values)) > _room(values):
                return None
            return [_real(one) for one in values]
    except (RuntimeError, ValueError, NotImplementedError) as error:
        logger.debug("nothing is measured: %s", error)
        return None


def _room(values: Sequence[Any]) -> int:
    devices = {one.device for one in values if isinstance(one, torch.Tensor) and one.is_cuda}
    if not devices:
        return _MOST_BYTES
    return min(torch.cuda.mem_get_info(one)[0] for one in devices) // 2


def _hint(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        if hint is None:
            raise ValueError(f"{size} has no example")
        return int(hint)
    return int(size)


def _extent(value: torch.Tensor) -> int:
    sizes = list(map(_hint, value.shape))
    if 0 in sizes:
        return _hint(value.storage_offset())
    reach = sum((n - 1) * _hint(step) for n, step in zip(sizes, value.stride(), strict=True))
    return _hint(value.storage_offset()) + reach + 1


def _bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return 0
    return _extent(value) * value.element_size()


def _real(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout != torch.strided:
        raise NotImplementedError(f"an input of layout {value.layout}")
    memory = torch.zeros(_extent(value), dtype=value.dtype, device=value.device)
    if value.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        memory.uniform_(-1, 1)
    sizes, strides = map(_hint, value.shape), map(_hint, value.stride())
    return memory.as_strided(tuple(sizes), tuple(strides), _hint(value.storage_offset()))
