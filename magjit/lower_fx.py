"""Operator graph to ``torch.fx``: one torch-level graph, as backends take it (MagPy §4.3).

Placeholders come in the order of first use, the model's parameters and buffers among them. Every
operator is kept in order, also one whose result nobody uses: it may change a tensor or draw from
the random number generator.
"""

from __future__ import annotations

import linecache
import operator
import types
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils.checkpoint import checkpoint

from magjit.errors import line_of
from magjit.monitor.arrays import ArrayIndex, ArrayOperator
from magjit.monitor.functions import make_parameter
from magjit.monitor.operator_graph import (
    NumberRef,
    Operator,
    OperatorGraph,
    ValueRef,
    floats_in,
    mapped,
    refs_in,
)
from magjit.monitor.regions import FunctionRegion, Region
from magjit.plugin import make_graph_module, runnable
from magjit.plugin.fx_nodes import new_call
from magjit.refgraph.number_values import SYMBOLIC, Item
from magjit.replayed_function import ForwardPlan, replayed_apply

_DUNDERS: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, name)
    for name in [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "matmul",
        "pow",
        "lshift",
        "rshift",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "ilshift",
        "irshift",
        "iand",
        "ior",
        "ixor",
        "neg",
        "pos",
        "abs",
        "invert",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "getitem",
        "setitem",
    ]
} | {"__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor}
_REFLECTED: dict[str, Callable[..., Any]] = {
    "__radd__": operator.add,
    "__rmul__": operator.mul,
    "__rsub__": operator.sub,
    "__rtruediv__": operator.truediv,
    "__rdiv__": operator.truediv,
    "__rfloordiv__": operator.floordiv,
    "__rpow__": operator.pow,
    "__rmod__": operator.mod,
    "__rmatmul__": operator.matmul,
    "__rand__": operator.and_,
    "__ror__": operator.or_,
    "__rxor__": operator.xor,
    "__rlshift__": operator.lshift,
    "__rrshift__": operator.rshift,
}


def lower(
    graph: OperatorGraph,
    outputs: tuple[int, ...],
    names: dict[int, str],
    *,
    numbers: Sequence[Any] = (),
    floats: Sequence[tuple[Any, torch.dtype]] = (),
    traced: bool = True,
) -> GraphModule:
    """Make the graph module.

    Args:
        graph: from the operator recorder.
        outputs: ids of the values to return, in order; an input may be among them.
        names: readable names for the inputs, by value id.
        numbers: those that change from call to call; placeholders after those of the tensors.
        floats: those that are tensors there, of which type; placeholders after the numbers.
        traced: the backend traces the graph, and is to see a checkpoint as torch's higher-order
            operator; otherwise the graph is run, and a checkpoint is torch's own function.
    """
    inputs = tuple(item.value_id for item in graph.inputs)
    lowering = _Lowering(inputs, names, traced)
    lowering.add_numbers(numbers)
    lowering.add_floats(floats)
    lowering.add_sizes(graph)
    return lowering.finish(graph.operators, outputs)


def checkpointed(inner: GraphModule, *args: Any, **options: Any) -> Any:
    """Torch's checkpoint over a graph, which is no module of the program's: it has no hooks."""
    return checkpoint(runnable(inner), *args, **options)


class _Lowering:
    """One fx graph; ``wanted`` are the values that are used outside of the regions in it."""

    def __init__(self, inputs: tuple[int, ...], names: dict[int, str], traced: bool) -> None:
        self.fx = Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, Node] = {}
        self.numbers: dict[int, Node] = {}
        self.places: dict[tuple[int, int], str] = {}
        self.floats: dict[tuple[int, torch.dtype], Node] = {}
        self.wanted: set[int] = set()
        taken: set[str] = set()
        self.traced = traced
        for value_id in inputs:
            name = _identifier(names.get(value_id, f"input_{value_id}"))
            if name in taken:  # `a.b_c` and `a_b.c`
                name = f"{name}_{value_id}"
            taken.add(name)
            self.bind(ValueRef(value_id), self.placeholder(name))

    def placeholder(self, name: str) -> Node:
        """An input under its node's name: `a_b` and `a_B` are one name to torch.fx."""
        node = self.fx.placeholder(name)
        node.target = node.name
        return node

    def add_numbers(self, numbers: Sequence[Any]) -> None:
        for index, number in enumerate(numbers):
            self.numbers[id(number)] = self.placeholder(f"number_{index}")

    def add_floats(self, floats: Sequence[tuple[Any, torch.dtype]]) -> None:
        for index, (number, dtype) in enumerate(floats):
            self.floats[id(number), dtype] = self.placeholder(f"float_{index}")

    def add_sizes(self, graph: OperatorGraph) -> None:
        """Sizes that the operators use, read before any operator can change an input's shape."""
        for number in graph.live_numbers():
            for source in number.sources if number.sym is not None else ():
                if id(source) not in self.numbers and not source.pinned:
                    tensor = self.nodes[graph.inputs[source.position].value_id]
                    node = self.fx.call_method("size", (tensor, source.dim))
                    self.numbers[id(source)] = node

    def number(self, number: Any) -> Any:
        """The node of a number that a replay computes anew; its value where it is a constant."""
        if not number.live:
            return number.original
        if isinstance(number.source, Item):
            return self.nodes[number.source.value_id]
        key = id(number if number.source is None else number.source)
        found = self.numbers.get(key)
        if found is None:
            found = self.numbers.get(id(number))
        if found is None:
            args = tuple([self.number(a) if hasattr(a, "sources") else a for a in number.args])
            func = SYMBOLIC.get(number.func, number.func)
            found = self.numbers[key] = self.fx.call_function(func, args)
        return found

    def finish(self, operators: Sequence[Operator], outputs: tuple[int, ...]) -> GraphModule:
        self.wanted = {ref.value_id for op in operators for ref in refs_in((op.args, op.kwargs))}
        self.wanted |= set(outputs)
        for op in operators:
            if isinstance(op.func, FunctionRegion):
                self.add_function(op, op.func)
            elif isinstance(op.func, Region):
                self.add_checkpoint(op.func)
            else:
                self.add(op)
        self.fx.output(tuple(self.nodes[value_id] for value_id in outputs))
        return make_graph_module(self.root, self.fx)

    def submodule(self, prefix: str, region: Region, outputs: tuple[int, ...]) -> Node:
        """The graph of a region as an attribute of this one."""
        name = f"{prefix}_{len(list(self.root.children()))}"
        inner = _Lowering(region.inputs, {}, self.traced)
        self.root.add_module(name, inner.finish(region.operators, outputs))
        return self.fx.get_attr(name)

    def add_checkpoint(self, region: Region) -> None:
        """A checkpoint over a graph module of its own; it returns what others use."""
        outputs = tuple(value_id for value_id in region.made if value_id in self.wanted)
        inner = self.submodule("checkpointed", region, outputs)
        args = (inner, *[self.nodes[value_id] for value_id in region.inputs])
        kwargs = dict(region.options)
        target: Callable[..., Any] = checkpointed
        if self.traced:
            target, kwargs = tag_activation_checkpoint, {"use_reentrant": False}
        node = self.fx.call_function(target, args, kwargs)
        for index, value_id in enumerate(outputs):
            item = self.fx.call_function(operator.getitem, (node, index))
            self.bind(ValueRef(value_id), item)

    def add_function(self, op: Operator, region: FunctionRegion) -> None:
        """``apply`` with the forward as a graph module; a value used elsewhere comes along."""
        returned = [ref.value_id for ref in refs_in(region.returned)]
        kept = tuple(v for v in region.made if v in self.wanted and v not in returned)
        told = (region.saved, region.dirty, region.undifferentiable, region.attributes)
        outputs = tuple(dict.fromkeys([*returned, *[r.value_id for r in refs_in(told)], *kept]))
        args = op.args
        positions = tuple(args.index(ValueRef(value_id)) for value_id in region.inputs)
        apply = replayed_apply(ForwardPlan(region, positions, outputs, kept))
        inner = self.submodule(region.function.__name__, region, outputs)
        node = self.fx.call_function(apply, (inner, *[self.argument(a) for a in args]))
        node.meta["stack_trace"] = self.place(op) if op.code is not None else ""
        result = (*region.result, *[ValueRef(value_id) for value_id in kept])
        alone = len(result) == 1 and not isinstance(region.returned, tuple)
        self.bind(result[0] if alone else result, node)

    def add(self, op: Operator) -> None:
        form = op.floats
        if form is not None and next(floats_in((op.args, op.kwargs)), None) is not None:
            args = tuple(self.with_floats(a, form.dtype) for a in op.args)
            kwargs = {k: self.with_floats(v, form.dtype) for k, v in op.kwargs.items()}
            if form.function is not None:
                self.bind(op.result, self.traced_form(form.function, args, kwargs, op))
                return
        else:
            args = tuple(self.argument(a) for a in op.args)
            kwargs = {k: self.argument(v) for k, v in op.kwargs.items()}
        func = op.func
        if self.traced and _is_pick(op):
            func = torch.select  # an index by a symbol makes a constant
            args = (args[0], 0, args[1])
        node = _make_node(self.fx, func, args, kwargs, self.traced)
        if op.code is not None:
            node.meta["stack_trace"] = self.place(op)
        self.bind(op.result, node)

    def place(self, op: Operator) -> str:
        """Where an operator is called; a loop calls many at one place."""
        key = (id(op.code), op.offset)
        if key not in self.places:
            self.places[key] = _where(op)
        return self.places[key]

    def with_floats(self, template: Any, dtype: torch.dtype) -> Any:
        """An argument with tensors in the place of floats."""
        floats = {id(ref) for ref in floats_in(template)}

        def leaf(value: Any) -> Any:
            if id(value) in floats:
                return self.floats[id(value.number), dtype]
            return self._leaf(value)

        return mapped(template, leaf)

    def traced_form(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], op: Operator
    ) -> Node:
        """The operators of another form of an operator."""
        tracer = GraphAppendingTracer(self.fx)

        def proxied(value: Any) -> Any:
            return Proxy(value, tracer) if isinstance(value, Node) else value

        before = len(self.fx.nodes)
        made = function(*mapped(args, proxied), **mapped(kwargs, proxied))
        if op.code is not None:
            where = _where(op)
            for node in islice(reversed(self.fx.nodes), len(self.fx.nodes) - before):
                node.meta["stack_trace"] = where
        result: Node = made.node
        return result

    def argument(self, template: Any) -> Any:
        return mapped(template, self._leaf)

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, ValueRef):
            return self.nodes[value.value_id]
        if isinstance(value, NumberRef):
            return self.number(value.number)
        return tuple(value) if isinstance(value, torch.Size) else value

    def bind(self, result: Any, node: Node) -> None:
        """Give the tensors of an operator's result their nodes; parts of tuples by getitem.

        An operator that returns one of its arguments changed it in place: later uses then take
        the operator's own node, which orders them after it for every backend.
        """
        if isinstance(result, ValueRef):
            self.nodes[result.value_id] = node
            node.meta["value_id"] = result.value_id
        elif isinstance(result, tuple):
            for index, item in enumerate(result):
                if next(refs_in(item), None) is not None:
                    self.bind(item, new_call(self.fx, operator.getitem, (node, index)))


