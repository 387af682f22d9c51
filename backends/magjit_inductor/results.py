"""Results of Inductor's graphs lie in memory of their own, where eager mode's do.

Its passes over graphs replace ``w * torch.ones_like(w)`` by ``w``: as a result that would be the
input itself, and whoever changed it would change the input.  Where no gradient is wanted,
AOTAutograd says of no result that it is a view of another: those that are, by the graph that it has
traced, stay in one memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node

from magjit.plugin.aliases import is_strided, storage_of
from magjit.plugin.fx_helpers import called, placeholders, results_of, set_results

__all__ = ["NotingMemory", "with_own_results"]

_TRACED = "magjit_memory"
_OWN = (OutputType.non_alias, OutputType.unsafe_view_alias)


class NotingMemory(CustomGraphPass):
    """A pass in front of all others, which notes in which memory each result of a graph lies.

    Args:
        given: a user's (``joint_custom_pre_pass``), or several; they come behind it.
    """

    def __init__(self, given: Any = None) -> None:
        several = given if isinstance(given, list | tuple) else (given,)
        self._given = tuple(one for one in several if one is not None)

    def __call__(self, graph: Graph) -> None:
        output = graph.output_node()
        output.meta[_TRACED] = tuple(map(_memory, results_of(graph)))
        for one in self._given:
            one(graph)

    def uuid(self) -> Any:
        """What a cache of compiled graphs tells passes apart by; None keeps none."""
        theirs = [getattr(one, "uuid", lambda: None)() for one in self._given]
        return None if None in theirs else (get_hash_for_files((__file__,)), *theirs)


def with_own_results(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Inductor's compiler of ATen graphs, for graphs whose results are nobody else's memory."""

    def compile_inner(gm: GraphModule, example_inputs: Any, *args: Any, **options: Any) -> Any:
        if not options.get("is_backward"):
            _separate(gm)
        return inner(gm, example_inputs, *args, **options)

    return compile_inner


def _separate(gm: GraphModule) -> None:
    """Copy what lies in an input's memory, or in another result's, and should not."""
    results = results_of(gm.graph)
    traced = gm.graph.output_node().meta.get(_TRACED, (None,) * len(results))
    # Memory to what traced graphs say of it; of an input, and of others that say nothing, None.
    taken = {memory: None for node in placeholders(gm) if (memory := _memory(node)) is not None}
    changed = False
    for position in _own_positions(len(results)):
        node = results[position]
        memory = _memory(node)
        if memory in taken:
            if traced[position] is not None and taken[memory] == traced[position]:
                continue
            assert isinstance(node, Node)
            with gm.graph.inserting_before(gm.graph.output_node()):
                results[position] = called(gm.graph, torch.ops.aten.clone.default, node)
            changed = True
        elif memory is not None:
            taken[memory] = traced[position]
    if changed:
        set_results(gm, results)


def _memory(node: Any) -> int | None:
    """Which memory a fake tensor says that it lies in."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return storage_of(value) if is_strided(value) else None


def _own_positions(count: int) -> Iterator[int]:
    """Those of a forward's outputs that AOTAutograd takes for memory of their own."""
    context = TracingContext.try_get()
    about = None if context is None else context.fw_metadata
    if about is None:
        return
    first = len(about.tokens) + len(about.mutated_inp_runtime_indices)
    for position, one in enumerate(about.output_info, first):
        if position < count and one.output_type in _OWN:
            yield position
