"""Run a backend the way torch.compile would, under MagJIT's own tracing context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.utils import preserve_rng_state
from torch._guards import CompileContext, DuplicateInputs, StorageOverlap
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from magjit.errors import BackendError, MagJITError
from magjit.plugin.backend_guards import SameInput, StorageRelation
from magjit.plugin.calling_convention import simplify
from magjit.plugin.context import BackendContext
from magjit.plugin.convolutions import unguarded_convolutions
from magjit.plugin.data_sizes import SizeOfData, parted, refusing_sizes_of_data
from magjit.plugin.functional import changes
from magjit.plugin.fx_helpers import (
    FakeInputs,
    copy_graph_module,
    fakeify,
    input_position,
    placeholders,
    runnable,
)
from magjit.plugin.fx_nodes import enables_gradients, graphs_of, keep_checks
from magjit.plugin.generated_source import sources_tied_to_result
from magjit.plugin.inputs import GraphInput, TensorInput, materialize
from magjit.plugin.leaves import UsedLeaf, set_aside
from magjit.plugin.overlapping import overlapping_write
from magjit.plugin.protocol import Backend, CompiledGraph, ExampleInputs
from magjit.plugin.shape_guards import shape_guards
from magjit.plugin.symbols import bind_symbols, is_symbolic, passing_symbols

__all__ = ["run_backend"]


def run_backend(
    backend: Backend, gm: GraphModule, inputs: Sequence[GraphInput], context: BackendContext
) -> CompiledGraph:
    """Compile ``gm`` for inputs that are described, not given: nothing is executed.

    Call it in the same ambient state (autocast, default dtype, inference mode) as the
    graph will be called in.  Torch's function and dispatch modes are suspended meanwhile,
    and random number generators are left as they were.

    Args:
        backend: from ``resolve``.
        gm: is not changed; the backend gets a copy.
        inputs: one for each placeholder, from an ``InputDescriber``.
        context: the caller's wishes; on return also the guards, the dumps and what the
            backend was shown.

    Raises:
        BackendError: the backend refuses the graph or fails; its exception is the cause.
    """
    keep_checks()
    reasons = backend.supports(gm)
    if reasons:
        raise BackendError(
            f"Backend {backend.name!r} does not take this graph: {'; '.join(reasons)}",
            remedy="choose another backend, such as backend='inductor' or backend='eager'",
        )
    with _failures_named(backend):
        if _wants(backend) is ExampleInputs.NONE:
            context.inputs = tuple(inputs)
            owned = copy_graph_module(gm) if getattr(backend, "changes_graph", True) else gm
            return _called(backend, owned, (), context)
        if len(placeholders(gm)) != len(inputs):
            raise BackendError(
                f"The graph has {len(placeholders(gm))} placeholders, but {len(inputs)} inputs "
                "were described"
            )
        owned = copy_graph_module(gm)
        convention = simplify(owned, inputs)
        try:
            leaves = set_aside(owned)
        except UsedLeaf as reason:
            return _as_it_is(gm, inputs, context, str(reason))
        context.inputs = tuple(inputs[i] for i in convention.kept)
        taken = _takes_sizes_of_data(backend, owned, context)
        parts = None
        if not taken:
            with _undisturbed(context.grad_enabled):
                parts = parted(
                    owned, context.inputs, context.dynamic, grad_enabled=context.grad_enabled
                )
        if parts is not None and parts.before is None:
            return _as_it_is(gm, inputs, context, parts.reason)
        if context.live_inputs is not None:
            context.live_inputs = [context.live_inputs[i] for i in convention.kept]
        context.static_inputs = tuple(
            i for i, one in enumerate(context.inputs) if isinstance(one, TensorInput) and one.static
        )
        try:
            if parts is None:
                compiled = _compile_with_examples(backend, owned, context, taken)
            else:
                context.note(f"a part of a graph runs as it is: {parts.reason}")
                assert parts.before is not None
                before = _compile_with_examples(backend, parts.before, context, taken)
                compiled = parts.joined(before)
        except SizeOfData as reason:
            return _as_it_is(gm, inputs, context, str(reason))
        context.guards[:] = convention.guards(context.guards)
        context.symbolic_inputs = tuple(convention.kept[i] for i in context.symbolic_inputs)
        return convention.wrap(leaves.wrap(compiled))


def _as_it_is(
    gm: GraphModule, inputs: Sequence[GraphInput], context: BackendContext, reason: str
) -> CompiledGraph:
    context.note(f"a graph runs as it is: {reason}")
    owned = copy_graph_module(gm)
    convention = simplify(owned, inputs)
    context.symbolic_inputs = ()
    context.guards[:] = convention.guards([])
    return convention.wrap(runnable(owned))


def _wants(backend: Backend) -> ExampleInputs:
    wants: ExampleInputs = getattr(backend, "example_inputs", ExampleInputs.FAKE)
    return wants


def _takes_sizes_of_data(backend: Backend, gm: GraphModule, context: BackendContext) -> bool:
    """Whether a backend says so, of a graph without gradients that writes no tensor."""
    if not getattr(backend, "sizes_of_data", False):
        return False
    if any(changes(node) for graph in graphs_of(gm) for node in graph.nodes):
        return False
    wanted = any(isinstance(one, TensorInput) and one.requires_grad for one in context.inputs)
    return not wanted or not (context.grad_enabled or enables_gradients(gm))


@contextmanager
def _failures_named(backend: Backend) -> Iterator[None]:
    try:
        yield
    except MagJITError:
        raise
    except Exception as error:
        raise BackendError(
            f"Backend {backend.name!r} failed: {type(error).__name__}: {error}",
            remedy="backend='eager' runs the captured graph as it is",
        ) from error


def _called(
    backend: Backend, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
) -> CompiledGraph:
    with sources_tied_to_result() as tie:
        compiled = runnable(backend.compile(gm, example_inputs, context))
        tie(compiled)
    if not callable(compiled):
        raise BackendError(
            f"Backend {backend.name!r} returned {type(compiled).__name__}, not a callable"
        )
    function: CompiledGraph = compiled
    return function


def _compile_with_examples(
    backend: Backend, gm: GraphModule, context: BackendContext, taken: bool
) -> CompiledGraph:
    with _undisturbed(context.grad_enabled):
        fakes = fakeify(gm, context.inputs, context.dynamic)
        bindings, symbols = bind_symbols(gm, fakes.values, fakes.sources)
        context.fake_mode = fakes.fake_mode
        context.shape_env = fakes.shape_env
        context.tracing_context = fakes.tracing_context
        context.symbolic_inputs = tuple(
            i for i, value in enumerate(fakes.values) if is_symbolic(value)
        )
        examples: Sequence[Any] = (*fakes.values, *symbols)
        if reason := overlapping_write(gm, examples, fakes.fake_mode):
            context.note(f"a graph runs as it is: {reason}")
            return passing_symbols(runnable(gm), bindings, len(fakes.values))
        if _wants(backend) is ExampleInputs.COPIES:
            copies = materialize(context.inputs, context.live_inputs)
            examples = (*copies, *(binding.read(copies) for binding in bindings))
        with (
            unguarded_convolutions(fakes.shape_env),
            torch._guards.tracing(fakes.tracing_context),
            torch._guards.compile_context(CompileContext(gm.meta["dynamo_compile_id"])),
            refusing_sizes_of_data(fakes.shape_env, taken),
        ):
            compiled = _called(backend, gm, list(examples), context)
        _collect_guards(context, fakes)
    return passing_symbols(compiled, bindings, len(fakes.values))


@contextmanager
def _undisturbed(grad_enabled: bool) -> Iterator[None]:
    with ExitStack() as stack:
        # torch.compile in another thread shares fake-tensor caches, configs and counters.
        stack.enter_context(compile_lock)
        stack.enter_context(_without_function_modes())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(preserve_rng_state())
        stack.enter_context(torch.set_grad_enabled(grad_enabled))
        yield


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Suspend the stack of TorchFunctionModes, torch's default-device mode included."""
    popped = []
    while torch._C._len_torch_function_stack():
        popped.append(torch._C._pop_torch_function_stack())
    try:
        yield
    finally:
        for mode in reversed(popped):
            torch._C._push_on_torch_function_stack(mode)


def _collect_guards(context: BackendContext, fakes: FakeInputs) -> None:
    for guard in fakes.tracing_context.guards_context.aotautograd_guards:
        if isinstance(guard, DuplicateInputs):
            kept = _position(guard.input_source_a)
            context.add_guard(SameInput(kept, _position(guard.input_source_b)))
        elif isinstance(guard, StorageOverlap):
            context.add_guard(
                StorageRelation(
                    tuple(_position(source) for source in guard.overlapping_sources),
                    tuple(_position(source) for source in guard.non_overlapping_sources),
                )
            )
        else:
            raise BackendError(f"A guard of an unknown kind was added: {guard!r}")
    _collect_shape_guards(context, fakes)


def _position(source: Any) -> int:
    position = input_position(source)
    if position is None:
        raise BackendError(f"A guard on something that is no graph input: {source!r}")
    return position


def _collect_shape_guards(context: BackendContext, fakes: FakeInputs) -> None:
    symbolic = context.symbolic_inputs
    if symbolic:
        for guard in shape_guards(
            fakes.shape_env,
            [fakes.values[i] for i in symbolic],
            [fakes.sources[i] for i in symbolic],
            [fakes.symbolic_contexts[i] for i in symbolic],
        ):
            context.add_guard(guard)
