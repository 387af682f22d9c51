"""MonoDepth (Godard et al., 2016): disparities at four scales by a ResNet-18 and a decoder.

The disparities stay on the module, where a loss can pick them up after the call: a compiled call
has to leave them there, too.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .seeding import Example, Size, seeded


class Conv(nn.Module):
    """Pads, convolves, normalises, and applies ELU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        pad = int(np.floor((self.kernel - 1) / 2))
        return F.elu(self.norm(self.conv(F.pad(x, (pad, pad, pad, pad)))), inplace=True)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.outputs = outputs
        self.conv1 = Conv(inputs, outputs, 3, stride)
        self.conv2 = Conv(outputs, outputs, 3, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        project = x.size()[1] != self.outputs or self.stride == 2
        out = self.conv2(self.conv1(x))
        shortcut = self.shortcut(x) if project else x
        return F.elu(self.norm(out + shortcut), inplace=True)


class MaxPool(nn.Module):
    """Halves height and width, padding by the kernel."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        pad = int(np.floor((self.kernel - 1) / 2))
        return F.max_pool2d(F.pad(x, (pad, pad, pad, pad)), self.kernel, stride=2)


class UpConv(nn.Module):
    """Doubles height and width, then convolves."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True))


class Disparity(nn.Module):
    """Left and right disparity, as a fraction of the width, at most 0.3."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return 0.3 * torch.sigmoid(self.conv(x))


def stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
    """The first block changes the shape, the others keep it."""
    layers = [BasicBlock(inputs, outputs, stride)]
    layers += [BasicBlock(outputs, outputs, 1) for _ in range(1, blocks)]
    return nn.Sequential(*layers)


class MonoDepth(nn.Module):
    """Images (batch, 3, height, width), both multiples of 64, to disparities, largest first."""

    disp4: Tensor
    disp3: Tensor
    disp2: Tensor
    disp1: Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        w = width
        self.conv1 = Conv(3, w, 7, 2)
        self.pool1 = MaxPool(3)
        self.conv2 = stage(w, w, 2, 2)
        self.conv3 = stage(w, 2 * w, 2, 2)
        self.conv4 = stage(2 * w, 4 * w, 2, 2)
        self.conv5 = stage(4 * w, 8 * w, 2, 2)
        self.upconv6, self.iconv6 = UpConv(8 * w, 8 * w), Conv(12 * w, 8 * w, 3, 1)
        self.upconv5, self.iconv5 = UpConv(8 * w, 4 * w), Conv(6 * w, 4 * w, 3, 1)
        self.upconv4, self.iconv4 = UpConv(4 * w, 2 * w), Conv(3 * w, 2 * w, 3, 1)
        self.upconv3, self.iconv3 = UpConv(2 * w, w), Conv(2 * w + 2, w, 3, 1)
        self.upconv2, self.iconv2 = UpConv(w, w // 2), Conv(w // 2 + w + 2, w // 2, 3, 1)
        self.upconv1, self.iconv1 = UpConv(w // 2, w // 4), Conv(w // 4 + 2, w // 4, 3, 1)
        self.disp4_layer, self.disp3_layer = Disparity(2 * w), Disparity(w)
        self.disp2_layer, self.disp1_layer = Disparity(w // 2), Disparity(w // 4)

    def upsample(self, disparity: Tensor) -> Tensor:
        return F.interpolate(disparity, scale_factor=2, mode="bilinear", align_corners=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x1 = self.conv1(x)
        pooled = self.pool1(x1)
        x2 = self.conv2(pooled)
        x3 = self.conv3(x2)
        x4 = self.conv4(x3)
        x5 = self.conv5(x4)

        up = self.iconv6(torch.cat((self.upconv6(x5), x4), 1))
        up = self.iconv5(torch.cat((self.upconv5(up), x3), 1))
        up = self.iconv4(torch.cat((self.upconv4(up), x2), 1))
        self.disp4 = self.disp4_layer(up)
        up = self.iconv3(torch.cat((self.upconv3(up), pooled, self.upsample(self.disp4)), 1))
        self.disp3 = self.disp3_layer(up)
        up = self.iconv2(torch.cat((self.upconv2(up), x1, self.upsample(self.disp3)), 1))
        self.disp2 = self.disp2_layer(up)
        up = self.iconv1(torch.cat((self.upconv1(up), self.upsample(self.disp2)), 1))
        self.disp1 = self.disp1_layer(up)
        return self.disp1, self.disp2, self.disp3, self.disp4


@seeded
def build(size: Size = "small") -> Example:
    """The ResNet-18 version on 256×256, or at an eighth of its width on 64×64."""
    if size == "full":
        return MonoDepth(), (torch.randn(1, 3, 256, 256),)
    return MonoDepth(width=8), (torch.randn(1, 3, 64, 64),)
