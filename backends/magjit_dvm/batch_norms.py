"""Batch norms in training on GPUs: as a program, in parts, by sums of channels, or by kernels.

A program has a row for each channel, which is read once where it fits a block.  But a channel of
images lies in memory in parts, which come to a block slowly.  *In parts*, each image of a channel
is a row: its mean and squares about it, then those of channels, of which there are few, then an
elementwise operator, which is fused with what follows.  That reads images twice, as memory gives
them.  Eager mode's kernels, cuDNN's where it has one, hold a channel that is not too long.  Where
channels lie side by side, kernels of their own add them up (``channel_sums.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from math import prod
from typing import Any

import torch
from torch.fx import Node as FxNode

from magjit.plugin.sizes import elements
from magjit_dvm.builder import size_key
from magjit_dvm.channel_sums import (
    GRADIENTS,
    MOMENTS,
    ChannelGradients,
    ChannelMoments,
    around_channels,
)
from magjit_dvm.cuda.support import SMALL
from magjit_dvm.program import has_machine

__all__ = [
    "DTYPES",
    "LEAST_IMAGE",
    "BatchNorm",
    "BatchNormBackward",
    "backward",
    "forward",
    "kernel_of",
    "writes_in_place",
]

aten = torch.ops.aten
_C: Any = torch._C  # whose stubs lack what is asked of cuDNN

_WITH_STATS = aten._native_batch_norm_legit_functional.default
_WITHOUT = aten._native_batch_norm_legit.no_stats
_BACKWARD = aten.native_batch_norm_backward.default
_CUDNNS: Any = torch.cudnn_batch_norm
_CUDNNS_BACKWARD = aten.cudnn_batch_norm_backward.default

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Orders of memory that cuDNN knows beside the usual one, by numbers of dimensions."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What GPUs have words for, all of which is computed in float32."""
_ONE_LAUNCH = 1 << 19
"""Elements up to which a program of one launch is as fast as any other."""
_LONG = 1 << 17
"""Bytes of a channel beyond which cuDNN reads it more than once."""
LEAST_IMAGE = 32
"""Elements of a channel in one image from which on these are rows worth having."""
_LEAST_PARTS, _MANY = 1 << 21, 1 << 23
"""Elements from which on three launches are faster than ATen's own kernels; and backwards, of many
channels."""
_FEW_CHANNELS, _MANY_CHANNELS = 256, 1024
"""Channels, to each of which backward kernels give a block, up to which these leave much of a GPU
idle; and up to which ATen's own, which read them slowly, are slower for many elements."""


class Way(Enum):
    """How a batch norm is computed."""

    PROGRAM = auto()
    PARTS = auto()
    SUMS = auto()
    KERNEL = auto()


def forward(decomposition: Callable[..., Any], x: torch.Tensor, *others: Any) -> Any:
    """What a batch norm is taken apart into; nothing where it is one of ATen's kernels.

    Args:
        decomposition: torch's.
        x, others: the operator's arguments.
    """
    way = _way(x, training=others[-3])
    if way is Way.PARTS and len(others) > 5:  # statistics are results: a group ends with them
        return _in_parts(x, *others)
    if way is Way.SUMS:
        return _by_sums(x, *others)
    return decomposition(x, *others) if way is Way.PROGRAM else NotImplemented


def backward(
    decomposition: Callable[..., Any], dy: torch.Tensor, x: torch.Tensor, *others: Any
) -> Any:
    """The same of ``native_batch_norm_backward``."""
    train, _, (_, of_weight, of_bias) = others[-3:]
    if train and _way(x, training=True) is Way.SUMS:
        return _gradients_by_sums(dy, x, *others)
    if not x.is_cuda or not (of_weight or of_bias):
        return decomposition(dy, x, *others)
    if train and _backward_in_parts(x):
        return _gradients_in_parts(dy, x, *others)
    if train and others[1] is not None:  # which need not be kept for what does not read them
        return _BACKWARD(dy, x, others[0], None, None, *others[3:])
    return NotImplemented  # apart, sums across rows would be of tensors that are written for them


