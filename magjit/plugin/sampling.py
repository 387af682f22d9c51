"""Upsampling as the operators that eager mode runs.

Where torch traces a program it takes them apart, before their gradients are found: into look-ups by
tables of positions, whose backward adds up what each position was read by, one after another.  On
an H200 that was half of the time of a U-Net's training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size

from magjit.plugin.symbols import is_symbolic

__all__ = ["whole_upsampling"]

aten = torch.ops.aten

_NEAREST = ("upsample_nearest{}d", "_upsample_nearest_exact{}d")
_NAMES = (
    *(name.format(dims) for name in _NEAREST for dims in (1, 2, 3)),
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
)
_WITH_SYMBOLS = (aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def whole_upsampling() -> Iterator[None]:
    """Within it, torch traces upsampling as operators with gradients of their own.

    Of sizes that are symbols the nearest element alone, since torch has no others' gradients.
    """
    found = [one for name in _NAMES if (one := getattr(aten, name, None)) is not None]
    with ExitStack() as stack:
        for one in found:
            kernels = {key: one.vec.py_kernels.get(key) for key in _KEYS}
            ours = {key: partial(_sampled, one.default, kernels[key]) for key in _KEYS}
            stack.enter_context(_with_kernels(one.vec, ours))
        yield


@contextmanager
def _with_kernels(operator: Any, kernels: dict[Any, Any]) -> Iterator[None]:
    """Within it, an operator has these Python kernels, and none of others for such keys."""
    before = dict(operator.py_kernels)
    for key in _KEYS:
        operator.py_kernels.pop(key, None)
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.clear()
        operator.py_kernels.update(before)
        operator._dispatch_cache.clear()


def _sampled(
    operator: Any,
    apart: Callable[..., Any] | None,
    image: torch.Tensor,
    output_size: Sequence[Any] | None,
    *others: Any,
) -> Any:
    """The operator that is given sizes, for the one that may be given factors."""
    if apart is not None and operator not in _WITH_SYMBOLS and is_symbolic(image):
        return apart(image, output_size, *others)
    *options, factors = others  # `align_corners`, of those that have it
    size = upsample_compute_output_size(image.size(), output_size, factors)
    scales = factors or [None] * (image.dim() - 2)
    with _with_kernels(operator, {}):
        return operator(image, size, *options, *scales)
