"""What the backend calls: a torch-level graph compiled with generated kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from magjit.plugin import BackendContext, CompiledGraph, uncollected
from magjit.plugin.aot import aot
from magjit_triton.codegen.compiler import compile_graph
from magjit_triton.codegen.decompositions import decompositions
from magjit_triton.codegen.runtime import has_triton, interpreting
from magjit_triton.macro.program import macro_parts

__all__ = ["compile_with_kernels", "generates_kernels"]


def generates_kernels(example_inputs: Sequence[Any]) -> bool:
    """Whether graphs of these inputs should be given to the code generator."""
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    devices = {one.device.type for one in tensors if one.dim()}
    return has_triton() and ("cuda" in devices or (interpreting() and devices == {"cpu"}))


def compile_with_kernels(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    context: BackendContext,
    *,
    objective: str = "latency",
    measure: bool = False,
    cuda_graphs: bool = False,
    matmul: str = "auto",
) -> CompiledGraph:
    """Compile forward, and backward where an input requires a gradient.

    Args:
        gm, example_inputs, context: as ``Backend.compile`` is given them.
        objective: ``"latency"`` or ``"memory"``.
        measure: whether choices may be timed on the device.
        cuda_graphs: whether calls go through CUDA graphs.
        matmul: whose products: one of ``matmul.choice.SETTINGS``.
    """
    parts = macro_parts(matmul)

    def compile_aten(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
        with uncollected():
            made = compile_graph(
                graph,
                inputs,
                objective=objective,
                measure=measure,
                cuda_graphs=cuda_graphs,
                matmul=matmul,
                **parts,
            )
        context.dump("fusion_plan.txt", lambda: str(made.plan))
        context.dump("program.py", lambda: made.source)
        context.dump("kernels.py", lambda: "\n\n".join(one.source for one in made.kernels))
        return made

    return aot(
        gm,
        example_inputs,
        context,
        forward=compile_aten,
        mutations_in_graph=True,
        decompositions=decompositions(),
    )
