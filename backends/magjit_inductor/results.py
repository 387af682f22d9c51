"""Results of Inductor's graphs lie in memory of their own, where eager mode's do.

Its passes over graphs replace ``w * torch.ones_like(w)`` by ``w``: as a result that would be the
input itself, and whoever changed it would change the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from magjit.plugin.aliases import is_strided, storage_of
from magjit.plugin.fx_helpers import called, placeholders, results_of, set_results

__all__ = ["with_own_results"]

_OWN = (OutputType.non_alias, OutputType.unsafe_view_alias)


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
    taken = {memory for node in placeholders(gm) if (memory := _memory(node)) is not None}
    changed = False
    for position in _own_positions(len(results)):
        node = results[position]
        memory = _memory(node)
        if memory in taken:
            assert isinstance(node, Node)
            with gm.graph.inserting_before(gm.graph.output_node()):
                results[position] = called(gm.graph, torch.ops.aten.clone.default, node)
            changed = True
        elif memory is not None:
            taken.add(memory)
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
