"""Graph inputs as data, and fake tensors made from that data.

::

    GraphInput  := TensorInput | ValueInput
    TensorInput := layout and autograd metadata of one tensor *as it was before the run*
    ValueInput  := a Python value, lifted to a symbol when ``dynamic``

A capture is a real run: by the time a backend compiles, the run may have changed
the inputs (``x.t_()``, ``requires_grad_()``, resized buffers).  So each tensor is
described at its first use, and the backend sees fake tensors built from the
descriptions.  Aliasing survives: inputs that shared a storage or a base share the
fake one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.meta_utils import (
    MetaStorageId,
    MetaTensorDesc,
    MetaTensorDescriber,
    MetaTensorId,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    RelaxedUnspecConstraint,
    ShapeEnv,
    StatelessSymbolicContext,
    SymbolicContext,
)
from torch.utils._mode_utils import no_dispatch

from magjit.errors import BackendError

__all__ = [
    "GraphInput",
    "InputDescriber",
    "TensorInput",
    "ValueInput",
    "make_fake",
    "make_shape_env",
    "materialize",
    "symbolic_context",
    "without_base",
]


_FIRST_NUMBER = 1 << 40


@dataclass(frozen=True, slots=True)
class TensorInput:
    """What a graph may assume of one tensor input.

    Attributes:
        size: sizes, in elements.
        stride: strides, in elements; ``None`` for sparse layouts.
        storage_offset: in elements.
        requires_grad: before the run.
        is_parameter: whether it is an ``nn.Parameter``.
        static: its address is the same at every call (parameters, buffers, tensors
            marked with ``torch._dynamo.mark_static_address``): CUDA graphs need not
            copy it.
        dynamic_dims: dimensions the user declared dynamic (``mark_dynamic``).
        maybe_dynamic_dims: dimensions that may become symbols and may be specialised.
        static_dims: dimensions the user declared static (``mark_static``).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    storage_offset: int
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    is_parameter: bool
    static: bool = False
    dynamic_dims: frozenset[int] = frozenset()
    maybe_dynamic_dims: frozenset[int] = frozenset()
    static_dims: frozenset[int] = frozenset()
    description: MetaTensorDesc[Any] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        marks = [
            str(self.device),
            "grad" if self.requires_grad else "",
            "static" if self.static else "",
        ]
        return f"{dtype}[{', '.join(map(str, self.size))}] {' '.join(m for m in marks if m)}"


@dataclass(frozen=True, slots=True)
class ValueInput:
    """A Python value that the graph takes as an input.

    Attributes:
        value: the value in the run.
        dynamic: make an int a symbol of the shape environment, not a constant.
    """

    value: object
    dynamic: bool = False

    def __str__(self) -> str:
        return f"{type(self.value).__name__} {self.value!r}{' dynamic' if self.dynamic else ''}"


GraphInput = TensorInput | ValueInput


