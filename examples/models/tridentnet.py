"""TridentNet (Li et al., 2019): branches that share weights and differ in dilation.

A block takes and gives a list of tensors, one a branch, where the branches are open.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .resnet import Bottleneck, ResNet
from .seeding import Example, Size, seeded


class TridentConv(nn.Module):
    """One 3×3 kernel applied at several dilations."""

    def __init__(
        self, inputs: int, outputs: int, dilations: tuple[int, ...], stride: int, only: int | None
    ) -> None:
        super().__init__()
        self.branches = len(dilations)
        self.dilations = dilations
        self.stride = stride
        self.only = only
        self.weight = nn.Parameter(torch.empty(outputs, inputs, 3, 3))
        nn.init.kaiming_uniform_(self.weight, nonlinearity="relu")

    def extra_repr(self) -> str:
        return f"dilations={self.dilations}, stride={self.stride}, only={self.only}"

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        if self.training or self.only is None:
            dilations = list(self.dilations)
        else:
            assert len(inputs) == 1, "at test time a single branch has a single input"
            dilations = [self.dilations[self.only]]
        return [
            F.conv2d(x, self.weight, None, self.stride, dilation, dilation)
            for x, dilation in zip(inputs, dilations, strict=True)
        ]


class TridentBottleneck(Bottleneck):
    """A bottleneck whose 3×3 is a `TridentConv`; everything else is shared by the branches."""

    def __init__(
        self,
        inputs: int,
        planes: int,
        stride: int,
        downsample: nn.Module | None,
        dilations: tuple[int, ...],
        only: int | None,
        concatenate: bool,
    ) -> None:
        super().__init__(inputs, planes, stride, downsample)
        self.only = only
        self.dilations = dilations
        self.concatenate = concatenate
        self.conv2 = TridentConv(planes, planes, dilations, stride, only)  # type: ignore[assignment]

    def forward(self, x: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        branches = len(self.dilations) if self.training or self.only is None else 1
        inputs = x if isinstance(x, list) else [x] * branches
        identities = list(inputs)
        if self.downsample is not None:
            identities = [self.downsample(b) for b in inputs]

        outs = [self.relu(self.bn1(self.conv1(b))) for b in inputs]
        outs = self.conv2(outs)
        outs = [self.relu(self.bn2(b)) for b in outs]
        outs = [self.bn3(self.conv3(b)) for b in outs]
        outs = [self.relu(b + identity) for b, identity in zip(outs, identities, strict=True)]
        return torch.cat(outs, dim=0) if self.concatenate else outs


class TridentResNet(ResNet):
    """ResNet-101's stages to the third, whose blocks are trident blocks, with a box head.

    Gives scores and box offsets for each position; the branches lie along the batch dimension.
    """

    def __init__(
        self,
        layers: tuple[int, ...] = (3, 4, 23),
        width: int = 64,
        dilations: tuple[int, ...] = (1, 2, 3),
        test_branch: int | None = None,
        trident_blocks: int | None = None,
        anchors: int = 15,
    ) -> None:
        self.dilations = dilations
        self.test_branch = test_branch
        super().__init__(layers[:-1], width)
        del self.avgpool, self.fc
        planes = width << (len(layers) - 1)
        self.trident = self.make_trident_stage(planes, layers[-1], trident_blocks or layers[-1])
        self.head = nn.Conv2d(self.inputs, self.inputs // 2, 3, padding=1)
        self.scores = nn.Conv2d(self.inputs // 2, anchors, 1)
        self.boxes = nn.Conv2d(self.inputs // 2, 4 * anchors, 1)

    def make_trident_stage(self, planes: int, blocks: int, trident: int) -> nn.Sequential:
        """The last `trident` of the blocks are trident blocks; the last one joins the branches."""
        stage: list[nn.Module] = []
        for i in range(blocks):
            stride, inputs = (2, self.inputs) if i == 0 else (1, planes * Bottleneck.expansion)
            downsample = None
            if i == 0:
                outputs = planes * Bottleneck.expansion
                downsample = nn.Sequential(
                    nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
                )
            if i < blocks - trident:
                stage.append(Bottleneck(inputs, planes, stride, downsample))
                continue
            block = TridentBottleneck(
                inputs,
                planes,
                stride,
                downsample,
                self.dilations,
                self.test_branch,
                concatenate=i == blocks - 1,
            )
            nn.init.constant_(block.bn3.weight, 0.2)  # type: ignore[arg-type]
            stage.append(block)
        self.inputs = planes * Bottleneck.expansion
        return nn.Sequential(*stage)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self.stages):
            x = getattr(self, f"layer{i + 1}")(x)
        features = F.relu(self.head(self.trident(x)))
        return self.scores(features), self.boxes(features)


@seeded
def build(size: Size = "small") -> Example:
    """On ResNet-101 at 224×224 with three open branches, or a quarter as wide on 64×64."""
    if size == "full":
        return TridentResNet(), (torch.randn(1, 3, 224, 224),)
    return TridentResNet(width=16), (torch.randn(1, 3, 64, 64),)
