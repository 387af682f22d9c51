"""MagJIT backends for ``torch.compile``: what an entry point of its group names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from magjit.errors import BackendError
from magjit.plugin.context import BackendContext
from magjit.plugin.data_sizes import known_by_dynamo
from magjit.plugin.fx_helpers import copy_graph_module, placeholders, runnable
from magjit.plugin.inputs import InputDescriber, materialize
from magjit.plugin.overlapping import overlapping_write
from magjit.plugin.protocol import Backend, CompiledGraph, ExampleInputs
from magjit.plugin.registry import resolve

__all__ = ["for_torch_compile"]


def for_torch_compile(backend: Backend) -> Callable[..., CompiledGraph]:
    """Offer a MagJIT backend to ``torch.compile``.

    Tracing context and shape guards are then Dynamo's own, and example inputs are fake ones of
    its symbols: Dynamo passes real tensors, whose sizes are numbers.  Guards that the backend
    adds are checked at each call; where one fails, the graph runs operator by operator.
    """

    def compile_for_torch(
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> CompiledGraph:
        configured = resolve(backend, mode=mode, options=options)
        reasons = configured.supports(gm)
        if reasons:
            raise BackendError(
                f"Backend {configured.name!r} does not take this graph: {'; '.join(reasons)}"
            )
        context = _context(gm, example_inputs, mode, options)
        wanted = getattr(configured, "example_inputs", ExampleInputs.FAKE)
        examples: Sequence[Any] = ()
        if wanted is not ExampleInputs.NONE:
            examples = _fakes(example_inputs, context)
            reason = known_by_dynamo(gm) or overlapping_write(gm, examples, context.fake_mode)
            if reason:
                context.note(f"a graph runs as it is: {reason}")
                as_it_is: CompiledGraph = runnable(gm)
                return as_it_is
        if wanted is ExampleInputs.COPIES:
            examples = materialize(context.inputs, example_inputs)
        original = copy_graph_module(gm)
        compiled: CompiledGraph = runnable(configured.compile(gm, examples, context))
        return _guarded(compiled, original, context) if context.guards else compiled

    compile_for_torch.__name__ = f"magjit_{backend.name}"
    compile_for_torch.magjit_backend = backend  # type: ignore[attr-defined]
    return compile_for_torch


def _context(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> BackendContext:
    describer = InputDescriber()
    static = [
        "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}) for node in placeholders(gm)
    ]
    fake_mode = detect_fake_mode(list(example_inputs))
    return BackendContext(
        mode=mode,
        options=options,
        grad_enabled=torch.is_grad_enabled(),
        inputs=tuple(
            describer.describe(value, static=is_static)
            for value, is_static in zip(example_inputs, static, strict=True)
        ),
        static_inputs=tuple(i for i, is_static in enumerate(static) if is_static),
        fake_mode=fake_mode,
        shape_env=None if fake_mode is None else fake_mode.shape_env,
        tracing_context=TracingContext.try_get(),
    )


def _fakes(example_inputs: Sequence[Any], context: BackendContext) -> list[Any]:
    """The inputs with the symbols that Dynamo has given their sizes."""
    mode, tracing = context.fake_mode, context.tracing_context
    if mode is None:
        return list(example_inputs)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        known = None if tracing is None else tracing.tensor_to_context.get(value)
        if known is None:
            return mode.from_tensor(value, static_shapes=True)
        source = getattr(known, "tensor_source", None)
        return mode.from_tensor(value, symbolic_context=known, source=source, trace=False)

    return [fake(one) for one in example_inputs]


def _guarded(
    compiled: CompiledGraph, original: GraphModule, context: BackendContext
) -> CompiledGraph:
    predicates = [guard.predicate() for guard in context.guards]
    otherwise: CompiledGraph = runnable(original.forward)

    def call(*inputs: Any) -> Sequence[Any]:
        if all(holds(inputs) for holds in predicates):
            return compiled(*inputs)
        return otherwise(*inputs)

    return call
