"""What torch.profiler saw of a task: peak memory of tensors, and which ATen operators ran."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

Task = Callable[[], object]


@contextmanager
def quiet() -> Iterator[None]:
    """Drops what the profiler's C++ side writes to the standard error whenever it starts."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def profiled(task: Task, **options: Any) -> profile:
    """Runs a task under the profiler."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler: profile
    with quiet(), profile(activities=activities, **options) as profiler:
        task()
    return profiler


def allocation_events(events: list[Any]) -> Iterator[Any]:
    """All allocations and releases below some profiler events."""
    pending = list(events)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            yield event


def peak_bytes(task: Task) -> int:
    """The most bytes that were allocated during a task and not yet released.

    What was allocated before does not count, nor does its release.
    """
    profiler = profiled(task, profile_memory=True).profiler
    assert profiler is not None
    assert profiler.kineto_results is not None
    events = allocation_events(profiler.kineto_results.experimental_event_tree())
    alive: dict[int, int] = {}
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        fields = event.extra_fields
        if fields.alloc_size > 0:
            alive[fields.ptr] = fields.alloc_size
            held += fields.alloc_size
            peak = max(peak, held)
        else:
            held -= alive.pop(fields.ptr, 0)
    return peak


@cache
def views() -> frozenset[str]:
    """Names of the ATen operators whose result may share memory with an argument."""
    return frozenset(
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
    )


def aten_operators(task: Task) -> Counter[str]:
    """How often each ATen operator was dispatched, views left out."""
    events = profiled(task).events() or []
    names = (event.name for event in events)
    return Counter(name for name in names if name.startswith("aten::") and name not in views())
