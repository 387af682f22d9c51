"""Side effects: a counter, a print, a list that grows, an argument changed in place."""

import torch
import torch.nn as nn


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + 1


class Talking(nn.Module):
    def forward(self, x):
        print("input of", x.dim(), "dimensions")
        return x.exp()


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.shapes = []

    def forward(self, x):
        self.shapes = [tuple(x.shape)]
        return x.t()


class InPlace(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x


TESTCASES = [
    (Counting, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (Talking, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (Collecting, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (InPlace, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), True),
]
