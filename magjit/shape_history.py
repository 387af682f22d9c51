"""What was seen to change: sizes of tensors become symbols, and numbers become inputs.

The first capture compares every shape exactly. Where a later call misses it for a shape, the
dimensions in which a tensor has had several sizes are symbols of the next capture. Where it misses
for a number, an argument or an attribute, that number is lifted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from magjit.plugin import TensorInput
from magjit.refgraph.nodes import RefGraph, ShadowNode

Path = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class ShapeHistory:
    """The sizes that the captures of one compiled object have met.

    Attributes:
        dynamic: as ``magjit.compile`` takes it: True makes symbols from the first call on, False
            never, None of what changes.
        given_up: a capture with symbols failed where one without may not.
        of_region: the program goes on in its middle: all numbers that it is handed are inputs from
            the first capture on, because most of them come from a loop or from a tensor.
        likely: sizes that probably change: those that are symbols in the regions before, and the
            numbers that the frames hold, because a cache is as long as they count.
        expected: tensors by identity, as weak references, of which the region before has symbols
            for some sizes.
    """

    dynamic: bool | None = None
    given_up: bool = False
    of_region: bool = False
    expected: dict[int, tuple[Any, tuple[bool, ...]]] = field(default_factory=dict)
    likely: frozenset[int] = frozenset()
    _seen: dict[Path, tuple[set[int], ...]] = field(default_factory=dict)
    _fixed: set[tuple[Path, int]] = field(default_factory=set)
    _given: dict[int | str, set[str]] = field(default_factory=dict)
    varying: dict[str, set[str]] = field(default_factory=dict)

    def wants_symbols(self, values: list[Any], misses_for_shape: bool) -> bool:
        """Whether a capture is to be made with symbols.

        Args:
            values: the arguments of the call.
            misses_for_shape: a record does not serve the call because of a shape.
        """
        if self.dynamic is False or self.given_up:
            return False
        if self.dynamic or misses_for_shape or self.expected:
            return True
        if self.likely and any(not self.likely.isdisjoint(size) for size in _sizes(values)):
            return True
        if any(map(_is_marked, values)):
            return True
        return any(
            len(known) > 1 and (path, dim) not in self._fixed
            for path, sizes in self._seen.items()
            for dim, known in enumerate(sizes)
        )

    def expect(self, sizes: frozenset[int], args: tuple[Any, ...]) -> None:
        """Which sizes probably change in a capture that begins now.

        Args:
            sizes: those that are symbols in the regions before.
            args: of the capture.
        """
        held = {value for value in args if type(value) is int and value > 1}
        self.likely = sizes | held if self.of_region else sizes

    def note_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A capture has met these arguments."""
        texts = _texts(args) if self.of_region else []
        for place, value in [*_numbers(args, kwargs), *texts]:
            self._given.setdefault(place, set()).add(repr(value))

    def note_attribute(self, owner: str, name: Any) -> None:
        """A call misses a record for a value that an object has under a name."""
        if isinstance(name, str) and self.dynamic is not False:
            self.varying.setdefault(name, set()).add(owner)

    def lifted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int | str]:
        """Arguments that become inputs: all floats and changed ints, once one has changed."""
        if self.dynamic is False or self.given_up:
            return set()
        found = _numbers(args, kwargs)
        if self.of_region:
            return {place for place, _ in found} | self._with_other_values(_texts(args))
        changed = self.changed(args, kwargs)
        if not changed and not self.dynamic:
            return set()
        floats = {place for place, value in found if type(value) is float}
        return changed | floats if not self.dynamic else {place for place, _ in found}

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int | str]:
        """Number arguments that have had other values before."""
        return self._with_other_values(_numbers(args, kwargs))

    def _with_other_values(self, found: list[tuple[int | str, Any]]) -> set[int | str]:
        return {place for place, value in found if self._given.get(place, set()) - {repr(value)}}

    def chooser(self, graph: RefGraph) -> Callable[[ShadowNode, TensorInput], frozenset[int]]:
        """What says which dimensions of a graph input become symbols."""

        def choose(node: ShadowNode, given: TensorInput) -> frozenset[int]:
            if given.is_parameter or given.layout is not torch.strided:
                return frozenset()
            path = path_of(graph, node)
            chosen = set(given.dynamic_dims | given.maybe_dynamic_dims)
            if self.dynamic and node.structural:
                chosen |= set(range(len(given.size)))
            chosen |= self._changed(path, given.size)
            ref, free = self.expected.get(id(node.obj), (None, ()))
            if ref is not None and ref() is node.obj:
                chosen |= {dim for dim, may_change in enumerate(free) if may_change}
            if node.structural:
                likely = {dim for dim, size in enumerate(given.size) if size in self.likely}
                chosen |= {dim for dim in likely if (path, dim) not in self._fixed}
            chosen = {dim for dim in chosen if given.size[dim] > 1}
            return frozenset(chosen - given.static_dims)

        return choose

    def _changed(self, path: Path, size: tuple[int, ...]) -> set[int]:
        seen = self._seen.get(path, ())
        if len(seen) != len(size):
            return set()
        changed = {dim for dim, known in enumerate(seen) if known | {size[dim]} != {size[dim]}}
        return {dim for dim in changed if (path, dim) not in self._fixed}

    def note(self, graph: RefGraph, node: ShadowNode, size: tuple[int, ...]) -> None:
        """A capture has met a tensor of this size."""
        path = path_of(graph, node)
        seen = self._seen.get(path, ())
        if len(seen) != len(size):
            seen = self._seen[path] = tuple(set() for _ in size)
        for known, now in zip(seen, size, strict=True):
            known.add(now)

    def fix(self, graph: RefGraph, node: ShadowNode, dim: int) -> None:
        """The program needs the very size: a symbol is of no use there."""
        self._fixed.add((path_of(graph, node), dim))


def path_of(graph: RefGraph, node: ShadowNode) -> Path:
    """How a node was reached; equal for the same place in another run."""
    steps: list[Any] = []
    while node.node_id:
        steps.append(type(node.obj).__qualname__ if node.fixed else node.relation)
        if node.fixed:
            break
        node = graph.nodes[node.parent]
    return tuple(reversed(steps))


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int | str, Any]]:
    """Ints and floats among the arguments, by position or name."""
    pairs: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [(place, value) for place, value in pairs if type(value) in (int, float)]


def _texts(args: tuple[Any, ...]) -> list[tuple[int | str, Any]]:
    return [(place, value) for place, value in enumerate(args) if type(value) is str and value]


def _is_marked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and bool(
        getattr(value, "_dynamo_dynamic_indices", None)
        or getattr(value, "_dynamo_weak_dynamic_indices", None)
    )


def _sizes(values: Any, depth: int = 3) -> Iterator[torch.Size]:
    """Sizes of the tensors that are among some values, or in their lists and tuples."""
    for value in values:
        if type(value) is torch.Tensor:
            yield value.shape
        elif type(value) in (list, tuple) and depth:
            yield from _sizes(value, depth - 1)
