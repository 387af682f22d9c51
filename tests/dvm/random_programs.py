"""Random eager programs: operators, writes, views, reads and branches in one stream.

A program is a seed: the same choices are made again for the same shapes, so that it runs once
eagerly and once otherwise.  All operators are continuous, so that results may be compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

UNARY = (
    torch.tanh,
    torch.sigmoid,
    torch.relu,
    torch.sin,
    torch.abs,
    torch.neg,
    F.gelu,
    F.silu,
    lambda x: x * 0.5,
    lambda x: 1 - x,
    lambda x: x.clamp(-1, 1),
    lambda x: x.double().float(),
    lambda x: x.clone(),
    lambda x: x.contiguous(),
    lambda x: torch.where(x > 5, x, x * 0.25),
)
BINARY = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.add(x, y, alpha=0.5),
    lambda x, y: torch.lerp(x, y, 0.25),
)
ROWS = (
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.amax(0),
    lambda x: x.sum(0, keepdim=True) * 0.1,
    lambda x: x.softmax(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.var(-1, keepdim=True, correction=0),
)
VIEWS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.t(),
    lambda x: x[0],
    lambda x: x[1:],
    lambda x: x[:, ::2],
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: x.expand(2, *x.shape)[1],
    lambda x: x.detach(),
    lambda x: x.data,
    lambda x: x.chunk(2)[0],
    lambda x: x.transpose(0, 1).transpose(0, 1),
)
WRITES: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda x, y: x.add_(y, alpha=0.5),
    lambda x, y: x.mul_(0.5),
    lambda x, y: x.relu_(),
    lambda x, y: x.tanh_(),
    lambda x, y: x.copy_(y),
    lambda x, y: x.zero_(),
    lambda x, y: x.fill_(0.5),
    lambda x, y: x.sub_(y),
    lambda x, y: x.clamp_(-1, 1),
    lambda x, y: x.__setitem__(0, 0.25),
    lambda x, y: torch.add(x.clone(), y, out=x),
    lambda x, y: x.uniform_(),
)
RANDOM = (
    torch.rand_like,
    torch.randn_like,
    lambda x: F.dropout(x, 0.5),
    lambda x: torch.rand(x.shape),
)


class Program:
    """One program; ``run`` returns all tensors that it holds at its end."""

    def __init__(self, seed: int, steps: int = 40) -> None:
        self.seed, self.steps = seed, steps

    def run(self, rows: int, columns: int) -> tuple[list[Tensor], list[Any]]:
        """The tensors, and what the program has read."""
        torch.manual_seed(self.seed)
        self.random = random.Random(self.seed)
        self.pool = [
            torch.randn(rows, columns),
            torch.randn(columns, rows).t(),
            torch.randn(rows, 1),
        ]
        self.pool.append(torch.randn(columns))
        self.read: list[Any] = []
        actions = (
            [self.unary] * 6
            + [self.binary] * 6
            + [self.rows] * 3
            + [self.view] * 4
            + [self.write] * 3
            + [self.branch, self.product, self.joined, self.drop, self.drop, self.looked, self.draw]
        )
        for _ in range(self.steps):
            self.random.choice(actions)()
        return self.pool, self.read

    def pick(self, test: Callable[[Tensor], bool] = lambda x: True) -> Tensor | None:
        found = [x for x in self.pool if test(x)]
        return self.random.choice(found) if found else None

    def matrix(self) -> Tensor | None:
        return self.pick(lambda x: x.dim() == 2 and x.shape[0] > 1 and x.shape[1] > 1)

    def keep(self, made: Tensor) -> None:
        if made.numel() <= 1 << 14 and made.dtype is torch.float32:
            self.pool.append(made)
        if len(self.pool) > 12:
            del self.pool[self.random.randrange(len(self.pool))]

    def unary(self) -> None:
        x = self.pick()
        assert x is not None
        self.keep(self.random.choice(UNARY)(x))

    def partner(self, x: Tensor) -> Tensor:
        def fits(y: Tensor) -> bool:
            try:
                return torch.broadcast_shapes(x.shape, y.shape) == x.shape
            except RuntimeError:
                return False

        found = self.pick(fits)
        return x if found is None else found

    def binary(self) -> None:
        x = self.pick()
        assert x is not None
        y = self.partner(x)
        self.keep(self.random.choice(BINARY)(*((x, y) if self.random.random() < 0.5 else (y, x))))

    def rows(self) -> None:
        x = self.matrix()
        if x is not None:
            self.keep(self.random.choice(ROWS)(x))

    def view(self) -> None:
        x = self.matrix()
        if x is not None:
            self.keep(self.random.choice(VIEWS)(x))

    def write(self) -> None:
        x = self.pick(lambda x: x.dim() > 0 and x.shape[0] > 0)
        if x is not None:
            self.random.choice(WRITES)(x, self.partner(x))

    def branch(self) -> None:
        x = self.pick()
        assert x is not None
        self.read.append(float(x.double().mean()))
        if x.double().mean() > 0.01:
            self.keep(torch.tanh(x))
        else:
            self.keep(x - 1)

    def product(self) -> None:
        x = self.matrix()
        if x is not None:
            self.keep(torch.tanh(x @ (x.t() @ x) * 0.01))

    def joined(self) -> None:
        x = self.matrix()
        if x is not None:
            self.keep(torch.cat([x, torch.tanh(x)]) if x.shape[0] < 40 else torch.stack([x, x])[0])

    def drop(self) -> None:
        if len(self.pool) > 3:
            del self.pool[self.random.randrange(len(self.pool))]

    def looked(self) -> None:
        x = self.pick()
        assert x is not None
        how = self.random.choice(
            (lambda: x.tolist(), lambda: x.numpy().tolist(), lambda: list(x.shape))
        )
        self.read.append(how())

    def draw(self) -> None:
        x = self.pick()
        assert x is not None
        self.keep(self.random.choice(RANDOM)(x))
