"""Memory of a program that is captured: what a run allocates, and where that lies in one block.

    Watched:  run → Allocation*            each with the first and the last moment of its use
    planned:  Allocation* → offset*        two that are used at once do not overlap
    Planned:  run again, in that block     what outlives the run has memory of its own

A graph's private pool keeps whole segments, of 2 or 20 MiB at least, that nobody else can use; this
block is of the size that is needed, and all graphs of a stream share one: what is in it is of use
during a replay only.  Results of library operators that take no ``out`` are in the pool all the
same; where there is room enough for everything beside them, nothing is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch

__all__ = [
    "ALLOCATE",
    "Allocation",
    "Planned",
    "Watched",
    "is_worth_planning",
    "planned",
    "pool_bytes",
    "with_memory",
]

ALLOCATE = "__empty_strided"
"""What programs call for memory."""

_ALIGNMENT = 512
_MOST_PLANNED = 4000
_SMALL, _SMALL_SEGMENT, _LARGE_SEGMENT = 1 << 20, 2 << 20, 20 << 20

Run = Callable[..., Sequence[Any]]


@dataclass(eq=False, slots=True)
class Allocation:
    """Memory that a run asks for.

    Attributes:
        size, strides, dtype, device: of the tensor in it.
        count: bytes.
        begin: how many were asked for before.
        end: how many have been asked for when it is found free; None if it outlives the run.
        movable: whether it can be elsewhere: a library operator's own result cannot.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    count: int
    begin: int
    end: int | None = None
    movable: bool = True


@dataclass
class Watched:
    """Allocates for a program, and sees until when what it allocated is used."""

    allocations: list[Allocation] = field(default_factory=list)
    _used: list[tuple[Allocation, torch.UntypedStorage]] = field(default_factory=list)

    def empty_strided(
        self, size: Sequence[int], strides: Sequence[int], *, dtype: Any, device: Any
    ) -> torch.Tensor:
        """As ``torch.empty_strided``."""
        self.sweep()
        return self._noted(torch.empty_strided(size, strides, dtype=dtype, device=device))

    def calling(self, call: Callable[..., Any], out: Any) -> Callable[..., Any]:
        """A library operator whose results are memory, too.

        Args:
            out: its form that takes ``out``; None where it has none.
        """

        def called(*args: Any, **kwargs: Any) -> Any:
            self.sweep()
            made = call(*args, **kwargs)
            for one in made if isinstance(made, tuple | list) else (made,):
                if isinstance(one, torch.Tensor):
                    self._noted(one, movable=out is not None)
            return made

        return called

    def sweep(self) -> None:
        """See what is free by now."""
        now = len(self.allocations)
        used = []
        for one, storage in self._used:
            # The one reference that is left is this one.
            if torch._C._storage_Use_Count(storage._cdata) <= 1:
                one.end = now
            else:
                used.append((one, storage))
        self._used = used

    def finish(self) -> list[Allocation]:
        """What a run that is over has allocated; its results are still there."""
        self.sweep()
        self._used = []
        return self.allocations

    def _noted(self, made: torch.Tensor, *, movable: bool = True) -> torch.Tensor:
        storage = made.untyped_storage()
        one = Allocation(
            tuple(made.shape),
            made.stride(),
            made.dtype,
            made.device,
            storage.nbytes(),
            len(self.allocations),
            movable=movable,
        )
        self.allocations.append(one)
        self._used.append((one, storage))
        return made


