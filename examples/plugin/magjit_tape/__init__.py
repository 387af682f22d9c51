"""An example backend for MagJIT: ATen graphs as flat tapes, each slot freed after its last use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule

from magjit.plugin import BackendContext, BackendOptionError, CompiledGraph, for_torch_compile
from magjit.plugin.aot import aot
from magjit_tape.tape import Tape

__all__ = ["Tape", "TapeBackend", "compile_for_torch"]


class TapeBackend:
    """Options: ``keep`` (bool) keeps every slot until the end, to look at it in a debugger."""

    name = "tape"
    # Random operators stay ATen's own.
    exact_random = True

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep

    def supports(self, gm: GraphModule) -> list[str]:
        """Every graph is taken."""
        return []

    def configure(
        self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
    ) -> TapeBackend:
        """Take the option ``keep``; refuse everything else."""
        if mode not in (None, "default"):
            raise BackendOptionError(f"Backend 'tape' has no mode {mode!r}")
        given = dict(options or {})
        keep = given.pop("keep", False)
        if given or not isinstance(keep, bool):
            raise BackendOptionError("Backend 'tape' takes one option, keep: bool")
        return TapeBackend(keep)

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """One tape for inference, or one each for forward and backward."""

        def record(aten: GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            tape = Tape.from_graph(aten, keep=self.keep)
            context.dump("tape.txt", lambda: str(tape))
            return tape.run

        return aot(gm, example_inputs, context, forward=record)


compile_for_torch = for_torch_compile(TapeBackend())
