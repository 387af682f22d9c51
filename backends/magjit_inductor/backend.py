"""The Inductor backend: settings as torch.compile takes them, then ``compile_fx``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.fx import GraphModule

from magjit.plugin import BackendContext, BackendError, BackendOptionError, CompiledGraph
from magjit.plugin.aot import dump_graph
from magjit.plugin.fx_helpers import runnable
from magjit.plugin.inference import needs_gradients
from magjit.plugin.recurrent import recurrent_as_it_is
from magjit_inductor.changed_results import noticing_changes
from magjit_inductor.partitioning import KeepingOldValues
from magjit_inductor.results import NotingMemory, with_own_results
from magjit_inductor.steps import Step

__all__ = ["InductorBackend"]

_PASS = "post_grad_custom_pre_pass"
_PRE_PASS = "joint_custom_pre_pass"
_PARTITIONER = "custom_partitioner_fn"


class InductorBackend:
    """``compile_fx`` under MagJIT's protocol."""

    name = "inductor"

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: dict[str, Any] = dict(config or {})
        """Inductor's settings that differ from its defaults."""

    def supports(self, gm: GraphModule) -> list[str]:
        """Every graph is taken; what Inductor cannot generate falls back to ATen."""
        return []

    def configure(
        self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
    ) -> InductorBackend:
        """Check ``mode`` and ``options`` the way ``torch.compile`` does.

        One option is MagJIT's: ``virtual_tensors=True`` adds a pass that reads repeated operands of
        attention and products where they are.

        Raises:
            BackendOptionError: a mode or an option is unknown, or a value of the wrong type.
        """
        options = dict(options or {})
        virtual_tensors = options.pop("virtual_tensors", False)
        if not isinstance(virtual_tensors, bool):
            raise BackendOptionError(
                f"Option 'virtual_tensors' is {virtual_tensors!r}", remedy="True or False"
            )
        if virtual_tensors and _PASS in options:
            raise BackendOptionError(
                f"Options 'virtual_tensors' and {_PASS!r} exclude each other",
                remedy="call magjit.plugin.virtual_tensors.post_grad.WithoutCopies in your pass",
            )
        if mode is not None and options:
            raise BackendOptionError(
                "Either mode or options can be given, not both",
                remedy="torch._inductor.list_mode_options(mode) gives a mode's options",
            )
        try:
            settings = torch._TorchCompileInductorWrapper(mode, options, dynamic)
        except RuntimeError as error:
            first = str(error).split(", known options are")[0].split(", supported modes are")[0]
            raise BackendOptionError(first, remedy=_remedy(mode)) from error
        config = dict(settings.config)
        if virtual_tensors:
            from magjit.plugin.virtual_tensors.post_grad import WithoutCopies

            config[_PASS] = WithoutCopies()
        return InductorBackend(config)

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Compile forward, and backward where an input requires a gradient.

        Raises:
            BackendError: the options ask for something that cannot be called.
        """
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        if recurrent_as_it_is(gm, example_inputs):
            return cast(CompiledGraph, runnable(gm))
        inner: Callable[..., Any] = compile_fx_inner
        bypass_cache: AbstractContextManager[Any] = nullcontext()
        if context.want_dumps:
            import torch._functorch.config as aot_config

            inner = _dumping(inner, context)
            # A cached result comes without the graphs that it was made of.
            bypass_cache = aot_config.patch(enable_autograd_cache=False)
        patches = dict(self.config)
        training = needs_gradients(gm, example_inputs, context)
        if training:
            given = patches.get(_PARTITIONER, config.custom_partitioner_fn)
            patches[_PARTITIONER] = KeepingOldValues(given)
        else:
            given = patches.get(_PRE_PASS, config.joint_custom_pre_pass)
            patches[_PRE_PASS] = NotingMemory(given)
        with bypass_cache:
            compiled = compile_fx(
                gm,
                list(example_inputs),
                inner_compile=with_own_results(inner),
                config_patches=patches or None,
            )
        if not callable(compiled):
            raise BackendError(f"Inductor made no callable but {type(compiled).__name__}")
        with config.patch(self.config):
            uses_cuda_graphs = bool(config.triton.cudagraphs)
        function = cast(CompiledGraph, compiled)
        if training:
            function = noticing_changes(function)
        return Step(function) if uses_cuda_graphs else function


def _remedy(mode: str | None) -> str:
    if mode is not None:
        from torch._inductor import list_mode_options

        return f"modes: {', '.join(map(repr, list_mode_options()))}"
    return "torch._inductor.list_options() names the options"


def _dumping(inner: Callable[..., Any], context: BackendContext) -> Callable[..., Any]:
    """Keep the ATen graphs and the generated code on their way through."""

    def compile_and_dump(
        gm: GraphModule, example_inputs: Sequence[Any], **keywords: Any
    ) -> Callable[..., Any]:
        if keywords.get("is_backward"):
            part = "backward"
        else:
            part = "inference" if keywords.get("is_inference") else "forward"
        dump_graph(context, f"aten_{part}.py", gm)
        compiled: Callable[..., Any] = inner(gm, example_inputs, **keywords)
        source = getattr(compiled, "source_code", None)
        if isinstance(source, str):
            context.dump(f"inductor_{part}.py", source)
        return compiled

    return compile_and_dump
