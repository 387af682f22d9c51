"""The ``dvm`` backend under MagJIT's protocol."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule

from magjit.plugin import BackendContext, BackendOptionError, CompiledGraph, uncollected
from magjit.plugin.aliases import results_are_their_own
from magjit.plugin.aot import aot, dump_graph
from magjit.plugin.capturable import Varying, can_be_captured, varying_inputs
from magjit.plugin.cuda_graphs import ReplayingByModule
from magjit.plugin.floats_on_device import floats_on_device
from magjit.plugin.inference import lower_for_inference, needs_gradients
from magjit.plugin.inputs import TensorInput
from magjit.plugin.sampling import whole_upsampling
from magjit.plugin.views_apart import without_symbols, without_views
from magjit.plugin.writes import write_early, write_late
from magjit_dvm.casts import cast_where_least_moves
from magjit_dvm.channel_sums import absorb_masks
from magjit_dvm.channels_last import LAID, in_channels_last
from magjit_dvm.fuser import fuse
from magjit_dvm.lowering import decompositions
from magjit_dvm.repeating import repeat_between_reductions
from magjit_dvm.schedule import Schedule
from magjit_dvm.simplify import simplify
from magjit_dvm.streaming import Streamed
from magjit_dvm.writes import write_together

__all__ = ["MODES", "DvmBackend", "schedules"]

logger = logging.getLogger("magjit.dvm")

MODES = ("default", "reduce-overhead")

_live: weakref.WeakSet[Schedule] = weakref.WeakSet()


def schedules() -> list[Schedule]:
    """The graphs that are compiled and still in use."""
    return list(_live)


class DvmBackend:
    """Fused operators as bytecode for the virtual machine; what it cannot do stays with ATen."""

    name = "dvm"
    exact_random = True
    sizes_of_data = True

    def __init__(self, *, cuda_graphs: bool = False) -> None:
        self.cuda_graphs = cuda_graphs

    def configure(
        self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
    ) -> DvmBackend:
        """The backend, or with ``mode="reduce-overhead"`` one that replays CUDA graphs.

        Raises:
            BackendOptionError: another mode, or an option.
        """
        if mode not in (None, *MODES):
            raise BackendOptionError(
                f"Backend 'dvm' has no mode {mode!r}", remedy=f"modes: {', '.join(MODES)}"
            )
        if options:
            raise BackendOptionError("Backend 'dvm' takes no options", remedy="leave options= out")
        return DvmBackend(cuda_graphs=True) if mode == "reduce-overhead" else self

    def supports(self, gm: GraphModule) -> list[str]:
        """Every graph is taken: operators without instructions are ATen's."""
        return []

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Fuse the graph; with gradients, forward and backward."""
        with uncollected(), whole_upsampling():
            return self._compiled(gm, example_inputs, context)

    def stream(self) -> Streamed:
        """Programs of which no more graphs are compiled are fused while they run."""
        return Streamed()

    def _compiled(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        laid = in_channels_last(gm, example_inputs, context.fake_mode)
        if laid is not None:
            try:
                return self._lowered(laid, example_inputs, context, decompositions() | LAID)
            except Exception as error:  # a backward may ask more of its operands than a forward
                logger.debug("convolutions are left in their order", exc_info=error)
        return self._lowered(gm, example_inputs, context, decompositions())

    def _lowered(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        context: BackendContext,
        table: Mapping[Any, Callable[..., Any]],
    ) -> CompiledGraph:
        def compile_aten(graph: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            return self._schedule(graph, context)

        lowered = None
        if not needs_gradients(gm, example_inputs, context):
            lowered = lower_for_inference(gm, example_inputs, context.fake_mode, table)
        if lowered is None:
            return aot(
                gm,
                example_inputs,
                context,
                forward=compile_aten,
                decompositions=table,
                mutations_in_graph=True,
            )
        dump_graph(context, "aten_inference.py", lowered)
        parts = _parts(lowered) if self.cuda_graphs else None
        return self._schedule(lowered, context) if parts is None else self._replayed(parts, context)

    def _replayed(self, parts: _Parts, context: BackendContext) -> CompiledGraph:
        """What is computed as CUDA graphs, on views of the inputs; gives views of its results."""
        first = parts.computed if parts.before is None else parts.before
        given = [node for node in first.graph.nodes if node.op == "placeholder"]
        keeping = {given[k] for k in context.static_inputs}
        owned = {
            node
            for node, one in zip(given, context.inputs, strict=False)
            if isinstance(one, TensorInput) and one.is_parameter
        }
        taken = given
        if parts.before is not None:
            (output,) = (node for node in first.graph.nodes if node.op == "output")
            taken = list(output.args[0])
        static = [k for k, node in enumerate(taken) if node in keeping]
        parameters = [k for k, node in enumerate(taken) if node in owned]
        launched = self._schedule(parts.computed, context)
        unread: frozenset[int] = launched.unread  # type: ignore[attr-defined]
        replaying: Callable[..., Any] = ReplayingByModule(
            launched,
            len(taken),
            parameters=parameters,
            static=static,
            unread=unread,
            varying=parts.varying,
        )
        if parts.after is not None:
            made = sum(node.op == "placeholder" for node in parts.after.graph.nodes) - len(taken)
            replaying = _followed_by(self._schedule(parts.after, context), replaying, made)
        if parts.before is None or taken == given:
            return replaying
        viewed = self._schedule(parts.before, context)

        def call(*inputs: Any) -> Any:
            return replaying(*viewed(*inputs))

        call.unread = viewed.unread  # type: ignore[attr-defined]
        return call

    def _schedule(self, gm: GraphModule, context: BackendContext) -> CompiledGraph:
        simplify(gm.graph)
        write_late(gm.graph, fusing=True)
        write_together(gm.graph)
        absorb_masks(gm.graph)
        cast_where_least_moves(gm.graph)
        repeat_between_reductions(gm.graph)
        floats_on_device(gm.graph)
        write_early(gm.graph, fusing=True)
        schedule = Schedule(gm, fuse(gm.graph))
        _live.add(schedule)
        context.dump("dvm_schedule.py", schedule.source)
        context.dump("dvm_programs.txt", lambda: _programs(schedule))
        return _holding(schedule)


class _Parts(NamedTuple):
    before: GraphModule | None
    computed: GraphModule
    after: GraphModule | None
    varying: Varying


def _parts(lowered: GraphModule) -> _Parts | None:
    """A graph as what can be captured, and views before and after; None if nothing can.

    What computes with symbols is captured for each combination of sizes.
    """
    parts = without_symbols(lowered)
    before, computed = parts or (None, lowered)
    varying = varying_inputs(computed)
    after = None
    if not results_are_their_own(computed):
        apart = without_views(computed)
        if apart is None:
            return None
        computed, after = apart
    if varying is None or not can_be_captured(computed, varies=before is None):
        return None
    return _Parts(before, computed, after, varying)


def _followed_by(after: Any, replaying: Any, made: int) -> Callable[..., Any]:
    """What takes the results of a graph, ``made`` of them, and its inputs."""

    def call(*inputs: Any) -> Any:
        return after(*replaying(*inputs), *inputs)

    unread = frozenset(k for k in replaying.unread if made + k in after.unread)
    call.unread = unread  # type: ignore[attr-defined]
    return call


def _holding(schedule: Schedule) -> Callable[..., Any]:
    call = schedule.call
    call.schedule = schedule  # type: ignore[attr-defined]
    call.unread = schedule.unread  # type: ignore[attr-defined]
    call.only = schedule.only  # type: ignore[attr-defined]
    return call


def _programs(schedule: Schedule) -> str:
    parts = []
    for group in schedule.fusion.groups:
        names = ", ".join(str(node) for node in group.nodes)
        parts.append(f"# {names}\n{group.program}")
    return "\n\n".join(parts)
