"""Attention by hand, torch's own, and an encoder layer."""

import math

import torch
import torch.nn as nn


class HandMade(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask=None):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        return self.out(mixed), scores


class TorchAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        mixed, weights = self.attention(x, x, x)
        return {"mixed": mixed, "weights": weights}


TESTCASES = [
    (HandMade, lambda: ([8, 2], {}), lambda: ([torch.rand([2, 5, 8])], {}), True),
    (TorchAttention, lambda: ([8], {}), lambda: ([torch.rand([2, 5, 8])], {}), True),
    (
        nn.TransformerEncoderLayer,
        lambda: ([], {"d_model": 8, "nhead": 2, "dim_feedforward": 16}),
        lambda: ([torch.rand([5, 2, 8])], {}),
        True,
    ),
]
