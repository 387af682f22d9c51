"""DenseNet (Huang et al., 2016), with layers that are a `Sequential` and call its forward."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .seeding import Example, Size, seeded


class _DenseLayer(nn.Sequential):
    """Bottleneck and growth convolution over everything computed before in the block."""

    def __init__(
        self, inputs: int, growth: int, bottleneck: int, dropout: float, memory_efficient: bool
    ) -> None:
        super().__init__()
        self.add_module("norm1", nn.BatchNorm2d(inputs))
        self.add_module("relu1", nn.ReLU(inplace=True))
        self.add_module("conv1", nn.Conv2d(inputs, bottleneck * growth, 1, bias=False))
        self.add_module("norm2", nn.BatchNorm2d(bottleneck * growth))
        self.add_module("relu2", nn.ReLU(inplace=True))
        self.add_module("conv2", nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False))
        self.dropout = dropout
        self.memory_efficient = memory_efficient

    def any_requires_grad(self, features: tuple[Tensor, ...]) -> bool:
        return any(feature.requires_grad for feature in features)

    def forward(self, *features: Tensor) -> Tensor:
        run = super().forward

        def concatenate_and_run(*parts: Tensor) -> Tensor:
            return run(torch.cat(parts, 1))

        if self.memory_efficient and self.any_requires_grad(features):
            new: Tensor = checkpoint(concatenate_and_run, *features, use_reentrant=False)
        else:
            new = concatenate_and_run(*features)
        if self.dropout > 0:
            new = F.dropout(new, p=self.dropout, training=self.training)
        return new


class _DenseBlock(nn.Module):
    def __init__(self, layers: int, inputs: int, growth: int, **options: Any) -> None:
        super().__init__()
        for i in range(layers):
            self.add_module(
                f"denselayer{i + 1}", _DenseLayer(inputs + i * growth, growth, **options)
            )

    def forward(self, first: Tensor) -> Tensor:
        features = [first]
        for _, layer in self.named_children():
            features.append(layer(*features))
        return torch.cat(features, 1)


class _Transition(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.add_module("norm", nn.BatchNorm2d(inputs))
        self.add_module("relu", nn.ReLU(inplace=True))
        self.add_module("conv", nn.Conv2d(inputs, outputs, kernel_size=1, stride=1, bias=False))
        self.add_module("pool", nn.AvgPool2d(kernel_size=2, stride=2))


class DenseNet(nn.Module):
    """Images (batch, 3, height, width) to class scores; the defaults are DenseNet-121's."""

    def __init__(
        self,
        growth: int = 32,
        blocks: tuple[int, ...] = (6, 12, 24, 16),
        stem: int = 64,
        bottleneck: int = 4,
        dropout: float = 0.0,
        classes: int = 1000,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        first: list[tuple[str, nn.Module]] = [
            ("conv0", nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False)),
            ("norm0", nn.BatchNorm2d(stem)),
            ("relu0", nn.ReLU(inplace=True)),
            ("pool0", nn.MaxPool2d(kernel_size=3, stride=2, padding=1)),
        ]
        self.features = nn.Sequential(OrderedDict(first))
        channels = stem
        for i, layers in enumerate(blocks, 1):
            block = _DenseBlock(
                layers,
                channels,
                growth,
                bottleneck=bottleneck,
                dropout=dropout,
                memory_efficient=memory_efficient,
            )
            self.features.add_module(f"denseblock{i}", block)
            channels += layers * growth
            if i < len(blocks):
                self.features.add_module(f"transition{i}", _Transition(channels, channels // 2))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = F.relu(self.features(x), inplace=True)
        pooled = F.adaptive_avg_pool2d(features, (1, 1)).view(features.size(0), -1)
        return self.classifier(pooled)


@seeded
def build(size: Size = "small") -> Example:
    """DenseNet-121 on 224×224, or with the same 58 layers at a growth of 8 on 64×64."""
    if size == "full":
        return DenseNet(), (torch.randn(1, 3, 224, 224),)
    return DenseNet(growth=8, stem=16), (torch.randn(1, 3, 64, 64),)
