"""The decompositions with which graphs should come to the code generator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._decomp import (
    _core_aten_decompositions_post_autograd,
    core_aten_decompositions,
    get_decompositions,
)

from magjit.plugin.draws import without_draws
from magjit.plugin.losses import nll_loss
from magjit_triton.strides import is_known, iterated_strides

__all__ = ["decompositions"]

aten = torch.ops.aten

_ALSO = (
    aten._softmax,
    aten._log_softmax,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._native_batch_norm_legit_functional,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.threshold_backward,
    aten.leaky_relu,
    aten.leaky_relu_backward,
    aten.elu,
    aten.elu_backward,
    aten.hardtanh,
    aten.hardtanh_backward,
    aten.hardswish,
    aten.hardswish_backward,
    aten.hardsigmoid,
    aten.sigmoid_backward,
    aten.tanh_backward,
    aten.softplus,
    aten.mish,
    aten.addcmul,
    aten.addcdiv,
    aten.lerp,
    aten.mse_loss,
    aten.nll_loss_forward,
)

# One kernel or one library call each as they are.
_KEPT = (
    # Decomposed, 16-bit operands would be multiplied in float32.
    aten.addmm.default,
    aten.baddbmm.default,
    aten.gelu.default,
    aten.silu.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_bilinear2d.vec,
    aten.roll.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.select_scatter.default,
)

_NORMALISING = (
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._native_batch_norm_legit_functional,
    aten.native_batch_norm,
)

_LOSSES = (aten.nll_loss_forward, aten.nll_loss2d_forward)


def decompositions(*, composite: bool = False) -> dict[Any, Callable[..., Any]]:
    """ATen operator → its decomposition into pointwise operators, reductions and movements.

    Args:
        composite: with composite operators, which decompose by themselves where a graph is
            recorded, but not in one of ``torch.export``.
    """
    return dict(_table(composite))


@cache
def _table(composite: bool) -> dict[Any, Callable[..., Any]]:
    if composite:
        table = dict(core_aten_decompositions())
    else:
        table = dict(_core_aten_decompositions_post_autograd())
    table.update(get_decompositions(list(_ALSO)))
    for kept in _KEPT:
        table.pop(kept, None)
    drawn_by_eager = without_draws(table)
    return {target: _as_in_eager(target, made) for target, made in drawn_by_eager.items()}


def _as_in_eager(target: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition whose results lie in memory as those of the operator itself."""
    packet = getattr(target, "overloadpacket", None)
    if packet in _LOSSES:
        return partial(_loss, function)
    if packet in _NORMALISING:
        return lambda *args, **kwargs: _normalised(args[0], function(*args, **kwargs))
    if torch.Tag.pointwise not in getattr(target, "tags", ()) or "out" in str(target):
        return function

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        known = [made, *tensors] if isinstance(made, torch.Tensor) else []
        if len(tensors) < 2 or not all(map(is_known, known)):
            return made
        return _strided(made, iterated_strides(tensors, made.shape))

    return decomposed


def _loss(function: Callable[..., Any], given: torch.Tensor, *others: Any) -> Any:
    """Means and sums of losses, apart from each of them."""
    *_, reduction, _ = others
    apart = reduction != 0 and given.dim() > 1
    return nll_loss(function, given, *others) if apart else function(given, *others)


def _normalised(given: torch.Tensor, made: Any) -> Any:
    """Kernels of batch norm give dense results, in channels last where their operand is that."""
    first, *others = made
    if not is_known(first) or not is_known(given):
        return made
    like = torch._prims_common.suggest_memory_format(given)
    if given.dim() == 4 and not given.is_contiguous():
        if given.is_contiguous(memory_format=torch.channels_last):
            like = torch.channels_last
    dense = torch.empty(first.shape, device="meta").contiguous(memory_format=like)
    return (_strided(first, dense.stride()), *others)


def _strided(made: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A result with other strides, where these are not those of dimensions of size 1."""
    given = zip(made.shape, made.stride(), strides, strict=True)
    if all(size == 1 or one == other for size, one, other in given) or not made.numel():
        return made
    place = torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device)
    return aten.copy.default(place, made)  # type: ignore[no-any-return]
