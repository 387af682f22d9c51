"""Python in the forward pass: options, recursion, closures, mixed precision, no gradients."""

import functools
import warnings

import torch
import torch.nn as nn
from torch.autograd import Variable
from _paritybench_helpers import _mock_config


class Configured(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Tanh()})

    def forward(self, x):
        for name in self.config.order:
            x = self.parts[name](x)
        if self.config.verbose:
            warnings.warn("verbose")
        return x


class Recursive(nn.Module):
    def forward(self, x, depth=3):
        if depth == 0:
            return x
        half = functools.partial(torch.mul, other=0.5)
        return half(self.forward(x, depth - 1)) + depth


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            features = self.body(Variable(x))
        return self.head(features)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return Straight.apply(self.head(x))


TESTCASES = [
    (
        Configured,
        lambda: ([], {"config": _mock_config(order=["b", "a"], verbose=False)}),
        lambda: ([torch.rand([4, 4])], {}),
        False,
    ),
    (Recursive, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (Frozen, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), True),
    (Rounded, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
]