def planned(allocations: Sequence[Allocation]) -> tuple[dict[Allocation, int], int]:
    """Where memory lies in one block: the largest first, each in the lowest gap.

    Returns:
        Byte offsets of what is free again within the run, and the size of the block in bytes.
    """
    offsets: dict[Allocation, int] = {}
    total = 0
    inner = [one for one in allocations if one.movable and one.end is not None and one.count]
    if len(inner) > _MOST_PLANNED:
        return {}, 0
    for one in sorted(inner, key=lambda one: -one.count):
        assert one.end is not None
        beside = sorted(
            (offsets[other], other.count)
            for other in offsets
            if other.begin < one.end and one.begin < (other.end or 0)
        )
        place = 0
        for offset, count in beside:
            if place + one.count <= offset:
                break
            place = max(place, _aligned(offset + count))
        offsets[one] = place
        total = max(total, place + one.count)
    return offsets, total


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def pool_bytes(allocations: Sequence[Allocation]) -> int:
    """Bytes of the segments that hold these in a private pool, as torch's allocator makes them."""
    small = [one for one in allocations if one.count <= _SMALL]
    large = [one for one in allocations if one.count > _SMALL]
    total = -(-_peak(small) // _SMALL_SEGMENT) * _SMALL_SEGMENT
    if large:
        total += max(_LARGE_SEGMENT, -(-_peak(large) // _SMALL_SEGMENT) * _SMALL_SEGMENT)
    return total


def _peak(allocations: Sequence[Allocation]) -> int:
    """The most bytes in use at once."""
    changes: list[tuple[float, int]] = []
    for one in allocations:
        changes += [(one.begin, one.count)]
        changes += [] if one.end is None else [(one.end - 0.5, -one.count)]
    return max(accumulate(count for _, count in sorted(changes)), default=0)


def is_worth_planning(allocations: Sequence[Allocation]) -> bool:
    """Whether a captured run holds less memory when it is planned than in a pool alone."""
    offsets, total = planned(allocations)
    left = [one for one in allocations if not one.movable]
    kept = sum(one.count for one in allocations if one.movable and one not in offsets)
    return total + kept + pool_bytes(left) < pool_bytes(allocations)


_blocks: WeakValueDictionary[tuple[torch.device, int], torch.Tensor] = WeakValueDictionary()


def _block(device: torch.device, stream: int, count: int) -> torch.Tensor:
    """The block of a stream: one that captured graphs use already, if it is large enough."""
    found = _blocks.get((device, stream))
    if found is None or found.numel() < count:
        found = torch.empty(count, dtype=torch.uint8, device=device)
        _blocks[device, stream] = found
    return found


class Planned:
    """Gives a program the memory that has been planned; it lies there before the run begins.

    Args:
        allocations: of an earlier run of the same program on inputs of the same shapes.
        stream: whose graphs share memory.

    Attributes:
        block: the shared memory; to be kept as long as the graph; None where nothing lies in it.
    """

    def __init__(self, allocations: Sequence[Allocation], stream: int) -> None:
        allocations = [one for one in allocations if one.movable]
        devices = {one.device for one in allocations}
        offsets, total = planned(allocations) if len(devices) == 1 else ({}, 0)
        self.block = _block(devices.pop(), stream, total) if total else None
        self._places = [
            torch.empty_strided(one.size, one.strides, dtype=one.dtype, device=one.device)
            if one not in offsets or self.block is None
            else torch.empty(0, dtype=one.dtype, device=one.device).set_(
                self.block.untyped_storage(),
                offsets[one] // one.dtype.itemsize,
                one.size,
                one.strides,
            )
            for one in allocations
        ]
        self._places.reverse()

    def empty_strided(
        self, size: Sequence[int], strides: Sequence[int], *, dtype: Any, device: Any
    ) -> torch.Tensor:
        """As ``torch.empty_strided``.

        Raises:
            RuntimeError: the program asks for something else than it did.
        """
        place = self._next()
        same = place.shape == tuple(size) and place.stride() == tuple(strides)
        if not same or place.dtype != dtype:
            raise RuntimeError(f"memory for {tuple(size)} where {tuple(place.shape)} was planned")
        return place

    def calling(self, call: Callable[..., Any], out: Any) -> Callable[..., Any]:
        """A library operator that writes its result into planned memory.

        Args:
            out: its form that takes ``out``; None where it has none.
        """
        if out is None:
            return call
        return lambda *args, **kwargs: out(*args, **kwargs, out=self._next())

    def _next(self) -> torch.Tensor:
        if not self._places:
            raise RuntimeError("more memory is asked for than was planned")
        return self._places.pop()


def with_memory(run: Run, calls: Mapping[str, Any], memory: Watched | Planned) -> Run:
    """A program that gets its memory from ``memory``.

    Args:
        run: the program.
        calls: names of library operators in it that make memory → their forms that take ``out``, if
            there are such.
    """
    assert isinstance(run, FunctionType)
    names: dict[str, Any] = {**run.__globals__, ALLOCATE: memory.empty_strided}
    for name, out in calls.items():
        names[name] = memory.calling(names[name], out)
    return FunctionType(run.__code__, names)
