"""What the code generator decides about a graph: from the disk, by the search, or on the device.

``decide`` says what is computed in another tensor's memory, ``cut`` into which blocks a kernel is
cut, ``times`` how long a product takes as ours and as the library's. With ``mode="max-autotune"``
all of them are measured; otherwise the models of ``traffic``, ``kernel`` and ``matmul.choice`` have
the word.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from magjit.plugin.fx_helpers import copy_graph_module
from magjit.plugin.virtual_tensors.refining import named, refined, with_names
from magjit.plugin.virtual_tensors.search import Strategy
from magjit_triton.codegen.fusion import Group, Plan
from magjit_triton.codegen.kernel import Kernel
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.codegen.matmul.fusing import ProductFusion
from magjit_triton.codegen.matmul.measuring import measured
from magjit_triton.codegen.nest import Hint
from magjit_triton.codegen.placement import Choices, searched
from magjit_triton.codegen.printer import Blocks
from magjit_triton.codegen.runtime import interpreting
from magjit_triton.codegen.tuning import tuned
from magjit_triton.decisions import Decisions
from magjit_triton.measuring import Stopwatch, example_inputs
from magjit_triton.settings import Settings

__all__ = ["Decide", "Deciding"]

logger = logging.getLogger(__name__)

Decide = Callable[[Choices], Strategy]
Make = Callable[[GraphModule, Decide], Callable[..., Any]]


@dataclass
class Deciding:
    """Decisions about one graph.

    Attributes:
        gm: the graph; what is tried is tried on copies of how it is now.
        settings: mode and objective.
        decisions: what is known already.
        make: compiles a copy under a strategy.
    """

    gm: GraphModule
    settings: Settings
    decisions: Decisions
    make: Make | None = None
    _original: GraphModule | None = None
    _watch: Stopwatch | None = None
    _busy: bool = False

    def __post_init__(self) -> None:
        if self.settings.measures and not self.decisions.found:
            self._original = copy_graph_module(self.gm)

    def decide(self, choices: Choices) -> Strategy:
        """The strategy of the graph."""
        known = self.decisions.strategy(choices.opportunities, choices.model, choices.order)
        if known is None:
            known = searched(choices)
            if self._original is not None and self.settings.measures_places:
                known = self._measured(known, choices)
            self.decisions.choose(known, choices.order)
        return known

    def _stopwatch(self) -> Stopwatch | None:
        """What measures, while there is time and room for inputs."""
        if self._watch is None:
            inputs = example_inputs(self.gm if self._original is None else self._original)
            self._watch = Stopwatch(()) if inputs is None else Stopwatch(inputs)
            if inputs is None:
                self._watch.budget = 0.0
        return None if self._watch.is_over() else self._watch

    def _measured(self, strategy: Strategy, choices: Choices) -> Strategy:
        programs: dict[int, tuple[Strategy, Callable[..., Any]]] = {}

        def program(one: Strategy) -> Callable[..., Any]:
            if id(one) not in programs:
                assert self._original is not None and self.make is not None
                names = named(one, choices.order)

                def same(others: Choices) -> Strategy:
                    found = with_names(names, others.opportunities, others.order)
                    assert found is not None, "a copy of a graph has other opportunities"
                    return found

                programs[id(one)] = one, self.make(copy_graph_module(self._original), same)
            return programs[id(one)][1]

        def faster(one: Strategy, other: Strategy) -> bool | None:
            watch = self._stopwatch()
            return None if watch is None else watch.is_faster(program(one), program(other))

        self._busy = True
        try:
            return refined(strategy, choices.opportunities, choices.model, faster)
        finally:
            self._busy = False

    def cut(self, kernel: Kernel, hint: Hint) -> Kernel:
        """A kernel with the blocks that are known, or found, to be best."""
        if not self.settings.measures or self._busy:
            return kernel
        digest = hashlib.sha256(kernel.source.encode()).hexdigest()[:24]
        found = self.decisions.blocks.get(digest)
        if found is None and not self.decisions.found and not interpreting():
            watch = self._stopwatch()
            if watch is None:
                return kernel
            blocks = tuned(kernel, hint, watch)
            found = [blocks.p, blocks.inner, int(blocks.looped), blocks.warps, blocks.stages]
            self.decisions.blocks[digest] = found
        if found is None:
            return kernel
        p, inner, looped, warps, stages = found
        wide = kernel.blocks.wide
        return kernel.with_blocks(Blocks(p, inner, bool(looped), wide, warps, stages))

    def times(self, fusion: ProductFusion, group: Group, plan: Plan) -> tuple[float, float] | None:
        """Seconds of our kernels of a group with products, and of the library's way.

        They are measured once for a graph; our best cut goes into ``fusion.cuts``.
        """
        places = {node: number for number, node in enumerate(fusion.gm.graph.nodes)}
        inside = sorted(places[node] for node in group.nodes)
        stored = sorted(places[node] for node in group.nodes if node in plan.stored)
        name = f"{inside} {stored}"
        products = fusion.products_in(group.nodes)
        if name not in self.decisions.products:
            if self.decisions.found:
                return None
            found = measured(fusion, group, plan)
            if found is None:
                return None
            cut = fusion.cuts[products[0]]
            self.decisions.products[name] = (*found, cut.numbers)
        ours, library, numbers = self.decisions.products[name]
        try:
            cut = Configuration.of(numbers)
        except ValueError as error:
            logger.debug("a cut on disk is ignored: %s", error)
            return None
        fusion.cuts.update(dict.fromkeys(products, cut))
        return ours, library

    def finish(self) -> None:
        """Keep what was decided."""
        if self._watch is not None:
            self._watch.stop()
        self._original = None
        self.decisions.keep()
