"""Which operators ATen's lowering takes apart for the VM."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch

from magjit.plugin.draws import all_dropped
from magjit.plugin.losses import nll_loss
from magjit_dvm import batch_norms, group_norms
from magjit_dvm.norms_backward import layer_norm_backward, rms_norm_backward

__all__ = ["decompositions"]

aten = torch.ops.aten

_BATCH_NORMS = (
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)
_OURS = {
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
}


@cache
def decompositions() -> dict[Any, Any]:
    """Operators whose parts the VM has: those with several reductions, losses, backwards.

    What only handlers know how to do well (softmax, layer norm, GELU …) is not among them.
    """
    names = (
        "_fused_rms_norm",  # eager mode has it on GPUs alone, as its backward
        "_fused_rms_norm_backward",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits",
        "celu",
        "elu_backward",
        "glu_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "huber_loss",
        "huber_loss_backward",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "log_sigmoid_forward",
        "mish",
        "mse_loss",
        "mse_loss_backward",
        "native_batch_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_layer_norm_backward",
        "_native_batch_norm_legit",
        "_native_batch_norm_legit_functional",
        "smooth_l1_loss",
        "smooth_l1_loss_backward",
        "soft_margin_loss",
        "softplus_backward",
    )
    operators = [getattr(aten, name) for name in names if hasattr(aten, name)]
    table = dict(torch._decomp.get_decompositions(operators))
    table[aten.native_dropout.default] = _native_dropout
    of_groups = aten.native_group_norm_backward.default
    table[of_groups] = partial(group_norms.backward, table[of_groups])
    table[aten.native_group_norm.default] = partial(
        group_norms.forward, table[aten.native_group_norm.default]
    )
    of_batches = aten.native_batch_norm_backward.default
    table[of_batches] = partial(batch_norms.backward, table[of_batches])
    for operator in _BATCH_NORMS:
        table[operator] = partial(batch_norms.forward, table[operator])
    for operator, ours in _OURS.items():
        table[operator] = partial(_ours_on_gpus, ours, table[operator])
    for operator in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default):
        table[operator] = partial(_nll_loss, operator)
    return table


def _ours_on_gpus(ours: Any, decomposition: Any, dy: torch.Tensor, *others: Any) -> Any:
    return (ours if dy.is_cuda else decomposition)(dy, *others)


def _native_dropout(
    given: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask is drawn by ATen, from eager's generator in eager's order; the rest is the VM's.

    On GPUs eager mode draws in a kernel of this operator's own, in another order than bernoulli's.
    """
    if train is False or p == 0 or not given.dtype.is_floating_point or given.is_cuda:
        return NotImplemented  # type: ignore[no-any-return]
    if p == 1:
        return all_dropped(given)
    if given.dtype in (torch.float32, torch.float64) and given.is_contiguous():
        mask: torch.Tensor = aten.bernoulli.p(given, 1 - p)  # one operator instead of two
    else:
        mask = aten.bernoulli.p(torch.empty_like(given, dtype=torch.bool), 1 - p)
    return given * mask * (1.0 / (1.0 - p)), mask.to(torch.bool)


def _nll_loss(operator: Any, given: torch.Tensor, *others: Any) -> Any:
    """Each target's loss apart from their mean or sum, which reduce other loops than softmax."""
    *_, reduction, _ = others
    if reduction == 0 or given.dim() < 2:
        return NotImplemented
    return nll_loss(operator, given, *others)
