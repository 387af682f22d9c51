"""What a report says, as plain data: nothing in it refers to the run's own objects.

    Content      ::= Input* OperatorCall* GuardLine* side effect* Split* Function* ObjectView*
    OperatorCall ::= text, the line of the program that made it
    GuardLine    ::= kind, text
    Split        ::= reason, remedy, the line of the program
    ObjectView   ::= one node of the reference graph with its place in the tree of first paths

The exceptions are the result of the run and the graph modules, which are what was asked for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from types import CodeType
from typing import Any

from torch.fx import GraphModule

from magjit.errors import Location
from magjit.plugin.data_movement import DataMovement
from magjit.refgraph import relations

TIMING_NAMES = {
    "run_ms": "the program's own run",
    "record_ms": "recording",
    "build_ms": "guard, mock and lowering",
    "backend_ms": "backend",
}
"""The parts of a capture; ``run_ms`` includes ``record_ms``."""


_KINDS = {
    "Call": "number and names of the arguments",
    "Type": "exact type of an object",
    "Tensor": "dtype, shape, strides, device and the like of a tensor that the graph reads",
    "Distinct": "objects that must not be one and the same",
    "Overlap": "tensors that must not share memory",
    "GlobalState": "settings of torch",
    "Backend": "what the backend assumed",
    "Numbers": "what the program decides by counters and random numbers",
}


def kind_meaning(kind: str) -> str:
    """What guards of a kind check, in words."""
    found = _KINDS.get(kind) or getattr(relations, kind, None).__doc__ or kind
    return found.removeprefix("Fact: ").rstrip(".").replace("``", "")


def counted(number: int, noun: str) -> str:
    """``1 guard``, ``2 guards``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator of the graph and the line of the program that called it."""

    text: str
    location: Location | None = None

    def __str__(self) -> str:
        return self.text if self.location is None else f"{self.text}  # {self.location}"


@dataclass(frozen=True, slots=True)
class GuardLine:
    """One condition of the guard; ``kind`` is the relation that it checks."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """Why the program is not one graph, where, and what can be done."""

    reason: str
    file: str | None = None
    line: int | None = None
    function: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        where = "" if self.file is None else f" at {self.file}:{self.line} in {self.function}"
        return self.reason + where


@dataclass(frozen=True, slots=True)
class Function:
    """A Python function that the run went through; ``own`` marks the program's own."""

    name: str
    code: CodeType
    own: bool


class Role(StrEnum):
    """What an object is, as far as a picture tells objects apart."""

    OUTSIDE = "the outside"
    ARGUMENT = "argument"
    MODULE = "nn.Module"
    TENSOR = "tensor"
    CONTAINER = "container"
    CODE = "function, class or module"
    OBJECT = "object"


@dataclass(frozen=True, slots=True)
class ObjectView:
    """A node of the reference graph.

    Attributes:
        parent, label: the object that it was first reached from, and by what.
        hidden: a ``__dict__`` or the like, which readers see as a part of its owner.
        library: belongs to torch or to Python, not to the program.
        facts: what the guard checks of its values.
        links: nodes that it refers to besides those that were first reached through it.
    """

    node_id: int
    parent: int
    label: str
    type_name: str
    role: Role
    path: str
    changed: bool = False
    hidden: bool = False
    library: bool = False
    facts: tuple[str, ...] = ()
    links: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class Content:
    """Everything that a report shows.

    Attributes:
        name: the compiled object's name.
        backend: the backend's name.
        result: what the run returned.
        graphs: the graphs as the backend got them; one when the whole run was captured.
        inputs: the graph's inputs, in order.
        operator_calls: the operators, in order.
        guards: how many guards there are, by kind.
        guard_lines: the guards.
        side_effects: what a replay redoes besides computing its result, in order.
        splits: why the run, or its rest from some point on, is not captured.
        cuts: where the run was cut into regions, and why.
        timings: milliseconds of each part of the capture, see `TIMING_NAMES`.
        record_count: records that the run left.
        missing: C callables without an annotation, each with YAML to paste.
        functions: the Python functions that were followed, in order of their first call.
        objects: the reference graph; the first is the outside world.
        mock_text, mock_source: the mock as a plan and as code.
        backend_dumps: readable artefacts that the backend kept, by file name.
        movement: what the backend says of the data that each of its graphs moves.
        notes: what a reader should know of how the report came about.
    """

    name: str
    backend: str
    result: Any = None
    graphs: list[GraphModule] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    operator_calls: list[OperatorCall] = field(default_factory=list)
    guards: Counter[str] = field(default_factory=Counter)
    guard_lines: list[GuardLine] = field(default_factory=list)
    side_effects: list[str] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    cuts: list[Split] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    record_count: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)
    objects: list[ObjectView] = field(default_factory=list)
    mock_text: str = ""
    mock_source: str = ""
    backend_dumps: dict[str, str] = field(default_factory=dict)
    movement: list[DataMovement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def operators(self) -> list[str]:
        """The operators, each with its line in the program."""
        return [str(call) for call in self.operator_calls]

    @property
    def guard_text(self) -> str:
        """The guards, one a line, under a heading for each kind."""
        by_kind: dict[str, list[str]] = {}
        for line in self.guard_lines:
            by_kind.setdefault(line.kind, []).append(line.text)
        parts = []
        for kind, texts in by_kind.items():
            parts += [f"{kind} ({len(texts)})", *(f"    {text}" for text in texts)]
        return "\n".join(parts)

    @property
    def refgraph_text(self) -> str:
        """The reference graph: each object, what was found in it, what it leads to."""
        reached: dict[int, list[int]] = {view.node_id: list(view.links) for view in self.objects}
        for view in self.objects[1:]:
            reached[view.parent].append(view.node_id)
        lines = []
        for view in self.objects:
            kind = f": {view.type_name}" if view.type_name else ""
            lines.append(f"#{view.node_id} {view.path}{kind}{' (changed)' if view.changed else ''}")
            lines += [f"    {fact}" for fact in view.facts]
            if found := reached[view.node_id]:
                lines.append(f"    leads to {', '.join(f'#{n}' for n in sorted(found))}")
        return "\n".join(lines)

    @property
    def whole(self) -> bool:
        """Whether the run became one graph."""
        return len(self.graphs) == 1 and not self.splits and not self.cuts

    @property
    def verdict(self) -> str:
        """The outcome in a few words."""
        if self.whole:
            return f"one graph of {counted(len(self.operator_calls), 'operator')}"
        if self.cuts and not self.splits:
            return (
                f"{counted(len(self.graphs), 'region')}, cut at {counted(len(self.cuts), 'place')}"
            )
        if not self.splits:
            return counted(len(self.graphs), "graph")
        return f"not one graph, for {counted(len(self.splits), 'reason')}"

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of what a report lists, by what one of them is called."""
        return {
            "graph": len(self.graphs),
            "operator": len(self.operator_calls),
            "input": len(self.inputs),
            "guard": self.guards.total(),
            "side effect": len(self.side_effects),
            "outside object": max(0, len(self.objects) - 1),
            "record": self.record_count,
        }

    @property
    def shown_timings(self) -> dict[str, float]:
        """Milliseconds by part, without overlap: recording is taken out of the run."""
        found = {key: self.timings.get(key, 0.0) for key in TIMING_NAMES}
        found["run_ms"] = max(0.0, found["run_ms"] - found["record_ms"])
        return found
