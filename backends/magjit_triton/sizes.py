"""Size expressions as nodes of a graph: ints stay ints, symbols are read from inputs."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._sympy.functions import FloorDiv, Mod

from magjit.plugin.virtual_tensors.indexing import size_expr

__all__ = ["Sizes", "symbolic_size"]

aten = torch.ops.aten


class Sizes:
    """Where the symbols of a graph's sizes can be read, and the expressions made so far."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._nodes: dict[sympy.Expr, Node] = {}
        self._places: dict[sympy.Symbol, tuple[Node, int]] = {}

    def know(self, node: Node) -> None:
        """An input of the graph: a size itself, or a tensor that has sizes."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._nodes.setdefault(size_expr(value), node)
        if isinstance(value, torch.Tensor):
            for k, size in enumerate(value.shape):
                expr = size_expr(size)
                if expr.is_Symbol:
                    self._places.setdefault(expr, (node, k))

    def node(self, expr: sympy.Expr) -> int | Node:
        """An int, or a node that computes the expression.

        Raises:
            KeyError: a symbol that no input has.
        """
        if expr.is_Integer:
            return int(expr)
        if expr not in self._nodes:
            self._nodes[expr] = self._computed(expr)
        return self._nodes[expr]

    def value(self, expr: sympy.Expr, like: torch.Tensor) -> Any:
        """An expression as an int or SymInt of a fake tensor's shape environment."""
        return symbolic_size(expr, like)

    def _computed(self, expr: sympy.Expr) -> Node:
        if expr.is_Symbol:
            node, dim = self._places[expr]
            return self.graph.call_function(aten.sym_size.int, (node, dim))
        given = [self.node(one) for one in expr.args]
        if isinstance(expr, FloorDiv):
            return self.graph.call_function(operator.floordiv, tuple(given))
        if isinstance(expr, Mod):
            return self.graph.call_function(operator.mod, tuple(given))
        if expr.is_Pow:
            return self.graph.call_function(operator.pow, tuple(given))
        function = {sympy.Add: operator.add, sympy.Mul: operator.mul}.get(expr.func)
        if function is None:
            function = max if expr.func.__name__ == "Max" else min
        total: Any = given[0]
        for one in given[1:]:
            total = self.graph.call_function(function, (total, one))
        return total  # type: ignore[no-any-return]


def symbolic_size(expr: sympy.Expr, like: torch.Tensor) -> Any:
    """An expression as an int or a SymInt; None where a symbol has no example value."""
    if expr.is_Integer:
        return int(expr)
    shape_env = like.fake_mode.shape_env  # type: ignore[attr-defined]
    values = getattr(shape_env, "backed_var_to_val", None)
    if values is None:
        values = shape_env.var_to_val
    if any(symbol not in values for symbol in expr.free_symbols):
        return None
    known = {symbol: values[symbol] for symbol in expr.free_symbols}
    return shape_env.create_symintnode(expr, hint=int(expr.xreplace(known)))
