"""Straight-line networks: an MLP, convolutions with batch norm, a residual block."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from _paritybench_helpers import _mock_layer, patch_functional

patch_functional()


class Perceptron(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class ConvNorm(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Residual(nn.Module):
    def __init__(self, block, width):
        super().__init__()
        self.block = block
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x):
        return x + self.scale * self.block(x)


TESTCASES = [
    # (nn.Module, init_args, forward_args, jit_compiles)
    (Perceptron, lambda: ([4], {"depth": 3}), lambda: ([torch.rand([4, 4])], {}), True),
    (ConvNorm, lambda: ([4, 8], {}), lambda: ([torch.rand([4, 4, 4, 4])], {}), True),
    (
        Residual,
        lambda: ([], {"block": _mock_layer(), "width": 4}),
        lambda: ([torch.rand([4, 4, 4, 4])], {}),
        True,
    ),
]
