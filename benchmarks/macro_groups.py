"""Groups of operators around products, and whole models, for macro_kernels.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"


# -- groups ---------------------------------------------------------------------------------------


class BiasGelu(nn.Module):
    """BERT-large's first feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.up(x))


class BiasRelu(nn.Module):
    """OPT 1.3B's first feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2048, 8192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.up(x))


class Residual(nn.Module):
    """Llama 8B's output projection of attention, and the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4096, 4096, bias=False)

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        attended, residual = given
        out: torch.Tensor = self.out(attended)
        return residual + out


class SwiGLU(nn.Module):
    """Qwen 0.5B's gated feed-forward layer, up to the product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(896, 4864, bias=False)
        self.up = nn.Linear(896, 4864, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up: torch.Tensor = self.up(x)
        return F.silu(self.gate(x)) * up


class RotaryQKV(nn.Module):
    """Llama 8B's projections, queries and keys turned by their positions."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4096, 4096, bias=False)
        self.k = nn.Linear(4096, 1024, bias=False)
        self.v = nn.Linear(4096, 1024, bias=False)
        powers = torch.arange(0, 128, 2).float() / 128
        angles = torch.outer(torch.arange(16384).float(), 500000.0**-powers)
        turns = torch.cat([angles, angles], -1)
        self.register_buffer("cos", turns.cos())
        self.register_buffer("sin", turns.sin())

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        heads = x.view(rows, -1, 128)
        swapped = torch.cat([-heads[..., 64:], heads[..., :64]], -1)
        cos, sin = self.cos[:rows, None], self.sin[:rows, None]
        return heads * cos + swapped * sin

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.turned(self.q(x)), self.turned(self.k(x)), self.v(x)


class RowStatistics(nn.Module):
    """Scores of 8192 classes, with each row's greatest one and sum of exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(1024, 8192, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.classes(x)
        most = scores.amax(-1, keepdim=True)
        return scores, most, (scores - most).float().exp().sum(-1)


GROUPS: dict[str, tuple[type[nn.Module], int]] = {
    "bias, GELU": (BiasGelu, 1024),
    "bias, ReLU": (BiasRelu, 2048),
    "residual": (Residual, 4096),
    "SwiGLU": (SwiGLU, 896),
    "QKV, rotary": (RotaryQKV, 4096),
    "row statistics": (RowStatistics, 1024),
}
FAMILIES = ("linear_bias", "linear_gelu", "linear_relu", "linear_residual", "swiglu")
FAMILIES_OF_MODELS = ("linear_gelu_tanh", "linear_bias_residual")


# -- models ---------------------------------------------------------------------------------------


class Resized(nn.Module):
    """A vision transformer whose positions are resized to the image's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x, interpolate_pos_encoding=True).last_hidden_state


class Encoded(nn.Module):
    """A text encoder's last states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens).last_hidden_state


LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
MODELS = ("BERT-large", "ALBERT-large", "ViT-base")
SHAPES_OF_MODELS, IMAGES = 25, 32


def model_of(name: str) -> nn.Module:
    """A model at its published size, with random weights."""
    import transformers

    torch.manual_seed(0)
    if name == "BERT-large":
        config = transformers.BertConfig(**LARGE)
        return Encoded(transformers.BertModel(config, add_pooling_layer=False))
    if name == "ALBERT-large":
        config = transformers.AlbertConfig(**LARGE, embedding_size=128)
        return Encoded(transformers.AlbertModel(config, add_pooling_layer=False))
    vit = transformers.ViTModel(transformers.ViTConfig(), add_pooling_layer=False)
    return Resized(vit)


def rows_of_groups(count: int) -> list[int]:
    """Random numbers of rows; the first ones suit all, as what programs are compiled with."""
    numbers = random.Random(7)
    rows = [2048, 1024, *(max(2, round(16384 ** numbers.random())) for _ in range(count - 2))]
    return rows[: max(1, count)]


def group_of(name: str, dtype: torch.dtype, rows: Sequence[int]) -> tuple[nn.Module, list[Any]]:
    """A group with random weights, and its inputs."""
    make, width = GROUPS[name]
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype).eval()

    def operand(m: int) -> torch.Tensor:
        return torch.randn(m, width, device=DEVICE, dtype=dtype)

    pairs = make is Residual
    return model, [(operand(m), operand(m)) if pairs else operand(m) for m in rows]


def inputs_of(name: str, seed: int, count: int) -> list[torch.Tensor]:
    """Batches of 32: sequences of 1 to 512 tokens, or images of 32 to 384 pixels a side."""
    chosen, found = random.Random(seed), []
    for _ in range(count):
        if name.startswith("ViT"):
            side = chosen.randint(32, 384)
            image = torch.randn(IMAGES, 3, side, side, device=DEVICE, dtype=torch.float16)
            found.append(image)
        else:
            found.append(torch.randint(0, 30000, (IMAGES, chosen.randint(1, 512)), device=DEVICE))
    return found
