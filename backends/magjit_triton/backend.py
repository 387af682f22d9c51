"""The ``triton`` backend under MagJIT's protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from magjit.plugin import BackendContext, BackendOptionError, CompiledGraph, uncollected
from magjit.plugin.aot import aot
from magjit_triton.codegen.entry import compile_with_kernels, generates_kernels
from magjit_triton.codegen.matmul.choice import SETTINGS
from magjit_triton.cuda_graphs import Replaying, can_be_captured
from magjit_triton.passes import OBJECTIVES, compiled_graph

__all__ = ["MODES", "TritonBackend"]

MODES = ("default", "reduce-overhead")


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Graphs in which data movement costs nothing; what is not provable runs as in eager mode.

    Attributes:
        mode: ``"reduce-overhead"`` replays inference on a GPU as CUDA graphs.
        objective: what the search saves: ``"latency"`` (bytes moved) or ``"memory"``.
        matmul: whose products: ``"library"``, ``"triton"`` where legal, or ``"auto"``.
    """

    mode: str = "default"
    objective: str = "latency"
    matmul: str = "auto"

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
        given = dict(options or {})
        objective = given.pop("objective", "latency")
        matmul = given.pop("matmul", "auto")
        if mode not in (None, *MODES):
            raise BackendOptionError(
                f"Backend 'triton' has no mode {mode!r}", remedy=f"modes: {', '.join(MODES)}"
            )
        if given or objective not in OBJECTIVES:
            raise BackendOptionError(
                f"Backend 'triton' does not know {given or objective!r}",
                remedy=f"options 'objective': {', '.join(OBJECTIVES)}; "
                f"'matmul': {', '.join(SETTINGS)}",
            )
        if matmul not in SETTINGS:
            raise BackendOptionError(
                f"Backend 'triton' does not know matmul={matmul!r}",
                remedy=f"option 'matmul': {', '.join(SETTINGS)}",
            )
        return TritonBackend(mode or "default", objective, matmul)

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Compile forward, and backward where an input requires a gradient."""
        if generates_kernels(example_inputs):
            return compile_with_kernels(
                gm,
                example_inputs,
                context,
                objective=self.objective,
                cuda_graphs=self.mode == "reduce-overhead",
                matmul=self.matmul,
            )

        def compile_aten(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            with uncollected():
                return compiled_graph(graph, context, self.objective).forward

        def compile_inference(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            captured = self.mode == "reduce-overhead" and can_be_captured(graph)
            compiled = compile_aten(graph, inputs)
            return Replaying(compiled) if captured else compiled

        return aot(
            gm,
            example_inputs,
            context,
            forward=compile_aten,
            inference=compile_inference,
            mutations_in_graph=True,
        )
