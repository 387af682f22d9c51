"""Find a backend by name, or make one of a callable.

Names are looked up in this order: ``eager``; the entry points of group
``magjit.backends``, MagJIT's own backends and third parties' alike; the backends that
``torch.compile`` knows.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch.fx import GraphModule

from magjit.errors import ArgumentError, BackendError, BackendOptionError, UnknownBackendError
from magjit.garbage import uncollected
from magjit.plugin.context import BackendContext
from magjit.plugin.fx_helpers import runnable
from magjit.plugin.protocol import (
    Backend,
    CompiledGraph,
    ConfigurableBackend,
    ExampleInputs,
    FloatInputs,
)

__all__ = [
    "ENTRY_POINT_GROUP",
    "EagerBackend",
    "TorchBackend",
    "list_backends",
    "refresh",
    "resolve",
]

ENTRY_POINT_GROUP = "magjit.backends"

TorchCompilerFn = Callable[..., Callable[..., Any]]
"""What ``torch.compile`` takes as a backend: ``(gm, example_inputs) -> callable``."""


class EagerBackend:
    """Runs the graph as it is, operator by operator."""

    name = "eager"
    example_inputs = ExampleInputs.NONE
    float_inputs = FloatInputs.NUMBERS
    changes_graph = False
    exact_random = True

    def supports(self, gm: GraphModule) -> list[str]:
        """Every graph is taken."""
        return []

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Return the graph's own generated function."""
        context.dump("graph.py", lambda: str(gm.code))
        forward: CompiledGraph = runnable(gm.forward)
        return forward


class TorchBackend:
    """Any backend that ``torch.compile`` takes, under MagJIT's protocol.

    A compiler function that executes its example inputs sets an attribute
    ``example_inputs = magjit.plugin.ExampleInputs.COPIES`` on itself; otherwise they are
    fake tensors.
    """

    def __init__(
        self, name: str, compiler_fn: TorchCompilerFn, keywords: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self._compiler_fn = compiler_fn
        self._keywords = dict(keywords or {})
        self.example_inputs: ExampleInputs = getattr(
            compiler_fn, "example_inputs", ExampleInputs.FAKE
        )

    def supports(self, gm: GraphModule) -> list[str]:
        """Nothing is known before the compiler function has tried."""
        return []

    def configure(
        self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
    ) -> TorchBackend:
        """Pass ``mode`` and ``options`` on when the compiler function has such parameters."""
        wanted: dict[str, Any] = {}
        if mode is not None and mode != "default":
            wanted["mode"] = mode
        if options:
            wanted["options"] = dict(options)
        for keyword in wanted:
            if not _takes_keyword(self._compiler_fn, keyword):
                raise BackendOptionError(
                    f"Backend {self.name!r} takes no {keyword!r}",
                    remedy=f"leave {keyword}= out, or choose backend='inductor'",
                )
        return TorchBackend(self.name, self._compiler_fn, wanted)

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Call the compiler function."""
        context.dump("graph.py", lambda: str(gm.code))
        compiled: CompiledGraph = self._compiler_fn(gm, list(example_inputs), **self._keywords)
        return compiled


def resolve(
    backend: str | Backend | TorchCompilerFn,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Backend:
    """The backend that ``magjit.compile(backend=...)`` means, with its settings checked.

    Raises:
        UnknownBackendError: no backend has this name; close matches are named.
        BackendOptionError: ``mode`` or ``options`` are not what the backend takes.
        ArgumentError: ``backend`` is neither a name, nor a backend, nor a callable.
        BackendError: the backend's package cannot be imported.
    """
    found = _find(backend)
    if mode is not None and not isinstance(mode, str):
        raise BackendOptionError(f"mode must be a string, got {type(mode).__name__}")
    if options is not None and not isinstance(options, Mapping):
        raise BackendOptionError(f"options must be a mapping, got {type(options).__name__}")
    if isinstance(found, ConfigurableBackend):
        return found.configure(mode, options, dynamic)
    if mode not in (None, "default"):
        raise BackendOptionError(f"Backend {found.name!r} takes no mode", remedy="leave mode= out")
    if options:
        raise BackendOptionError(
            f"Backend {found.name!r} takes no options", remedy="leave options= out"
        )
    return found


def _find(backend: object) -> Backend:
    if isinstance(backend, str):
        return _find_by_name(backend)
    ours = getattr(backend, "magjit_backend", None)
    if isinstance(ours, Backend):
        return ours
    if isinstance(backend, type):
        raise ArgumentError(
            f"backend is the class {backend.__name__}, not an instance",
            remedy=f"pass {backend.__name__}()",
        )
    if isinstance(backend, Backend):
        return backend
    if callable(backend):
        name = getattr(backend, "__name__", None) or type(backend).__name__
        return TorchBackend(name, backend)
    raise ArgumentError(
        f"backend must be a name, a backend or a callable, got {type(backend).__name__}"
    )


def _find_by_name(name: str) -> Backend:
    if name == EagerBackend.name:
        return EagerBackend()
    point = _entry_points().get(name)
    if point is not None:
        return _load(point)
    from torch._dynamo.backends.registry import lookup_backend

    if name in _torch_names():
        compiler_fn = lookup_backend(name)
        ours = getattr(compiler_fn, "magjit_backend", None)
        return ours if isinstance(ours, Backend) else TorchBackend(name, compiler_fn)
    known = list_backends(include_torch_debug=True)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else None
    raise UnknownBackendError(
        f"No backend is named {name!r}",
        remedy=hint or f"known backends: {', '.join(list_backends())}",
    )


def _load(point: EntryPoint) -> Backend:
    try:
        with uncollected():
            loaded = point.load()
    except Exception as error:
        raise BackendError(
            f"Backend {point.name!r} cannot be imported from {point.value!r}: {error}"
        ) from error
    if isinstance(loaded, type) or not isinstance(loaded, Backend):
        if not callable(loaded):
            raise BackendError(f"Entry point {point.value!r} is no backend: {loaded!r}")
        loaded = loaded()
    if not isinstance(loaded, Backend):
        raise BackendError(
            f"Entry point {point.value!r} is no backend: {type(loaded).__name__} lacks "
            f"{', '.join(a for a in ('name', 'supports', 'compile') if not hasattr(loaded, a))}"
        )
    return loaded


@cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _torch_names() -> list[str]:
    from torch._dynamo.backends.registry import list_backends as torch_list_backends

    return list(torch_list_backends(exclude_tags=()))


def refresh() -> None:
    """Forget the entry points that were seen: a package was installed since."""
    _entry_points.cache_clear()


def list_backends(*, include_torch_debug: bool = False) -> list[str]:
    """Names that ``magjit.compile(backend=...)`` takes, sorted."""
    from torch._dynamo.backends.registry import list_backends as torch_list_backends

    torch_names = _torch_names() if include_torch_debug else torch_list_backends()
    return sorted({EagerBackend.name, *_entry_points(), *torch_names})


def _takes_keyword(function: Callable[..., Any], keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(
        p.kind is inspect.Parameter.VAR_KEYWORD
        or (p.name == keyword and p.kind is not inspect.Parameter.POSITIONAL_ONLY)
        for p in parameters
    )
