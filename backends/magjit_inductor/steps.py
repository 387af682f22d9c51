"""CUDA graph trees: when the results of graphs that were run before may be overwritten.

Torch's trees own the memory of what their graphs return. A *generation* begins at each call of a
compiled program, and what an earlier one has returned is lost then. A program that is cut runs
several graphs in a call and holds results of the first ones meanwhile: a graph that was seen to be
one of several has its results copied out, so that each of its runs can be a generation of its own.
(Within one generation, torch would record a graph anew for each way through the program.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from magjit.plugin import CompiledGraph
from magjit.plugin.aliases import is_strided, storage_of
from magjit.plugin.calls import current_call

__all__ = ["Step"]


class _Last(threading.local):
    """What this thread's last step was."""

    call: int = 0
    step: weakref.ref[Step] | None = None
    lends: bool = False
    """Whether a step of this call has returned memory of torch's."""


_last = _Last()


class Step:
    """Runs a compiled graph, and begins a generation where nothing of the last one is needed.

    ``cudagraph_mark_step_begin`` would not do: it also frees the outputs of a forward whose
    backward is still to come.
    """

    def __init__(self, compiled: CompiledGraph) -> None:
        self.compiled = compiled
        self.copies = False

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """The graph's results."""
        from torch._dynamo.mutation_guard import GenerationTracker

        call = current_call()
        if call and call == _last.call:
            self.copies = True
            before = None if _last.step is None else _last.step()
            if before is not None:
                before.copies = True
        else:
            _last.call, _last.lends = call, False
        _last.step = weakref.ref(self)
        if not _last.lends:
            GenerationTracker.generation += 1
        results = self.compiled(*inputs)
        if self.copies and _are_separate(results, inputs):
            return [one.clone() if isinstance(one, torch.Tensor) else one for one in results]
        _last.lends = True
        return results


def _are_separate(results: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether copies of the results are as good: none shares its memory, or has a gradient."""
    tensors = [one for one in results if isinstance(one, torch.Tensor)]
    if any(one.requires_grad or one.layout is not torch.strided for one in tensors):
        return False
    known = set(map(storage_of, filter(is_strided, inputs)))
    for one in tensors:
        storage = storage_of(one)
        if storage in known:
            return False
        known.add(storage)
    return True
