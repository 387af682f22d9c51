"""The decompositions with which graphs should come to the code generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

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
)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """ATen operator → its decomposition into pointwise operators, reductions and movements."""
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(list(_ALSO)))
    for kept in _KEPT:
        table.pop(kept, None)
    return table
