"""Records: what one capture produced, and the cache that a compiled object keeps of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from magjit import _C
from magjit.errors import Location
from magjit.guards.emit import (
    METADATA_ORIGIN,
    SHAPES_ORIGIN,
    Instruction,
    Origin,
    describe_origin,
)
from magjit.guards.misses import Miss, find_miss
from magjit.plugin.data_movement import DataMovement
from magjit.refgraph.cached_calls import not_asked
from magjit.refgraph.relations import Item

if TYPE_CHECKING:
    from magjit.guards.plan import GuardPlan
    from magjit.late_graphs import LateGraph
    from magjit.mocks.ir import MockPlan
    from magjit.monitor.operator_graph import OperatorGraph
    from magjit.refgraph.nodes import RefGraph
    from magjit.refgraph.paths import Paths


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """Why a run did not become one graph.

    Attributes:
        error: when MagJIT itself failed.
        about: the object that a replay cannot make again.
    """

    reason: str
    location: Location | None
    remedy: str | None = None
    error: BaseException | None = None
    about: Any = None

    def __str__(self) -> str:
        where = f" at {self.location}" if self.location is not None else ""
        return f"{self.reason}{where}"


@dataclass(slots=True)
class Timings:
    """Milliseconds that each part of a capture took.

    ``run`` is the monitor run as a whole; ``record`` is the part of it that observation added, as
    far as it can be told: the time inside the recorder's handlers.
    """

    run_ms: float = 0.0
    record_ms: float = 0.0
    build_ms: float = 0.0
    backend_ms: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {
            "run_ms": self.run_ms,
            "record_ms": self.record_ms,
            "build_ms": self.build_ms,
            "backend_ms": self.backend_ms,
        }


@dataclass(slots=True, eq=False)
class Record:
    """A guard, a mock and a graph (MagPy §2.2), with what reports show of them.

    Attributes:
        handle: the C object that the dispatcher tries.
        instructions: those of the guard.
        guard_origins: what each of them is for.
        paths: how the nodes that the origins name are reached.
        graph_module: the graph as the backend got it.
        notes: what the backend had to say of it.
        grad_enabled: grad mode at each call, which the guard checks.
        repeatable: the graph changes nothing outside, so that after a failure in it the program
            can be run as if it had not been called.
        fixed_draws: the guard asks for random numbers of certain values.
        late: the graph, while it waits to be compiled.
        compiled: what the backend has made of it, which lives as long as the record.
    """

    handle: _C.Record
    instructions: list[Instruction]
    guard_origins: list[Origin]
    paths: Paths
    guard_kinds: Counter[str]
    graph_module: GraphModule
    operator_count: int
    mock_source: str
    timings: Timings
    dumps: dict[str, str] = field(default_factory=dict)
    movement: tuple[DataMovement, ...] = ()
    notes: tuple[str, ...] = ()
    grad_enabled: bool = True
    repeatable: bool = False
    fixed_draws: bool = False
    late: LateGraph | None = None
    compiled: Any = None

    @property
    def origins(self) -> list[str]:
        """What each guard instruction is for, as text."""
        return [describe_origin(origin, self.paths) for origin in self.guard_origins]

    @property
    def hits(self) -> int:
        return int(self.handle.hits)

    def serves(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> bool:
        """Whether a call would hit."""
        with not_asked():
            return bool(self.handle.program.explain(args, kwargs or {}) is None)

    def miss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Miss | None:
        """What a call misses this record for, or None when it would hit."""
        with not_asked():
            return find_miss(
                self.handle.program, self.instructions, self.guard_origins, self.paths, args, kwargs
            )

    def _failing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Origin | None:
        with not_asked():
            index = self.handle.program.explain(args, kwargs)
        return None if index is None else self.guard_origins[index]

    def missed_numbers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[tuple[str, Any]]:
        """The attribute that a call misses it for: its object and its name."""
        node_id, what = self._failing(args, kwargs) or (0, "")
        if not node_id or not isinstance(what, Item):
            return []
        return [(self.paths.path(node_id), what.key.key)]

    def misses_for_shape(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call misses it for the metadata of a tensor, such as its shape."""
        _, what = self._failing(args, kwargs) or (0, "")
        return what == METADATA_ORIGIN or str(what).startswith(SHAPES_ORIGIN)


@dataclass(slots=True, repr=False)
class Stats:
    """What a compiled object has done so far.

    Attributes:
        captures: runs that became a record.
        replays: calls that a record served.
        splits: runs that could not become one graph.
        eager_calls: calls that ran the original program without observation.
        records: records held now, those of regions included.
        regions: parts of the program behind the first cut.
        region_replays: how often a record served a region behind a cut.
        operations: how often an operation was done between two regions of a replay.
        streamed_calls: of ``eager_calls``, those in which the backend had the operators.
    """

    captures: int = 0
    replays: int = 0
    splits: int = 0
    eager_calls: int = 0
    records: int = 0
    regions: int = 0
    region_replays: int = 0
    operations: int = 0
    streamed_calls: int = 0

    def __repr__(self) -> str:
        """Without what is about regions where there are none, or streaming."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if not self.streamed_calls:
            del values["streamed_calls"]
        if not self.regions and not self.operations:
            for name in ("regions", "region_replays", "operations"):
                del values[name]
        return f"Stats({', '.join(f'{name}={value}' for name, value in values.items())})"


@dataclass(slots=True, eq=False)
class Captured:
    """Everything that a monitor run left, before it is thrown away; reports are made of it."""

    refgraph: RefGraph
    operators: OperatorGraph
    guard_plan: GuardPlan | None = None
    mock_plan: MockPlan | None = None
    split: SplitPoint | None = None
    missing: list[Callable[..., Any]] = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    record: Record | None = None
