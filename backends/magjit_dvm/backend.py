"""The ``dvm`` backend under MagJIT's protocol."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from magjit.plugin import BackendContext, CompiledGraph, uncollected
from magjit.plugin.aot import aot, dump_graph
from magjit.plugin.floats_on_device import floats_on_device
from magjit.plugin.inference import lower_for_inference, needs_gradients
from magjit_dvm.fuser import fuse
from magjit_dvm.lowering import decompositions
from magjit_dvm.schedule import Schedule
from magjit_dvm.simplify import simplify
from magjit_dvm.streaming import Streamed

__all__ = ["DvmBackend", "schedules"]

_live: weakref.WeakSet[Schedule] = weakref.WeakSet()


def schedules() -> list[Schedule]:
    """The graphs that are compiled and still in use."""
    return list(_live)


class DvmBackend:
    """Fused operators as bytecode for the virtual machine; what it cannot do stays with ATen."""

    name = "dvm"
    exact_random = True

    def supports(self, gm: GraphModule) -> list[str]:
        """Every graph is taken: operators without instructions are ATen's."""
        return []

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Fuse the graph; with gradients, forward and backward."""
        with uncollected():
            return self._compiled(gm, example_inputs, context)

    def stream(self) -> Streamed:
        """Programs of which no more graphs are compiled are fused while they run."""
        return Streamed()

    def _compiled(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        def compile_aten(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            return self._schedule(graph, context)

        lowered = None
        if not needs_gradients(example_inputs, context):
            mode = context.fake_mode
            lowered = lower_for_inference(gm, example_inputs, mode, decompositions())
        if lowered is None:
            return aot(
                gm,
                example_inputs,
                context,
                forward=compile_aten,
                decompositions=decompositions(),
            )
        dump_graph(context, "aten_inference.py", lowered)
        return self._schedule(lowered, context)

    def _schedule(self, gm: GraphModule, context: BackendContext) -> CompiledGraph:
        simplify(gm.graph)
        floats_on_device(gm.graph)
        schedule = Schedule(gm, fuse(gm.graph))
        _live.add(schedule)
        context.dump("dvm_schedule.py", schedule.source)
        context.dump("dvm_programs.txt", lambda: _programs(schedule))
        return _holding(schedule)


def _holding(schedule: Schedule) -> Callable[..., Any]:
    call = schedule.call
    call.schedule = schedule  # type: ignore[attr-defined]
    call.unread = schedule.unread  # type: ignore[attr-defined]
    return call


def _programs(schedule: Schedule) -> str:
    parts = []
    for group in schedule.fusion.groups:
        names = ", ".join(str(node) for node in group.nodes)
        parts.append(f"# {names}\n{group.program}")
    return "\n\n".join(parts)