def _way(x: torch.Tensor, training: bool) -> Way:
    """By the sizes of the example, where only a call tells them."""
    if not x.is_cuda or not training or x.dim() < 2:
        return Way.PROGRAM
    if x.dtype not in DTYPES:
        return Way.KERNEL
    count = elements(x.shape)
    images, channels = elements(x.shape[:1]), elements(x.shape[1:2])
    if size_key(x.stride(1)) == 1:  # as rows, the VM would leave these to ATen at each call
        dense = x.dim() == 2 or (x.dim() in _LAST and x.is_contiguous(memory_format=_LAST[x.dim()]))
        summed = dense and channels * x.itemsize % 16 == 0 and has_machine(x.device)
        return Way.PROGRAM if 0 < count <= SMALL else Way.SUMS if summed else Way.KERNEL
    if count <= _ONE_LAUNCH or images == 1 or not x.is_contiguous():
        return Way.PROGRAM
    has_cudnn = x.dtype is not torch.bfloat16
    if count < LEAST_IMAGE * images * channels:
        return Way.KERNEL if has_cudnn else Way.PROGRAM
    long = count // channels * x.itemsize > _LONG
    return Way.PARTS if long or (not has_cudnn and count >= _LEAST_PARTS) else Way.KERNEL


def _backward_in_parts(x: torch.Tensor) -> bool:
    many = x.dtype is torch.bfloat16 and elements(x.shape) >= _MANY
    few = elements(x.shape[1:2]) <= (_MANY_CHANNELS if many else _FEW_CHANNELS)
    return few and _way(x, training=True) is Way.PARTS


def _in_parts(x: torch.Tensor, weight: Any, bias: Any, *others: Any) -> Any:
    """Mean and deviation by those of images (Chan, Golub and LeVeque 1983)."""
    *running, _, momentum, eps = others
    images, channels, *sizes = x.shape
    size = prod(sizes)
    total = images * size
    inner = list(range(2, x.dim()))
    given = x.to(torch.float32)
    means = given.mean(inner, keepdim=True)
    about = given - means
    squares = (about * about).sum(inner).t().clone(memory_format=torch.contiguous_format)
    means = means.view(images, channels).t().clone(memory_format=torch.contiguous_format)
    mean = means.mean(1, keepdim=True)
    apart = means - mean
    var = (squares.sum(1, keepdim=True) + size * (apart * apart).sum(1, keepdim=True)) / total
    root = torch.rsqrt(var + eps)
    updated = [
        (momentum * found + (1 - momentum) * old.unsqueeze(1)).to(old.dtype).squeeze(1)
        for found, old in zip((mean, var * (total / (total - 1))), running, strict=False)
    ]
    mean, root = mean.squeeze(1), root.squeeze(1)
    around = around_channels(x)
    scale = root if weight is None else root * weight
    out = (x - mean.view(around)) * scale.view(around)
    if bias is not None:
        out = out + bias.view(around)
    return out.to(x.dtype), mean, root, *updated


def _gradients_in_parts(dy: torch.Tensor, x: torch.Tensor, weight: Any, *others: Any) -> Any:
    *_, mean, root, _, _, mask = others
    images, _, *sizes = x.shape
    share = 1.0 / (images * prod(sizes))
    around = around_channels(x)
    inner = list(range(2, x.dim()))
    center = mean.view(around)
    given = dy.to(torch.float32)  # both sums read it once
    of_images = [one.sum(inner) for one in (given, given * (x - center))]
    of_channels = [
        one.t().clone(memory_format=torch.contiguous_format).sum(1, keepdim=True)
        for one in of_images
    ]
    total, along = of_channels
    root = root.unsqueeze(1)
    scale = root if weight is None else root * weight.unsqueeze(1)
    slope, shift = along * (-share * root * root * scale), total * (-share * scale)
    of_weight, of_bias = (
        one.squeeze(1).to(x.dtype if weight is None else weight.dtype)
        for one in (along * root, total)
    )
    slope, shift, scale = (one.view(around) for one in (slope, shift, scale))
    dx = dy * scale + (x - center) * slope + shift
    return dx.to(x.dtype), of_weight if mask[1] else None, of_bias if mask[2] else None


def _by_sums(x: torch.Tensor, weight: Any, bias: Any, *others: Any) -> Any:
    """What channels have one number of by kernels, then the norm."""
    *running, _, momentum, eps = others
    given = running or (None, None)
    mean, root, scale, *updated, shift = MOMENTS(x, weight, bias, *given, momentum, eps)
    around = around_channels(x)
    if x.itemsize == 2:
        out = x * scale + shift
    else:  # a mean of many deviations would round off more than x has
        out = (x - mean.view(around)) * scale
        out = out if bias is None else out + bias.view(around)
    return out.to(x.dtype), mean, root, *updated[: len(running)]


