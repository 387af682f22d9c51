"""Random numbers: dropout, noise, and a module that eager itself cannot repeat."""

import os

import torch
import torch.nn as nn
import torch.nn.functional as F


class Dropping(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.drop(self.first(x)), 0.1, training=True)


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


class Unrepeatable(nn.Module):
    def forward(self, x):
        return x + int.from_bytes(os.urandom(2), "little")


TESTCASES = [
    (Dropping, lambda: ([4], {}), lambda: ([torch.rand([4, 4])], {}), True),
    (Noisy, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), True),
    (Unrepeatable, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
]
