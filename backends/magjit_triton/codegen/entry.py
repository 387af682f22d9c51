"""What the backend calls: a torch-level graph compiled with generated kernels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.fx import GraphModule, Node

from magjit.plugin import BackendContext, CompiledGraph, uncollected
from magjit.plugin.aliases import results_are_their_own
from magjit.plugin.aot import aot, dump_graph
from magjit.plugin.floats_on_device import floats_on_device
from magjit.plugin.fx_helpers import placeholders
from magjit.plugin.inference import lower_for_inference, needs_gradients, written_inputs
from magjit.plugin.virtual_tensors.accounts import account
from magjit_triton.codegen.accounts import moved_by, virtual_in
from magjit_triton.codegen.compiler import compile_graph
from magjit_triton.codegen.decompositions import decompositions
from magjit_triton.codegen.graphs import has_all_symbols
from magjit_triton.codegen.kernel import Kernel
from magjit_triton.codegen.runtime import has_triton, interpreting
from magjit_triton.macro.program import macro_parts
from magjit_triton.passes import bytes_before
from magjit_triton.settings import DEFAULTS, Settings

__all__ = ["compile_with_kernels", "generates_kernels"]


def generates_kernels(example_inputs: Sequence[Any]) -> bool:
    """Whether graphs of these inputs should be given to the code generator."""
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    devices = {one.device.type for one in tensors if one.dim()}
    return has_triton() and ("cuda" in devices or (interpreting() and devices == {"cpu"}))


def sources(kernels: Sequence[Kernel]) -> list[str]:
    """Of the kernels that are compiled."""
    found: dict[Hashable, str] = {}
    for one in kernels:
        found.setdefault(one.identity, one.source)
    return list(found.values())


def compile_with_kernels(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    context: BackendContext,
    settings: Settings = DEFAULTS,
) -> CompiledGraph:
    """Compile forward, and backward where an input requires a gradient.

    Args:
        gm, example_inputs, context: as ``Backend.compile`` is given them.
        settings: mode, objective, and whose products run.
    """
    parts = macro_parts(settings.matmul)

    def compile_aten(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        before = bytes_before(graph) if context.want_dumps else {}
        title = f"graph {len(context.movement) + 1}"
        with uncollected():
            floats_on_device(graph.graph)
            made = compile_graph(graph, inputs, settings, **parts)
        context.dump("fusion_plan.txt", lambda: str(made.plan))
        context.dump("program.py", lambda: made.source)
        context.dump("kernels.py", lambda: "\n\n".join(sources(made.kernels)))
        context.explain_movement(
            lambda: account(
                title,
                before,
                moved_by(made.fusion, made.plan),
                virtual_in(made.fusion, made.plan),
            )
        )
        return made

    if not needs_gradients(gm, example_inputs, context):
        mode, table = context.fake_mode, decompositions()
        lowered = lower_for_inference(
            gm, example_inputs, mode, table, with_writes=False, to_inputs=True
        )
        if lowered is not None and has_all_symbols(lowered) and results_are_their_own(lowered):
            dump_graph(context, "aten_inference.py", lowered)
            written = written_inputs(lowered)
            made = compile_aten(lowered, example_inputs)
            return _noting_writes(made, lowered, written) if written else made
    return aot(
        gm,
        example_inputs,
        context,
        forward=compile_aten,
        mutations_in_graph=True,
        decompositions=decompositions(),
    )


def _noting_writes(made: Any, lowered: GraphModule, written: set[Node]) -> CompiledGraph:
    """Kernels leave no trace in the versions of what they write, which autograd compares."""
    positions = [k for k, node in enumerate(placeholders(lowered)) if node in written]

    def call(*inputs: Any) -> Sequence[Any]:
        results: Sequence[Any] = made(*inputs)
        for position in positions:
            if not inputs[position].is_inference():
                increment_version(inputs[position])
        return results

    call.unread = getattr(made, "unread", frozenset())  # type: ignore[attr-defined]
    return call
