"""torch's own samples of its operators, run through the backend and compared with eager."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal import common_utils

from magjit.errors import BackendError
from magjit.plugin.compiling import run_backend
from magjit.plugin.context import BackendContext
from magjit.plugin.inputs import InputDescriber
from magjit_dvm import backend
from magjit_dvm.backend import schedules
from magjit_dvm.operators import HANDLERS
from magjit_dvm.translate import handles

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
_HALVES = (torch.float16, torch.bfloat16)
_MOST_ELEMENTS = 200_000
_SEED = 5
_NO_FAKES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
"""torch cannot trace these over fake tensors, whatever the backend."""
_COPIES = {
    torch.ops.aten.clone.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
}


@dataclass
class Counts:
    """What came of an operator's samples."""

    compared: int = 0
    fused: int = 0
    left_out: int = 0


class Sampled:
    """One sample as a function of its tensors."""

    def __init__(self, op: Callable[..., Any], sample: Any) -> None:
        self.op = op
        self.leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.places = [k for k, one in enumerate(self.leaves) if isinstance(one, torch.Tensor)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.leaves[k].detach() for k in self.places]

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves = list(self.leaves)
        for k, one in zip(self.places, tensors, strict=True):
            leaves[k] = one
        given, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.op(given, *args, **kwargs)
        return tuple(one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor))

    @property
    def suitable(self) -> bool:
        return bool(self.places) and all(
            one.layout is torch.strided
            and not one.is_complex()
            and not one.is_quantized
            and type(one) is torch.Tensor
            and one.numel() <= _MOST_ELEMENTS
            and one.device.type == "cpu"
            for one in self.tensors
        )


def traced(sampled: Sampled) -> GraphModule | None:
    """The operators that the sample runs, or None where a trace cannot hold it."""
    try:
        return make_fx(sampled)(*sampled.tensors)
    except Exception:
        return None


def reaches(gm: GraphModule) -> bool:
    """Whether the graph has something to fuse."""
    return any(handles(node) and node.target not in _COPIES for node in gm.graph.nodes)


def check_sample(sampled: Sampled) -> str:
    """Compare one sample; ``left out``, ``compared`` or ``fused`` says what was done.

    Raises:
        AssertionError: the backend's result is not eager's.
    """
    if not sampled.suitable:
        return "left out"
    tensors = sampled.tensors
    gm = traced(sampled)
    if gm is None or not reaches(gm):
        return "left out"
    expected = eagerly(gm, tensors)
    before = set(schedules())
    describer = InputDescriber()
    described = [describer.describe(one) for one in tensors]
    with torch.no_grad():
        try:
            compiled = run_backend(backend, gm, described, BackendContext(grad_enabled=False))
        except BackendError as error:
            if isinstance(error.__cause__, _NO_FAKES):
                return "left out"
            raise
        made = set(schedules()) - before
        torch.default_generator.manual_seed(_SEED)
        results = compiled(*tensors)
    assert len(results) == len(expected)
    for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        try:
            compare(got, wanted)
        except AssertionError:
            if wanted.dtype not in _HALVES or not nearer(sampled, number, got, wanted):
                raise
    fused = any(
        node.target in HANDLERS and node.target not in _COPIES
        for schedule in made
        for group in schedule.fusion.groups
        for node in group.nodes
    )
    return "fused" if fused else "compared"


def eagerly(
    function: Callable[..., tuple[torch.Tensor, ...]], tensors: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    torch.default_generator.manual_seed(_SEED)
    with torch.no_grad():
        return function(*(_like(one) for one in tensors))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, for operators that write their inputs."""
    storage = tensor.untyped_storage().clone()
    return tensor.new_empty(0).set_(
        storage, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def nearer(sampled: Sampled, number: int, got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether the result is nearer than eager's to what wider arithmetic gives.

    Eager rounds each operator's result to half precision, a fused group its own alone.
    """
    wide = [one.double() if one.dtype in _HALVES else one for one in sampled.tensors]
    try:
        exact = eagerly(sampled, wide)[number].double()
    except (RuntimeError, TypeError, ValueError):
        return False
    apart, eagers = (got.double() - exact).abs(), (wanted.double() - exact).abs()
    largest = exact[exact.isfinite()].abs().max() if bool(exact.isfinite().any()) else 0.0
    limit = torch.maximum(eagers, 4 * torch.finfo(got.dtype).eps * (exact.abs() + largest))
    return bool(((apart <= limit) | (apart.isnan() & eagers.isnan())).all())


def compare(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Values, dtype, shape, and strides along dimensions that have more than one element."""
    torch.testing.assert_close(got, wanted, equal_nan=True)
    if wanted.numel():
        strides = [
            [stride for stride, size in zip(one.stride(), one.shape, strict=True) if size > 1]
            for one in (got, wanted)
        ]
        assert strides[0] == strides[1], f"strides {got.stride()}, eager's are {wanted.stride()}"


def samples_of(info: Any, dtype: torch.dtype, most: int | None = None) -> Iterator[Sampled]:
    """The operator's samples, or the first ``most`` of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in first_samples(info, dtype, most):
            yield Sampled(info.op, sample)


def first_samples(info: Any, dtype: torch.dtype, most: int | None = None) -> Iterator[Any]:
    """torch's own samples of an operator, or the first ``most`` of them.

    Drawn as ``info.sample_inputs`` draws them, which looks for a test case in every frame of the
    stack and reads the sources for it.
    """
    _seed()
    samples = iter(info.sample_inputs_func(info, "cpu", dtype, False))
    for _ in itertools.count() if most is None else range(most):
        _seed()
        try:
            yield next(samples)
        except StopIteration:
            return


def _seed() -> None:
    """Of all that draws on the CPU."""
    torch.default_generator.manual_seed(common_utils.SEED)
    random.seed(common_utils.SEED)
    numpy.random.seed(common_utils.SEED)
