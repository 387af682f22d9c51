"""Reductions of few long rows, in two launches each: of pieces of rows, then of what pieces have.

A launch has a block for each row, or several rows for a block, so that a loss, which is one row,
would have a GPU's work done by one of its blocks.  Of such a program *steps* are made, which are
programs of their own::

    for each level of reductions
        pieces     every reduction of this level, of each piece of a row, to memory
        rows       the reductions of what pieces have; what rows have one number of
    elements       results that have all elements, if there are any

Pieces are one dimension more, of which reductions keep what others go over.  Each call says how
many there are, and how loops are divided into them (``csrc/cuda_split.cpp``); what that leaves over
is a piece more, by a launch of its own.  What a step needs of one before is a tensor; what has all
elements is computed again where it is needed, from tensors that the call is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

from magjit_dvm.instructions import DType
from magjit_dvm.program import (
    ACROSS,
    MAX_DIMS,
    MAX_INPUTS,
    MAX_NODES,
    MAX_OUTPUTS,
    ONE,
    Input,
    InputKind,
    Node,
    NodeKind,
    Output,
    Program,
)

__all__ = ["Step", "steps_of"]

_MOVED = (NodeKind.IOTA, NodeKind.INDEX, NodeKind.DRAW, NodeKind.SCAN)
"""What is of a place in its row."""


_JOINS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""What makes one result of two pieces'."""


@dataclass(frozen=True, slots=True)
class Step:
    """One launch.

    Attributes:
        program: what it computes.
        pieces: whether tensors that are reduced come in pieces, which their first dimension counts.
        sources: of each input, the number of an argument of the whole, or behind all of those that
            of a tensor of a step before; or −1 − dims: how many elements these loops have, as a
            set of bits.
        results: of each output, where it goes: the number that such a tensor has, or −1 − k: it is
            the whole program's result k.
        left_over: of pieces, where results of what is left over go.
        joined: of rows, what runs instead where something is left over.
    """

    program: Program
    pieces: bool
    sources: tuple[int, ...]
    results: tuple[int, ...]
    left_over: tuple[int, ...] = ()
    joined: Step | None = None


def _between(dtype: DType) -> DType:
    """Of a tensor between steps: registers have 32 bits, which have been found to be enough."""
    return DType.I32 if dtype is DType.I64 else dtype


def steps_of(program: Program) -> tuple[Step, ...] | None:
    """What runs instead of ``program`` where its rows are few and long; None if nothing can."""
    splitter = _Splitter(program)
    return splitter.steps() if splitter.may_split() else None


class _Kind(Enum):
    """What a tensor between steps has of a value."""

    ROWS = auto()
    PIECES = auto()
    LEFT_OVER = auto()


_Wanted = tuple[int, Output, int]
"""A value, how it is stored, and ``Step.results``."""


