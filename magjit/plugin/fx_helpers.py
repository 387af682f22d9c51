"""Helpers over torch-level FX graphs: fake inputs, shape propagation, partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch._dynamo.source import ConstantSource, LocalSource
from torch._guards import CompileId, TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import (
    _LazyGraphModule,
    _make_graph_module,
    _use_lazy_graph_module,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, SymbolicContext
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils._pytree import tree_leaves

from magjit.errors import BackendError
from magjit.plugin.inputs import (
    GraphInput,
    TensorInput,
    ValueInput,
    make_fake,
    make_shape_env,
    symbolic_context,
)

__all__ = [
    "FakeInputs",
    "called",
    "copy_graph_module",
    "fakeify",
    "input_position",
    "make_graph_module",
    "partition",
    "placeholders",
    "propagate",
    "results_of",
    "runnable",
    "set_results",
]

_compile_numbers = count()
_SOURCE_PREFIX = "input_"


@dataclass(frozen=True, slots=True)
class FakeInputs:
    """The example inputs of one compilation, and where their symbols live."""

    values: tuple[Any, ...]
    symbolic_contexts: tuple[SymbolicContext | None, ...]
    sources: tuple[LocalSource, ...]
    fake_mode: FakeTensorMode
    shape_env: ShapeEnv
    tracing_context: TracingContext


def placeholders(gm: GraphModule) -> list[Node]:
    """The graph's inputs in calling order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def results_of(graph: Graph) -> list[Any]:
    """What a graph returns, of one that ends in a tuple or a list."""
    (results,) = graph.output_node().args
    assert isinstance(results, (tuple, list))
    return list(results)


def set_results(gm: GraphModule, results: list[Any]) -> None:
    """Have a graph return these, as many as before."""
    output = gm.graph.output_node()
    output.args = (tuple(results) if isinstance(output.args[0], tuple) else results,)
    gm.recompile()


def copy_graph_module(gm: GraphModule) -> GraphModule:
    """A module with its own graph; parameters, buffers and submodules are shared.

    Its Python code is generated when first needed: most backends never run it.  (It takes
    some 50 µs a node.)
    """
    graph = torch.fx.Graph()
    copied: dict[Node, Node] = {}
    result = graph.graph_copy(gm.graph, copied)
    old_output = next((node for node in reversed(gm.graph.nodes) if node.op == "output"), None)
    output = graph.output(result)
    if old_output is not None:
        output.meta = dict(old_output.meta)
    made = make_graph_module(gm, graph)
    made.meta = dict(gm.meta)
    return made


def make_graph_module(
    root: torch.nn.Module | Mapping[str, Any], graph: torch.fx.Graph
) -> GraphModule:
    """A graph module whose Python code is generated when first needed."""
    with _use_lazy_graph_module(True):
        made: GraphModule = _make_graph_module(root, graph, class_name="GraphModule")
    return made


def runnable(compiled: Any) -> Any:
    """``compiled``; of a graph module, or the forward of one, its generated function.

    No hooks of modules are called: neither its own, of which it has none, nor the global ones.
    """
    owner = getattr(compiled, "__self__", None)
    if isinstance(compiled, _LazyGraphModule):
        _LazyGraphModule.force_recompile(compiled)
    if isinstance(compiled, GraphModule):
        return compiled.forward
    if isinstance(owner, _LazyGraphModule) and compiled.__name__ == "_lazy_forward":
        _LazyGraphModule.force_recompile(owner)
        return owner.forward
    return compiled


