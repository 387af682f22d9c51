"""CUDA graphs around a compiled program: one launch for a whole call.

A recording reads inputs where they were when it was made, as long as they still are there;
an input that moves is copied into a place of its own first.  What a call returned may be in use
when the next one comes: a recording whose results are alive is not replayed, another one with
other memory for its results is, and when there are too many of them the program runs plainly.
The first call always runs plainly, since libraries set themselves up in it; so does the second,
which shows what memory a call takes.  Where the device works far longer than the host launches, a
graph saves nothing and holds memory: there is none.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from magjit.plugin.cuda_graphs import capturing, current_stream, device_seconds, saves_nothing
from magjit_triton.codegen.memory_plan import (
    Allocation,
    Planned,
    Watched,
    is_worth_planning,
    with_memory,
)

__all__ = ["GraphedProgram"]

_MOST_RECORDINGS = 3
_MOST_SHAPES = 64

Run = Callable[..., Sequence[Any]]


@dataclass
class _Recording:
    """A captured graph, its inputs and its outputs."""

    graph: Any
    inputs: list[Any]
    places: list[tuple[int, int]]
    copied: list[int]
    outputs: list[Any]
    storages: list[Any]
    counts: list[int]
    block: torch.Tensor | None
    is_weighed: bool = False

    def is_free(self) -> bool:
        """Whether nobody holds a result of the last replay."""
        return all(
            torch._C._storage_Use_Count(storage._cdata) <= count
            for storage, count in zip(self.storages, self.counts, strict=True)
        )

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether the inputs that are read in place are there."""
        return all(inputs[number].data_ptr() == place for number, place in self.places)

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        """Run on these inputs."""
        for number in self.copied:
            self.inputs[number].copy_(inputs[number])
        self.graph.replay()
        return [one.detach() if isinstance(one, torch.Tensor) else one for one in self.outputs]


@dataclass
class _Calls:
    """Calls with inputs of some shapes on a stream.

    Attributes:
        recordings: what is replayed.
        places: addresses of the inputs of the last call.
        moving: positions of inputs that were elsewhere at some call.
        allocations: what a call allocates; None until one has been watched.
        host_seconds: what launching a call takes the host, the least seen: it may have been busy.
        device_seconds: what the device takes for a call that is launched so.
        hidden: the device takes far longer than the host.
    """

    recordings: list[_Recording] = field(default_factory=list)
    places: list[int] | None = None
    moving: set[int] = field(default_factory=set)
    allocations: list[Allocation] | None = None
    host_seconds: float = math.inf
    device_seconds: float = math.inf
    hidden: bool = False


