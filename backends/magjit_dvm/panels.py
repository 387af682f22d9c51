"""Matrix products and convolutions by panels (DVM, §4.2): cube and vector work in turns.

ATen computes the product.  Where its result is large and only one fused operator reads it,
the two run panel by panel: some rows of the product, then the fused operator on these rows
while they are in cache.  The product as a whole is never in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit.plugin.aliases import memory_of
from magjit_dvm import vm
from magjit_dvm.builder import size_key
from magjit_dvm.groups import FusedGroup, Fusion, Size
from magjit_dvm.program import ONE, NodeKind, Program
from magjit_dvm.touching import stored_by

__all__ = ["CUBES", "Panels", "ranges", "use_panels"]

aten = torch.ops.aten

Range = tuple[int, int]

# Measured.  Products of fewer bytes stay in the last cache, panels of more do not: multiples of a
# core's local memory.  A panel of fewer rows for each packed element makes the product slower;
# in deeper products what follows hardly counts.
_LEAST, _MOST, _ROWS, _DEEPEST = 64, 16, 2 / 3, 512


@dataclass(frozen=True, slots=True)
class Cube:
    """How an operator is cut into panels.

    Attributes:
        cut: the arguments that begin with the result's leading dimensions.
        weight: the argument that each panel reads as a whole and packs anew, or -1.
    """

    cut: tuple[int, ...]
    weight: int = -1


CUBES: dict[Any, Cube] = {
    aten.addmm.default: Cube((1,), 2),
    aten.bmm.default: Cube((0, 1)),
    aten.convolution.default: Cube((0,)),
    aten.linear.default: Cube((0,), 1),
    aten.mm.default: Cube((0,), 1),
}


# -- which operators --


def use_panels(fusion: Fusion) -> None:
    """Give groups the product that only they read, where panels may pay."""
    steps = fusion.steps
    at = {id(step): number for number, step in enumerate(steps)}
    sizes = [one for group in fusion.groups for one in group.arguments if isinstance(one, Size)]
    needed = {node for one in sizes for node in one.nodes}
    for group in fusion.groups:
        if group.on_gpu:
            continue
        for number, node in enumerate(group.arguments):
            if not isinstance(node, FxNode) or node in needed:
                continue
            if _belongs(node, group, number):
                between = steps[at[id(node)] + 1 : at[id(group)]]
                if not any(_writes(step) for step in between):
                    group.cube = number
                    break
    taken = {id(group.arguments[group.cube]) for group in fusion.groups if group.cube >= 0}
    steps[:] = [step for step in steps if id(step) not in taken]


def _belongs(node: FxNode, group: FusedGroup, number: int) -> bool:
    assert group.program is not None
    inside = set(group.nodes)
    if node.target not in CUBES or node.kwargs or any(user not in inside for user in node.users):
        return False
    if stored_by(group) & memory_of(node.all_input_nodes):
        return False  # later panels would read what the first ones have written
    loops = loops_to_cut(group.program, number)
    return group.arguments.count(node) == 1 and bool(loops) and _may_pay(node, loops)


def _writes(step: FusedGroup | FxNode) -> bool:
    schema = getattr(step.target, "_schema", None) if isinstance(step, FxNode) else None
    return schema is not None and schema.is_mutable


def loops_to_cut(program: Program, number: int) -> tuple[int, ...]:
    """The loops of an input's one or two leading dimensions that may be cut; size 1 has ``ONE``."""
    found = []
    for loop in program.inputs[number].dims[:2]:
        if loop != ONE and not _may_cut(program, loop):
            break
        found.append(loop)
    return () if all(loop == ONE for loop in found) else tuple(found)


def _may_cut(program: Program, loop: int) -> bool:
    """Whether each element along a loop is computed as if there were no other."""
    positions = (NodeKind.REDUCE, NodeKind.SCAN, NodeKind.NUMEL)
    return all(loop in one.dims for one in program.outputs) and not any(
        (node.kind in positions and loop in node.dims)
        or (node.kind is NodeKind.IOTA and node.aux == loop)
        for node in program.nodes
    )


def _may_pay(node: FxNode, loops: tuple[int, ...]) -> bool:
    """Of fixed sizes, whether panels pay; of symbols each call decides."""
    if any(not isinstance(size_key(size), int) for size in node.meta["val"].shape):
        return True
    given = [one.meta["val"] if isinstance(one, FxNode) else one for one in node.args]
    return _ranges_of(node.target, given, loops, _image(node)) is not None


