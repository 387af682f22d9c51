"""Attention of few rows: functions, sizes, how many kernels it becomes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from product_cases import ProductCase, Tensors

__all__ = ["DECODING", "LARGE_DECODING"]

attention = F.scaled_dot_product_attention


def grouped(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, heads, length, width = x.shape
    x = x[:, :, None].expand(batch, heads, times, length, width)
    return x.reshape(batch, heads * times, length, width)


def with_new(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, y: torch.Tensor, z: torch.Tensor
) -> Tensors:
    """Keys and values that are the parts of a ``cat``, repeated for grouped queries."""
    keys, values = torch.cat([k, y], 2), torch.cat([v, z], 2)
    return [attention(q, grouped(keys, 2), grouped(values, 2))]


def by_positions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Positions before heads in memory, and heads as rows after."""
    made = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return [made.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1) * 2]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    rows, length = q.shape[2], k.shape[2]
    mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    return [attention(q, k, v, mask)]


def nothing_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    mask = torch.arange(k.shape[2]) < torch.tensor([[0], [7]])
    return [attention(q, k, v, mask[:, None, None])]


def added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> Tensors:
    return [attention(q, k, v, m, scale=0.3)]


def scaled(q: torch.Tensor, k: torch.Tensor, s: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Keys that are computed as they are read."""
    return [attention(q, k * s, v.tanh())]


DECODING: dict[str, ProductCase] = {
    "one query": ProductCase(
        lambda q, k, v: [attention(q, k, v)], ((2, 3, 1, 16), (2, 3, 40, 16), (2, 3, 40, 16))
    ),
    "odd sizes": ProductCase(
        lambda q, k, v: [attention(q, k, v)], ((1, 5, 3, 20), (1, 5, 33, 20), (1, 5, 33, 20))
    ),
    "one position": ProductCase(
        lambda q, k, v: [attention(q, k, v)], ((2, 3, 1, 8), (2, 3, 1, 8), (2, 3, 1, 8))
    ),
    "one head": ProductCase(
        lambda q, k, v: [attention(q, grouped(k, 4), grouped(v, 4))],
        ((1, 4, 2, 16), (1, 1, 50, 16), (1, 1, 50, 16)),
    ),
    "grouped": ProductCase(
        lambda q, k, v: [attention(q, grouped(k, 3), grouped(v, 3))],
        ((2, 6, 2, 16), (2, 2, 70, 16), (2, 2, 70, 16)),
    ),
    "long context": ProductCase(
        lambda q, k, v: [attention(q, grouped(k, 3), grouped(v, 3))],
        ((1, 6, 1, 16), (1, 2, 1100, 16), (1, 2, 1100, 16)),
        1,
        2,
    ),
    "long with a mask": ProductCase(
        added, ((1, 2, 3, 16), (1, 2, 700, 16), (1, 2, 700, 16), (1, 1, 3, 700)), 1, 2
    ),
    "added": ProductCase(added, ((2, 4, 3, 16), (2, 4, 50, 16), (2, 4, 50, 16), (3, 50))),
    "causal": ProductCase(causal, ((2, 4, 3, 16), (2, 4, 50, 16), (2, 4, 50, 16))),
    "nothing left": ProductCase(
        nothing_left, ((2, 2, 1, 16), (2, 2, 600, 16), (2, 2, 600, 16)), 1, 2
    ),
    "cat": ProductCase(
        with_new,
        ((2, 4, 1, 16), (2, 2, 40, 16), (2, 2, 40, 16), (2, 2, 1, 16), (2, 2, 1, 16)),
    ),
    "positions first": ProductCase(
        by_positions, ((2, 1, 4, 16), (2, 40, 4, 16), (2, 40, 4, 16)), 1, 2
    ),
    "computed": ProductCase(scaled, ((2, 4, 1, 16), (2, 4, 50, 16), (50, 1), (2, 4, 50, 16))),
}

# As decoding is; these are compiled and not run.
LARGE_DECODING: dict[str, ProductCase] = {
    "decoding 128 wide": ProductCase(
        lambda q, k, v: [attention(q, grouped(k, 4), grouped(v, 4))],
        ((1, 32, 1, 128), (1, 8, 4096, 128), (1, 8, 4096, 128)),
    ),
    "decoding 256 wide": ProductCase(
        lambda q, k, v: [attention(q, k, v)],
        ((1, 4, 4, 256), (1, 4, 2048, 256), (1, 4, 2048, 256)),
    ),
}