def _gradients_by_sums(dy: torch.Tensor, x: torch.Tensor, weight: Any, *others: Any) -> Any:
    *_, mean, root, _, _, mask = others
    found = GRADIENTS(dy, None, x, weight, mean, root)
    around = around_channels(x)
    scale, slope, shift = found[2:]
    away = x if x.itemsize == 2 else x - mean.view(around)
    dx = (dy * scale + away * slope + shift).to(x.dtype) if mask[0] else None
    return dx, found[0] if mask[1] else None, found[1] if mask[2] else None


# -- the kernels that eager mode has --


def kernel_of(node: FxNode) -> Callable[..., Any] | None:
    """What runs a batch norm that is whole in a graph, in training and on a GPU; or its sums."""
    if node.target is MOMENTS:
        return ChannelMoments(bool(node.meta.get("in_place")))
    if node.target is GRADIENTS:
        return ChannelGradients()
    if node.kwargs or node.target not in (_WITH_STATS, _WITHOUT, _BACKWARD):
        return None
    x = node.args[node.target is _BACKWARD]
    if not isinstance(x, FxNode) or not x.meta["val"].is_cuda:
        return None
    if node.target is _BACKWARD:
        return BatchNormBackward() if node.args[7] else None
    return BatchNorm(node.target, bool(node.meta.get("in_place"))) if node.args[-3] else None


def writes_in_place(node: FxNode) -> tuple[int, ...]:
    """Results that a batch norm's kernel can write to the arguments of the same numbers."""
    writes = node.target in (_WITH_STATS, MOMENTS) and kernel_of(node) is not None
    return (3, 4) if writes else ()


class BatchNorm:
    """ATen's functional operator, by cuDNN's kernel where eager mode takes that.

    Args:
        target: the operator.
        in_place: new running statistics are written where the old ones are.
    """

    __name__ = "batch_norm"

    def __init__(self, target: Any, in_place: bool = False) -> None:
        self._target, self._in_place = target, in_place

    def __call__(self, x: Any, weight: Any, bias: Any, *others: Any) -> Any:
        *running, _, momentum, eps = others
        if not _is_cudnns(x, weight, bias, running, eps):
            found = self._target(x, weight, bias, *others)
            if not self._in_place:
                return found
            torch._foreach_copy_(running, found[3:])
            return *found[:3], *running
        updated = running if self._in_place else [one.clone() for one in running]
        given = updated or (None, None)
        found = _CUDNNS(x, weight, bias, *given, True, momentum, eps)
        return *found[:3], *updated


class BatchNormBackward:
    """``native_batch_norm_backward`` in training, by cuDNN's kernel where eager mode takes that."""

    __name__ = "batch_norm_backward"

    def __call__(self, dy: Any, x: Any, weight: Any, *others: Any) -> Any:
        *running, mean, root, _, eps, mask = others
        stats = [one for one in running if one is not None]
        # For which of the two is left out eager mode takes ATen's kernel: results are alike.
        if not all(mask) or not _is_cudnns(x, weight, weight, stats, eps):
            return _BACKWARD(dy, x, weight, *others)
        blank = torch.empty(0, dtype=torch.uint8, device=x.device)
        dy = dy.contiguous(memory_format=_order_of(x))
        return _CUDNNS_BACKWARD(x, dy, weight, *running, mean, root, eps, blank)


def _is_cudnns(x: Any, weight: Any, bias: Any, running: Any, eps: float) -> bool:
    """Whether eager mode takes cuDNN's kernels, and these keep nothing for the backward."""
    order = _order_of(x)
    if weight is None or bias is None or not x.is_contiguous(memory_format=order):
        return False
    given = running or (weight, weight)  # what counts is that there are both or neither
    found = _C._select_batch_norm_backend(x, weight, bias, *given, True, eps)
    cudnns: object = _C._BatchNormBackend.Cudnn
    return bool(found == cudnns) and not _reserve_of(x, order)


def _order_of(x: torch.Tensor) -> torch.memory_format:
    """The order of memory that eager mode takes a dense tensor to have."""
    if x.is_contiguous() or x.dim() not in _LAST:
        return torch.contiguous_format
    return _LAST[x.dim()]


def _reserve_of(x: torch.Tensor, order: torch.memory_format) -> int:
    """Bytes that cuDNN's kernels keep for the backward of a tensor like this one."""
    key = x.dtype, x.dim(), order
    if key not in _RESERVES:
        _RESERVES[key] = int(_C._get_cudnn_batch_norm_reserve_space_size(x, True))
    return _RESERVES[key]


_RESERVES: dict[tuple[torch.dtype, int, torch.memory_format], int] = {}