# -- how large a panel is --


def ranges(rows: Sequence[int], item: int, packed: int) -> Iterator[tuple[Range, ...]] | None:
    """The panels of a product, each as first and count along its leading dimensions.

    Args:
        rows: sizes of the one or two leading dimensions.
        item: bytes of the result for each of them.
        packed: elements of the weight that each panel packs, for each element of a row.
            Packing must cost less than what a panel saves.

    Returns:
        None where the product is better computed as a whole.
    """
    local = vm.machine()[0]
    if not item or prod(rows) * item < _LEAST * local or packed > _DEEPEST:
        return None
    most = max(1, 2 * local * torch.get_num_threads() // item)
    most = max(most, int(packed * _ROWS))
    if most * item > _MOST * local or 2 * most > prod(rows):
        return None
    return _panels(rows, most)


def _ranges_of(
    target: Any, given: Sequence[Any], loops: tuple[int, ...], image: int
) -> Iterator[tuple[Range, ...]] | None:
    """The panels of an operator with these arguments; ``image`` is that of convolutions."""
    leading = given[CUBES[target].cut[0]]
    size = leading.element_size()
    if target is aten.linear.default:
        depth = min(len(loops), leading.dim() - 1)
        item = prod(leading.shape[depth:-1]) * given[1].shape[0] * size
        return ranges(leading.shape[:depth], item, given[1].shape[1])
    if target is aten.convolution.default:
        return ranges(leading.shape[:1], image, 0)
    if target is aten.bmm.default:
        return ranges(leading.shape[:1], leading.shape[1] * given[1].shape[2] * size, 0)
    weight = given[CUBES[target].weight]
    return ranges(leading.shape[:1], weight.shape[1] * size, weight.shape[0])


def _image(node: FxNode) -> int:
    """Bytes of the result for each element of its first dimension; of symbols an estimate."""
    result = node.meta["val"]
    return prod(_hint(size) for size in result.shape[1:]) * int(result.element_size())


def _panels(rows: Sequence[int], most: int) -> Iterator[tuple[Range, ...]]:
    if len(rows) == 1:
        yield from (((one),) for one in _parts(rows[0], most))
    elif rows[1] <= most:
        yield from ((one, (0, rows[1])) for one in _parts(rows[0], most // rows[1]))
    else:
        for first in range(rows[0]):
            yield from (((first, 1), one) for one in _parts(rows[1], most))


def _parts(size: int, most: int) -> Iterator[Range]:
    """Parts of nearly equal size."""
    count = -(-size // most)
    part = -(-size // count)
    for first in range(0, size, part):
        yield first, min(part, size - first)


# -- running --


class Panels:
    """A product and the fused operator that reads it."""

    def __init__(
        self, node: FxNode, function: Callable[..., Any], fused: Any, program: Program, number: int
    ) -> None:
        self.target = node.target
        self.function = function
        self.fused = fused
        self.number = number
        self.loops = loops_to_cut(program, number)
        self.cut = CUBES[node.target].cut
        self.image = _image(node)

    def __call__(self, given: Sequence[Any], *others: Any) -> Any:
        """The fused operator's results; ``given`` are the product's arguments."""
        found = _ranges_of(self.target, given, self.loops, self.image)
        if found is not None:
            try:
                return self._by_panels(given, found, others)
            except (vm.NotEncodable, IndexError, RuntimeError):
                pass  # as a whole it runs, or raises what eager raises
        whole = self.function(*given)
        return self.fused(*others[: self.number], whole, *others[self.number :])

    def _by_panels(
        self, given: Sequence[Any], found: Iterator[tuple[Range, ...]], others: Sequence[Any]
    ) -> Any:
        results: tuple[Any, ...] | None = None
        leading = given[self.cut[0]].shape
        for panel in found:
            arguments = list(given)
            for position in self.cut:
                for dim, (first, count) in enumerate(panel):
                    arguments[position] = arguments[position].narrow(dim, first, count)
            window = tuple(
                (loop, *one, total)
                for loop, one, total in zip(self.loops, panel, leading, strict=False)
                if loop != ONE
            )
            part = self.function(*arguments)
            results = self.fused.panel(
                window,
                self.number,
                results,
                *others[: self.number],
                part,
                *others[self.number :],
            )
        assert results is not None
        return results[0] if len(results) == 1 else results


def _hint(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return 1 if hint is None else int(hint)
    return int(size)
