"""Which tensors become virtual: the global greedy algorithm (VTC §5.2, Algorithm 2).

    Strategy ::= tensor → Opportunity      a points-to graph
    saving   : Strategy → number           measured, or estimated by a cost model

``Strategy.place`` follows a tensor's edges down to physical tensors and composes their movements.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.fx import Node

from magjit.plugin.virtual_tensors.mapping import (
    NotComposable,
    VirtualTensor,
    moved,
)
from magjit.plugin.virtual_tensors.opportunities import Opportunities, Opportunity

if TYPE_CHECKING:
    import networkx

__all__ = ["Gain", "Strategy", "greedy", "search"]


@dataclass(slots=True)
class Strategy:
    """A points-to graph: every tensor that is virtual, and of what.

    Attributes:
        chosen: the opportunity of each virtual tensor.
    """

    chosen: dict[Node, Opportunity] = field(default_factory=dict)
    _places: dict[Node, VirtualTensor] = field(default_factory=dict)

    def place(self, tensor: Node) -> VirtualTensor:
        """The physical tensors that a tensor points to, and its mapping over them.

        Raises:
            NotComposable: the chain has no mapping.
        """
        if tensor not in self._places:
            self._places[tensor] = self._placed(tensor)
        return self._places[tensor]

    def _placed(self, tensor: Node) -> VirtualTensor:
        opportunity = self.chosen.get(tensor)
        if opportunity is None:
            value = tensor.meta["val"]
            return VirtualTensor.physical(tensor, value.shape, value.stride())
        operands = []
        for target in opportunity.targets:
            if target is None:
                raise NotComposable("a result that nothing keeps")
            operands.append(self.place(target))
        return moved(opportunity.movement, operands)

    def points_to(self, tensor: Node) -> set[Hashable]:
        """The physical tensors."""
        return set(self.place(tensor).sources)

    def with_(self, opportunity: Opportunity) -> Strategy:
        """One tensor more virtual; places that this does not touch are kept."""
        chosen = self.chosen | {opportunity.tensor: opportunity}
        stale = self.pointing_to(opportunity.tensor) | {opportunity.tensor}
        places = {node: place for node, place in self._places.items() if node not in stale}
        return Strategy(chosen, places)

    def pointing_to(self, tensor: Node) -> set[Node]:
        """Virtual tensors that lead to a tensor."""
        found: set[Node] = set()
        grown = True
        while grown:
            grown = False
            for virtual, opportunity in self.chosen.items():
                if virtual not in found and any(
                    target is tensor or target in found for target in opportunity.targets
                ):
                    found.add(virtual)
                    grown = True
        return found

    def graph(self) -> networkx.DiGraph:
        """The points-to graph; an edge has the operator that it makes needless."""
        import networkx

        made = networkx.DiGraph()
        for tensor, opportunity in self.chosen.items():
            for target in opportunity.targets:
                if target is not None:
                    made.add_edge(tensor, target, operator=opportunity.operator)
        return made


Gain = Callable[[Strategy, Strategy, Opportunity], float | None]
"""What a strategy saves over another that lacks one opportunity; None where it is not legal."""


def search(opportunities: Opportunities, gain: Gain, cost: Callable[[Strategy], float]) -> Strategy:
    """The better of two greedy searches, one of which decides results first, one operands."""
    found = [greedy(opportunities, gain, results_first=first) for first in (True, False)]
    return min(found, key=cost)


def greedy(opportunities: Opportunities, gain: Gain, *, results_first: bool = True) -> Strategy:
    """Algorithm 2: anchors are decided tensors; each round decides the one that saves most.

    The marginal saving of an opportunity is measured when its targets are all anchors, and again
    when something that its tensor leads to, or that leads to it, has changed. Where tensors only
    wait for one another, one of them becomes physical, if possible one that no opportunity fits.

    Args:
        opportunities: the VTOG with its conflict sets.
        gain: the discrete derivative of the saving (Equation 4).
        results_first: which of tensors that wait for one another is decided first, and which
            direction is preferred where both save the same.
    """
    strategy = Strategy()
    waiting = dict(opportunities.choices)
    order = {tensor: number for number, tensor in enumerate(waiting)}
    known: dict[Opportunity, float | None] = {}
    while waiting:
        best: tuple[tuple[float, bool, int], Opportunity] | None = None
        for tensor, own in waiting.items():
            for opportunity in own:
                if any(target in waiting for target in opportunity.targets):
                    continue
                if opportunity not in known:
                    known[opportunity] = _legal_gain(strategy, opportunity, gain)
                saved = known[opportunity]
                if saved is None or saved < 0:
                    continue
                rank = (saved, opportunity.backward == results_first, -order[tensor])
                if best is None or rank > best[0]:
                    best = rank, opportunity
        if best is None:
            for own in waiting.values():
                for opportunity in own:
                    if opportunity not in known:
                        known[opportunity] = _legal_gain(strategy, opportunity, gain)
            hopeless = [
                tensor
                for tensor, own in waiting.items()
                if all(known[one] is None and not one.backward for one in own)
            ]
            for tensor in hopeless[-1:] or [_next_physical(waiting, results_first)]:
                del waiting[tensor]
            continue
        chosen = best[1]
        touched = strategy.pointing_to(chosen.tensor) | {chosen.tensor}
        strategy = strategy.with_(chosen)
        del waiting[chosen.tensor]
        for one in list(known):
            near = opportunities.beside[one.tensor]
            if not touched.isdisjoint((one.tensor, *one.targets)) or not touched.isdisjoint(near):
                del known[one]
    return strategy


def _legal_gain(strategy: Strategy, opportunity: Opportunity, gain: Gain) -> float | None:
    try:
        return gain(strategy, strategy.with_(opportunity), opportunity)
    except NotComposable:
        return None


def _next_physical(waiting: dict[Node, list[Opportunity]], results_first: bool) -> Node:
    """A tensor that others wait for: the last that operands go into, or the first operand."""
    wanted = {
        target
        for own in waiting.values()
        for one in own
        for target in one.targets
        if one.backward == results_first
    }
    for tensor in reversed(waiting) if results_first else waiting:
        if tensor in wanted:
            return tensor
    return next(iter(waiting))
