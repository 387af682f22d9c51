"""Programs that reports are made of."""

from __future__ import annotations

import resource

import torch
from torch import nn

TALLY = {"calls": 0}
TOTAL = 0


class Counting(nn.Module):
    """One graph with side effects of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, object]:
        global TOTAL
        TOTAL += 1
        self.calls += 1
        self.log.append(x)
        TALLY["calls"] += 1
        y = self.norm(self.linear(x)) * scale
        return {"y": y, "calls": self.calls}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Deep(nn.Module):
    """Twelve blocks that are built alike, with one parameter that two modules share."""

    def __init__(self, width: int = 8, depth: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.first = nn.Linear(width, width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def decides(x: torch.Tensor) -> torch.Tensor:
    """A split: the data of a tensor decides."""
    if x.sum() > 0:
        return x * 2
    return -x


def meets_two_unknown(x: torch.Tensor) -> torch.Tensor:
    """Two C callables that have no annotation."""
    size = resource.getpagesize()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return x + size + (usage is None)


def doubles(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


def make() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Block(4), (torch.ones(2, 4),)


def make_with_keywords() -> tuple[nn.Module, tuple[()], dict[str, torch.Tensor]]:
    return Block(4), (), {"x": torch.ones(2, 4)}


def make_model() -> nn.Module:
    return Block(4)


def raises(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("no such thing")


def prints(x: torch.Tensor) -> torch.Tensor:
    print("from the program")
    return x


A_NUMBER = 3


def make_number() -> int:
    return A_NUMBER
