"""Layers as models have them, trained and not: as in eager mode, and not operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import magjit
import magjit_dvm.schedule as scheduling
from magjit_dvm.by_aten import by_aten

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


class Block(nn.Module):
    """A convolution, its norm, and what is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


class Norm(nn.Module):
    """Of vectors, large and small."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(x))


class Pyramid(nn.Module):
    """Means of the whole image, as large as it again."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv, self.mode = nn.Conv2d(8, 8, 1), mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.adaptive_avg_pool2d(self.conv(x), 4)
        return torch.cat([F.interpolate(y, x.shape[2:], mode=self.mode), x], 1)


class Coordinates(nn.Module):
    """Where each pixel is, beside what it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = x.shape
        rows = torch.arange(height, device=x.device, dtype=x.dtype).view(1, 1, -1, 1) / (height - 1)
        columns = torch.arange(width, device=x.device, dtype=x.dtype).view(1, 1, 1, -1) / width
        places = [one.expand(batch, 1, height, width) * 2 - 1 for one in (rows, columns)]
        return torch.cat([x * 2, *places], 1)


class Reordered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [x[..., k::2, m::2] for m in range(2) for k in range(2)]
        return torch.cat(parts, 1)


class Biased(nn.Module):
    """A bias of relative positions, whose gradient is added up in a table of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(49, 4))
        self.register_buffer("index", torch.randint(0, 49, (16, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.table[self.index.view(-1)].view(16, 16, -1).permute(2, 0, 1)
        return (x.view(-1, 1, 16, 16) + bias).softmax(-1)


class Recurrent(nn.Module):
    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer(16, 16, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        out, state = self.layer(x.reshape(8, -1, 16))
        return F.relu(out), state


IMAGES = (4, 8, 32, 32)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "block": (Block, IMAGES),
    "norm of few": (Norm, (64, 1024)),
    "norm of many": (Norm, (4096, 1024)),
    "bilinear": (lambda: Pyramid("bilinear"), IMAGES),
    "nearest": (lambda: Pyramid("nearest"), IMAGES),
    "coordinates": (Coordinates, IMAGES),
    "reordered": (Reordered, IMAGES),
    "biased": (Biased, (8, 256)),
    "lstm": (lambda: Recurrent(nn.LSTM), (8, 64)),
    "gru": (lambda: Recurrent(nn.GRU), (8, 64)),
}
"""Model, and shape of its input."""
ORDERS = [
    (name, order)
    for name, (_, shape) in CASES.items()
    for order in (torch.contiguous_format, torch.channels_last)[: 1 + (len(shape) == 4)]
]


@pytest.fixture(autouse=True)
def exactly() -> Iterator[None]:
    """cuDNN's products of float32 as such."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs of groups that ran operator by operator."""
    found: list[str] = []

    def told(gm: Any, group: Any) -> Callable[..., Any]:
        run = by_aten(gm, group)

        def tell(*arguments: Any) -> Any:
            found.append(str(group.program))
            return run(*arguments)

        return tell

    monkeypatch.setattr(scheduling, "by_aten", told)
    return found


def played(call: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Results, gradients and buffers."""
    torch.manual_seed(3)
    x = x.clone().requires_grad_(model.training)
    results = torch.utils._pytree.tree_leaves(call(x))
    gradients: list[Any] = []
    if model.training:
        leaves = [x, *model.parameters()]
        loss = sum(one.square().sum() + one.sum() for one in results)
        gradients = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    kept = [*results, *(one for one in gradients if one is not None), *model.buffers()]
    return [one.detach().clone() for one in kept]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("name", "order"), ORDERS, ids=str)
def test_as_in_eager_mode(
    name: str, train: bool, order: torch.memory_format, left: list[str]
) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    model, twin = make().cuda().train(train), make().cuda().train(train)
    twin.load_state_dict(model.state_dict())
    compiled = magjit.compile(model, backend="dvm")
    for turn in range(3):
        x = torch.randn(shape, device="cuda").contiguous(memory_format=order)
        with torch.set_grad_enabled(train):
            made, expected = played(compiled, model, x), played(twin, twin, x)
        for got, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(
                got, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item()
            )
        assert not left, f"turn {turn}"
