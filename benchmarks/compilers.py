"""MagJIT and torch.compile alike, and backends that show what a compiler hands over."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config

import magjit
from harness import Task

COMPILERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "magjit": magjit.compile,
    "torch.compile": torch.compile,
}


class RealGraph:
    """A backend that runs the graphs as they are; keeps them and the inputs of a first run."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.run: Callable[..., Any] | None = None
        self.inputs: tuple[Any, ...] = ()

    def __call__(
        self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        self.graphs.append(module)
        self.run = self.runner(module.forward)
        return self.run

    def runner(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            if not self.inputs:
                self.inputs = inputs
            return forward(*inputs)

        return run

    def direct(self) -> Any:
        """Calls what the compiler calls, on the inputs that it gave."""
        assert self.run is not None
        return self.run(*self.inputs)


class Stub(RealGraph):
    """A backend whose function computes once and then yields the stored outputs."""

    def runner(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        stored: Any = None

        def run(*inputs: Any) -> Any:
            nonlocal stored
            if stored is None:
                self.inputs, stored = inputs, forward(*inputs)
            return stored

        return run


def compile_without_limit() -> None:
    """TorchDynamo compiles a function as often as it is asked to."""
    limits = torch._dynamo.config
    limits.recompile_limit = limits.accumulated_recompile_limit = 1 << 20


def disable_caches() -> None:
    """No compiler is to find what another one, or another process, compiled with Inductor.

    Kernels and C++ are kept in a folder of this process, which is empty and goes away with it.
    """
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _own_folder()


@functools.cache
def _own_folder() -> str:
    folder = tempfile.mkdtemp(prefix="inductor")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def warm_up(
    compiler: str,
    backend: str,
    device: str = "cpu",
    *,
    mode: str | None = None,
    sizes: Sequence[int] = (3,),
) -> None:
    """Compiles an unrelated function: what a first use sets up once is not a model's cost.

    With several sizes that holds for what a first symbol sets up, too.
    """

    def unrelated(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    compiled = COMPILERS[compiler](unrelated, backend=backend, mode=mode)
    for size in sizes:
        compiled(torch.ones(size, device=device))


def compiled_pair(
    compiler: str, model: torch.nn.Module, arguments: tuple[Any, ...], backend: RealGraph
) -> tuple[Task, Task]:
    """A compiled call and the direct call of its one graph, both warm.

    Raises:
        RuntimeError: the compiler made another number of graphs than one.
    """
    compiled = COMPILERS[compiler](model, backend=backend)
    for _ in range(3):
        compiled(*arguments)
    if len(backend.graphs) != 1 or not backend.inputs:
        raise RuntimeError(f"{compiler} made {len(backend.graphs)} graphs, not one that runs")
    return lambda: compiled(*arguments), backend.direct
