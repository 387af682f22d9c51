"""Layers that come again are recorded once: an ATen graph's nodes of one are copied for others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.aliases import storage_of
from magjit.plugin.fake_layouts import Layout, Undescribed, described, layout_of
from magjit.plugin.fx_helpers import runnable
from magjit.plugin.layers.repeats import apart, in_pieces, repeats_of

__all__ = ["LayerRecorder", "Recorder", "in_layers"]


LEAST_SAVED = 12
"""Nodes that need not be recorded again; for less it is not worth to look for them."""


class Recorder(Protocol):
    """What records the operators that run."""

    graph: Graph
    numbers: dict[Any, Node]

    def node_of(self, value: Any) -> Any: ...
    def keep(self, tensor: torch.Tensor, node: Node) -> None: ...
    def made(self, layout: Layout) -> FakeTensor: ...


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A layer's nodes, what they were given, and its results."""

    inputs: tuple[Any, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    layouts: tuple[Layout, ...]


class LayerRecorder:
    """The layers of a program that is being recorded.

    Args:
        layers: by number, what each of them computes; one function for all of a kind.
    """

    def __init__(self, layers: dict[int, Callable[..., Any]]) -> None:
        self._layers = layers
        self._found: dict[Any, _Recorded | None] = {}

    @contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Within it, layers are run for this recorder."""
        _running.append((self, recorder))
        try:
            yield
        finally:
            _running.pop()

    def run(self, recorder: Recorder, number: int, inputs: list[Any]) -> Sequence[Any]:
        """What a layer gives, for inputs that were or were not seen before."""
        layer = self._layers[number]
        grad_enabled = torch.is_grad_enabled()
        nodes = [recorder.node_of(one) for one in inputs]
        try:
            same = tuple(nodes.index(node) for node in nodes)  # which are one and the same
            key = (layer, grad_enabled, same, tuple(map(described, inputs)))
            found = self._found.get(key)
        except (Undescribed, TypeError):
            return layer(*inputs)  # type: ignore[no-any-return]
        if found is not None:
            return self._again(recorder, found, nodes)
        if key in self._found or any(getattr(one, "constant", None) is not None for one in inputs):
            return layer(*inputs)  # type: ignore[no-any-return]
        last = next(iter(reversed(recorder.graph.nodes)))
        results: Sequence[Any] = layer(*inputs)
        kept = grad_enabled == torch.is_grad_enabled()
        self._found[key] = _recorded(recorder, last, nodes, inputs, results) if kept else None
        return results

    def _again(self, recorder: Recorder, found: _Recorded, inputs: Sequence[Any]) -> list[Any]:
        copies = dict(zip(found.inputs, inputs, strict=True))
        for node in found.nodes:
            copies[node] = recorder.graph.node_copy(node, lambda one: copies.get(one, one))
        results = []
        for node, layout in zip(found.outputs, found.layouts, strict=True):
            result = recorder.made(layout)
            copies[node].meta["val"] = result
            recorder.keep(result, copies[node])
            results.append(result)
        return results


def _recorded(
    recorder: Recorder,
    last: Node,
    inputs: Sequence[Any],
    given: Sequence[Any],
    results: Sequence[Any],
) -> _Recorded | None:
    """What was added to the graph behind a node; None where copies of it might not do."""
    layouts = [layout_of(one, symbols=True) for one in results]
    known = [one for one in layouts if one is not None]
    tensors = [one for one in (*given, *results) if isinstance(one, torch.Tensor)]
    memory = Counter(map(storage_of, tensors))
    if len(known) < len(results) or any(memory[storage_of(one)] > 1 for one in results):
        return None
    shared = set(recorder.numbers.values())  # sizes are computed once for all layers
    nodes = []
    node = last.next
    while node.op != "root":
        if node not in shared and node.op != "get_attr":
            nodes.append(node)
        node = node.next
    outputs = tuple(recorder.node_of(one) for one in results)
    return _Recorded(tuple(inputs), tuple(nodes), outputs, tuple(known))


_running: list[tuple[LayerRecorder, Recorder]] = []


def run_layer(number: int, inputs: list[Any]) -> Sequence[Any]:
    """What stands for a layer in a program that is recorded."""
    layers, recorder = _running[-1]
    return layers.run(recorder, number, inputs)


def in_layers(program: Callable[..., Any]) -> tuple[Callable[..., Any], LayerRecorder]:
    """A program of which repeated layers are recorded once, and their recorder.

    Args:
        program: a torch-level graph, which is left as it is; a function has no layers.
    """
    layers: dict[int, Callable[..., Any]] = {}
    windows = {}
    if not isinstance(program, GraphModule):
        return program, LayerRecorder(layers)
    for repeat in repeats_of(program.graph, LEAST_SAVED):
        first = repeat.windows[0]
        layer = runnable(apart(first, first.inputs))
        for window in repeat.windows:
            windows[len(layers)] = window, window.inputs
            layers[len(layers)] = layer
    whole = in_pieces(program, windows, run_layer) if windows else program
    return runnable(whole), LayerRecorder(layers)
