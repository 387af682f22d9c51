"""Models of layers that are alike, and how many of their layers are one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Stack(nn.Module):
    """Layers one after another; what they pass on is theirs."""

    def __init__(self, layer: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.outer(F.gelu(self.inner(x))))


class Plain(nn.Module):
    """Its inputs' gradient is laid out anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.gelu(self.inner(x)))


class Attention(nn.Module):
    """With a mask of all layers', sizes as numbers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 2 + mask).softmax(-1)
        mixed = F.dropout(scores, 0.2, self.training) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Attentions(Stack):
    def __init__(self) -> None:
        super().__init__(Attention)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1]).triu(1) * -1e9
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Carrying(nn.Module):
    """Two values pass from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = torch.zeros_like(x)
        for step in self.steps:
            a, b = step(x).chunk(2, -1)
            c = c * a.sigmoid() + b.tanh()
            x = x + c.tanh() * b
        return x, c


class Partly(Stack):
    """Weights of some layers have no gradients."""

    def __init__(self, *frozen: int) -> None:
        super().__init__(Block, 6)
        for k in frozen:
            self.layers[k].requires_grad_(False)


class Shared(Stack):
    """One layer's weights, many times."""

    def __init__(self) -> None:
        super().__init__(Block, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layers[0](x)
        return x


class Scaled(nn.Module):
    """A part of each layer is computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().amax(-1, keepdim=True) + 1
        return torch.tanh(self.linear(x / scale)) * scale + x


class Beginning(Stack):
    """The first layers have no gradients."""

    def __init__(self) -> None:
        super().__init__(Block, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers[:3]:
                x = layer(x)
        for layer in self.layers[3:]:
            x = layer(x)
        return x


class Presents(Stack):
    """What the layers made on the way are results, too; not all of them need a gradient."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Any:
        states, best = [], []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
            best.append(x.argmax(-1))
        return x, states, best


class Chosen(Stack):
    """Of what the layers give, some decides only, and has no gradient."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        votes = 0
        for layer in self.layers:
            a, b = layer(x).relu().add(1).chunk(2, -1)
            x = (a * 2).tanh() + x
            votes = votes + (b * 3).sigmoid()
        return x * votes.argmax(-1, keepdim=True)


class Turned(nn.Module):
    """Passes a view on, whose strides are not those of a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x).transpose(0, 1) * 1.5).transpose(0, 1)


class Pooled(Stack):
    """The last layer's gradient has other strides than its result."""

    def __init__(
        self, pool: Callable[[Tensor], Tensor], layer: Callable[[], nn.Module] = Block
    ) -> None:
        super().__init__(layer)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(super().forward(x))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh() + 1
        y += x
        return y.mul_(2).sigmoid() + x


class Normed(nn.Module):
    """Writes its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).flatten(0, 1)).view(x.shape).relu()


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x).relu() @ self.linear.weight
        return x + y.float().tanh()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False).tanh() + x


class Filtered(nn.Module):
    """How large tensors inside of it are depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return x + y * y.masked_select(y > 0).mean() + y.sigmoid() * 3


class Numbered(Stack):
    """Layers that differ in a number alone."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = (layer(x).tanh() * (k + 0.5)).sigmoid() + x
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], int | None, int | None]] = {
    # Name: how it is built, and how many of its layers are one operator.  Where sizes are symbols,
    # the first layer's input differs from the others': its width is one, too.  None: that depends
    # on the strides that this version of torch gives to what is computed from a transposed tensor.
    "blocks": (lambda: Stack(Block), 4, 3),
    "attention": (Attentions, 4, 3),
    "two values carried": (Carrying, 3, 3),
    "first frozen": (lambda: Partly(0, 1), 6, 4),
    "one frozen in the middle": (lambda: Partly(3), 5, 4),
    "all but one frozen": (lambda: Partly(0, 1, 2, 4, 5), 5, 4),
    "shared weights": (Shared, 4, 3),
    "no_grad in each layer": (lambda: Stack(Scaled, 5), 5, 4),
    "no_grad for some layers": (Beginning, 2, 2),
    "results on the way": (Presents, 4, 3),
    "a result without gradient": (Chosen, 0, 0),
    "views passed on": (lambda: Stack(Turned, 5), 5, 4),
    "gradient of a mean": (lambda: Pooled(lambda x: x.mean(1)), 4, 3),
    "gradient of a transposed": (lambda: Pooled(lambda x: x.transpose(0, 2) * 2), None, 0),
    "gradient of a transposed, but for the last": (
        lambda: Pooled(lambda x: x.transpose(0, 2) * 2, Plain),
        None,
        2,
    ),
    "gradient of one element": (lambda: Pooled(lambda x: x[:, 0]), 4, 3),
    "in place": (lambda: Stack(InPlace), 0, 0),
    "running statistics": (lambda: Stack(Normed), 0, 0),
    "autocast in each layer": (lambda: Stack(Cast), 0, 0),
    "checkpoints": (lambda: Stack(Checkpointed), 0, 0),
    "sizes of data": (lambda: Stack(Filtered), 0, 0),
    "other numbers": (Numbered, 0, 0),
}
ROUNDED = {"autocast in each layer": {"rtol": 0.02, "atol": 0.2}}
