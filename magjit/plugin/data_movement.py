"""What a backend says of the data that a graph moves: tensors that are never made, bytes it saves.

    DataMovement ::= title, Place*, Edge*, Moved*
    Place        ::= tensor, virtual or in memory
    Edge         ::= tensor → the tensor that it is read from or computed in, operator
    Moved        ::= operator, bytes of the operator by itself, bytes of what runs

A backend hands it to ``BackendContext.explain_movement``; reports draw it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["DataMovement", "Edge", "Moved", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the graph.

    Attributes:
        name: of the tensor, different for each.
        text: dtype and shape.
        size: bytes of its elements.
        virtual: whether it has no memory of its own.
    """

    name: str
    text: str
    size: int
    virtual: bool


@dataclass(frozen=True, slots=True)
class Edge:
    """A virtual tensor and one that it points to, by the operator that this makes needless."""

    tensor: str
    target: str
    operator: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that an operator reads and writes.

    Attributes:
        name: of its result.
        operator: what it calls.
        before: when every operator of the graph runs by itself.
        after: in what runs; of operators that run together, the first that is stored has all.
    """

    name: str
    operator: str
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class DataMovement:
    """One graph.

    Attributes:
        title: which graph, for readers.
        places: the tensors of the points-to graph.
        edges: the points-to graph, from virtual tensors to others.
        moved: the operators, in order; those that move nothing either way are left out.
    """

    title: str
    places: tuple[Place, ...]
    edges: tuple[Edge, ...]
    moved: tuple[Moved, ...]

    @property
    def before(self) -> int:
        """Bytes of all operators, each by itself."""
        return sum(one.before for one in self.moved)

    @property
    def after(self) -> int:
        """Bytes of what runs."""
        return sum(one.after for one in self.moved)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; sizes are bytes."""
        return {
            "title": self.title,
            "before": self.before,
            "after": self.after,
            "tensors": [
                {"name": one.name, "text": one.text, "size": one.size, "virtual": one.virtual}
                for one in self.places
            ],
            "points_to": [
                {"tensor": one.tensor, "target": one.target, "operator": one.operator}
                for one in self.edges
            ],
            "operators": [
                {
                    "name": one.name,
                    "operator": one.operator,
                    "before": one.before,
                    "after": one.after,
                }
                for one in self.moved
            ],
        }
