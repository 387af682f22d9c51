"""What a backend is told about a compilation, and what it tells the front end back.

The guards that a backend adds are plain data here; the front end turns them into
guards of the record::

    BackendGuard := ShapeGuard(expression, inputs)      specialised symbols
                  | SameInput(kept, dropped)            two inputs are one tensor
                  | StorageRelation(overlapping, disjoint)
                  | CustomGuard(inputs, check, reason)  what a backend adds by hand
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv

from magjit.plugin.inputs import GraphInput

__all__ = [
    "BackendContext",
    "BackendGuard",
    "CustomGuard",
    "SameInput",
    "ShapeGuard",
    "StorageRelation",
]

_INPUT = re.compile(r"inputs\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class ShapeGuard:
    """A condition on sizes, strides and lifted ints.

    Attributes:
        expression: Python over ``inputs``, such as ``inputs[0].size()[1] == inputs[2].size()[0]``.
        inputs: positions of the graph inputs it reads.
    """

    expression: str
    inputs: tuple[int, ...]

    def __str__(self) -> str:
        return self.expression

    def predicate(self) -> Callable[[Sequence[Any]], bool]:
        """The condition as a function of all graph inputs."""
        names = {**SYMPY_INTERP, "math": math, "torch": torch}
        made: Callable[[Sequence[Any]], bool] = eval(f"lambda inputs: {self.expression}", names)
        return made

    def at(self, positions: Sequence[int]) -> ShapeGuard:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        expression = _INPUT.sub(lambda m: f"inputs[{positions[int(m[1])]}]", self.expression)
        return ShapeGuard(expression, tuple(positions[i] for i in self.inputs))


@dataclass(frozen=True, slots=True)
class SameInput:
    """The graph was specialised on two inputs being the same tensor."""

    kept: int
    dropped: int

    def __str__(self) -> str:
        return f"inputs[{self.kept}] is inputs[{self.dropped}]"

    def at(self, positions: Sequence[int]) -> SameInput:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        return SameInput(positions[self.kept], positions[self.dropped])


@dataclass(frozen=True, slots=True)
class StorageRelation:
    """Which inputs share memory.

    Attributes:
        overlapping: positions whose memory overlaps pairwise or in a chain.
        disjoint: positions that share the storage of those but none of their memory.
    """

    overlapping: tuple[int, ...]
    disjoint: tuple[int, ...]

    def __str__(self) -> str:
        return f"overlap{list(self.overlapping)} disjoint{list(self.disjoint)}"

    def at(self, positions: Sequence[int]) -> StorageRelation:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        return StorageRelation(
            tuple(positions[i] for i in self.overlapping),
            tuple(positions[i] for i in self.disjoint),
        )


@dataclass(frozen=True, slots=True)
class CustomGuard:
    """A condition that a backend states by hand.

    Attributes:
        inputs: positions of the graph inputs that ``check`` takes, in that order.
        check: must not run user code, and must be cheap: it runs at every call.
        reason: shown when the guard fails.
    """

    inputs: tuple[int, ...]
    check: Callable[..., bool]
    reason: str

    def __str__(self) -> str:
        return self.reason

    def at(self, positions: Sequence[int]) -> CustomGuard:
        """The same condition where input ``i`` has become input ``positions[i]``."""
        return CustomGuard(tuple(positions[i] for i in self.inputs), self.check, self.reason)


BackendGuard = ShapeGuard | SameInput | StorageRelation | CustomGuard


@dataclass(slots=True)
class BackendContext:
    """One compilation.

    The front end makes one with the caller's wishes; ``run_backend`` fills in the rest
    before the backend sees it.

    Attributes:
        mode: as ``torch.compile`` takes it.
        options: as ``torch.compile`` takes them.
        dynamic: ``True`` symbols wherever possible, ``False`` none, ``None`` as marked.
        fullgraph: the user wants one graph or an error.
        grad_enabled: grad mode at the start of the graph; with it off, no backward is built.
        want_dumps: keep what is passed to ``dump``.
        live_inputs: the run's own inputs, read only to make copies for backends that
            execute their example inputs.
        inputs: the graph inputs as data, in order.
        static_inputs: positions whose tensors keep their address from call to call.
        symbolic_inputs: positions whose sizes, strides and offset hold symbols: ``ShapeGuard``
            s say all that must hold of these numbers, the metadata in ``inputs`` does not.
        fake_mode: the mode of the example inputs.
        shape_env: its shape environment.
        tracing_context: torch's tracing context, set while the backend compiles.
        guards: what must hold for the compiled graph to be right, beyond the metadata in
            ``inputs``.
        dumps: name to text, in the order of the passes.
    """

    mode: str | None = None
    options: Mapping[str, Any] | None = None
    dynamic: bool | None = None
    fullgraph: bool = False
    grad_enabled: bool = field(default_factory=torch.is_grad_enabled)
    want_dumps: bool = False
    live_inputs: Sequence[Any] | None = None
    inputs: tuple[GraphInput, ...] = ()
    static_inputs: tuple[int, ...] = ()
    symbolic_inputs: tuple[int, ...] = ()
    fake_mode: FakeTensorMode | None = None
    shape_env: ShapeEnv | None = None
    tracing_context: TracingContext | None = None
    guards: list[BackendGuard] = field(default_factory=list)
    dumps: dict[str, str] = field(default_factory=dict)

    def add_guard(self, guard: BackendGuard) -> None:
        """Make ``guard`` part of the record that holds the compiled graph."""
        if guard not in self.guards:
            self.guards.append(guard)

    def dump(self, name: str, text: str | Callable[[], str]) -> None:
        """Keep a readable artefact, when somebody asked for artefacts.

        Args:
            name: file-like, such as ``aten_forward.py``; a second one of the same name
                gets a number.
            text: the text, or what makes it.
        """
        if not self.want_dumps:
            return
        stem, dot, suffix = name.rpartition(".")
        unique, number = name, 1
        while unique in self.dumps:
            unique = f"{stem}_{number}{dot}{suffix}" if dot else f"{name}_{number}"
            number += 1
        self.dumps[unique] = text if isinstance(text, str) else text()
