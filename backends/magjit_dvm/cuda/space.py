"""The space of one instance on the GPU, and where operands have its elements.

It is one line of elements: the dimensions that are kept, then those that reductions go over (the
columns), each from the outermost in memory inwards.  An operand that lies in memory in this order
is contiguous; any other has a descriptor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from magjit_dvm.program import NodeKind, Program
from magjit_dvm.vm import NotEncodable

__all__ = ["Layout", "Operand", "Space"]


@dataclass(slots=True)
class Operand:
    """Where a tensor is: bytes along the group's dimensions, and its address as far as it matters.

    Attributes:
        argument: its number among inputs, then outputs.
        strides: bytes, of each of the group's dimensions; 0 where it has none.
        offset: bytes from the argument's address.
        low: the address, plus offset, modulo 16.
        size: bytes an element.
        bound, step: of a table, the positions that there are, and the bytes between them.
    """

    argument: int
    strides: list[int]
    offset: int
    low: int
    size: int
    bound: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Of a result that a call makes: sizes and strides, in elements."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True)
class Space:
    """Sizes of one instance.

    Attributes:
        size: of the group's dimensions.
        crowded: whole rows do not fit shared memory.
        has: of each node, the dimensions of a size other than 1 that it varies along.
        active: all of those.
        reduced: those that reductions go over.
        rows_summed: those that sums go across; none without such sums.
        order: active ones from the outermost to the innermost.
        rows, cols: products of the sizes that are kept and reduced.
        each: elements a lane, R, where the space is divided into squares; otherwise 0.
        inputs, outputs: where tensors are; None for numbers.
        layouts: of outputs that a call makes.
    """

    program: Program
    size: list[int]
    crowded: bool = False
    has: list[frozenset[int]] = field(default_factory=list)
    active: frozenset[int] = frozenset()
    reduced: frozenset[int] = frozenset()
    rows_summed: frozenset[int] = frozenset()
    order: list[int] = field(default_factory=list)
    rows: int = 1
    cols: int = 1
    each: int = 0
    inputs: list[Operand | None] = field(default_factory=list)
    outputs: list[Operand] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return 0 in self.size

    def contiguous(self, one: Operand, along: Collection[int] | None = None) -> bool:
        """Whether the operand's elements are in the order of the space.

        Args:
            along: dimensions that it has; along all others it is the same.  All by default.
        """
        expected = one.size
        for d in reversed(self.order):
            inside = along is None or d in along
            if one.strides[d] != (expected if inside else 0):
                return False
            expected *= self.size[d] if inside else 1
        return True

    def rows_side_by_side(self, one: Operand) -> bool:
        """Whether the columns of each row are contiguous."""
        expected = one.size
        for d in reversed([d for d in self.order if d in self.reduced]):
            if one.strides[d] != expected:
                return False
            expected *= self.size[d]
        return True

    @property
    def reduces(self) -> bool:
        """Whether something is reduced, or runs along dimensions."""
        kinds = NodeKind.REDUCE, NodeKind.SCAN
        return any(node.kind in kinds for node in self.program.nodes)

    @property
    def has_positions(self) -> bool:
        """Whether there are positions along dimensions, or tables."""
        return any(node.kind in (NodeKind.IOTA, NodeKind.INDEX) for node in self.program.nodes)

    @property
    def draws(self) -> bool:
        """Whether there are random numbers."""
        return self.program.has(NodeKind.DRAW)

    @property
    def kept(self) -> frozenset[int]:
        """The dimensions of rows."""
        return self.active - self.reduced

    @property
    def whole_output(self) -> Operand | None:
        """The first output that has all dimensions."""
        whole = (
            k for k, one in enumerate(self.program.outputs) if self.has[one.node] == self.active
        )
        return next((self.outputs[k] for k in whole), None)

    def descriptor(
        self, one: Operand, dims: Sequence[int], apart: bool = False
    ) -> tuple[tuple[int, int], ...]:
        """(size, stride) of ``dims``, innermost first, neighbours in memory as one if not apart.

        Raises:
            NotEncodable: a size or stride has more than 31 bits.
        """
        found: list[tuple[int, int]] = []
        for d in reversed(dims):
            size, stride = self.size[d], one.strides[d]
            if found and not apart and stride == found[-1][1] * found[-1][0]:
                found[-1] = (found[-1][0] * size, found[-1][1])
            else:
                found.append((size, stride))
        if any(size >= 1 << 31 or abs(stride) >= 1 << 31 for size, stride in found):
            raise NotEncodable("a view of more than 31 bits")
        return tuple(found)
