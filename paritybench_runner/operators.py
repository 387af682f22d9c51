"""Which ATen operators a call dispatches, and what a graph is made of."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from magjit.plugin import CompiledGraph

Task = Callable[[], object]

# Eager may take one kernel for a whole layer where a captured program computes its parts.
ATTENTION_FAST_PATH = frozenset(
    {"aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"}
)


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops what the profiler's C++ side writes to the standard error whenever it starts."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@cache
def _views() -> frozenset[str]:
    """Names of the ATen operators whose result may share memory with an argument."""
    return frozenset(
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if any(result.alias_info and not result.alias_info.is_write for result in schema.returns)
    )


_GRAPH = "compiled graph"


class Dispatched:
    """Counts how often each ATen operator runs inside of it, nested ones too, views left out.

    Attributes:
        counts: by operator.
        in_graphs: how many of them ran inside of compiled graphs (`marked`).
    """

    _active = 0

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.in_graphs = 0
        self._profiler = profile(activities=[ProfilerActivity.CPU])

    def __enter__(self) -> Dispatched:
        with _quiet():
            self._profiler.__enter__()
        Dispatched._active += 1
        return self

    def __exit__(self, *exception: object) -> None:
        Dispatched._active -= 1
        with _quiet():
            self._profiler.__exit__(None, None, None)
        profiler = self._profiler.profiler
        assert profiler is not None
        assert profiler.kineto_results is not None
        events = profiler.kineto_results.events()
        aten = [event for event in events if _is_counted(event.name())]
        self.counts = Counter(event.name() for event in aten)
        graphs = [
            (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == _GRAPH
        ]
        self.in_graphs = sum(
            any(start <= event.start_ns() <= end for start, end in graphs) for event in aten
        )


def marked(compiled: CompiledGraph) -> CompiledGraph:
    """A compiled graph whose operators `Dispatched` tells from others."""

    def run(*inputs: Any) -> Any:
        if not Dispatched._active:
            return compiled(*inputs)
        with record_function(_GRAPH):
            return compiled(*inputs)

    return run


def _is_within(event: Any, graph: Any) -> bool:
    return bool(0 <= event.start_ns() - graph.start_ns() <= graph.duration_ns())


def _is_counted(name: str) -> bool:
    return name.startswith("aten::") and name not in _views()


def unexplained(eager: Counter[str], replay: Counter[str], run_eagerly: Task) -> str | None:
    """How a replay's operators differ from eager's beyond what is allowed.

    A replay may leave out operators whose results nobody uses, which an eager run tells, and may
    compute the parts of a layer that eager computes by the attention fast path.

    Returns:
        `+2 aten::mm -1 aten::add` for what runs more and less often than in eager, or None.
    """
    if ATTENTION_FAST_PATH & eager.keys() or eager == replay:
        return None
    more, fewer = replay - eager, eager - replay
    if not more and fewer:
        used, seen = liveness(run_eagerly)
        # A name that no dispatch mode sees is a part of another operator, or made of others.
        fewer = Counter(
            {
                name: min(count, used[name] - replay[name])
                for name, count in fewer.items()
                if seen[name] and used[name] > replay[name]
            }
        )
    changes = [f"+{n} {name}" for name, n in sorted(more.items())]
    changes += [f"-{n} {name}" for name, n in sorted(fewer.items())]
    return " ".join(changes) or None


class _Flow(TorchDispatchMode):
    """Each operator with the tensors that it reads, writes and makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, bool, list[int], list[int]]] = []
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self._alive += [inputs, outputs]
        writes = bool(func._schema.is_mutable)
        name = str(func._schema.name)
        self.calls.append((name, writes, _storages(inputs), _storages(outputs)))
        return result


def _storages(tensors: Sequence[Tensor]) -> list[int]:
    strided = [t for t in tensors if t.layout is torch.strided]
    return [t.untyped_storage()._cdata for t in strided]


def liveness(task: Task) -> tuple[Counter[str], Counter[str]]:
    """How often each operator's result is used by the task's result, and how often it ran."""
    with _Flow() as flow:
        result = task()
    needed = set(_storages([t for t in tree_leaves(result) if isinstance(t, Tensor)]))
    used: Counter[str] = Counter()
    for name, writes, inputs, outputs in reversed(flow.calls):
        # What writes may write to state that outlives the call.
        if writes or not outputs or needed & set(outputs):
            used[name] += 1
            needed |= set(inputs)
    return used, Counter(name for name, *_ in flow.calls)


# -- graphs ------------------------------------------------------------------------------------


def opaque_nodes(graph: fx.GraphModule) -> list[str]:
    """The nodes that are no torch operators: calls of modules or of Python code of the user's.

    What calls a graph inside of the graph (a checkpoint, an autograd function) is looked into.
    """
    opaque = []
    for node in graph.graph.nodes:
        target = node.target
        if inner := _inner_graph(graph, node):
            opaque += opaque_nodes(inner)
        elif node.op == "call_function":
            if not _is_torch_operator(target):
                opaque.append(fx.node._get_qualified_name(target))
        elif (node.op == "call_module" and not _is_graph(graph, str(target))) or (
            node.op == "call_method" and not hasattr(Tensor, str(target))
        ):
            opaque.append(str(target))
    return opaque


def _inner_graph(graph: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a call gets as its first argument."""
    first = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(first, fx.Node) or first.op != "get_attr":
        return None
    found = graph.get_submodule(str(first.target)) if _is_module(graph, first) else None
    return found if isinstance(found, fx.GraphModule) else None


def _is_module(graph: fx.GraphModule, node: fx.Node) -> bool:
    return str(node.target) in dict(graph.named_modules())


def _is_graph(graph: fx.GraphModule, target: str) -> bool:
    return isinstance(graph.get_submodule(target), fx.GraphModule)


def _is_torch_operator(target: Any) -> bool:
    """Is it torch's own, or one of Python's operators, which call torch's?"""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or ""
    return (
        target is getattr(operator, name, None)
        or target is getattr
        or module.split(".")[0] in ("torch", "math")
        or module
        in (
            "magjit.lower_fx",
            "magjit.monitor.functions",
        )  # names for torch's, where torch has none
        or hasattr(torch._C._VariableFunctions, name)
        or hasattr(Tensor, name)
    )


def operator_count(graph: fx.GraphModule) -> int:
    """Nodes that compute something."""
    kinds = ("call_function", "call_method", "call_module")
    return sum(node.op in kinds for node in graph.graph.nodes)
