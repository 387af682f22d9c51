"""CUDA graphs around a compiled program: one launch for a whole call.

A recording reads inputs where they were when it was made, as long as they still are there;
an input that moves is copied into a place of its own first.  What a call returned may be in use
when the next one comes: a recording whose results are alive is not replayed, another one with
other memory for its results is, and when there are too many of them the program runs plainly.
The first call always runs plainly: libraries set themselves up in it.  Where the device works far
longer than the host launches, a graph saves nothing and holds memory: there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from magjit.plugin.cuda_graphs import HIDDEN, device_seconds

__all__ = ["GraphedProgram"]

_MOST_RECORDINGS = 3

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
class GraphedProgram:
    """Calls a program through CUDA graphs.

    Attributes:
        run: the program; does nothing that a capture forbids, or the graphs are given up.
        static: positions of inputs that stay where they are.
        changed: positions of inputs that the program writes to; they are never copied.
        dynamic: whether inputs of other shapes may come, or other numbers.
        refusal: why there are no graphs.
    """

    run: Run
    static: frozenset[int] = frozenset()
    changed: frozenset[int] = frozenset()
    dynamic: bool = True
    refusal: str = ""
    _recordings: dict[Any, list[_Recording]] = field(default_factory=dict)
    _seen: dict[Any, list[int]] = field(default_factory=dict)
    _hidden: set[Any] = field(default_factory=set)
    _pool: Any = None

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Results for inputs of any values, at any addresses."""
        if self.refusal or torch.cuda.is_current_stream_capturing():
            return self.run(*inputs)
        key = self._key(inputs) if self.dynamic else None
        if key in self._hidden:
            return self.run(*inputs)
        recordings = self._recordings.setdefault(key, [])
        for recording in recordings:
            if recording.fits(inputs) and recording.is_free():
                return recording.replay(inputs)
        places = [one.data_ptr() if isinstance(one, torch.Tensor) else 0 for one in inputs]
        before = self._seen.get(key)
        self._seen[key] = places
        if before is None or len(recordings) >= _MOST_RECORDINGS:
            return self.run(*inputs)
        if any(not self._graphable(one) for one in inputs):
            self.refusal = "an input is on the CPU"
            return self.run(*inputs)
        return self._record(key, inputs, places, before)

    @staticmethod
    def _key(inputs: Sequence[Any]) -> Any:
        return tuple(
            (one.shape, one.stride()) if isinstance(one, torch.Tensor) else one for one in inputs
        )

    @staticmethod
    def _graphable(value: Any) -> bool:
        return not isinstance(value, torch.Tensor) or value.device.type == "cuda"

    def _record(
        self, key: Any, inputs: Sequence[Any], places: Sequence[int], before: Sequence[int]
    ) -> Sequence[Any]:
        taken: list[Any] = []
        kept: list[tuple[int, int]] = []
        copied: list[int] = []
        for number, one in enumerate(inputs):
            if not isinstance(one, torch.Tensor):
                taken.append(one)
                continue
            stays = places[number] == before[number]
            if stays or number in self.static or number in self.changed:
                taken.append(one.detach())
                kept.append((number, places[number]))
            else:
                own = torch.empty_strided(
                    one.shape, one.stride(), dtype=one.dtype, device=one.device
                )
                taken.append(own)
                copied.append(number)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                begin = time.perf_counter()
                outputs = list(self.run(*taken))
                host_seconds = time.perf_counter() - begin
        except RuntimeError as error:
            self.refusal = str(error)
            torch.cuda.synchronize()
            return self.run(*inputs)
        tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
        own_memory = {one.untyped_storage().data_ptr() for one in taken if _is_tensor(one)}
        if any(one.untyped_storage().data_ptr() in own_memory for one in tensors):
            self.refusal = "a result is an input"
            return self.run(*inputs)
        storages = [one.untyped_storage() for one in tensors]
        counts = [torch._C._storage_Use_Count(storage._cdata) for storage in storages]
        # Inputs read in place belong to the caller: the recording holds none of them.
        own_inputs = [one if number in copied else None for number, one in enumerate(taken)]
        recording = _Recording(graph, own_inputs, kept, copied, outputs, storages, counts)
        results, seconds = device_seconds(recording.replay, inputs)
        if seconds > HIDDEN * host_seconds:
            self._hidden.add(key)
            if not any(self._recordings.values()):
                self._pool = None
        else:
            self._recordings[key].append(recording)
        return results


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 0
