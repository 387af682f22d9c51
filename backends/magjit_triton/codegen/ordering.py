"""Kernels in the order in which least memory is in use at once.

A kernel runs where its first node stands in the graph; what it makes waits for its reader.  Where
memory is fullest, what waits there is made later, if that lowers the peak.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.fx import Node

from magjit.plugin.virtual_tensors.costs import tensor_bytes
from magjit_triton.codegen.graphs import is_tensor, mutates
from magjit_triton.codegen.plan import Group

__all__ = ["Use", "bytes_of", "lowering_peak", "peak", "uses"]

_MOST_MOVES = 8

U = TypeVar("U")


@dataclass(frozen=True)
class Use:
    """What a unit does with memory.

    Attributes:
        makes: memory that it allocates → bytes.
        reads: memory that it needs.
        movable: whether it may run later.
        writes: whether it changes inputs, which what stands before it may read.
    """

    makes: Mapping[Any, int]
    reads: frozenset[Hashable]
    movable: bool = True
    writes: bool = False


def peak(uses: Sequence[Use], kept: frozenset[Hashable] = frozenset()) -> tuple[int, int]:
    """The most bytes that are in use at once, and at which unit.

    Args:
        uses: of units in order.
        kept: memory that is in use after the last one.
    """
    last: dict[Hashable, int] = {}
    for number, use in enumerate(uses):
        last.update(dict.fromkeys((*use.reads, *use.makes), number))
    last.update(dict.fromkeys(kept, len(uses)))
    alive: dict[Hashable, int] = {}
    now = most = at = 0
    for number, use in enumerate(uses):
        for one, count in use.makes.items():
            if one not in alive:
                alive[one] = count
                now += count
        if now > most:
            most, at = now, number
        for one in (*use.reads, *use.makes):
            if last[one] == number:
                now -= alive.pop(one, 0)
    return most, at


def lowering_peak(
    units: Sequence[U],
    use_of: Callable[[U], Use],
    before: Mapping[int, set[int]],
    kept: frozenset[Hashable] = frozenset(),
) -> list[U]:
    """Units in an order of which the peak is no higher.

    Args:
        units: in an order in which they can run.
        use_of: what each does with memory.
        before: id of a unit → ids of all units that run before it.
        kept: memory that is in use after the last one.
    """
    order = list(units)
    used = [use_of(one) for one in order]
    best = peak(used, kept)
    for _ in range(_MOST_MOVES):
        found, at = None, best[1]
        for number, use in enumerate(used[: at + 1]):
            if not use.movable or not use.makes:
                continue
            place = _first_after(order, number, before, used)
            if place <= at + 1:
                continue
            tried = [*used[:number], *used[number + 1 : place], use, *used[place:]]
            if (other := peak(tried, kept))[0] < best[0]:
                best, found = other, (number, place)
        if found is None:
            break
        number, place = found
        order.insert(place - 1, order.pop(number))
        used.insert(place - 1, used.pop(number))
    return order


def _first_after(
    order: Sequence[U], number: int, before: Mapping[int, set[int]], used: Sequence[Use]
) -> int:
    """Where the first unit stands that needs this one to have run."""
    own = id(order[number])
    for place in range(number + 1, len(order)):
        if own in before[id(order[place])] or used[place].writes:
            return place
    return len(order)


def bytes_of(node: Node) -> float:
    """Of a tensor, of likely sizes where they are symbols."""
    return tensor_bytes(node.meta["val"])


def uses(
    stored: Collection[Node],
    placed: Mapping[Node, Node],
    updates: Collection[Node],
    fusible: Callable[[Node], bool],
    reads_of: Callable[[Node], Iterable[Node]],
) -> Callable[[Group | Node], Use]:
    """What the units of a plan do with memory.

    Args:
        stored: nodes that kernels store.
        placed: nodes that are computed in another's memory → whose.
        updates: nodes that are stored into inputs.
        fusible: whether kernels compute a node.
        reads_of: the nodes with memory that computing one reads.
    """

    def use_of(unit: Group | Node) -> Use:
        nodes = unit.nodes if isinstance(unit, Group) else [unit]
        made = [node for node in nodes if node in stored or not fusible(node)]
        owners = [placed.get(node, node) for node in made if node not in updates]
        makes = {one: int(bytes_of(one)) for one in owners if is_tensor(one)}
        reads = frozenset(one for node in nodes for one in reads_of(node))
        writes = any(node in updates or mutates(node) for node in nodes)
        return Use(makes, reads, isinstance(unit, Group) and not writes, writes)

    return use_of
