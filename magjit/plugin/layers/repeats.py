"""Stretches of a graph that come again one after another, as the layers of a model do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.functional import changes

__all__ = ["Repeat", "Window", "apart", "find_repeats", "in_pieces", "repeats_of"]

LEAST_NODES = 3


@dataclass(frozen=True, slots=True)
class Window:
    """One of the stretches: its nodes, what they read of others, and what others read of them."""

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Stretches of the same calls; the k-th inputs (and outputs) of all have the same place."""

    windows: tuple[Window, ...]


def repeats_of(graph: Graph, least_saved: int) -> list[Repeat]:
    """Repeats of a torch-level graph; none where a call has an effect on those behind it."""
    if any(map(_has_effect, graph.nodes)):
        return []
    return find_repeats(graph, _may_repeat, least_saved)


_PURE = ("torch", "torch.nn.functional", "torch._C._nn", "torch._C._linalg", "_operator")
_EFFECTS = ("backward", "register_hook", "retain_grad")


def _has_effect(node: Node) -> bool:
    """Whether a call does more than compute its result, but for the switching of gradients."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.op == "call_method" and node.target in _EFFECTS:
        return True
    return changes(node) or _home(node).startswith("torch.amp")


def _may_repeat(node: Node) -> bool:
    """Whether a call is that of an operator, or switches gradients."""
    if node.op == "call_method" or node.target is torch._C._set_grad_enabled:
        return True
    return node.op == "call_function" and _home(node) in _PURE


def _home(node: Node) -> str:
    return str(getattr(node.target, "__module__", None))


def find_repeats(
    graph: Graph, may_repeat: Callable[[Node], bool], least_saved: int
) -> list[Repeat]:
    """Repeats that share no node, in order.

    Two nodes are the same call if their targets and all constants are; what the tensors are like
    is not looked at.

    Args:
        graph: of function calls and method calls.
        may_repeat: whether a node may be a part of what comes again.
        least_saved: nodes that need not be looked at again; less is not worth it.
    """
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    forms: dict[Any, int] = {}
    ids = np.array(
        [
            forms.setdefault(_form(node, _anywhere) if may_repeat(node) else node, len(forms))
            for node in calls
        ],
        np.int64,
    )
    found = []
    ranges = [(0, len(calls))]
    while ranges:
        start, end = ranges.pop()
        best = _longest(ids[start:end], least_saved)
        if best is None:
            continue
        first, last, period = start + best[0], start + best[1], best[2]
        found += _cut(calls[first:last], period, least_saved)
        ranges += [(start, first), (last, end)]
    order = {node: place for place, node in enumerate(calls)}
    return sorted(found, key=lambda repeat: order[repeat.windows[0].nodes[0]])


def _anywhere(node: Node) -> None:
    """The place of an argument that may be any node."""


def _form(node: Node, place: Callable[[Node], Any]) -> Any:
    """What two nodes have in common if they are the same call."""
    return node.op, node.target, _frozen(node.args, place), _frozen(node.kwargs, place)


def _frozen(value: Any, place: Callable[[Node], Any]) -> Any:
    """Hashable, and equal for equal values of one type only."""
    if isinstance(value, Node):
        return Node, place(value)
    if isinstance(value, tuple | list):
        return type(value), *(_frozen(one, place) for one in value)
    if isinstance(value, dict):
        return dict, *((name, _frozen(value[name], place)) for name in sorted(value))
    if isinstance(value, slice):
        return slice, *(_frozen(one, place) for one in (value.start, value.stop, value.step))
    if isinstance(value, float | complex):
        return type(value), repr(value)  # 0.0 and -0.0 are equal, NaN and NaN are not
    try:
        hash(value)
    except TypeError:
        return object()
    return type(value), value


def _longest(
    ids: np.ndarray[Any, np.dtype[np.int64]], least_saved: int
) -> tuple[int, int, int] | None:
    """Start and end of the stretch that saves the most nodes, and after how many it comes again."""
    best, most = None, least_saved - 1
    for period in range(LEAST_NODES, len(ids) // 2 + 1):
        same = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        if not len(edges):
            continue
        saved = (edges[:, 1] - edges[:, 0]) // period * period
        if saved.max() > most:
            most = int(saved.max())
            first, last = map(int, edges[saved.argmax()])
            best = first, last + period, period
    return best


def _cut(stretch: Sequence[Node], period: int, least_saved: int) -> list[Repeat]:
    """Windows, cut where the fewest values pass from one to the next."""
    places = {node: place for place, node in enumerate(stretch)}
    beyond = len(stretch)
    last_use = np.array(
        [max((places.get(user, beyond) for user in node.users), default=0) for node in stretch]
    )

    def passing(shift: int) -> int:
        cut = shift + period
        return int((last_use[shift:cut] >= cut).sum())

    shift = min(range(period), key=lambda shift: (passing(shift), shift))
    starts = range(shift, len(stretch) - period + 1, period)
    formed = [_window(stretch[start : start + period]) for start in starts]
    groups = [[window for _, window in group] for _, group in groupby(formed, lambda one: one[0])]
    return [
        Repeat(tuple(windows)) for windows in groups if (len(windows) - 1) * period >= least_saved
    ]


def _window(nodes: Sequence[Node]) -> tuple[Any, Window]:
    """With what it has in common with another one that computes the same."""
    inside = {node: place for place, node in enumerate(nodes)}
    inputs: dict[Node, int] = {}

    def place(node: Node) -> tuple[bool, int]:
        if node in inside:
            return True, inside[node]
        return False, inputs.setdefault(node, len(inputs))

    calls = tuple(_form(node, place) for node in nodes)
    used = tuple(k for k, node in enumerate(nodes) if any(one not in inside for one in node.users))
    window = Window(tuple(nodes), tuple(inputs), tuple(nodes[k] for k in used))
    return (calls, used), window


# -- graphs ---------------------------------------------------------------------------------------


def apart(window: Window, inputs: Sequence[Node]) -> GraphModule:
    """What a window computes, as a function of its inputs, in this order."""
    graph = Graph()
    copies = {node: graph.placeholder(f"input_{k}") for k, node in enumerate(inputs)}
    for node in window.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in window.outputs))
    return GraphModule(torch.nn.Module(), graph)


def in_pieces(
    gm: GraphModule,
    windows: Mapping[int, tuple[Window, Sequence[Node]]],
    function: Callable[[int, list[Any]], Sequence[Any]],
) -> GraphModule:
    """A copy of a program in which windows are calls of ``function(number, inputs)``.

    Args:
        gm: torch-level; it is left as it is.
        windows: by number, with their inputs in the order in which they are to be given.
        function: gives the outputs of the window of a number.
    """
    graph = Graph()
    copies: dict[Node, Any] = {}
    ends = {window.nodes[-1]: number for number, (window, _) in windows.items()}
    inside = {node for window, _ in windows.values() for node in window.nodes}
    for node in gm.graph.nodes:
        if node not in inside:
            copies[node] = copy = graph.node_copy(node, copies.__getitem__)
            if hasattr(node, "_dynamo_source"):
                copy._dynamo_source = node._dynamo_source
        elif node in ends:
            window, inputs = windows[ends[node]]
            call = graph.call_function(function, (ends[node], [copies[one] for one in inputs]))
            for k, output in enumerate(window.outputs):
                copies[output] = graph.call_function(operator.getitem, (call, k))
    whole = GraphModule(gm, graph)
    for name, value in vars(gm).items():  # What AOTAutograd is to know of the inputs.
        vars(whole).setdefault(name, value)
    whole.meta = dict(gm.meta)
    return whole