class InputDescriber:
    """Describes the inputs of one capture.

    Use one describer for all inputs of a graph: it is what relates tensors that
    share a storage, or are one and the same.
    """

    def __init__(self) -> None:
        self._describer = MetaTensorDescriber()
        # A fake mode remembers what it made by these numbers, and counts from 0 itself.
        self._describer.next_tensor_id = MetaTensorId(_FIRST_NUMBER)
        self._describer.next_storage_id = MetaStorageId(_FIRST_NUMBER)

    def describe(self, value: object, *, static: bool = False, dynamic: bool = False) -> GraphInput:
        """Describe a tensor or a Python value as it is now.

        Args:
            value: a tensor, or any Python value that the graph takes.
            static: the tensor keeps its address from call to call.
            dynamic: all sizes of the tensor, or the int itself, may become symbols.
        """
        if not isinstance(value, torch.Tensor):
            return ValueInput(value, dynamic)
        described = self._describe_metadata(value)
        ndim = described.ndim
        return TensorInput(
            size=tuple(described.size),
            stride=None if described.stride is None else tuple(described.stride),
            storage_offset=described.storage_offset,
            dtype=described.dtype,
            device=described.device,
            layout=described.layout,
            requires_grad=described.requires_grad,
            is_parameter=described.is_parameter,
            static=static or getattr(value, "_dynamo_static_input_type", None) is not None,
            dynamic_dims=_marked(value, "_dynamo_dynamic_indices"),
            maybe_dynamic_dims=(
                frozenset(range(ndim))
                if dynamic
                else _marked(value, "_dynamo_weak_dynamic_indices")
            ),
            static_dims=_marked(value, "_dynamo_static_indices"),
            description=described,
        )

    def _describe_metadata(self, tensor: torch.Tensor) -> MetaTensorDesc[Any]:
        ordinary = (
            type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and tensor.layout is torch.strided
            and not tensor._is_view()
            and not tensor.is_nested
            and not tensor.is_quantized
            and not torch._is_functional_tensor(tensor)
            and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        )
        if not ordinary:
            return _without_references(self._describer.describe_tensor(tensor))
        # The full description costs some 30 µs a tensor; a model has hundreds of these.
        return MetaTensorDesc(
            id=self._describer.get_tensor_id(tensor),
            ndim=tensor.dim(),
            dtype=tensor.dtype,
            device=tensor.device,
            size=tensor.size(),
            dynamo_dynamic_indices=[],
            dynamo_hint_overrides={},
            layout=torch.strided,
            is_inference=tensor.is_inference(),
            is_leaf=tensor.is_leaf,
            requires_grad=tensor.requires_grad,
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
            is_parameter=isinstance(tensor, torch.nn.Parameter),
            stride=tensor.stride(),
            storage_offset=int(tensor.storage_offset()),
            storage=self._describer.describe_storage(tensor.untyped_storage()),
        )


def _marked(tensor: torch.Tensor, name: str) -> frozenset[int]:
    return frozenset(getattr(tensor, name, ()))


def _without_references(described: MetaTensorDesc[Any]) -> MetaTensorDesc[Any]:
    """Drop what keeps the real tensor alive, and gradients, which are never graph inputs."""
    base = None if described.base is None else _without_references(described.base)
    keep_view = described.is_traceable_wrapper_subclass
    return dataclasses.replace(
        described,
        base=base,
        grad=None,
        view_func=described.view_func if keep_view else None,
    )


def without_base(given: TensorInput) -> TensorInput:
    """The description of a tensor of the same sizes and strides that is no view."""
    described = given.description
    if described is not None:
        described = dataclasses.replace(
            described, base=None, is_view=False, view_func=None, storage_offset=0
        )
    return dataclasses.replace(given, storage_offset=0, description=described)


def make_fake(
    fake_mode: FakeTensorMode, given: TensorInput, source: Any, context: SymbolicContext
) -> torch.Tensor:
    """Build the fake tensor that stands for ``given``.

    Args:
        fake_mode: has a shape environment.
        given: describes the tensor.
        source: names the input in guards.
        context: from ``symbolic_context``: which sizes become symbols.

    Raises:
        BackendError: the kind of tensor cannot be faked (quantized, for one).
    """
    described = given.description
    if described is None:
        raise BackendError("A tensor input has no description", remedy="use InputDescriber")

    def make(make_meta: Callable[[], torch.Tensor], device: torch.device | str) -> FakeTensor:
        with no_dispatch():
            return FakeTensor(fake_mode, make_meta(), torch.device(device))

    converter = fake_mode.fake_tensor_converter.meta_converter
    # Without symbols there is nothing to ask the shape environment, at half the time.
    shape_env = fake_mode.shape_env if _makes_symbols(context) else None
    try:
        fake = converter.meta_tensor(described, shape_env, make, source, context)
    except (NotImplementedError, AssertionError) as error:
        raise BackendError(f"An input cannot be faked: {given}: {error}") from error
    if fake is NotImplemented:
        raise BackendError(f"An input cannot be faked: {given}")
    assert isinstance(fake, torch.Tensor)
    return fake


