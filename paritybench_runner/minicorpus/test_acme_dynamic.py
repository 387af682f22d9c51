"""Programs whose shape or path depends on data; and one that only indexes with integers."""

import torch
import torch.nn as nn


class Threshold(nn.Module):
    def forward(self, x):
        if x.mean() > 0.5:
            return x * 2
        return x - 1


class Selected(nn.Module):
    def forward(self, x):
        return x[x > 0.5].sum(), x.nonzero().float().mean()


class ToNumpy(nn.Module):
    def forward(self, x):
        return torch.from_numpy(x.detach().numpy() * 2)


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def forward(self, x):
        return x[:, self.order]


TESTCASES = [
    (Threshold, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (Selected, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (ToNumpy, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (Gathered, lambda: ([], {}), lambda: ([torch.rand([4, 3])], {}), True),
]
