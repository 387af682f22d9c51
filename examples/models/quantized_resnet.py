"""ResNet trained in eight bits (Banner et al., 2018), by quantising and dequantising.

The range of activations is measured while training and kept in buffers; the rounding passes
gradients straight through, by an `autograd.Function` that works in place on what it was given.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .seeding import Example, Size, seeded


class QParams(NamedTuple):
    """How a tensor is quantised: value = range × code / (2^bits − 1) + zero point."""

    range: Tensor
    zero_point: Tensor
    bits: int


def spread(values: Tensor, like: Tensor) -> Tensor:
    """Adds dimensions of size 1 until `values` has as many as `like`."""
    return values.view(*list(values.size()) + [1] * (like.dim() - values.dim()))


def calculate_qparams(
    x: Tensor, bits: int, flatten: tuple[int, int] = (1, -1), reduce: str | None = "mean"
) -> QParams:
    """Smallest and largest value of each slice, reduced over the slices."""
    with torch.no_grad():
        flat = x.flatten(*flatten)
        if flat.dim() == 1:
            low, high = spread(flat.min(), x), spread(flat.max(), x)
        else:
            low, high = spread(flat.min(-1)[0], x), spread(flat.max(-1)[0], x)
        if reduce == "mean":
            low, high = low.mean(0, keepdim=True), high.mean(0, keepdim=True)
        elif reduce == "extreme":
            low, high = low.min(0, keepdim=True)[0], high.max(0, keepdim=True)[0]
        return QParams(range=high - low, zero_point=low, bits=bits)


class UniformQuantize(torch.autograd.Function):
    """Rounds to the nearest representable value; the gradient passes straight through."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, qparams: QParams, signed: bool = False, inplace: bool = False
    ) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
            output = x
        else:
            output = x.clone()
        low = -(2.0 ** (qparams.bits - 1)) if signed else 0.0
        high = low + 2.0**qparams.bits - 1.0
        scale = (qparams.range / (high - low)).clamp(min=1e-8)
        output.add_(low * scale - qparams.zero_point).div_(scale)
        output.clamp_(low, high).round_()
        output.mul_(scale).add_(qparams.zero_point - low * scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


class QuantizeGradient(torch.autograd.Function):
    """Leaves the values alone and quantises the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        qparams = calculate_qparams(grad, ctx.bits, flatten=(0, -1), reduce=None)
        return UniformQuantize.apply(grad, qparams), None


def quantize(x: Tensor, qparams: QParams, inplace: bool = False) -> Tensor:
    """`x` rounded to what `qparams` can represent."""
    return UniformQuantize.apply(x, qparams, False, inplace)


class QuantMeasure(nn.Module):
    """Quantises activations by a running range, which training updates."""

    running_zero_point: Tensor
    running_range: Tensor
    measured: Tensor

    def __init__(self, bits: int = 8, momentum: float = 0.1) -> None:
        super().__init__()
        self.bits = bits
        self.momentum = momentum
        self.register_buffer("running_zero_point", torch.zeros(1, 1, 1, 1))
        self.register_buffer("running_range", torch.ones(1, 1, 1, 1))
        self.register_buffer("measured", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            qparams = calculate_qparams(x, self.bits)
            with torch.no_grad():
                momentum = self.momentum if x.dim() == 4 else 1.0
                self.running_zero_point.mul_(1 - momentum).add_(qparams.zero_point * momentum)
                self.running_range.mul_(1 - momentum).add_(qparams.range * momentum)
                self.measured += 1
        else:
            qparams = QParams(self.running_range, self.running_zero_point, self.bits)
        return quantize(x, qparams)


class QConv2d(nn.Conv2d):
    """Convolution over quantised activations with quantised weights."""

    def __init__(self, *args: Any, bits: int = 8, grad_bits: int | None = 8, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bits = bits
        self.grad_bits = grad_bits
        self.quantize_input = QuantMeasure(bits)

    def forward(self, x: Tensor) -> Tensor:
        quantized = self.quantize_input(x)
        weight = quantize(
            self.weight, calculate_qparams(self.weight, self.bits, flatten=(1, -1), reduce=None)
        )
        bias = None
        if self.bias is not None:
            parameters = calculate_qparams(self.bias, 2 * self.bits, flatten=(0, -1), reduce=None)
            bias = quantize(self.bias, parameters)
        output = F.conv2d(
            quantized, weight, bias, self.stride, self.padding, self.dilation, self.groups
        )
        if self.grad_bits is not None:
            output = QuantizeGradient.apply(output, self.grad_bits)
        return output


class RangeBatchNorm(nn.Module):
    """Batch norm that divides by the range of chunks in place of the standard deviation."""

    running_mean: Tensor
    running_scale: Tensor

    def __init__(self, features: int, chunks: int = 16, momentum: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_scale", torch.ones(features))
        self.chunks = chunks
        self.momentum = momentum

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            batch, channels, height, width = x.shape
            y = x.transpose(0, 1).contiguous().view(channels, -1)
            chunk = max(2, batch * height * width // self.chunks)
            mean = y.mean(-1)
            y = y[:, : y.size(-1) // chunk * chunk].view(channels, -1, chunk)
            # The expected range of so many normal samples gives the scale (paper, equation 3).
            factor = 0.175 * (1 + math.sqrt(math.pi * math.log(4))) / math.sqrt(2 * math.log(chunk))
            scale = (y.max(-1)[0].mean(-1) - y.min(-1)[0].mean(-1)) * factor
            with torch.no_grad():
                self.running_mean.mul_(1 - self.momentum).add_(mean * self.momentum)
                self.running_scale.mul_(1 - self.momentum).add_(scale * self.momentum)
        else:
            mean, scale = self.running_mean, self.running_scale
        out = (x - mean.view(1, -1, 1, 1)) / (scale.view(1, -1, 1, 1) + 1e-5)
        return out * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class BasicBlock(nn.Module):
    """Two quantised 3×3 convolutions and a shortcut."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = QConv2d(inputs, planes, 3, stride, 1, bias=False)
        self.bn1 = RangeBatchNorm(planes)
        self.conv2 = QConv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = RangeBatchNorm(planes)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(
                QConv2d(inputs, planes, 1, stride, bias=False), RangeBatchNorm(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class QuantizedResNet(nn.Module):
    """Images (batch, 3, height, width) to class scores; the defaults are ResNet-18's."""

    def __init__(
        self, layers: tuple[int, ...] = (2, 2, 2, 2), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = QConv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = RangeBatchNorm(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        inputs = width
        for i, count in enumerate(layers):
            for j in range(count):
                blocks.append(BasicBlock(inputs, width << i, 2 if i and not j else 1))
                inputs = width << i
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.blocks(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1))


@seeded
def build(size: Size = "small") -> Example:
    """Quantised ResNet-18 on 224×224, or at a quarter of its width on 64×64.

    One batch in training mode measures the ranges first, as evaluation needs them.
    """
    width, edge = (64, 224) if size == "full" else (16, 64)
    model = QuantizedResNet(width=width)
    with torch.no_grad():
        model.train()(torch.randn(2, 3, edge, edge))
    return model, (torch.randn(1, 3, edge, edge),)