def _makes_symbols(context: SymbolicContext) -> bool:
    sizes = context.dynamic_sizes if isinstance(context, StatelessSymbolicContext) else ()
    return any(kind is not DimDynamic.STATIC for kind in sizes)


def symbolic_context(given: TensorInput, dynamic: bool | None) -> SymbolicContext:
    """Which sizes of ``given`` become symbols.

    ``dynamic=True`` makes symbols of all, equal ones sharing one, as ``torch.compile`` does;
    otherwise only what is marked.
    """
    sizes: list[DimDynamic] = []
    constraints: list[Any] = []
    for dim in range(len(given.size)):
        constraint = None
        if given.static or dim in given.static_dims:
            kind = DimDynamic.STATIC
        elif dim in given.dynamic_dims:
            kind = DimDynamic.DYNAMIC
            constraint = RelaxedUnspecConstraint(warn_only=False)
        elif dim in given.maybe_dynamic_dims:
            kind = DimDynamic.DYNAMIC
        elif dynamic:
            kind = DimDynamic.DUCK
        else:
            kind = DimDynamic.STATIC
        sizes.append(kind)
        constraints.append(constraint)
    base: SymbolicContext | None = None
    described_base = None if given.description is None else given.description.base
    if described_base is not None:
        all_static = all(kind is DimDynamic.STATIC for kind in sizes)
        kind = DimDynamic.STATIC if all_static else DimDynamic.DYNAMIC
        base = StatelessSymbolicContext(
            dynamic_sizes=[kind] * described_base.ndim,
            constraint_sizes=[None] * described_base.ndim,
        )
    return StatelessSymbolicContext(
        dynamic_sizes=sizes, constraint_sizes=constraints, view_base_context=base
    )


class _UnlocatedShapeEnv(ShapeEnv):
    """A shape environment that looks for the places of its guards only where it logs them.

    To know torch's own frames from the user's it imports Inductor and export, and it walks the
    stack at each guard. MagJIT's reports have the user's lines from the monitor.
    """

    def _get_stack_summary(
        self, is_debug: bool = False, framework_loc: str | None = None
    ) -> tuple[SLoc, str]:
        if is_debug:
            return super()._get_stack_summary(is_debug, framework_loc)
        return SLoc(framework_loc or "", None), ""  # torch 2.11 cannot print None


def make_shape_env() -> ShapeEnv:
    """A shape environment that allows data-dependent sizes inside a graph.

    A size that the user's program *read* is a constant or a split before lowering;
    what stays in the graph is data flow between tensors only.
    """
    return _UnlocatedShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)


def materialize(inputs: Sequence[GraphInput], live: Sequence[Any] | None = None) -> list[Any]:
    """Real tensors for a backend that executes its example inputs.

    Copies of ``live`` where these still have the described metadata, zeros otherwise.
    The user's own tensors are never handed out.
    """
    candidates: Sequence[Any] = live if live is not None else [None] * len(inputs)
    return [_materialize(given, one) for given, one in zip(inputs, candidates, strict=True)]


def _materialize(given: GraphInput, live: Any) -> Any:
    if isinstance(given, ValueInput):
        return given.value
    if given.layout is not torch.strided or given.stride is None:
        made = torch.zeros(given.size, dtype=given.dtype, device=given.device)
        made = made if given.layout is torch.strided else made.to_sparse(layout=given.layout)
        return made.requires_grad_(given.requires_grad)
    made = torch.empty_strided(given.size, given.stride, dtype=given.dtype, device=given.device)
    with torch.no_grad():
        made.zero_()
        if (
            isinstance(live, torch.Tensor)
            and live.dtype == given.dtype
            and live.device == given.device
            and tuple(live.shape) == given.size
        ):
            made.copy_(live)
    return made.requires_grad_(given.requires_grad)
