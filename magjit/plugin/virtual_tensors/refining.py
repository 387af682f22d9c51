"""Savings that are measured where the model cannot tell (VTC §5.2: Algorithm 2 profiles).

    refined : Strategy → Strategy       each close alternative is tried on the device

The paper profiles every edge, which takes minutes. Here the model decides what is clear, and only
alternatives whose estimate is within a fraction of the tensor's bytes are run, the largest first,
each beside the best strategy so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Node

from magjit.plugin.virtual_tensors.costs import CostModel, tensor_bytes
from magjit.plugin.virtual_tensors.mapping import NotComposable
from magjit.plugin.virtual_tensors.opportunities import Opportunities, Opportunity
from magjit.plugin.virtual_tensors.search import Strategy

__all__ = ["CLOSE", "alternatives", "is_legal", "named", "refined", "with_names"]

CLOSE = 0.5
"""The share of reading and writing a tensor by which estimates may differ to count as close."""

Faster = Callable[[Strategy, Strategy], bool | None]
"""Whether the first strategy runs faster than the second; None where no time is left to tell."""

Names = list[tuple[int, int, bool]]


def refined(
    strategy: Strategy,
    opportunities: Opportunities,
    model: CostModel,
    faster: Faster,
    close: float = CLOSE,
) -> Strategy:
    """The strategy after trying what the model takes for about as good.

    Args:
        strategy: what the search has found.
        opportunities: the VTOG.
        model: its costs in bytes.
        faster: runs two strategies on the device.
        close: see ``CLOSE``.
    """
    best = strategy
    by_size = sorted(opportunities.choices, key=lambda node: -tensor_bytes(node.meta["val"]))
    for tensor in by_size:
        for other in list(alternatives(best, tensor, opportunities, model, close)):
            answer = faster(other, best)
            if answer is None:
                return best
            if answer:
                best = other
    return best


def alternatives(
    strategy: Strategy,
    tensor: Node,
    opportunities: Opportunities,
    model: CostModel,
    close: float = CLOSE,
) -> Iterator[Strategy]:
    """Legal strategies that differ in one tensor, and about as good by the model's estimate."""
    taken = strategy.chosen.get(tensor)
    physical = Strategy({node: one for node, one in strategy.chosen.items() if node is not tensor})
    now = 0.0 if taken is None else _gain(physical, taken, model)
    if now is None:
        return
    limit = close * 2 * tensor_bytes(tensor.meta["val"])
    for other in (*opportunities.choices[tensor], None):
        if other is taken:
            continue
        if other is not None and not _is_acyclic(physical, other, opportunities):
            continue
        then = 0.0 if other is None else _gain(physical, other, model)
        if then is not None and abs(then - now) <= limit:
            found = physical if other is None else physical.with_(other)
            if is_legal(found, opportunities, model):
                yield found


def _is_acyclic(strategy: Strategy, one: Opportunity, opportunities: Opportunities) -> bool:
    return opportunities.is_points_to_graph(strategy.chosen | {one.tensor: one})


def _gain(strategy: Strategy, one: Opportunity, model: CostModel) -> float | None:
    try:
        return model.gain(strategy, strategy.with_(one), one)
    except NotComposable:
        return None


def is_legal(strategy: Strategy, opportunities: Opportunities, model: CostModel) -> bool:
    """Whether kernels can work under a strategy, and no element has two places."""
    if not opportunities.is_points_to_graph(strategy.chosen):
        return False
    try:
        return model.total(strategy) < float("inf")
    except NotComposable:
        return False


def named(strategy: Strategy, order: dict[Node, int]) -> Names:
    """A strategy as data: tensor, operator and direction, nodes being numbers."""
    return [
        (order[tensor], order[one.operator], one.backward)
        for tensor, one in strategy.chosen.items()
    ]


def with_names(
    names: Names, opportunities: Opportunities, order: dict[Node, int]
) -> Strategy | None:
    """The strategy that ``named`` described; None where the graph has no such opportunity."""
    wanted = {(tensor, operator, backward) for tensor, operator, backward in names}
    chosen = {
        tensor: one
        for tensor, own in opportunities.choices.items()
        for one in own
        if (order[tensor], order[one.operator], one.backward) in wanted
    }
    return Strategy(chosen) if len(chosen) == len(wanted) == len(names) else None
