"""Small torch-level graphs made by hand, and how to call a backend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock

from magjit.plugin import BackendContext, CompiledGraph, InputDescriber, resolve, run_backend
from magjit.plugin.protocol import Backend


def functional_graph(program: Callable[..., Any]) -> torch.fx.GraphModule:
    """A graph of a function whose inputs are tensors; the output is made a tuple."""
    with compile_lock:  # tracing patches torch's modules for all threads
        gm = torch.fx.symbolic_trace(program)
    output = next(node for node in gm.graph.nodes if node.op == "output")
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    else:
        output.args = (tuple(output.args[0]),)
    gm.recompile()
    return gm


def compile_for(
    backend: str | Backend | Callable[..., Any],
    program: Callable[..., Any] | torch.fx.GraphModule,
    inputs: Sequence[Any],
    *,
    static: Sequence[int] = (),
    context: BackendContext | None = None,
) -> CompiledGraph:
    gm = program if isinstance(program, torch.fx.GraphModule) else functional_graph(program)
    describer = InputDescriber()
    described = [
        describer.describe(value, static=position in static)
        for position, value in enumerate(inputs)
    ]
    context = context or BackendContext()
    found = (
        resolve(backend)
        if isinstance(backend, str) or not isinstance(backend, Backend)
        else backend
    )
    return run_backend(found, gm, described, context)
