"""Names of older libraries: they have to work as they did."""

import collections

import numpy as np
import torch
import torch.nn as nn
from torch._six import container_abcs, string_classes


class OldNames(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size if isinstance(size, container_abcs.Sequence) else (size, size)
        self.weight = nn.Parameter(torch.ones(np.int(3), dtype=torch.float32))
        self.scale = np.float(0.5)

    def forward(self, x):
        assert not isinstance(x, string_classes)
        assert isinstance(self.size, collections.Sequence)
        return nn.functional.adaptive_avg_pool2d(x, self.size) * self.scale + self.weight.sum()


TESTCASES = [
    (OldNames, lambda: ([2], {}), lambda: ([torch.rand([4, 3, 4, 4])], {}), False),
]
