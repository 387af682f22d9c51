"""Attention that a program writes out, ``softmax(q @ k.T) @ v``, by ATen's flash kernels.

The scores are never in memory.  What the kernel of CPUs does otherwise than the written-out form
shows in the logarithms of its sums, and such a call is written out after all: rows that are masked
as a whole are NaN there, and 0 in the kernel.  To look at numbers, a GPU would have to be waited
for: there are no masks on one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from magjit.plugin.aliases import trust

__all__ = [
    "DTYPES",
    "LANES",
    "Attention",
    "DeviceAttention",
    "attention",
    "gpu_takes_width",
    "written_out",
]

_kernel: Any = torch._scaled_dot_product_flash_attention_for_cpu
_kernel_of_gpus: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float16, torch.bfloat16)}
"""Of operands, by the type of their device."""
_WIDEST = 256
"""Elements of a head that the kernel of GPUs takes, by eight."""
_MARGIN = 150.0
"""What is smaller than the sum of a row by this factor's logarithm is 0 beside it in float32."""
LANES = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
# Measured, in ns.  The kernel takes the exponentials of a row in whole vectors, and one by one what
# is left over; keys and values of zeros make rows whole, but are computed with, and must be copied.
_LEFT_OVER, _ADDED, _ADDED_PRODUCT, _COPIED, _PADDING = 11.0, 0.6, 0.03, 1.6, 12000.0
_LONGEST_WAIT = 64


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, fill: float | None
) -> Tensor:
    """Stands in a graph for a call of ``Attention``; is never called."""
    raise NotImplementedError("attention is run by the schedule")


trust(attention)


def written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, fill: float | None
) -> Tensor:
    """What ``Attention`` computes, operator by operator; four dimensions, contiguous or not."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask if fill is None else torch.where(mask < 0, fill, scores)
    return torch.matmul(torch.softmax(scores, -1), value)


class Attention:
    """One attention of a graph; it remembers whether the kernel has been of use."""

    def __init__(self) -> None:
        self._waits = 0
        self._failed = 0

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        fill: float | None,
    ) -> Tensor:
        """Attention of one of ``DTYPES``.

        Args:
            query: (batch, heads, rows, width), or (batch, rows, width).
            key: (batch, heads, columns, width), or (batch, columns, width).
            value: (batch, heads, columns, other width), or without heads.
            mask: what is added to the scores, if not None; of as many dimensions or fewer.  Where
                there is a ``fill``, 0, or -inf where that takes the place of a score.
            scale: what the product of query and key is multiplied with.
            fill: a large negative number, or -inf.

        Returns:
            (batch, rows, heads, other width), or (batch, rows, other width), contiguous.
        """
        heads = query.dim() == 4
        if not heads:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            if mask is not None and mask.dim() == 3:
                mask = mask.unsqueeze(1)
        if mask is not None and mask.dim() < 4:
            mask = mask[(None,) * (4 - mask.dim())]
        made = self._made(query, key, value, mask, scale, fill).transpose(1, 2).contiguous()
        return made if heads else made.squeeze(2)

    def _made(self, *given: Any) -> Tensor:
        """The result as (batch, heads, rows, other width)."""
        if self._waits or not _may_be_flash(*given):
            self._waits = max(0, self._waits - 1)
            return written_out(*given)
        made = _flash(*given)
        if made is None:
            # Each time in vain, twice as many calls do without an attempt.
            self._waits = self._failed = min(2 * self._failed + 1, _LONGEST_WAIT)
            return written_out(*given)
        self._failed = 0
        return made


class DeviceAttention(Attention):
    """The same on a GPU, where there are no masks.

    The kernel keeps scores in float32, where eager mode rounds them to 16 bits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._takes: dict[tuple[int, torch.dtype, torch.device], bool] = {}

    def _made(self, *given: Any) -> Tensor:
        query, key, value, mask, scale, _ = given
        if mask is not None or not _may_be_flash(*given):
            return written_out(*given)
        kind = query.shape[3], query.dtype, query.device
        if kind not in self._takes:
            self._takes[kind] = _gpu_takes(query, key, value)
        if not self._takes[kind]:
            return written_out(*given)
        query, key, value = (_in_lines(one) for one in (query, key, value))
        made: Tensor = _kernel_of_gpus(query, key, value, 0.0, False, False, scale=scale)[0]
        return made


def _in_lines(tensor: Tensor) -> Tensor:
    """The kernel of GPUs reads 16 bytes at a time."""
    lies = tensor.stride(3) == 1 and not any(one % 8 for one in tensor.stride()[:3])
    if lies and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def gpu_takes_width(width: int) -> bool:
    """Whether the kernel of GPUs takes heads of so many elements."""
    return width % 8 == 0 and 0 < width <= _WIDEST


def _gpu_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the flash kernel runs on this GPU, for this width and dtype, and may be used."""
    if not gpu_takes_width(query.shape[3]):
        return False
    given = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False)
    return torch.backends.cuda.can_use_flash_attention(given)


def _may_be_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, fill: float | None
) -> bool:
    """Whether the kernel takes these sizes at all; they may be symbols where the graph is made."""
    batch, heads, _, width = query.shape
    columns = key.shape[2]
    return (
        query.numel() > 0
        and columns > 0
        and key.shape == value.shape == (batch, heads, columns, width)
        and scale != 0
        and math.isfinite(scale)
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, fill: float | None
) -> Tensor | None:
    """The kernel's result; None where it is not that of the written-out form."""
    columns = key.shape[2]
    over = columns % LANES
    if over and _pays(query, columns, over, mask):
        more = LANES - over
        key = torch.constant_pad_nd(key, (0, 0, 0, more))
        value = torch.constant_pad_nd(value, (0, 0, 0, more))
        if mask is None:
            mask = query.new_zeros((1, 1, 1, columns))
        elif mask.shape[3] == 1:
            mask = mask.expand(-1, -1, -1, columns)
        mask = torch.constant_pad_nd(mask, (0, more), -math.inf)
    elif mask is not None and mask.stride(3) not in (0, 1):
        mask = mask.contiguous()
    made, sums = _kernel(
        _in_rows(query), _in_rows(key), _in_rows(value), 0.0, False, attn_mask=mask, scale=scale
    )
    # NaN of any row that is masked as a whole (0 in the kernel), or that has an infinity or NaN.
    if math.isnan((sums / sums).sum().item()):
        return None
    if fill is not None and fill > -math.inf and not sums.amin().item() > fill + _MARGIN:
        return None
    return made  # type: ignore[no-any-return]


def _pays(query: Tensor, columns: int, over: int, mask: Tensor | None) -> bool:
    """Whether columns are made whole vectors of, where ``over`` are left over."""
    batch, heads, rows, width = query.shape
    added = (LANES - over) * (_ADDED + _ADDED_PRODUCT * width)
    saved = rows * (over * _LEFT_OVER - added) - _COPIED * columns * width
    return batch * heads * saved > _PADDING + (0 if mask is None else mask.numel())


def _in_rows(tensor: Tensor) -> Tensor:
    """The kernel reads rows that are contiguous and do not overlap."""
    apart = tensor.stride(2) >= tensor.shape[3] or tensor.shape[2] == 1
    return tensor if tensor.stride(3) == 1 and apart else tensor.contiguous()
