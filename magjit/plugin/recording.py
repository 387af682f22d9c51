"""An ATen graph of a program whose sizes are all numbers, recorded in one pass.

Less than ``make_fx`` does, in a third of the time: what remains is the cost of fake tensors.
Symbolic sizes are nodes of a graph themselves; they are left to ``make_fx``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["NotRecorded", "record"]


class NotRecorded(Exception):
    """The program does something that only ``make_fx`` follows."""


def record(
    function: Callable[..., Any],
    example_inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> GraphModule:
    """Run ``function`` on fake inputs and keep every ATen operator.

    Raises:
        NotRecorded: a tensor or a size comes from where it cannot be followed.
    """
    recorder = _Recorder(fake_mode, decompositions)
    for position, value in enumerate(example_inputs):
        recorder.placeholder(position, value)
    with torch.no_grad(), fake_mode, recorder:
        results = function(*example_inputs)
    recorder.graph.output(tree_map(recorder.node_of, tuple(results)))
    return GraphModule(recorder.constants, recorder.graph)


class _Recorder(TorchDispatchMode):
    def __init__(
        self, fake_mode: FakeTensorMode, decompositions: Mapping[Any, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants = torch.nn.Module()
        self.fake_mode = fake_mode
        self.decompositions = decompositions
        self.nodes: dict[int, Node] = {}
        self.alive: list[torch.Tensor] = []  # so that no address is used twice

    def placeholder(self, position: int, value: Any) -> None:
        node = self.graph.placeholder(f"arg{position}_1")
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self.keep(value, node)

    def keep(self, tensor: torch.Tensor, node: Node) -> None:
        """What computes ``tensor``, from now on."""
        self.nodes[id(tensor)] = node
        self.alive.append(tensor)

    def node_of(self, value: Any) -> Any:
        """The node of a tensor; other values stand for themselves."""
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotRecorded("a symbolic size")
        if not isinstance(value, torch.Tensor):
            return value
        node = self.nodes.get(id(value))
        if node is None:
            if isinstance(value, FakeTensor):
                raise NotRecorded("a tensor of unknown origin")
            node = self.constant(value)
        return node

    def constant(self, value: torch.Tensor) -> Node:
        """A real tensor that the program holds."""
        name = f"_tensor_constant{len(self.alive)}"
        self.constants.register_buffer(name, value, persistent=False)
        node = self.graph.get_attr(name)
        node.meta["val"] = self.fake_mode.from_tensor(value)
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
        given, named = tree_map(self.node_of, (args, kwargs))
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__  # as make_fx names it
        node = self.graph.create_node("call_function", func, given, named, name)
        node.meta["val"] = result
        self.name_results(node, result)
        return result

    def name_results(self, node: Node, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            self.keep(result, node)
        elif isinstance(result, (tuple, list)):
            for position, one in enumerate(result):
                if isinstance(one, torch.Tensor):
                    item = self.graph.call_function(operator.getitem, (node, position))
                    item.meta["val"] = one
                    self.keep(one, item)
                elif isinstance(one, (tuple, list)):
                    raise NotRecorded("results within results")
        elif isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotRecorded("a symbolic size")
