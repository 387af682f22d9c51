"""CUDA graphs for ``mode="reduce-overhead"``: what a call launches is captured, and replayed.

    inputs = pinned | moving      pinned ones are read where they lie, moving ones are copied in
    graphs: addresses of the pinned inputs → a captured graph

The first call runs as it is. The next one tells which inputs lie elsewhere; those move, all others
are read, and updated, where they were when the graph was captured: nothing else is copied in. A
program that writes an input has no moving ones, since two inputs may overlap. What a graph returns
is lent, where results have been out of use when the next call came: a replay writes over them. Else
it is copied out. What else a graph needs it shares with the others of its stream. Code that several
modules share is captured for the parameters of each, which are never copied; code for sizes that
vary, for each of the sizes that come again, of which the last ones are kept. Where the device works
far longer than the host launches, a graph saves nothing and holds its memory between calls: it is
given up.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from magjit.plugin.capturable import NOTHING_VARIES, Varying

__all__ = [
    "Replaying",
    "ReplayingByModule",
    "capturing",
    "current_stream",
    "device_seconds",
    "saves_nothing",
]

_log = logging.getLogger(__name__)

_HIDDEN = 3.0
"""Launches are hidden where the device takes so many times as long as they do."""
_HIDDEN_IF_SEEN = 2.0
"""The same where launching them one by one has been seen to take no longer than a replay."""
_AS_LONG = 1.05

_MOST_GRAPHS = 8
_MOST_CAPTURES = 16
_MOST_ADDRESSES = 64
_MOST_MODULES = 64
_MOST_SIZES = 32

_DATA_PTR, _STRIDE = torch.Tensor.data_ptr, torch.Tensor.stride
_SHAPE = attrgetter("shape")

T = TypeVar("T")
Addresses = tuple[int, ...]
_Key = tuple[Addresses, tuple[tuple[int, ...], ...]]
_Pools = dict[int, torch.cuda.MemPool]


@dataclass(slots=True)
class _Captured:
    """A graph, the memory of what is copied in and what it returns, and what launching it takes.

    Attributes:
        lends: results are its own memory, not copies.
    """

    replay: Callable[[], None]
    static: list[torch.Tensor]
    outputs: Sequence[Any]
    stream: int
    host_seconds: float = math.inf
    is_weighed: bool = False
    lends: bool = False
    _storages: list[torch.UntypedStorage] = field(default_factory=list)
    _held: int = 0

    def __post_init__(self) -> None:
        tensors = [one for one in self.outputs if isinstance(one, torch.Tensor)]
        self._storages = [one.untyped_storage() for one in tensors]
        self._held = _held_by_one()
        # What somebody else holds now may be let go later; an inference tensor stays one.
        self.lends = (
            self.lends
            and len({one._cdata for one in self._storages}) == len(tensors)
            and self.is_free()
            and not any(map(torch.is_inference, tensors))
        )

    def is_free(self) -> bool:
        """Whether nobody holds a result of the last replay."""
        for storage in self._storages if self.lends else ():
            if torch._C._storage_Use_Count(storage._cdata) > self._held:
                return False
        return True

    def run(self, moved: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        if len(moved) == 1:
            self.static[0].copy_(moved[0])
        elif moved:
            torch._foreach_copy_(self.static, moved)
        self.replay()
        if self.lends:
            return tuple(
                [one.detach() if isinstance(one, torch.Tensor) else one for one in self.outputs]
            )
        if len(self.outputs) == 1 and isinstance(self.outputs[0], torch.Tensor):
            return (self.outputs[0].clone(),)
        kept = [one for one in self.outputs if isinstance(one, torch.Tensor)]
        made = [torch.empty_like(one) for one in kept]
        if made:
            torch._foreach_copy_(made, kept)
        copies = iter(made)
        return tuple(next(copies) if isinstance(one, torch.Tensor) else one for one in self.outputs)


def _held_by_one() -> int:
    """How often a storage counts as used that one tensor and one Python object hold."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def _taking(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the elements at some positions; in C, since every call goes through it."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda given: tuple([given[k] for k in positions])


