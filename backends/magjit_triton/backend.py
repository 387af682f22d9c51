"""The ``triton`` backend under MagJIT's protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from magjit.plugin import BackendContext, CompiledGraph, uncollected
from magjit.plugin.aot import aot
from magjit.plugin.capturable import can_be_captured
from magjit.plugin.cuda_graphs import Replaying
from magjit_triton.codegen.entry import compile_with_kernels, generates_kernels
from magjit_triton.passes import compiled_graph
from magjit_triton.settings import DEFAULTS, Settings

__all__ = ["TritonBackend"]


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Graphs in which data movement costs nothing; what is not provable runs as in eager mode.

    Attributes:
        settings: mode, objective, and whose products run.
    """

    settings: Settings = DEFAULTS

    name = "triton"
    exact_random = True

    def supports(self, gm: GraphModule) -> list[str]:
        """Every graph is taken: operators without kernels of ours are ATen's."""
        return []

    def configure(
        self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
    ) -> TritonBackend:
        """A backend with these settings.

        Raises:
            BackendOptionError: a mode or an option is unknown.
        """
        return TritonBackend(Settings.of(mode, options))

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Compile forward, and backward where an input requires a gradient."""
        if generates_kernels(example_inputs):
            with uncollected():
                return compile_with_kernels(gm, example_inputs, context, self.settings)

        def compile_aten(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            with uncollected():
                return compiled_graph(graph, context, self.settings).forward

        def compile_inference(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            captured = self.settings.cuda_graphs and can_be_captured(graph)
            compiled = compile_aten(graph, inputs)
            if not captured:
                return compiled
            return Replaying(compiled, len(inputs), writes=True)

        return aot(
            gm,
            example_inputs,
            context,
            forward=compile_aten,
            inference=compile_inference,
            mutations_in_graph=True,
        )
