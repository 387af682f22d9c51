"""Models that the examples lack: vision, a language model's block, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VisionLayer(nn.Module):
    """Attention and a perceptron, each behind a norm (Dosovitskiy et al., 2020)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.mixed(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return result


class VisionTransformer(nn.Module):
    """Images (batch, 3, side, side) to class scores."""

    def __init__(self, side: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.ModuleList(VisionLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x)[:, 0])
        return result


class UNet(nn.Module):
    """Images to as many numbers a pixel; group norms, sizes halved and doubled again."""

    def __init__(self, width: int, results: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(self.level, [3, *widths[:-1]], widths))
        self.middle = self.level(4 * width, 8 * width)
        given = [12 * width, 6 * width, 3 * width]
        self.up = nn.ModuleList(map(self.level, given, reversed(widths)))
        self.last = nn.Conv2d(width, results, 1)

    @staticmethod
    def level(given: int, made: int) -> nn.Module:
        first, second = (nn.Conv2d(one, made, 3, padding=1) for one in (given, made))
        norms = [nn.GroupNorm(8, made) for _ in range(2)]
        return nn.Sequential(first, norms[0], nn.SiLU(), second, norms[1], nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level in self.down:
            kept.append(level(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        result: Tensor = self.last(x)
        return result


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention, gated perceptron (Touvron et al., 2023)."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(2))
        self.mixed = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        powers = torch.arange(0, self.size, 2) / self.size
        self.register_buffer("frequencies", 10000.0**-powers)

    def normed(self, x: Tensor, number: int) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        weight: Tensor = self.norms[number]
        return x * scale * weight

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        assert isinstance(self.frequencies, Tensor)
        angles = torch.arange(length, device=x.device)[:, None] * self.frequencies
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mixed = self.mixed(self.normed(x, 0)).view(batch, length, 3, self.heads, self.size)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        query, key = self.turned(query, cos, sin), self.turned(key, cos, sin)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.normed(x, 1)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class MixtureOfExperts(nn.Module):
    """Experts, a gate and a tower for each task (Ma et al., 2018), rows of features to scores."""

    def __init__(
        self, width: int, experts: int, hidden: tuple[int, int], tasks: int, tower: int
    ) -> None:
        super().__init__()
        first, second = hidden
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU())
            for _ in range(experts)
        )
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(second, tower), nn.ReLU(), nn.Linear(tower, 1))
            for _ in range(tasks)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        scores = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            shares = gate(x).softmax(-1).unsqueeze(-1)
            scores.append(torch.sigmoid(tower((answers * shares).sum(1))))
        return scores