class Replaying:
    """A function that captures itself when it is called again, and is replayed from then on.

    Args:
        function: launches work on the current device only; takes tensors, which keep their shapes,
            and returns a tuple or list.
        count: of its inputs.
        writes: whether it may write them.
        static: positions of inputs that keep their strides, too.
        unread: positions of inputs that it does not read, which may be anything.
        parameters: positions of inputs that are where they were at every call.
        pools: the memory that graphs of a stream share.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        count: int,
        *,
        writes: bool,
        static: Iterable[int] = (),
        unread: Collection[int] = (),
        parameters: Iterable[int] = (),
        pools: _Pools | None = None,
    ) -> None:
        self.function, self.unread = function, frozenset(unread)
        self._pools: _Pools = {} if pools is None else pools
        self._static = frozenset(static)
        self._may_move = not writes
        known = self.unread.union(parameters)
        self._read = [k for k in range(count) if k not in known]
        self._last: Addresses | None = None
        self._captures = 0
        self._results: list[StorageWeakRef] = []  # of the last call that ran as it is
        self._lends = True
        self._lock = threading.Lock()
        self._move(())

    def _move(self, positions: Iterable[int]) -> None:
        """From now on inputs at these positions move: what was captured before holds no more."""
        self._moving = sorted(positions)
        pinned = [k for k in self._read if k not in self._moving]
        self._pinned = _taking(pinned)
        self._laid_out = _taking([k for k in pinned if k not in self._static])
        self._moved = _taking(self._moving)
        self._seen: set[_Key] = set()
        self._graphs: dict[_Key, _Captured] = {}

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        # A graph has its memory once: what other threads ask for meanwhile runs as it is.
        if not self._lock.acquire(blocking=False):
            return self.function(*inputs)
        try:
            key = self._key(inputs)
            captured = self._graphs.get(key)
            if captured is not None and captured.stream == current_stream():
                if captured.is_free():
                    moved = self._moved(inputs)
                    return (
                        captured.run(moved)
                        if captured.is_weighed
                        else self._weighed(captured, moved)
                    )
                self._lends = False
                captured = None
                del self._graphs[key]
            if captured is None:
                captured = self._captured(inputs)
                if captured is not None:
                    return captured.run(self._moved(inputs))
        finally:
            self._lock.release()
        results = self.function(*inputs)
        if self._captures < _MOST_CAPTURES:
            self._results = [_weakly(one) for one in results if isinstance(one, torch.Tensor)]
        return results

    def _key(self, inputs: Sequence[Any]) -> _Key:
        """What a captured graph holds for: where the pinned inputs are, and how they lie there."""
        addresses = tuple(map(_DATA_PTR, self._pinned(inputs)))
        return addresses, tuple(map(_STRIDE, self._laid_out(inputs)))

    def _captured(self, inputs: Sequence[Any]) -> _Captured | None:
        """A new graph for these inputs, where that is worth it."""
        if self._captures >= _MOST_CAPTURES or torch.cuda.is_current_stream_capturing():
            return None
        self._learn(inputs)
        key = self._key(inputs)
        if key not in self._seen:
            if len(self._seen) < _MOST_ADDRESSES:
                self._seen.add(key)
            return None
        if len(self._graphs) >= _MOST_GRAPHS:
            return None
        self._captures += 1
        try:
            lends = self._lends
            made = _capture(self.function, inputs, self._moving, self._pools, lends=lends)
            self._graphs[key] = made
        except RuntimeError as error:
            self._captures = _MOST_CAPTURES
            _log.warning("launched one by one, since no CUDA graph can be captured: %s", error)
        return self._graphs.get(key)

    def _weighed(self, captured: _Captured, moved: tuple[torch.Tensor, ...]) -> Sequence[Any]:
        """The second replay, which tells whether there will be others; the first one uploads it."""
        captured.is_weighed = True
        results, seconds = device_seconds(captured.run, moved)
        if saves_nothing(seconds, captured.host_seconds):
            self._graphs.clear()
            self._captures = _MOST_CAPTURES
            _log.debug(
                "launched one by one: the host takes %.0f us of the device's %.0f",
                captured.host_seconds * 1e6,
                seconds * 1e6,
            )
        return results

    def _learn(self, inputs: Sequence[Any]) -> None:
        """What lies elsewhere than at the last call moves, and so does what looks like it.

        Of the states of a loop some stay in their places for a while by chance.
        """
        if any(not one.expired() for one in self._results):
            self._lends = False
        addresses = tuple([inputs[k].data_ptr() for k in self._read])
        last, self._last = self._last, addresses
        if last is None or not self._may_move:
            return
        places = zip(self._read, last, addresses, strict=True)
        moved = {k for k, before, now in places if before != now}
        if not moved <= set(self._moving):
            moved.update(self._moving)
            looks = {(inputs[k].dtype, inputs[k].shape) for k in moved}
            moved.update(
                k
                for k in self._read
                if k not in self._static and (inputs[k].dtype, inputs[k].shape) in looks
            )
            self._move(moved)


class ReplayingByModule:
    """A `Replaying` for each module whose parameters a function is called with, and for each size.

    Args:
        function: as for `Replaying`, writing no input.
        count, static, unread: as for `Replaying`.
        parameters: positions of inputs that tell the modules apart.
        varying: what tells sizes apart.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Any]],
        count: int,
        *,
        parameters: Iterable[int],
        static: Iterable[int] = (),
        unread: Collection[int] = (),
        varying: Varying = NOTHING_VARIES,
    ) -> None:
        self.function, self.unread = function, frozenset(unread)
        self._count, self._static = count, tuple(static)
        self._parameters = [k for k in parameters if k not in self.unread]
        self._module = _taking(self._parameters)
        self._varies = varying != NOTHING_VARIES
        self._sized, self._numbers = _taking(varying.tensors), _taking(varying.numbers)
        self._no_addresses = self.unread.union(varying.numbers)
        self._most = _MOST_SIZES if self._varies else _MOST_MODULES
        self._pools: _Pools = {}
        self._of_module: OrderedDict[Any, Replaying] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        # Their layouts are those that the function was compiled for.
        key: Any = tuple(map(_DATA_PTR, self._module(inputs)))
        if self._varies:
            key = key, tuple(map(_SHAPE, self._sized(inputs))), self._numbers(inputs)
        replaying = self._of_module.get(key)
        if replaying is None:
            replaying = self._new(key)
            if replaying is None:
                return self.function(*inputs)
        elif self._varies:
            with self._lock:
                if key in self._of_module:
                    self._of_module.move_to_end(key)
        return replaying(*inputs)

    def _new(self, key: Any) -> Replaying | None:
        """Room for one more; sizes that have not come for longest make way, modules do not."""
        made = Replaying(
            self.function,
            self._count,
            writes=False,
            static=self._static,
            unread=self._no_addresses,
            parameters=self._parameters,
            pools=self._pools,
        )
        with self._lock:
            if len(self._of_module) >= self._most:
                if not self._varies:
                    return None
                self._of_module.popitem(last=False)
            return self._of_module.setdefault(key, made)


