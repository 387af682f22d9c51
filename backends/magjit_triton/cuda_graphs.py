"""CUDA graphs for ``mode="reduce-overhead"``: a graph for each set of input addresses.

Nothing is copied in: a captured graph reads and updates the very tensors that it was captured with,
so a call replays it only where all inputs are at the same addresses, and inputs that the program
updates are updated. What it returns is copied out, for the next replay writes over it. The first
call with new addresses runs as it is, the second is captured; a program whose inputs keep moving
is not captured at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

__all__ = ["Replaying", "can_be_captured"]

_MOST_GRAPHS = 8
_MOST_ADDRESSES = 64


def can_be_captured(gm: GraphModule) -> bool:
    """Whether everything that a graph does is launched on one CUDA device and draws no numbers."""
    devices: set[torch.device] = set()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, torch.Tensor):
                devices.add(one.device)
                if any(isinstance(size, torch.SymInt) for size in one.shape):
                    return False
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags or torch.Tag.dynamic_output_shape in tags:
            return False
        if torch.Tag.data_dependent_output in tags:
            return False
    return len(devices) == 1 and next(iter(devices)).type == "cuda"


class Replaying:
    """A function that captures itself when it is called again with inputs at the same addresses.

    Args:
        function: launches work on the current device only; returns a tuple or list.
    """

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        self.function = function
        self._seen: set[tuple[Any, ...]] = set()
        self._graphs: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Sequence[Any]]] = {}

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        key = tuple(
            one.data_ptr() if isinstance(one, torch.Tensor) else (type(one), one) for one in inputs
        )
        found = self._graphs.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing() or not self._is_worth(key):
                return self.function(*inputs)
            found = self._graphs[key] = self._captured(inputs)
        graph, outputs = found
        graph.replay()
        return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in outputs)

    def _is_worth(self, key: tuple[Any, ...]) -> bool:
        if key in self._seen:
            return len(self._graphs) < _MOST_GRAPHS
        if len(self._seen) < _MOST_ADDRESSES:
            self._seen.add(key)
        return False

    def _captured(self, inputs: Sequence[Any]) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """Nothing runs while it is captured: the replay that follows is the one execution."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = self.function(*inputs)
        return graph, outputs