def fakeify(
    gm: GraphModule, inputs: Sequence[GraphInput], dynamic: bool | None = None
) -> FakeInputs:
    """Make fake example inputs and annotate ``gm`` with them the way Dynamo does.

    ``compile_fx`` and AOTAutograd take static inputs, the sources for their guards and
    the compile id from annotations that they otherwise find on Dynamo's graphs.  The
    user's tensors are not touched.

    Args:
        gm: gets ``meta["example_value"]`` and the rest on its placeholders.
        inputs: one for each placeholder.
        dynamic: ``True`` makes symbols of all sizes that are not declared static.

    Raises:
        BackendError: the number of inputs is wrong, or one cannot be faked.
    """
    nodes = placeholders(gm)
    if len(nodes) != len(inputs):
        raise BackendError(
            f"The graph has {len(nodes)} placeholders but {len(inputs)} inputs were described"
        )
    shape_env = make_shape_env()
    fake_mode = FakeTensorMode(shape_env=shape_env)
    sources = tuple(LocalSource(f"{_SOURCE_PREFIX}{i}") for i in range(len(nodes)))
    contexts = tuple(
        symbolic_context(given, dynamic) if isinstance(given, TensorInput) else None
        for given in inputs
    )
    values: list[Any] = []
    for node, given, source, context in zip(nodes, inputs, sources, contexts, strict=True):
        if isinstance(given, ValueInput):
            value = _lift(fake_mode, given, source)
        else:
            assert context is not None
            value = make_fake(fake_mode, given, source, context)
        values.append(value)
        node.meta["example_value"] = value
        node._dynamo_source = source
        if isinstance(given, TensorInput) and given.static:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    gm.meta["dynamo_compile_id"] = CompileId(frame_id=next(_compile_numbers), frame_compile_id=0)
    names = [name for name, _ in (*gm.named_parameters(), *gm.named_buffers())]
    annotated: Any = gm
    annotated._param_name_to_source = {
        name: ConstantSource(f"graph_constant_{name}") for name in names
    }
    annotated._source_to_user_stacks = {}
    return FakeInputs(
        tuple(values), contexts, sources, fake_mode, shape_env, TracingContext(fake_mode)
    )


def _lift(fake_mode: FakeTensorMode, given: ValueInput, source: LocalSource) -> Any:
    value = given.value
    if not given.dynamic or type(value) is not int:
        return value
    shape_env = fake_mode.shape_env
    assert shape_env is not None
    symbol = shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=value, source=source)


def input_position(source: Any) -> int | None:
    """The position of the graph input that ``source`` names, if it names one."""
    name = getattr(source, "local_name", None)
    if isinstance(name, str) and name.startswith(_SOURCE_PREFIX):
        return int(name.removeprefix(_SOURCE_PREFIX))
    return None


def propagate(
    gm: GraphModule, inputs: Sequence[GraphInput], dynamic: bool | None = None
) -> FakeInputs:
    """Set ``meta["example_value"]`` on every node, running nothing for real.

    The fake inputs are used up by it (in-place operators change their metadata): a
    backend needs fresh ones.

    Raises:
        BackendError: a node fails on fake tensors; the message names it.
    """
    fakes = fakeify(gm, inputs, dynamic)
    interpreter = _Propagator(gm)
    grad = torch.is_grad_enabled()
    try:
        with fakes.fake_mode, torch._guards.tracing(fakes.tracing_context):
            interpreter.run(*fakes.values)
    except Exception as error:
        at = "" if interpreter.current is None else f" at {interpreter.current.format_node()}"
        raise BackendError(f"Shapes cannot be propagated{at}: {error}") from error
    finally:
        torch.set_grad_enabled(grad)
    return fakes


class _Propagator(torch.fx.Interpreter):
    current: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.current = n
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        return result


class _Support(OperatorSupportBase):
    def __init__(self, predicate: Callable[[Node], bool]) -> None:
        self._predicate = predicate

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        return node.op in ("call_function", "call_method", "call_module") and self._predicate(node)


def partition(
    gm: GraphModule,
    can_take: Callable[[Node], bool],
    compile_part: Callable[[GraphModule], Callable[..., Any]] | None = None,
) -> GraphModule:
    """Split a functional graph into parts that a backend can take and a rest for ATen.

    Args:
        gm: a functional ATen graph; nodes may move across each other, so no node may
            mutate its inputs.
        can_take: whether the backend takes the node.
        compile_part: called with each part; what it returns takes the part's place.

    Returns:
        A graph module whose ``fused_*`` submodules are the parts.
    """
    partitioner = CapabilityBasedPartitioner(
        gm, _Support(can_take), allows_single_node_partition=True
    )
    fused = partitioner.fuse_partitions(partitioner.propose_partitions(), prefix="fused_")
    if compile_part is not None:
        for node in fused.graph.nodes:
            if node.op == "call_module" and str(node.target).startswith("fused_"):
                part = getattr(fused, str(node.target))
                setattr(fused, str(node.target), _Part(compile_part(part)))
        fused.recompile()
    return fused


class _Part(torch.nn.Module):
    """Gives a compiled part the shape of a submodule."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = compiled


def called(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A new node of an operator, where the graph inserts, with the value of its operands'."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.map_arg(args, lambda one: one.meta["val"])
    tensor = next(one for one in tree_leaves(values) if isinstance(one, torch.Tensor))
    with tensor.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        node.meta = {"val": target(*values, **kwargs)}
    return node
