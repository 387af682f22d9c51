"""Random graphs of pointwise operators, reductions, movements and matrix products."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case

__all__ = ["random_case"]

Step = Callable[[random.Random, list[torch.Tensor]], torch.Tensor]


def _pick(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    return rng.choice(values[-4:])


def _unary(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    return rng.choice([torch.tanh, torch.sigmoid, F.gelu, F.silu, torch.relu, torch.neg])(x)


def _binary(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    same = [one for one in values if one.shape == x.shape]
    y = rng.choice(same)
    return rng.choice([torch.add, torch.mul, torch.sub, torch.maximum])(x, y)


def _normalise(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    dim = rng.randrange(x.dim())
    return rng.choice(
        [
            lambda: torch.softmax(x, dim),
            lambda: x - x.mean(dim, keepdim=True),
            lambda: x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1),
            lambda: x / (1 + x.abs().amax(dim, keepdim=True)),
        ]
    )()


def _reduce(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    if x.dim() < 2:
        return x + 1
    dim = rng.randrange(x.dim())
    return rng.choice([torch.mean, torch.amax, torch.amin])(x, dim)


def _reshape(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    rest, sizes = x.numel(), []
    while rest > 1 and len(sizes) < 4:
        size = rng.choice([k for k in range(1, rest + 1) if rest % k == 0])
        sizes.append(size)
        rest //= size
    return x.reshape([*sizes, rest])


def _permute(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    order = list(range(x.dim()))
    rng.shuffle(order)
    return x.permute(order)


def _move(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    dim = rng.randrange(x.dim())
    size = x.shape[dim]
    start = rng.randrange(size)
    moves = [
        lambda: x.flip(dim),
        lambda: torch.roll(x, rng.randrange(-3, 4), dim),
        lambda: x.narrow(dim, start, rng.randrange(1, size - start + 1)),
        lambda: torch.cat([x, x.narrow(dim, start, size - start) * 2], dim),
        lambda: F.pad(x, (1, 2), value=0.5),
        lambda: x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:]).clone(),
        lambda: torch.index_select(x, dim, torch.tensor([start, 0, size - 1])),
        lambda: x.repeat_interleave(2, dim),
    ]
    return rng.choice(moves)() if x.numel() < 2000 else x * 2


def _product(rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
    x = _pick(rng, values)
    if x.dim() < 2:
        return x * 3
    return x @ x.transpose(-1, -2) / x.shape[-1]


STEPS: list[Step] = [
    _unary, _unary, _binary, _binary, _normalise, _reduce, _reshape, _permute, _move, _move,
    _product,
]  # fmt: skip


def random_case(seed: int) -> Case:
    """A graph of some ten steps; the same for a seed."""

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        rng = random.Random(seed)
        values = list(inputs)
        for _ in range(rng.randrange(4, 14)):
            values.append(rng.choice(STEPS)(rng, values))
        return [(values[-1] * 1.0).contiguous(), values[rng.randrange(2, len(values))] + 0.5]

    def arguments() -> list[torch.Tensor]:
        rng = random.Random(seed)
        shape = [rng.choice([1, 2, 3, 4, 6, 8]) for _ in range(rng.randrange(2, 4))]
        return [torch.randn(shape), torch.randn(shape)]

    return Case(function, arguments, None)