@dataclass
class GraphedProgram:
    """Calls a program through CUDA graphs.

    Attributes:
        run: the program; does nothing that a capture forbids, or the graphs are given up.
        library: names of library operators in it that make memory → their forms that take
            ``out``, if there are such.
        multiplies: whether it calls cuBLAS.
        static: positions of inputs that stay where they are.
        changed: positions of inputs that the program writes to; they are never copied.
        dynamic: whether inputs of other shapes may come, or other numbers.
        refusal: why there are no graphs.
    """

    run: Run
    library: Mapping[str, Any] = field(default_factory=dict)
    multiplies: bool = True
    static: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    dynamic: bool = True
    refusal: str = ""
    _calls: dict[Any, _Calls] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Results for inputs of any values, at any addresses."""
        if self.refusal or torch.cuda.is_current_stream_capturing():
            return self.run(*inputs)
        # Inputs that are copied have one place: what other threads ask for meanwhile runs plainly.
        if not self._lock.acquire(blocking=False):
            return self.run(*inputs)
        try:
            return self._called(inputs)
        finally:
            self._lock.release()

    def _called(self, inputs: Sequence[Any]) -> Sequence[Any]:
        stream = current_stream()
        key = (stream, self._shapes(inputs)) if self.dynamic else stream
        calls = self._calls.get(key)
        if calls is None:
            if len(self._calls) >= _MOST_SHAPES:
                return self.run(*inputs)
            calls = self._calls[key] = _Calls()
        if calls.hidden:
            return self.run(*inputs)
        for recording in calls.recordings:
            if recording.fits(inputs) and recording.is_free():
                if not recording.is_weighed:
                    return self._weighed(calls, recording, inputs)
                return recording.replay(inputs)
        places = [one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in inputs]
        before, calls.places = calls.places, places
        if before is None or len(calls.recordings) >= _MOST_RECORDINGS:
            return self.run(*inputs)
        calls.moving |= {k for k, one in enumerate(places) if one != before[k]}
        if calls.allocations is None:
            return self._watch(calls, inputs)
        if calls.device_seconds == math.inf:
            return self._timed(calls, inputs)
        if any(not self._graphable(one) for one in inputs):
            self.refusal = "an input is on the CPU"
            return self.run(*inputs)
        return self._record(calls, inputs, stream)

    @staticmethod
    def _shapes(inputs: Sequence[Any]) -> Any:
        return tuple(
            (one.shape, one.stride()) if isinstance(one, torch.Tensor) else one for one in inputs
        )

    @staticmethod
    def _graphable(value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or value.device.type == "cuda"

    def _watch(self, calls: _Calls, inputs: Sequence[Any]) -> Sequence[Any]:
        watched = Watched()
        results = with_memory(self.run, self.library, watched)(*inputs)
        calls.allocations = watched.finish()
        return results

    def _timed(self, calls: _Calls, inputs: Sequence[Any]) -> Sequence[Any]:
        """A call as those without a graph would be: all is loaded, and nothing else is done."""

        def launched() -> Sequence[Any]:
            begin = time.perf_counter()
            results = self.run(*inputs)
            calls.host_seconds = time.perf_counter() - begin
            return results

        results, calls.device_seconds = device_seconds(launched)
        return results

    def _record(self, calls: _Calls, inputs: Sequence[Any], stream: int) -> Sequence[Any]:
        assert calls.places is not None and calls.allocations is not None
        taken: list[Any] = []
        kept: list[tuple[int, int]] = []
        copied: list[int] = []
        for number, one in enumerate(inputs):
            if not isinstance(one, torch.Tensor):
                taken.append(one)
            elif number not in calls.moving or number in self.static or number in self.changed:
                taken.append(one.detach())
                kept.append((number, calls.places[number]))
            else:
                own = torch.empty_strided(
                    one.shape, one.stride(), dtype=one.dtype, device=one.device
                )
                taken.append(own)
                copied.append(number)
        graph = torch.cuda.CUDAGraph()
        try:
            plan = calls.allocations if is_worth_planning(calls.allocations) else []
            planned = Planned(plan, stream)
            block = planned.block
            run = with_memory(self.run, self.library, planned) if plan else self.run
            with capturing(graph, multiplies=self.multiplies):
                begin = time.perf_counter()
                outputs = list(run(*taken))
                calls.host_seconds = min(calls.host_seconds, time.perf_counter() - begin)
        except RuntimeError as error:
            self.refusal = str(error)
            torch.cuda.synchronize()
            return self.run(*inputs)
        del planned, run  # Whose references to results would be counted as somebody's.
        tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
        own_memory = {one.untyped_storage().data_ptr() for one in taken if _is_tensor(one)}
        if any(one.untyped_storage().data_ptr() in own_memory for one in tensors):
            self.refusal = "a result is an input"
            return self.run(*inputs)
        storages = [one.untyped_storage() for one in tensors]
        counts = [torch._C._storage_Use_Count(storage._cdata) for storage in storages]
        # Inputs read in place belong to the caller: the recording holds none of them.
        own_inputs = [one if number in copied else None for number, one in enumerate(taken)]
        recording = _Recording(graph, own_inputs, kept, copied, outputs, storages, counts, block)
        calls.recordings.append(recording)
        return recording.replay(inputs)

    @staticmethod
    def _weighed(calls: _Calls, recording: _Recording, inputs: Sequence[Any]) -> Sequence[Any]:
        """The second replay, which tells whether there will be others; the first one uploads it."""
        recording.is_weighed = True
        results, seconds = device_seconds(recording.replay, inputs)
        if saves_nothing(seconds, calls.host_seconds, calls.device_seconds):
            calls.hidden = True
            calls.recordings.clear()
        return results


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0
