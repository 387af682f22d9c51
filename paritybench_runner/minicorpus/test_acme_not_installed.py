"""A module that exists nowhere: what does not use it runs, what does cannot."""

import torch
import torch.nn as nn

import acme_vision_tools
from acme_vision_tools.layers import Sharpen, sharpen
from torch.nn import layer_that_never_was


class Unaffected(nn.Module):
    def __init__(self):
        super().__init__()
        self.logger = acme_vision_tools.Logger("run")

    def forward(self, x):
        return x.tanh()


class Affected(nn.Module):
    def forward(self, x):
        return sharpen(x)


class Derived(Sharpen):
    pass


TESTCASES = [
    (Unaffected, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (Affected, lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), False),
]
