"""Which sizes of a graph are equal, beyond what its symbols say (DVM, §5.2: symbol deduction).

Tracing keeps sizes apart that no single symbol stands for: those of two views that an addition
proves equal, or of tensors whose sizes only a run tells.  Symbolic shape propagation
(TSCompiler, section 4.1) finds the classes; equations that tracing has noted are taken for true,
also those that nothing checks beforehand: a fused operator runs operator by operator where the
sizes of one loop turn out to differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import sympy
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from magjit.plugin import BackendError, SymbolicShapes, propagate_shapes
from magjit_dvm.builder import size_key

__all__ = ["SizeClasses"]

log = logging.getLogger("magjit.dvm")


class SizeClasses:
    """The classes of equal sizes of one graph, found when the first symbol is asked for.

    A graph without symbols costs nothing.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.runs = 0
        self._shapes: SymbolicShapes | None = None

    def of(self, size: Any) -> Any:
        """What a size has in common with all that are equal to it: an int or an expression."""
        key = size_key(size)
        if isinstance(key, int):
            return key
        if not self.runs:
            self.runs += 1
            self._shapes = self._propagated(size.node.shape_env)
        return key if self._shapes is None else self._shapes.representative(key)

    def _propagated(self, env: ShapeEnv) -> SymbolicShapes | None:
        try:
            return propagate_shapes(self.graph, shape_env=env, equations=_equations(env))
        except BackendError as error:
            # A program that fails in every run, or an assumption that does not hold.
            log.info("Sizes are compared as tracing names them: %s", error)
            return None


def _equations(env: ShapeEnv) -> Iterator[sympy.Eq]:
    """What tracing has found to be equal: guards, and what it would check in each run."""
    asserted = [one.expr for each in env.deferred_runtime_asserts.values() for one in each]
    for expression in (*(guard.expr for guard in env.guards), *asserted):
        if isinstance(expression, sympy.Eq):
            yield expression
