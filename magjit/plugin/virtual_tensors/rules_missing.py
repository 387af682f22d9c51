"""Views and data-movement operators without a rule, and why: their results stay physical."""

from __future__ import annotations

from typing import Any

import torch

from magjit.plugin.virtual_tensors.rules import unsupported

__all__: list[str] = []

aten = torch.ops.aten

_COMPOSITE = "made of other operators: no lowered graph contains it"
_DTYPE = "the result's elements are not the operand's: another dtype, or parts of numbers"
_LAYOUT = "not a strided tensor"
_PLACE = "another device or pinned memory: a real transfer"
_AUTOGRAD = "of autograd's own use: no lowered graph contains it"
_SAMPLED = "which element is taken is computed in floating point"
_MEMORY = "what it replaces depends on where the operand's elements are in memory"
_TENSOR = "the value is a tensor's"
_NAMED = "of tensors whose dimensions have names, which torch 2.13 no longer has"

_REASONS: dict[str, str] = {
    _COMPOSITE: (
        "adjoint.default dsplit.array dsplit.int hsplit.array hsplit.int linalg_diagonal.default "
        "mH.default matrix_H.default moveaxis.int moveaxis.intlist movedim.int movedim.intlist "
        "narrow.Tensor positive.default split.sizes tensor_split.tensor_indices_or_sections "
        "vsplit.array vsplit.int to.dtype to.other"
    ),
    _DTYPE: (
        "_conj.default _neg_view.default conj.default imag.default real.default "
        "resolve_conj.default resolve_neg.default view.dtype view_as_complex.default "
        "view_as_real.default _autocast_to_full_precision.default "
        "_autocast_to_reduced_precision.default"
    ),
    _LAYOUT: (
        "_indices.default _nested_get_values.default _nested_view_from_buffer.default "
        "_nested_view_from_jagged.default _sparse_broadcast_to.default _values.default "
        "ccol_indices.default coalesce.default col_indices.default crow_indices.default "
        "indices.default row_indices.default values.default"
    ),
    _PLACE: "pin_memory.default to.device to.dtype_layout",
    _AUTOGRAD: (
        "_fw_primal.default _make_dual.default _test_autograd_multiple_dispatch_view.default "
        "_unpack_dual.default slice_inverse.default"
    ),
    _SAMPLED: (
        "upsample_nearest1d.default upsample_nearest2d.default upsample_nearest3d.default "
        "_upsample_nearest_exact1d.default _upsample_nearest_exact2d.default "
        "_upsample_nearest_exact3d.default"
    ),
    _MEMORY: "as_strided_scatter.default",
    _TENSOR: "masked_fill.Tensor",
    _NAMED: (
        "align_to.default align_to.ellipsis_idx diagonal.Dimname flatten.DimnameList "
        "flatten.named_out_dim flatten.using_names refine_names.default rename.default "
        "select.Dimname squeeze.dimname transpose.Dimname unbind.Dimname unflatten.Dimname"
    ),
}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload, None)


for _reason, _names in _REASONS.items():
    for _name in _names.split():
        _found = _operator(_name)
        if _found is not None:  # some are of one version of torch only
            unsupported[_found] = _reason
