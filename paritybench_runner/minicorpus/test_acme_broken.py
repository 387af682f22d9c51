"""Cases that eager cannot run: at construction, with its inputs, in the forward pass."""

import torch
import torch.nn as nn


class NeedsMore(nn.Module):
    def __init__(self, width, depth):
        super().__init__()

    def forward(self, x):
        return x


class WrongShape(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(x)


TESTCASES = [
    (NeedsMore, lambda: ([4], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (WrongShape, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (nn.Identity, lambda: ([], {}), lambda: ([torch.rand([4, "4"])], {}), False),
]
