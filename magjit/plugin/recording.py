"""An ATen graph of a program, recorded in one pass.

Less than ``make_fx`` does, in a third of the time: what remains is the cost of fake tensors.
Sizes and ints may be symbols. Where an operator is given an expression of them, its sums and
products become nodes; what else there is of symbols is left to ``make_fx``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import disable_autocast_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, ToFloat

from magjit.plugin.fake_layouts import Layout
from magjit.plugin.fake_results import FakeResults
from magjit.plugin.fx_helpers import make_graph_module
from magjit.plugin.fx_nodes import new_call
from magjit.plugin.layers.recorded import LayerRecorder
from magjit.plugin.modes import leave_modes

__all__ = ["NotRecorded", "record"]


_FOLDED: dict[Any, Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    IntTrueDiv: operator.truediv,
    FloatTrueDiv: operator.truediv,
    ToFloat: torch.sym_float,
}
_EXACT_ONLY = (sympy.Add, sympy.Mul)
"""An expression keeps no order of its terms, which matters where each step rounds."""

_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


_MASKS = (torch.bool, torch.uint8)


class NotRecorded(Exception):
    """The program does something that only ``make_fx`` follows."""


def record(
    function: Callable[..., Any],
    example_inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
    layers: LayerRecorder | None = None,
) -> GraphModule:
    """Run ``function`` on fake inputs and keep every ATen operator.

    Args:
        function: takes and gives tensors and sizes.
        example_inputs: fake tensors and symbols.
        fake_mode: theirs.
        decompositions: ATen operator to function.
        layers: those of the function that are recorded once (`in_layers`).

    Raises:
        NotRecorded: a tensor or a size comes from where it cannot be followed.
    """
    recorder = _Recorder(fake_mode, decompositions)
    for position, value in enumerate(example_inputs):
        recorder.placeholder(position, value)
    # The mode's own cache would be asked by every operator; `FakeResults` is asked before.
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(disable_autocast_cache())  # what it keeps is of one pass
        stack.enter_context(disable_fake_tensor_cache(fake_mode))
        stack.enter_context(fake_mode)
        stack.enter_context(recorder)
        if layers is not None:
            stack.enter_context(layers.recording(recorder))
        try:
            results = function(*example_inputs)
        except BaseException as error:
            leave_modes(error, grad_enabled=False)
            raise
    recorder.graph.output(tree_map(recorder.node_of, tuple(results)))
    return make_graph_module(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):
    def __init__(
        self, fake_mode: FakeTensorMode, decompositions: Mapping[Any, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants = torch.nn.Module()
        self.fake_mode = fake_mode
        self.decompositions = decompositions
        self.results = FakeResults(fake_mode)
        self.nodes: dict[int, Node] = {}
        self.alive: list[torch.Tensor] = []  # so that no address is used twice
        self.numbers: dict[Any, Node] = {}  # by expression
        self.last_given: Node | None = None
        self.sizes: dict[Node, tuple[Any, ...]] = {}
        self.symbols: dict[Any, tuple[Node, int | None]] = {}
        """The input that each symbol is, or is a size of, with its dimension."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo would be told anew at each operator that it is not to look

    def placeholder(self, position: int, value: Any) -> None:
        node = self.graph.placeholder(f"arg{position}_1")
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self.keep(value, node)
            self.sizes[node] = tuple(value.shape)
            for dim, size in enumerate(value.shape):
                self.source(size, node, dim)
        self.source(value, node, None)
        self.last_given = node

    def source(self, value: Any, node: Node, dim: int | None) -> None:
        """Where a symbol can be read."""
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            self.symbols.setdefault(value.node.expr, (node, dim))

    def keep(self, tensor: torch.Tensor, node: Node) -> None:
        """What computes ``tensor``, from now on."""
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def made(self, layout: Layout) -> FakeTensor:
        """A new tensor that no operator computes."""
        return self.results.made(layout)

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; other values stand for themselves."""
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self.number(value.node.expr)
        if isinstance(value, torch.SymBool):
            raise NotRecorded("a symbolic bool")
        if not isinstance(value, torch.Tensor):
            return value
        node = self.nodes.get(id(value))
        if node is None:
            if isinstance(value, FakeTensor):
                raise NotRecorded("a tensor of unknown origin")
            node = self.constant(value)
        return node

    def number(self, expr: Any) -> Any:
        """The node of an expression of symbols."""
        if expr.is_Integer:
            return int(expr)
        if expr.is_Float:
            return float(expr)
        node = self.numbers.get(expr)
        if node is None:
            if expr.is_Symbol and expr in self.symbols:
                node = self.read(*self.symbols[expr])
            else:
                func, parts = self.folded(expr)
                first, *others = map(self.number, parts)
                computed = partial(self.computed, func)
                node = reduce(computed, others, first) if others else computed(first)
            self.numbers[expr] = node
        return node

    @staticmethod
    def folded(expr: Any) -> tuple[Callable[..., Any], Sequence[Any]]:
        """A function, and what it folds to the expression.

        Raises:
            NotRecorded: there is none.
        """
        if expr.is_Pow and expr.exp.is_Integer and expr.exp > 0 and expr.base.is_integer:
            return operator.mul, [expr.base] * int(expr.exp)
        if expr.func not in _FOLDED or (expr.func in _EXACT_ONLY and not expr.is_integer):
            raise NotRecorded(f"a number computed from sizes: {expr}")
        return _FOLDED[expr.func], expr.args

    def read(self, node: Node, dim: int | None) -> Node:
        """The node of a symbol."""
        if dim is None:
            return node
        assert self.last_given is not None
        # Before any operator, which may change the shape of an input.
        with self.graph.inserting_after(self.last_given):
            made = self.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
        made.meta["val"] = self.sizes[node][dim]
        return made

    def computed(self, func: Callable[..., Any], *parts: Any) -> Node:
        """The node of a sum or a product of numbers."""
        made = self.graph.call_function(func, parts)
        values = [part.meta["val"] if isinstance(part, Node) else part for part in parts]
        made.meta["val"] = func(*values)
        return made

    def constant(self, value: torch.Tensor) -> Node:
        """A real tensor that the program holds."""
        name = f"_tensor_constant{len(self.alive)}"
        self.constants.register_buffer(name, value, persistent=False)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.fake_mode.from_tensor(value, static_shapes=True)
        self.keep(value, node)
        return node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor
            return func(*args, **kwargs)
        decomposition = self.decompositions.get(func)
        with self:
            if decomposition is not None:
                result = decomposition(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self.symbols and _has_size_of_data(func, args):
            # A size that nobody knows yet is made once only, which make_fx is then to do.
            raise NotRecorded(f"a size that depends on data: {func}")
        given, named = tree_map(self.node_of, (args, kwargs))
        result = self.results.call(func, args, kwargs)
        if isinstance(result, torch.SymInt):
            return result  # an expression, which tells where it comes from
        name = func.overloadpacket.__name__  # as make_fx names it
        node = new_call(self.graph, func, given, named, name)
        node.meta["val"] = result
        self.name_results(node, result)
        return result

    def name_results(self, node: Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.keep(result, node)
        elif isinstance(result, (tuple, list)):
            for position, one in enumerate(result):
                if isinstance(one, torch.Tensor):
                    item = new_call(self.graph, operator.getitem, (node, position))
                    item.meta["val"] = one
                    self.keep(one, item)
                elif isinstance(one, (tuple, list)):
                    raise NotRecorded("results within results")
        elif isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotRecorded("a symbolic size")


def _has_size_of_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the size of a result depends on data."""
    if func is torch.ops.aten.index.Tensor:  # whose tag is for masks
        return any(one is not None and one.dtype in _MASKS for one in args[1])
    return not _DATA_DEPENDENT.isdisjoint(func.tags)
