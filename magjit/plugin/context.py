"""What a backend is told about a compilation, and what it tells the front end back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from magjit.plugin.backend_guards import BackendGuard
from magjit.plugin.data_movement import DataMovement
from magjit.plugin.inputs import GraphInput

__all__ = ["BackendContext"]

logger = logging.getLogger(__name__)


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
        want_dumps: keep what is passed to ``dump`` and ``explain_movement``.
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
        movement: what the compiled graphs move, in the order in which they were compiled.
        notes: what a reader of the report should know of the compilation.
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
    movement: list[DataMovement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Tell the log, at level INFO, and the report."""
        logger.info("%s", text)
        self.notes.append(text)

    def add_guard(self, guard: BackendGuard) -> None:
        """Make ``guard`` part of the record that holds the compiled graph."""
        if guard not in self.guards:
            self.guards.append(guard)

    def explain_movement(self, made: Callable[[], DataMovement]) -> None:
        """Keep what a compiled graph moves for the report, when somebody asked for one.

        Args:
            made: makes it.
        """
        if self.want_dumps:
            self.movement.append(made())

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