class _Splitter:
    """Divides one program.

    Attributes:
        over: the dimensions that reductions go over.
        levels: of each node, how many reductions follow one another up to it.
        slots: numbers of what goes from one step to others.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.nodes, self.varies = program, program.nodes, program.varies
        reducing = [node for node in self.nodes if node.kind is NodeKind.REDUCE]
        self.over = reducing[0].dims if reducing else frozenset[int]()
        self.levels = list[int]()
        for node in self.nodes:
            below = max((self.levels[arg] for arg in node.args), default=0)
            self.levels.append(below + (node.kind is NodeKind.REDUCE))
        self.slots: dict[tuple[int, _Kind], int] = {}

    def may_split(self) -> bool:
        """Whether reductions go over the same, and elements are what they are in any piece."""
        for node in self.nodes:
            partly = node.kind is NodeKind.BROADCAST and node.dims & self.over not in (
                frozenset(),
                self.over,
            )
            other = node.kind is NodeKind.REDUCE and (node.dims != self.over or node.aux == ACROSS)
            sized = node.kind is NodeKind.SCALAR and self.program.inputs[node.aux].dims
            unknown = node.kind is NodeKind.REDUCE and node.op not in _JOINS
            if partly or other or unknown or sized or node.kind in _MOVED:
                return False
        plain = all(
            one.allocated and one.along < 0 and one.offset < 0 for one in self.program.outputs
        )
        return plain and bool(self.over) and self.program.rank < MAX_DIMS

    def is_of_rows(self, n: int) -> bool:
        """Whether rows have one number of it, which reductions have gone into."""
        return self.levels[n] > 0 and not self.varies[n] & self.over

    def steps(self) -> tuple[Step, ...] | None:
        """All of them, made from the last to the first, which knows what others need of it."""
        wanted: dict[int, list[_Wanted]] = {}
        for k, out in enumerate(self.program.outputs):
            level = self.levels[out.node] if self.is_of_rows(out.node) else 0
            wanted.setdefault(level, []).append((out.node, out, -1 - k))
        made = list[_Made]()
        if 0 in wanted:
            made.append(_Made(self, 0, wanted[0]))
        for level in range(max(self.levels), 0, -1):
            taken = {n for one in made for n in one.taken if self.levels[n] == level}
            wanted.setdefault(level, []).extend(self.stored(n, _Kind.ROWS) for n in sorted(taken))
            rows = _Made(self, level, wanted[level])
            rows.joined = _Made(self, level, wanted[level], joining=True)
            reduced = [self.stored(n, _Kind.PIECES) for n in sorted(rows.reduced)]
            made += [rows, _Made(self, level, reduced, pieces=True)]
        found = [one.step() for one in reversed(made)]
        return None if None in found else tuple(one for one in found if one is not None)

    def stored(self, n: int, kind: _Kind) -> _Wanted:
        """A value as a result that is there for other steps."""
        dims = self.dims_of(n, kind)
        return n, Output(n, dims, tuple(range(len(dims)))), self.slot(n, kind)

    def dims_of(self, n: int, kind: _Kind) -> tuple[int, ...]:
        """The dimensions of such a value; of a piece that is left over there is one."""
        last = {_Kind.ROWS: (), _Kind.PIECES: (self.program.rank,), _Kind.LEFT_OVER: (ONE,)}
        return (*sorted(self.varies[n]), *last[kind])

    def slot(self, n: int, kind: _Kind) -> int:
        """The number of a tensor between steps, as ``Step.sources`` counts."""
        return len(self.program.inputs) + self.slots.setdefault((n, kind), len(self.slots))


class _Made:
    """A step as it is made.

    Args:
        splitter: what the program is.
        level: of the reductions that it makes; 0: of all elements, behind all of them.
        wanted: what it stores.
        pieces: whether it reduces pieces, rather than what pieces have.
        joining: whether there is a piece that was left over.

    Attributes:
        taken: values of rows that steps before have.
        reduced: reductions whose pieces are reduced here.
        joined: the same with what is left over.
    """

    def __init__(
        self,
        splitter: _Splitter,
        level: int,
        wanted: list[_Wanted],
        pieces: bool = False,
        joining: bool = False,
    ) -> None:
        self.splitter, self.level = splitter, level
        self.pieces, self.joining = pieces, joining
        self.taken, self.reduced = set[int](), set[int]()
        self.nodes, self.inputs, self.sources = list[Node](), list[Input](), list[int]()
        self.place: dict[int, int] = {}
        self.joined: _Made | None = None
        self.targets = [n for n, _, _ in wanted]
        for n in self.targets:
            self.visit(n)
        self.outputs = [replace(out, node=self.put_stored(n, to)) for n, out, to in wanted]
        self.results = tuple(result for _, _, result in wanted)

    def visit(self, n: int) -> None:
        """The value and what it needs; what a step before has is not computed again."""
        if n in self.place:
            return
        splitter, node = self.splitter, self.splitter.nodes[n]
        own = self.level > 0 and splitter.levels[n] == self.level  # of its rows, or of its pieces
        if splitter.is_of_rows(n) and not own:
            self.taken.add(n)
            self.place[n] = self.take(n, _Kind.ROWS)
        elif node.kind is NodeKind.REDUCE and not self.pieces:
            self.reduced.add(n)
            self.place[n] = self.reduce(n)
        elif node.kind is NodeKind.NUMEL:
            mask = sum(1 << d for d in node.dims)
            floating = node.dtype is DType.F32
            number = Input(InputKind.FLOAT if floating else InputKind.INT, node.dtype)
            aux = self.given(number, -1 - mask)
            self.place[n] = self.put(Node(NodeKind.SCALAR, node.dtype, aux=aux))
        elif node.kind in (NodeKind.LOAD, NodeKind.SCALAR):
            given = splitter.program.inputs[node.aux]
            if self.pieces and splitter.over & set(given.dims):
                given = replace(given, dims=(splitter.program.rank, *given.dims))
            self.place[n] = self.put(replace(node, aux=self.given(given, node.aux)))
        else:
            for arg in node.args:
                self.visit(arg)
            dims = node.dims
            if node.kind is NodeKind.BROADCAST and self.pieces and dims & splitter.over:
                dims = dims | {splitter.program.rank}
            args = tuple(self.place[arg] for arg in node.args)
            self.place[n] = self.put(replace(node, args=args, dims=dims))

    def reduce(self, n: int) -> int:
        """What pieces have, reduced; with what the piece that is left over has."""
        node, pieces = self.splitter.nodes[n], self.load(n, _Kind.PIECES)
        over, dtype = frozenset({self.splitter.program.rank}), _between(node.dtype)
        found = self.put(Node(NodeKind.REDUCE, dtype, (pieces,), node.op, dims=over))
        if self.joining:
            more = self.load(n, _Kind.LEFT_OVER)
            found = self.put(Node(NodeKind.COMPUTE, dtype, (found, more), _JOINS[node.op]))
        return self.cast(found, node.dtype)

    def take(self, n: int, kind: _Kind) -> int:
        """A value that a step before has found."""
        return self.cast(self.load(n, kind), self.splitter.nodes[n].dtype)

    def load(self, n: int, kind: _Kind) -> int:
        """A tensor of a step before."""
        dtype = _between(self.splitter.nodes[n].dtype)
        given = Input(InputKind.TENSOR, dtype, self.splitter.dims_of(n, kind))
        aux = self.given(given, self.splitter.slot(n, kind))
        return self.put(Node(NodeKind.LOAD, dtype, aux=aux))

    def put_stored(self, n: int, result: int) -> int:
        """A value as it is stored: one that other steps need, in their dtype."""
        dtype = self.splitter.nodes[n].dtype
        return self.cast(self.place[n], _between(dtype) if result >= 0 else dtype)

    def cast(self, n: int, dtype: DType) -> int:
        same = self.nodes[n].dtype is dtype
        return n if same else self.put(Node(NodeKind.CAST, dtype, (n,)))

    def given(self, one: Input, source: int) -> int:
        """The number of an input."""
        if source not in self.sources:
            self.inputs.append(one)
            self.sources.append(source)
        return self.sources.index(source)

    def put(self, node: Node) -> int:
        """A node more."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def step(self) -> Step | None:
        """None where it is too large, or has a dimension whose size none of its tensors has."""
        splitter = self.splitter
        rank = splitter.program.rank + 1
        program = Program(rank, tuple(self.inputs), tuple(self.nodes), tuple(self.outputs))
        tensors = [one.dims for one in self.inputs if one.kind is InputKind.TENSOR]
        sized = {d for dims in tensors for d in dims}
        needed = {d for one in self.outputs for d in one.dims if d >= 0}
        needed.update(*(one.dims for one in self.nodes))
        fits = (
            needed <= sized
            and len(self.nodes) <= MAX_NODES
            and len(self.inputs) <= MAX_INPUTS
            and 0 < len(self.outputs) <= MAX_OUTPUTS
            and all(len(dims) <= MAX_DIMS for dims in tensors)
        )
        joined = self.joined.step() if self.joined else None
        if not fits or (self.joined and joined is None):
            return None
        over = [splitter.slot(n, _Kind.LEFT_OVER) for n in self.targets] if self.pieces else []
        sources = tuple(self.sources)
        return Step(program, self.pieces, sources, self.results, tuple(over), joined)
