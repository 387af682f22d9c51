"""Symbolic shapes of an ATen graph (TSCompiler, section 4.1, Algorithm 1).

A work list holds nodes whose operands all have shapes.  The paper's ``ComputeSymShape`` and
``InferSibSymShape`` are tables in ``shape_rules``: an operator's result from its operands, and
the sizes of an operand whose shape is unknown from one whose shape is known.  A size that is not
known yet is a symbol of its own (``w.1``), so that a shape may be known in part.  Sizes that
must agree are united, and each is shown by its representative.

Whether two sizes must agree may depend on neither being 1 (broadcasting).  As to torch, which
specialises 0 and 1, a symbol stands for at least 2 unless the shape environment says otherwise;
a caller who cannot promise this of its inputs lowers ``minimum``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sympy
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from magjit.errors import BackendError
from magjit.plugin.shape_rules import rule_of, siblings_of
from magjit.plugin.symbolic_sizes import (
    Call,
    Dim,
    NoRule,
    Shape,
    Sizes,
    Value,
    shape_of_value,
    show,
)

__all__ = ["SymbolicShapes", "propagate_shapes", "shape_of_value"]


class SymbolicShapes:
    """The shapes of all nodes of a graph, as ``propagate_shapes`` finds them.

    Attributes:
        graph: the graph.
        unknown: why a node has no shape, for each that has none.
    """

    def __init__(
        self, graph: Graph, values: Mapping[Node, Value], unknown: dict[Node, str], sizes: Sizes
    ) -> None:
        self.graph = graph
        self.unknown = unknown
        self._values = values
        self._sizes = sizes

    def value(self, node: Node) -> Value:
        """A shape; the expression of a number; several results as a list."""
        return self._sizes.canonical(self._values.get(node))

    def shape(self, node: Node) -> Shape | None:
        """The shape of a tensor; ``None`` where it is unknown or the node is no tensor."""
        value = self.value(node)
        return value if isinstance(value, tuple) else None

    def numel(self, node: Node) -> Dim | None:
        """The number of elements of a tensor."""
        shape = self.shape(node)
        return None if shape is None else self._sizes.canonical(math.prod(shape))

    def representative(self, dim: Dim) -> Dim:
        """What all sizes have in common that are known to be equal to this one."""
        found: Dim = self._sizes.canonical(dim)
        return found

    def equal(self, a: Dim, b: Dim) -> bool:
        """Whether two sizes are equal in every run that the graph's operators accept."""
        return bool(self.representative(a) == self.representative(b))

    def is_one(self, a: Dim) -> bool:
        """Whether a size is always 1."""
        return self.equal(a, 1)

    def verify(self, values: Mapping[Node, Any]) -> None:
        """Compare with values of one run, real or fake; a size's symbol has one value throughout.

        Raises:
            BackendError: sizes differ; the message names the nodes.
        """
        pairs = [(node, self.value(node), shape_of_value(value)) for node, value in values.items()]
        pairs = [pair for pair in pairs if pair[1] is not None]
        bound: dict[Any, Any] = {}
        for _, mine, theirs in pairs:
            for symbol, size in zip(_leaves(mine), _leaves(theirs), strict=False):
                if getattr(symbol, "is_Symbol", False) and isinstance(size, int):
                    bound.setdefault(symbol, size)
        wrong = [
            f"{node}: {show(mine)} is {show(theirs)} in the run"
            for node, mine, theirs in pairs
            if not self._fits(mine, theirs, bound)
        ]
        if wrong:
            raise BackendError("Symbolic shapes differ from a run's:\n" + "\n".join(wrong))

    def _fits(self, mine: Value, theirs: Value, bound: Mapping[Any, Any]) -> bool:
        if mine is None:
            return True
        if isinstance(mine, tuple | list):
            same = type(mine) is type(theirs) and len(mine) == len(theirs)
            return same and all(self._fits(a, b, bound) for a, b in zip(mine, theirs, strict=True))
        valued = mine.xreplace(bound) if isinstance(mine, sympy.Expr) else mine
        return theirs is not None and (self.equal(mine, theirs) or bool(valued == theirs))

    def __str__(self) -> str:
        lines = []
        for node in self.graph.nodes:
            if node.op != "output":
                target = node.op if node.op == "placeholder" else node.target
                name = getattr(target, "__name__", str(target)) if callable(target) else target
                arguments = f"({', '.join(map(str, node.all_input_nodes))})" if node.args else ""
                reason = f"  # {self.unknown[node]}" if node in self.unknown else ""
                lines.append(f"{node}: {show(self.value(node))} = {name}{arguments}{reason}")
        return "\n".join([*lines, *(f"{a} == {b}" for a, b in self._sizes.united)])


