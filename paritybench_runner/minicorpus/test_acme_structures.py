"""Results that are no tensors: a dataclass, a named tuple, nested containers, plain numbers."""

import collections
from collections import Iterable
from dataclasses import dataclass

import torch
import torch.nn as nn

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: torch.Tensor
    count: int
    extra: list


class Structured(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        logits = self.head(x)
        return Output(logits, x.size(0), [Pair(logits.sum(), {"x": x}), None])


class Flattening(nn.Module):
    def forward(self, items):
        return list(self.leaves(items))

    def leaves(self, items):
        for item in items:
            if isinstance(item, Iterable) and not isinstance(item, torch.Tensor):
                yield from self.leaves(item)
            else:
                yield item * 2


TESTCASES = [
    (Structured, lambda: ([4], {}), lambda: ([torch.rand([4, 4])], {}), False),
    (
        Flattening,
        lambda: ([], {}),
        lambda: ([], {"items": [torch.rand([2]), (torch.rand([3]), [torch.rand([4])])]}),
        False,
    ),
]