def _is_pick(op: Operator) -> bool:
    """Whether an operator is the item of a tensor under one number that changes."""
    if getattr(op.func, "__name__", "") != "__getitem__" or len(op.args) != 2:
        return False
    return isinstance(op.args[1], NumberRef) and type(op.args[1].number.obj) is int


def _make_node(
    fx: Graph,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: bool,
) -> Node:
    name = getattr(func, "__name__", "")
    owner = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        attribute = getattr(owner, "__name__", None) or owner.fget.__name__
        return new_call(fx, getattr, (args[0], attribute))
    if name in _REFLECTED and len(args) == 2 and not kwargs:
        return new_call(fx, _REFLECTED[name], (args[1], args[0]))
    if name in _DUNDERS and not kwargs and _is_tensor_method(func):
        return new_call(fx, _DUNDERS[name], args)
    if _is_tensor_method(func) and args and isinstance(args[0], Node):
        return new_call(fx, name, args, kwargs)
    if args and args[0] is torch.nn.Parameter:
        return new_call(fx, make_parameter, args[1:], kwargs)
    if func is torch.tensor and traced and fx.find_nodes(op="call_method", target="size"):
        func = torch._refs.tensor  # which takes symbols for numbers
    return new_call(fx, _named(func, traced), args, kwargs)