def _leaves(value: Value) -> list[Any]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def propagate_shapes(
    graph: Graph,
    inputs: Sequence[Value] | None = None,
    *,
    shape_env: ShapeEnv | None = None,
    equations: Iterable[sympy.Eq] = (),
    use_meta: bool = True,
    minimum: int = 2,
) -> SymbolicShapes:
    """Give every node of an ATen graph its symbolic shape (TSCompiler, section 4.1).

    Args:
        graph: ``call_function`` nodes on ATen overloads; parameters (``get_attr``) are static.
        inputs: for each placeholder its shape, or the expression of a symbolic number;
            ``None`` for an unknown shape, or for an unknown size in one.  By default what the
            placeholders' metadata says.
        shape_env: whose symbols these are: what it has unified is equal, and its ranges hold.
        equations: of sizes, that hold in every run: guards, or what is checked while it runs.
        use_meta: a node that no rule covers has the shape that its metadata says.
        minimum: the least that a symbol outside of ``shape_env``, or an unknown size, stands
            for.  With less than 2, fewer sizes are known to be equal.

    Raises:
        BackendError: sizes contradict each other; the message names the node.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    given = [_meta_value(node) for node in placeholders] if inputs is None else inputs
    if len(given) != len(placeholders):
        raise BackendError(f"The graph has {len(placeholders)} placeholders, not {len(given)}")
    sizes = Sizes(shape_env, minimum)
    for one in equations:
        if not sizes.unite(one.lhs, one.rhs):
            raise BackendError(f"No sizes satisfy {one}")
    propagation = _Propagation(graph, sizes, use_meta)
    for node, value in zip(placeholders, given, strict=True):
        if value is not None:
            propagation.values[node] = (
                sizes.fill(node, value) if isinstance(value, tuple) else value
            )
    return propagation.run()


def _meta_value(node: Node) -> Value:
    return shape_of_value(node.meta.get("val", node.meta.get("example_value")))


class _Propagation:
    """Algorithm 1; its lines are named where they are."""

    def __init__(self, graph: Graph, sizes: Sizes, use_meta: bool) -> None:
        self.graph = graph
        self.sizes = sizes
        self.use_meta = use_meta
        self.values: dict[Node, Value] = {}
        self.reasons: dict[Node, str] = {}
        self._processed: set[Node] = set()
        # A node is in a list once, or each joining of branches would double the work behind it.
        self._list: OrderedDict[Node, None] = OrderedDict()
        self._waiting: OrderedDict[Node, None] = OrderedDict()  # known operands, and others

    def run(self) -> SymbolicShapes:
        for node in self.graph.nodes:  # lines 2 to 13
            if node.op == "get_attr":
                self._take_attribute(node)
            if node in self.values or (not node.all_input_nodes and node.op != "placeholder"):
                self._list[node] = None
        self._drain()
        for node in self.graph.nodes:
            if node not in self.values and self._take_meta(node):
                self._list[node] = None
                self._drain()
        unknown = {
            node: self._reason(node)
            for node in self.graph.nodes
            if node.op != "output" and node not in self.values
        }
        return SymbolicShapes(self.graph, self.values, unknown, self.sizes)

    def _reason(self, node: Node) -> str:
        missing = [str(one) for one in node.all_input_nodes if one not in self.values]
        waits = f"waits for {', '.join(missing)}" if missing else "no user says its shape"
        return self.reasons.get(node, waits)

    def _take_attribute(self, node: Node) -> None:
        owner: Any = self.graph.owning_module
        for name in str(node.target).split("."):
            owner = getattr(owner, name, None)
        value = shape_of_value(owner)
        if value is None:
            self._take_meta(node)
        else:
            self.values[node] = value

    def _take_meta(self, node: Node) -> bool:
        value = _meta_value(node) if self.use_meta and node.op != "placeholder" else None
        if value is not None:
            self.values[node] = value
        return value is not None

    def _eligible(self, node: Node) -> bool:
        return all(operand in self.values for operand in node.all_input_nodes)

    def _drain(self) -> None:
        """Lines 14 to 31, but siblings wait until no node is eligible.

        An operand that is yet to be computed is so never given symbols for its sizes.
        """
        while self._list or self._waiting:
            while self._list:
                self._visit(self._list.popitem(last=False)[0])
            if self._waiting:
                successor, _ = self._waiting.popitem(last=False)
                if not self._eligible(successor):
                    self._infer_siblings(successor)

    def _visit(self, node: Node) -> None:
        if node.op.startswith("call_") and node not in self._processed and self._eligible(node):
            self._processed.add(node)
            self._compute(node)
        for successor in node.users if node in self.values else ():
            if not self._eligible(successor):
                self._waiting[successor] = None
            elif successor.op != "output" and successor not in self._processed:
                self._list[successor] = None

    def _compute(self, node: Node) -> None:
        """``ComputeSymShape``; a shape that was inferred before must agree with it."""
        rule = rule_of(node)
        call = Call(node, self.values, self.sizes)
        try:
            if rule is None:
                raise NoRule(f"no rule for {node.target}")
            value = rule(call)
            if value is None:
                raise NoRule("the operator's rule leaves this result open")
        except NoRule as reason:
            self.reasons[node] = str(reason)
            if node not in self.values:
                self._take_meta(node)
            return
        self._meet(call, node, value)

    def _infer_siblings(self, successor: Node) -> None:
        """``InferSibSymShape`` for all operands of one successor."""
        siblings = siblings_of(successor) if successor.op == "call_function" else None
        call = Call(successor, self.values, self.sizes)
        for node, shape in siblings(call) if siblings is not None else ():
            if isinstance(node, Node) and shape is not None:
                if node not in self.values:
                    self._list[node] = None
                    self._take_meta(node)
                self._meet(call, node, tuple(shape))

    def _meet(self, call: Call, node: Node, value: Value) -> None:
        """Make ``value`` what is known of ``node``, or agree with what is known."""
        before = self.values.get(node)
        if before is None:
            partly = isinstance(value, tuple) and None in value
            self.values[node] = self.sizes.fill(node, value) if partly else value
        elif isinstance(before, tuple):
            if len(before) != len(value):
                call.fail(f"{node} has the shape {show(before)}, not {show(tuple(value))}")
            known = [(a, b) for a, b in zip(before, value, strict=True) if b is not None]
            call.agree([a for a, _ in known], [b for _, b in known])
