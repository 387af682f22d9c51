"""ResNet with bottleneck blocks (He et al., 2015)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .seeding import Example, Size, seeded


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1, with the stride at the 3×3."""

    expansion = 4

    def __init__(
        self,
        inputs: int,
        planes: int,
        stride: int = 1,
        downsample: nn.Module | None = None,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = norm(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = norm(planes)
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = norm(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to class scores; the defaults are ResNet-101's."""

    def __init__(
        self, layers: tuple[int, ...] = (3, 4, 23, 3), width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.inputs = width
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        for i, blocks in enumerate(layers):
            stage = self.make_stage(width << i, blocks, stride=1 if i == 0 else 2)
            setattr(self, f"layer{i + 1}", stage)
        self.stages = len(layers)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck) and isinstance(module.bn3, nn.BatchNorm2d):
                # As residual branches start small in training: keeps the activations in range.
                nn.init.constant_(module.bn3.weight, 0.2)

    def make_stage(self, planes: int, blocks: int, stride: int) -> nn.Sequential:
        outputs = planes * Bottleneck.expansion
        downsample = None
        if stride != 1 or self.inputs != outputs:
            downsample = nn.Sequential(
                nn.Conv2d(self.inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        stage = [Bottleneck(self.inputs, planes, stride, downsample)]
        self.inputs = outputs
        stage += [Bottleneck(outputs, planes) for _ in range(1, blocks)]
        return nn.Sequential(*stage)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


@seeded
def build(size: Size = "small") -> Example:
    """ResNet-101 on 224×224, or at a quarter of its width on 64×64."""
    if size == "full":
        return ResNet(), (torch.randn(1, 3, 224, 224),)
    return ResNet(width=16), (torch.randn(1, 3, 64, 64),)
