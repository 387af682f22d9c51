"""The Backend protocol: what a compiler for MagJIT's graphs looks like.

The graph is a torch-level ``torch.fx.GraphModule``: placeholders (parameters and
buffers among them), ``call_function`` and ``call_method`` nodes on torch functions and
Tensor methods, one output node whose argument is a tuple.  In-place operators on
inputs are allowed.  Each placeholder carries ``meta["example_value"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch.fx import GraphModule

from magjit.plugin.context import BackendContext

__all__ = [
    "Backend",
    "CompiledGraph",
    "ConfigurableBackend",
    "ExampleInputs",
    "FloatInputs",
    "Streaming",
    "StreamingBackend",
]

CompiledGraph = Callable[..., Sequence[Any]]
"""Takes the flat graph inputs positionally; returns the flat outputs.

Its attribute ``unread``, if it has one, is a set of positions of inputs that it does not read: the
sizes among them are not asked for at a call, ``None`` is passed.  Its attribute ``only``, if it is
there and not ``None``, is a callable and the positions of the inputs that this takes: it returns
the graph's one output itself, which saves a call where the program returns nothing else.
"""


class ExampleInputs(Enum):
    """What a backend wants as its ``example_inputs``."""

    FAKE = "fake"
    """Fake tensors with the metadata from before the run: the default."""

    COPIES = "copies"
    """Real tensors that the backend may execute and change."""

    NONE = "none"
    """The backend looks at no example: ``example_inputs`` is empty and nothing is faked."""


class FloatInputs(Enum):
    """How a backend takes a Python float that changes from call to call."""

    TENSORS = "tensors"
    """As a tensor without dimensions, on the CPU, which each call makes anew: the default.
    Operators that compute otherwise with a tensor than with a float keep it as a constant."""

    NUMBERS = "numbers"
    """As it is: the compiled graph is called with a ``float`` in its place."""

    CONSTANTS = "constants"
    """Not at all: each value is a compilation of its own."""


@runtime_checkable
class Backend(Protocol):
    """A compiler that MagJIT can hand a graph to.

    Optional attributes:
        ``example_inputs: ExampleInputs`` what ``compile`` wants to see, fakes by default;
        ``changes_graph: bool`` false when ``compile`` leaves ``gm`` as it is, which saves
        a copy for backends that look at no example;
        ``float_inputs: FloatInputs`` how it takes floats that change, as tensors by default;
        ``exact_random: bool`` true when the compiled graph draws eager's random numbers;
        ``sizes_of_data: bool`` true when a graph without gradients that writes no tensor finds out
        at each call which sizes that depend on data are 1 or differ (`magjit.plugin.data_sizes`).
    """

    @property
    def name(self) -> str:
        """What users pass as ``backend=``, and reports show."""
        ...

    def supports(self, gm: GraphModule) -> list[str]:
        """Why this backend cannot take ``gm``; empty when it can."""
        ...

    def compile(
        self, gm: GraphModule, example_inputs: Sequence[Any], context: BackendContext
    ) -> CompiledGraph:
        """Compile ``gm``, which the backend owns from then on."""
        ...


@runtime_checkable
class ConfigurableBackend(Backend, Protocol):
    """A backend that takes ``mode`` and ``options``."""

    def configure(
        self, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
    ) -> Backend:
        """Check the settings and return a backend that uses them.

        Raises:
            BackendOptionError: a setting is unknown, or of the wrong type.
        """
        ...


class Streaming(Protocol):
    """How one program is run of which no more graphs are compiled."""

    def context(self, values: Sequence[Any]) -> AbstractContextManager[Any] | None:
        """A context for one call of the program; the caller enters it at once.

        Whatever operators do inside (wait in a queue, run fused), results, side effects and
        exceptions are eager mode's, and when the context has ended nothing is left to be done.

        Args:
            values: what the program is called with.

        Returns:
            None where this call is better run plainly.
        """
        ...


@runtime_checkable
class StreamingBackend(Backend, Protocol):
    """A backend that runs programs without a graph, too.

    What exceeds ``config``'s ``record_limit`` varies too much to be worth graphs: such calls are
    run under the backend's ``Streaming`` instead of plainly.
    """

    def stream(self) -> Streaming:
        """What runs one program from now on."""
        ...
