"""AOTAutograd for backends that want plain ATen graphs.

A backend's ``compile`` gets a torch-level graph with in-place operators, aliases and a
backward that is still implicit.  ``aot`` turns it into functional ATen graphs, one for
inference or two for training, hands these to the backend's own compilers and takes care
of everything around them: mutated inputs are written back, outputs that alias inputs
alias them, gradients flow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch.fx import GraphModule

from magjit.plugin.aliases import VIEWS_OF_INPUTS
from magjit.plugin.context import BackendContext
from magjit.plugin.draws import as_eager_draws, without_draws
from magjit.plugin.functional import can_be_functional
from magjit.plugin.fx_helpers import results_of, runnable
from magjit.plugin.fx_nodes import keep_checks
from magjit.plugin.generated_source import sources_tied_to_result
from magjit.plugin.inference import needs_gradients
from magjit.plugin.layers import Layers, once
from magjit.plugin.protocol import CompiledGraph
from magjit.plugin.saved import keeping_old_values
from magjit.plugin.undefined_gradients import Reaching

logger = logging.getLogger(__name__)

__all__ = ["AtenCompiler", "aot", "core_aten_decompositions", "dump_graph"]

AtenCompiler = Callable[[GraphModule, Sequence[Any]], CompiledGraph]
"""``(aten_graph, fake_inputs) -> callable(*inputs) -> outputs``."""

Decompositions = Mapping[Any, Callable[..., Any]]
_VIEWS = (OutputType.alias_of_input, OutputType.is_input)


def aot(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    context: BackendContext,
    *,
    forward: AtenCompiler,
    backward: AtenCompiler | None = None,
    inference: AtenCompiler | None = None,
    decompositions: Decompositions | None = None,
    partition_fn: Callable[..., Any] | None = None,
    mutations_in_graph: bool = False,
) -> CompiledGraph:
    """Compile ``gm`` through AOTAutograd; to be called inside ``Backend.compile``.

    A graph that AOTAutograd would get wrong runs as it is.

    Args:
        gm: as ``compile`` was given it.
        example_inputs: as ``compile`` was given them.
        context: as ``compile`` was given it; the ATen graphs are dumped to it.
        forward: compiles the forward graph of a training pair, whose extra outputs are
            what the backward needs.
        backward: compiles the backward graph; ``forward`` by default.
        inference: compiles the one graph when no gradient is asked for; ``forward`` by
            default.
        decompositions: ATen operator to function; by default only of dropout of everything,
            for which eager mode draws nothing.
        partition_fn: splits the joint graph; by default torch's min-cut, which recomputes
            what is cheaper to recompute than to keep.
        mutations_in_graph: let the inference graph end in ``copy_`` to its mutated inputs;
            otherwise new values are outputs and written back outside.
    """
    if not can_be_functional(gm, example_inputs):
        as_it_is: CompiledGraph = runnable(gm)
        return as_it_is
    keep_checks()  # Also where torch.compile calls the backend.
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backward = backward or forward
    inference = inference or forward
    reaching = Reaching()
    split = keeping_old_values(partition_fn or min_cut_rematerialization_partition)
    split = reaching.noting(split)
    table = as_eager_draws(decompositions or {})

    def compiled(gm: GraphModule, split: Callable[..., Any]) -> CompiledGraph:
        compiler = aot_autograd(
            fw_compiler=_boxed(forward, context, "aten_forward.py"),
            bw_compiler=_boxed(backward, context, "aten_backward.py"),
            inference_compiler=_boxed(_with_views(inference), context, "aten_inference.py"),
            decompositions=table,
            partition_fn=split,
            keep_inference_input_mutations=mutations_in_graph,
        )
        return reaching.applied(compiler(gm, list(example_inputs)))

    layers = None
    if context.grad_enabled and needs_gradients(gm, example_inputs, context):
        layers = once(gm, example_inputs, context.fake_mode, table)
    while layers is not None:
        try:
            with layers.traced():
                return compiled(layers.graph, partial(_expand_and_split, layers, split))
        except Exception as error:
            if layers.expanded:
                raise
            logger.debug("layers are not traced once", exc_info=error)
        layers = layers.without_refused()
    return compiled(gm, split)


def _expand_and_split(
    layers: Layers,
    split: Callable[..., Any],
    joint: GraphModule,
    inputs: Sequence[Any],
    **options: Any,
) -> Any:
    layers.expand(joint)
    return split(joint, inputs, **options)


def _boxed(compiler: AtenCompiler, context: BackendContext, name: str) -> Callable[..., Any]:
    """AOTAutograd passes inputs as one list, so that they can be freed early."""

    def compile_boxed(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        dump_graph(context, name, gm)
        # The backward may be compiled as late as when it is first needed.
        with sources_tied_to_result() as tie:
            compiled: Callable[..., Any] = runnable(compiler(gm, example_inputs))
            tie(compiled)
        if getattr(compiled, "_boxed_call", False):
            return compiled

        def boxed(inputs: list[Any]) -> Sequence[Any]:
            arguments = tuple(inputs)
            inputs.clear()
            outputs: Sequence[Any] = compiled(*arguments)
            return outputs

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    return compile_boxed


def _with_views(compiler: AtenCompiler) -> AtenCompiler:
    """Say in the graph which of its results AOTAutograd makes anew as views of inputs."""

    def compile_noted(gm: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        metadata = getattr(TracingContext.try_get(), "fw_metadata", None)
        if metadata is not None:
            first, kinds = metadata.num_mutated_inp_runtime_indices, metadata.output_info
            results = results_of(gm.graph)
            if len(results) == first + len(kinds):
                found = (k for k, one in enumerate(kinds, first) if one.output_type in _VIEWS)
                gm.graph.output_node().meta[VIEWS_OF_INPUTS] = frozenset(found)
        return compiler(gm, example_inputs)

    return compile_noted


def dump_graph(context: BackendContext, name: str, gm: GraphModule) -> None:
    """Dump a graph with shapes, strides and devices."""
    context.dump(
        name,
        lambda: str(
            gm.print_readable(print_output=False, include_stride=True, include_device=True)
        ),
    )


def core_aten_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions to the some 200 core ATen operators, with eager mode's random numbers."""
    return without_draws(torch._decomp.core_aten_decompositions())
