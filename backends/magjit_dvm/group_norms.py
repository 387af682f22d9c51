"""Group norms on GPUs, in parts: of each image's channels first, then of groups of these.

An image of a channel lies side by side, and is a row: one group of operators reads it once, with
whatever it is made of, for its mean and the squares about it, or for both sums of a backward.
What groups have is made of these, of which there are few, and so are gradients of weights.  The
norm itself, and the gradient of its input, are elementwise, with a few numbers for each row, and
are fused with what follows.

Taken apart as torch does it, a group would be a row: of few, each is long, and channels, which have
the weights, are parts of a row that another operator has to come to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from magjit.plugin.sizes import elements
from magjit_dvm.batch_norms import DTYPES, LEAST_IMAGE
from magjit_dvm.program import has_machine

__all__ = ["backward", "forward"]

_FEWEST = 1 << 20
"""Elements from which on three launches are faster than one, or ATen's own kernels."""


def forward(decomposition: Callable[..., Any], x: torch.Tensor, *others: Any) -> Any:
    """What ``native_group_norm`` is taken apart into."""
    return (_in_parts if x.is_cuda and _pays(x) else decomposition)(x, *others)


def _in_parts(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    images: Any,
    channels: Any,
    size: Any,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    each = channels // groups
    inner = list(range(2, x.dim()))
    around = [images, channels, *[1] * len(inner)]
    given = x.to(torch.float32)
    means = given.mean(inner, keepdim=True)
    about = given - means
    squares = (about * about).sum(inner).view(images, groups, each)
    means = means.view(images, groups, each)
    mean = means.mean(2, keepdim=True)  # Chan, Golub and LeVeque 1983
    apart = means - mean
    of_groups = squares.sum(2, keepdim=True) + size * (apart * apart).sum(2, keepdim=True)
    root = torch.rsqrt(of_groups / (each * size) + eps)
    scale = root.expand(images, groups, each)
    if weight is not None:
        scale = scale * weight.view(1, groups, each)
    if x.itemsize == 2:
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias.view(1, groups, each)
        out = x * scale.reshape(around) + shift.reshape(around)
    else:  # whose rounding might tell
        center = mean.expand(images, groups, each).reshape(around)
        out = (x - center) * scale.reshape(around)
        out = out if bias is None else out + bias.view([1, channels, *[1] * len(inner)])
    mixed = x.itemsize == 2 and weight is not None and weight.dtype is torch.float32
    dtype = torch.float32 if mixed else x.dtype  # as eager mode has them
    return out.to(x.dtype), *(one.view(images, groups).to(dtype) for one in (mean, root))


def backward(
    decomposition: Callable[..., Any],
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    root: torch.Tensor,
    weight: torch.Tensor | None,
    *others: Any,
) -> Any:
    """What ``native_group_norm_backward`` is taken apart into; nothing where it is ATen's."""
    mask = others[-1]
    if not dy.is_cuda or not (mask[1] or mask[2]):
        return decomposition(dy, x, mean, root, weight, *others)
    return _gradients_in_parts(dy, x, mean, root, weight, *others) if _pays(x) else NotImplemented


def _pays(x: torch.Tensor) -> bool:
    """By the sizes of the example, where only a call tells them."""
    count, channels = elements(x.shape), elements(x.shape[:2])
    known = x.dtype in DTYPES and x.is_contiguous() and has_machine(x.device)
    return known and count >= _FEWEST and count >= LEAST_IMAGE * channels


def _gradients_in_parts(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    root: torch.Tensor,
    weight: torch.Tensor | None,
    images: Any,
    channels: Any,
    size: Any,
    groups: int,
    mask: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    each = channels // groups
    inner = list(range(2, x.dim()))
    around = [images, channels, *[1] * len(inner)]

    def of_channels(one: torch.Tensor) -> torch.Tensor:
        """What groups have one number of, for each of their channels."""
        spread = one.to(torch.float32).view(images, groups, 1).expand(images, groups, each)
        return spread.reshape(images, channels)

    center, roots = of_channels(mean), of_channels(root)
    given = dy.to(torch.float32)  # both sums read it once
    total = given.sum(inner)
    along = (given * (x - center.view(around))).sum(inner)
    of_weight = (along * roots).sum(0) if mask[1] else None
    of_bias = total.sum(0) if mask[2] else None
    dtype = x.dtype if weight is None else weight.dtype
    dx = None
    if mask[0]:
        share = 1.0 / (each * size)
        weights = (one if weight is None else one * weight for one in (total, along))
        totals, alongs = (one.view(images, groups, each).sum(2) for one in weights)
        slopes, shifts = alongs * (-share * root * root * root), totals * (-share * root)
        slope, shift = of_channels(slopes), of_channels(shifts)
        scale = roots if weight is None else roots * weight
        if x.itemsize == 2:
            shift, away = shift - center * slope, x
        else:  # whose rounding might tell
            away = x - center.view(around)
        dx = dy * scale.view(around) + away * slope.view(around) + shift.view(around)
        dx = dx.to(x.dtype)
    return dx, *(None if one is None else one.to(dtype) for one in (of_weight, of_bias))