def _capture(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
    moving: Sequence[int],
    pools: _Pools,
    *,
    lends: bool,
) -> _Captured:
    """Nothing runs while it is captured: the replay that follows is the one execution."""
    given = list(inputs)
    for k in moving:
        given[k] = inputs[k].clone()
    graph = torch.cuda.CUDAGraph()
    stream = current_stream()
    if stream not in pools:
        # It outlives its graphs: without one, a mere handle of a pool cannot be used again.
        pools[stream] = torch.cuda.MemPool()
    with capturing(graph, pool=pools[stream].id):
        begin = time.perf_counter()
        outputs = function(*given)
        spent = time.perf_counter() - begin
    static = [given[k] for k in moving]
    del given  # with what a result might share memory, and what counts as somebody's
    return _Captured(graph.replay, static, outputs, stream, spent, lends=lends)


def _weakly(tensor: torch.Tensor) -> StorageWeakRef:
    """What tells whether a tensor's memory is in use."""
    return StorageWeakRef(tensor.untyped_storage())


_sides: dict[tuple[int, int], torch.cuda.Stream] = {}
_workspaces: dict[tuple[int, int], torch.cuda.MemPool] = {}


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, *, multiplies: bool = True, pool: Any = None
) -> Iterator[None]:
    """Capture what is launched, on a stream that stands for the current one.

    Graphs of different streams may be replayed at once, so each has its own workspace of cuBLAS,
    which goes by stream. It lies in memory that stays: others may drop workspaces at any time, and
    a graph has no other name for its own than the address. Afterwards the workspaces of all
    streams are dropped; what is launched outside of graphs makes another one when it needs it.

    Args:
        graph: what is captured into.
        multiplies: whether cuBLAS is called; if it is all the same, the graph's own pool has the
            workspace.
        pool: memory that it shares with other graphs, which are never replayed meanwhile.
    """
    device = torch.cuda.current_device()
    key = device, current_stream()
    if key not in _sides:
        _sides[key] = torch.cuda.Stream()
        _workspaces[key] = torch.cuda.MemPool()
    side = _sides[key]
    torch._C._cuda_clearCublasWorkspaces()
    if multiplies:
        matrix = torch.zeros(16, 16, device=torch.device("cuda", device))
        made = torch.empty_like(matrix)
        torch.cuda.synchronize()
        with torch.cuda.use_mem_pool(_workspaces[key]), torch.cuda.stream(side):
            torch.mm(matrix, matrix, out=made)
    try:
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def device_seconds(task: Callable[..., T], *given: Any) -> tuple[T, float]:
    """What a task returns, and for how long the current CUDA device works for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = task(*given)
    end.record()
    end.synchronize()
    return result, begin.elapsed_time(end) / 1e3


def saves_nothing(replayed: float, host: float, launched: float = math.inf) -> bool:
    """Whether a graph only holds memory.

    Args:
        replayed: seconds that the device takes for a replay.
        host: seconds that the host takes for launching the same one by one.
        launched: seconds that the device takes then.
    """
    if launched < _AS_LONG * replayed and replayed > _HIDDEN_IF_SEEN * host:
        return True
    return replayed > _HIDDEN * host


def current_stream() -> int:
    """The handle of torch's current CUDA stream."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
