"""ALIGN (Jia et al., 2021): a text tower (BERT) and an image tower (EfficientNet) in one space."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bert import Bert, BertConfig, BertOutput
from .seeding import Example, Size, seeded


@dataclass(frozen=True)
class Stage:
    """One stage of EfficientNet-B0 before scaling (Tan and Le, 2019, table 1)."""

    kernel: int
    inputs: int
    outputs: int
    stride: int
    expansion: int
    repeats: int


B0 = (
    Stage(3, 32, 16, 1, 1, 1),
    Stage(3, 16, 24, 2, 6, 2),
    Stage(5, 24, 40, 2, 6, 2),
    Stage(3, 40, 80, 2, 6, 3),
    Stage(5, 80, 112, 1, 6, 3),
    Stage(5, 112, 192, 2, 6, 4),
    Stage(3, 192, 320, 1, 6, 1),
)


@dataclass
class VisionConfig:
    """Scaling of EfficientNet; the defaults are those of B7, which ALIGN uses."""

    width: float = 2.0
    depth: float = 3.1
    divisor: int = 8
    squeeze: float = 0.25
    stages: tuple[Stage, ...] = field(default=B0)

    def filters(self, channels: int) -> int:
        """Channels scaled by the width, rounded to the divisor, never down by over a tenth."""
        scaled = channels * self.width
        rounded = max(self.divisor, int(scaled + self.divisor / 2) // self.divisor * self.divisor)
        return rounded + self.divisor if rounded < 0.9 * scaled else rounded

    def repeats(self, repeats: int) -> int:
        return math.ceil(self.depth * repeats)


@dataclass
class AlignOutput:
    """Similarities of every text with every image, and the embeddings that gave them."""

    logits_per_image: Tensor
    logits_per_text: Tensor
    text_embeddings: Tensor
    image_embeddings: Tensor
    text: BertOutput
    loss: Tensor | None = None


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate computed from the means of all."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.expand(F.silu(self.reduce(self.squeeze(x))))
        return torch.mul(x, torch.sigmoid(gate))


class MBConv(nn.Module):
    """Inverted residual: expand, depthwise, squeeze-excite, project."""

    def __init__(self, config: VisionConfig, stage: Stage, first: bool) -> None:
        super().__init__()
        outputs = config.filters(stage.outputs)
        inputs = config.filters(stage.inputs) if first else outputs
        self.stride = stage.stride if first else 1
        self.expands = stage.expansion != 1
        self.residual = self.stride == 1 and inputs == outputs
        inner = inputs * stage.expansion
        if self.expands:
            self.expand = nn.Conv2d(inputs, inner, 1, bias=False)
            self.expand_norm = nn.BatchNorm2d(inner, eps=1e-3, momentum=0.01)
        self.depthwise = nn.Conv2d(
            inner, inner, stage.kernel, self.stride, stage.kernel // 2, groups=inner, bias=False
        )
        self.depthwise_norm = nn.BatchNorm2d(inner, eps=1e-3, momentum=0.01)
        self.excite = SqueezeExcite(inner, max(1, int(inputs * config.squeeze)))
        self.project = nn.Conv2d(inner, outputs, 1, bias=False)
        self.project_norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.expands:
            y = F.silu(self.expand_norm(self.expand(y)))
        y = self.excite(F.silu(self.depthwise_norm(self.depthwise(y))))
        y = self.project_norm(self.project(y))
        return y + x if self.residual else y


class EfficientNet(nn.Module):
    """Images (batch, 3, height, width) to features (batch, channels)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        stem = config.filters(config.stages[0].inputs)
        self.stem = nn.Conv2d(3, stem, 3, 2, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(stem, eps=1e-3, momentum=0.01)
        self.blocks = nn.ModuleList(
            MBConv(config, stage, first=repeat == 0)
            for stage in config.stages
            for repeat in range(config.repeats(stage.repeats))
        )
        self.channels = config.filters(config.stages[-1].outputs)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = F.silu(self.stem_norm(self.stem(pixels)))
        for block in self.blocks:
            hidden = block(hidden)
        return F.adaptive_avg_pool2d(hidden, 1).flatten(1)


class Align(nn.Module):
    """Contrasts token ids (texts, length) with images (images, 3, height, width)."""

    def __init__(self, text: BertConfig, vision: VisionConfig) -> None:
        super().__init__()
        self.text_model = Bert(text)
        self.vision_model = EfficientNet(vision)
        self.text_projection = nn.Linear(text.hidden, self.vision_model.channels)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(
        self, ids: Tensor, pixels: Tensor, mask: Tensor | None = None, return_loss: bool = False
    ) -> AlignOutput:
        image = self.vision_model(pixels)
        described = self.text_model(ids, mask=mask)
        text = self.text_projection(described.last_hidden[:, 0, :])
        image = image / image.norm(p=2, dim=-1, keepdim=True)
        text = text / text.norm(p=2, dim=-1, keepdim=True)
        per_text = torch.matmul(text, image.t()) / self.temperature
        output = AlignOutput(per_text.t(), per_text, text, image, described)
        if return_loss:
            target = torch.arange(per_text.size(0), device=per_text.device)
            losses = [F.cross_entropy(logits, target) for logits in (per_text, per_text.t())]
            output.loss = torch.stack(losses).mean()
        return output


@seeded
def build(size: Size = "small") -> Example:
    """ALIGN-base (64 tokens, 289×289), or a narrow one with every stage (16 tokens, 64×64)."""
    if size == "full":
        text, vision, length, edge = BertConfig(), VisionConfig(), 64, 289
    else:
        text = BertConfig(1000, 64, 12, 4, 128, 64)
        vision, length, edge = VisionConfig(width=0.25, depth=1.0), 16, 64
    ids = torch.randint(1, text.vocabulary, (1, length))
    return Align(text, vision), (ids, torch.randn(1, 3, edge, edge))
