"""What a graph writes into its inputs at its end: many small tensors by one call.

A convolutional network in training has three buffers for each batch norm.  Each written by a call
of its own, they take a host longer than all the gradients of small images.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch.fx import Graph, Node

from magjit.plugin.aliases import memory_of
from magjit.plugin.writes import last_copies, written_in_part
from magjit_dvm.batch_norms import writes_in_place

__all__ = ["write_together"]

aten = torch.ops.aten

_SMALL = 1 << 16
"""Elements up to which a tensor is better written together with others."""


def write_together(graph: Graph) -> None:
    """Join the last writes of inputs; what a kernel can write by itself is not copied."""
    copies = last_copies(graph)
    for node in graph.nodes:
        if written := writes_in_place(node):
            _by_its_kernel(graph, node, written, copies)
    targets: set[Any] = {one.args[0] for one in copies}
    partial = {one.copy for one in written_in_part(graph, fusing=True)}
    added: dict[Any, list[Node]] = defaultdict(list)
    copied: dict[Any, list[Node]] = defaultdict(list)
    for copy in copies:
        to, source = copy.args[:2]
        assert isinstance(to, Node) and isinstance(source, Node)
        value, given = to.meta["val"], source.meta["val"]
        if copy.users or copy in partial:
            continue
        if _elements(value) > _SMALL or memory_of([source]) & targets:
            continue
        key = value.dtype, value.device
        if _adds_to(source, to, copy):
            added[key, source.args[1]].append(copy)
        elif (given.dtype, given.device, given.shape) == (*key, value.shape):
            copied[key].append(copy)
    output = graph.output_node()
    for (_, number), found in added.items():
        if len(found) > 1:
            _replace(graph, output, found, aten._foreach_add_.Scalar, number)
    for found in copied.values():
        if len(found) > 1:
            sources = [one.args[1] for one in found]
            _replace(graph, output, found, aten._foreach_copy_.default, sources)


def _by_its_kernel(graph: Graph, norm: Node, numbers: tuple[int, ...], copies: list[Node]) -> None:
    """Running statistics that a batch norm's kernel writes where they are."""
    items = {one.args[1]: one for one in norm.users if one.target is operator.getitem}
    found = []
    for number in numbers:
        to, made = norm.args[number], items.get(number)
        written = [one for one in copies if made is not None and one.args == (to, made)]
        if not isinstance(to, Node) or len(written) != 1 or set(to.users) != {norm, *written}:
            return
        found += written
    for copy in found:
        copies.remove(copy)
        graph.erase_node(copy)
    norm.meta["in_place"] = True


def _adds_to(source: Node, to: Node, copy: Node) -> bool:
    """Whether a number is added to an input, for the input alone: a count of batches."""
    if source.target is not aten.add.Tensor or source.kwargs or len(source.args) != 2:
        return False
    number = source.args[1]
    same = source.args[0] is to and isinstance(number, int) and set(source.users) == {copy}
    return same and set(to.users) == {source, copy}


def _replace(graph: Graph, output: Node, copies: list[Node], target: Any, other: Any) -> None:
    inputs = [one.args[0] for one in copies]
    with graph.inserting_before(output):
        made = graph.call_function(target, (inputs, other))
    made.meta["val"] = None
    for copy in copies:
        source = copy.args[1]
        graph.erase_node(copy)
        assert isinstance(source, Node)
        if not source.users:
            graph.erase_node(source)


def _elements(value: torch.Tensor) -> int:
    sizes = [size for size in value.shape if isinstance(size, int)]
    return torch.Size(sizes).numel() if len(sizes) == value.dim() else _SMALL + 1
