"""Operators of batch norms in training whose channels lie side by side in memory.

What a norm needs of all positions is found by kernels of their own (``cuda/channel_sums.py``); the
norm itself, and its gradient, are elementwise with a few numbers for each channel, and are fused
with what is around them::

    channel_moments      mean, 1 / deviation, scale, running statistics, shift
                         y = x · scale + shift
    channel_gradients    gradients of weight and bias, scale, slope, shift
                         dx = dy · scale + x · slope + shift

The first has running statistics among its results in the places of those among its arguments, as
ATen's operator has.  As operators they can be traced; where there is no kernel (yet), on another
device, or for tensors that lie otherwise, they are computed by ATen's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from magjit.plugin.aliases import trust

__all__ = [
    "GRADIENTS",
    "MOMENTS",
    "ChannelGradients",
    "ChannelMoments",
    "absorb_masks",
    "around_channels",
]

aten = torch.ops.aten

_library = torch.library.Library("magjit_dvm", "FRAGMENT")
_library.define(
    "channel_moments(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean, "
    "Tensor? running_var, float momentum, float eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "channel_gradients(Tensor dy, Tensor? y, Tensor x, Tensor? weight, Tensor mean, Tensor root) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
MOMENTS: Any = torch.ops.magjit_dvm.channel_moments.default
GRADIENTS: Any = torch.ops.magjit_dvm.channel_gradients.default
trust(MOMENTS)
trust(GRADIENTS)


@torch.library.register_fake("magjit_dvm::channel_moments", lib=_library)  # type: ignore[untyped-decorator]
def _fake_moments(x: Tensor, weight: Any, bias: Any, *others: Any) -> tuple[Tensor, ...]:
    running = [x.new_empty((0,)) if one is None else torch.empty_like(one) for one in others[:2]]
    mean, root = (x.new_empty((x.shape[1],), dtype=torch.float32) for _ in range(2))
    scale, shift = (x.new_empty(around_channels(x), dtype=torch.float32) for _ in range(2))
    return mean, root, scale, *running, shift


@torch.library.register_fake("magjit_dvm::channel_gradients", lib=_library)  # type: ignore[untyped-decorator]
def _fake_gradients(dy: Tensor, y: Any, x: Tensor, weight: Any, *others: Any) -> tuple[Tensor, ...]:
    dtype = x.dtype if weight is None else weight.dtype
    of_weight, of_bias = (x.new_empty((x.shape[1],), dtype=dtype) for _ in range(2))
    made = (x.new_empty(around_channels(x), dtype=torch.float32) for _ in range(3))
    return of_weight, of_bias, *made


def around_channels(x: Tensor) -> list[int]:
    """The shape of what channels have one number of, beside x."""
    return [1, x.shape[1], *[1] * (x.dim() - 2)]


def _kernels() -> Any:
    """Imported late: a machine without GPUs does not need it."""
    from magjit_dvm.cuda import channel_sums

    return channel_sums


def _blank(like: Tensor | None) -> Tensor | None:
    return None if like is None else torch.empty_like(like)


class ChannelMoments:
    """``channel_moments``, by the GPU's kernels where these are there.

    Args:
        in_place: new running statistics are written where the old ones are.
    """

    __name__ = "channel_moments"

    def __init__(self, in_place: bool = False) -> None:
        self._in_place = in_place
        self._kernels: Any = None

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        *others: Any,
    ) -> tuple[Tensor | None, ...]:
        *old, momentum, eps = others
        if x.is_cuda:
            self._kernels = self._kernels or _kernels().Moments()
            into = old if self._in_place else [_blank(one) for one in old]
            found = self._kernels(x, weight, bias, old, into, momentum, eps)
            if found is not None:
                return *found[:3], *into, found[3]
        *made, new_mean, new_var, shift = _moments(x, weight, bias, *others)
        if self._in_place:
            for one, new in zip(old, (new_mean, new_var), strict=True):
                if one is not None:
                    one.copy_(new)
            return *made, *old, shift
        return *made, new_mean, new_var, shift


class ChannelGradients:
    """``channel_gradients``, by the GPU's kernels where these are there."""

    __name__ = "channel_gradients"

    def __init__(self) -> None:
        self._kernels: Any = None

    def __call__(
        self, dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor | None, *stats: Tensor
    ) -> tuple[Tensor, ...]:
        if x.is_cuda:
            self._kernels = self._kernels or _kernels().Gradients()
            found: tuple[Tensor, ...] | None = self._kernels(dy, y, x, weight, *stats)
            if found is not None:
                return found
        return _gradients(dy, y, x, weight, *stats)


@torch.library.impl(_library, "channel_moments", "CompositeExplicitAutograd")
def _moments(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    old_mean: Tensor | None,
    old_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    count = x.numel() // x.shape[1]
    over = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x.to(torch.float32), over, correction=0)
    root = torch.rsqrt(var + eps)
    scale = root if weight is None else root * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    unbiased = var * (count / max(count - 1, 1))
    running = [
        x.new_empty((0,)) if old is None else (momentum * new + (1 - momentum) * old).to(old.dtype)
        for old, new in ((old_mean, mean), (old_var, unbiased))
    ]
    scale, shift = scale.clone().view(around_channels(x)), shift.view(around_channels(x))
    return mean, root, scale, *running, shift


@torch.library.impl(_library, "channel_gradients", "CompositeExplicitAutograd")
def _gradients(
    dy: Tensor, y: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, root: Tensor
) -> tuple[Tensor, ...]:
    share = x.shape[1] / x.numel()
    over = [0, *range(2, x.dim())]
    around = around_channels(x)
    given = dy.to(torch.float32)
    if y is not None:
        given = given.masked_fill(y <= 0, 0)
    total, along = given.sum(over), (given * (x - mean.view(around))).sum(over)
    dtype = x.dtype if weight is None else weight.dtype
    scale = root.clone() if weight is None else root * weight
    slope, shift = along * (-share * root * root * scale), total * (-share * scale)
    if x.itemsize == 2:
        shift = shift - mean * slope
    made = (one.view(around) for one in (scale, slope, shift))
    return (along * root).to(dtype), total.to(dtype), *made


def absorb_masks(graph: Graph) -> None:
    """Have sums of a gradient behind a ReLU read what it is made of, if nobody else reads it.

    Then it is not written: what is left of its uses is the norm's own gradient, fused with it.
    """
    for node in graph.nodes:
        if node.target is not GRADIENTS or node.args[1] is not None:
            continue
        masked, x = node.args[0], node.args[2]
        if masked.target is not aten.threshold_backward.default or len(masked.users) != 2:
            continue
        dy, y, threshold = masked.args
        values = [one.meta["val"] for one in (dy, y, x) if isinstance(one, Node)]
        alike = {(one.dtype, tuple(one.stride())) for one in values}
        if threshold == 0 and len(values) == 3 and len(alike) == 1:
            node.args = (dy, y, *node.args[2:])