def _array_function(op: ArrayOperator, traced: bool) -> Callable[..., Any]:
    """A tensor of an array; what traces sees a copy, since shared memory would be real."""
    called = ArrayOperator(torch.tensor, op.array) if traced and op.func is torch.from_numpy else op

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        return called(*args, **kwargs)

    make.__name__ = make.__qualname__ = op.__name__
    return make


def _index_function(op: ArrayIndex, traced: bool) -> Callable[..., Any]:
    called = op.traced if traced else op

    def index(*args: Any) -> Any:
        return called(*args)

    index.__name__ = index.__qualname__ = op.__name__
    return index


def _named(func: Callable[..., Any], traced: bool) -> Callable[..., Any]:
    """A function that generated code can name; ``apply`` of an autograd function is a method."""
    if isinstance(func, ArrayOperator):
        return _array_function(func, traced)
    if isinstance(func, ArrayIndex):
        return _index_function(func, traced)
    if not isinstance(func, types.MethodType):
        return func

    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    owner = func.__self__ if isinstance(func.__self__, type) else type(func.__self__)
    call.__module__ = __name__  # torch.fx takes what is of torch for what can be imported
    call.__name__ = call.__qualname__ = f"{owner.__name__}_{func.__name__}"
    return call


def _is_tensor_method(func: Any) -> bool:
    if isinstance(func, (types.MethodDescriptorType, types.WrapperDescriptorType)):
        return issubclass(torch.Tensor, func.__objclass__)
    if isinstance(func, types.FunctionType):
        return func.__module__ == "torch._tensor" and hasattr(torch.Tensor, func.__name__)
    return False


def _identifier(name: str) -> str:
    cleaned = "".join(c if c.isalnum() else "_" for c in name).strip("_")
    return cleaned if cleaned and not cleaned[0].isdigit() else f"input_{cleaned}"


def _where(op: Operator) -> str:
    assert op.code is not None
    line = line_of(op.code, op.offset)
    source = linecache.getline(op.code.co_filename, line).strip()
    return f'  File "{op.code.co_filename}", line {line}, in {op.code.co_name}\n    {source}'
