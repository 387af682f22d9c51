"""All that a backend may use: the protocol, the registry, helpers, the conformance suite."""

from magjit.errors import BackendError, BackendOptionError, UnknownBackendError
from magjit.garbage import uncollected
from magjit.plugin.backend_guards import (
    BackendGuard,
    CustomGuard,
    SameInput,
    ShapeGuard,
    StorageRelation,
)
from magjit.plugin.compiling import run_backend
from magjit.plugin.context import BackendContext
from magjit.plugin.data_movement import DataMovement, Edge, Moved, Place
from magjit.plugin.fx_helpers import (
    fakeify,
    make_graph_module,
    partition,
    placeholders,
    propagate,
    runnable,
)
from magjit.plugin.inputs import GraphInput, InputDescriber, TensorInput, ValueInput
from magjit.plugin.protocol import (
    Backend,
    CompiledGraph,
    ConfigurableBackend,
    ExampleInputs,
    FloatInputs,
    Streaming,
    StreamingBackend,
)
from magjit.plugin.registry import list_backends, resolve
from magjit.plugin.shape_propagation import SymbolicShapes, propagate_shapes, shape_of_value
from magjit.plugin.torch_compile import for_torch_compile

__all__ = [
    "Backend",
    "BackendContext",
    "BackendError",
    "BackendGuard",
    "BackendOptionError",
    "CompiledGraph",
    "ConfigurableBackend",
    "CustomGuard",
    "DataMovement",
    "Edge",
    "ExampleInputs",
    "FloatInputs",
    "GraphInput",
    "InputDescriber",
    "Moved",
    "Place",
    "SameInput",
    "ShapeGuard",
    "StorageRelation",
    "Streaming",
    "StreamingBackend",
    "SymbolicShapes",
    "TensorInput",
    "UnknownBackendError",
    "ValueInput",
    "fakeify",
    "for_torch_compile",
    "list_backends",
    "make_graph_module",
    "partition",
    "placeholders",
    "propagate",
    "propagate_shapes",
    "resolve",
    "run_backend",
    "runnable",
    "shape_of_value",
    "uncollected",
]
