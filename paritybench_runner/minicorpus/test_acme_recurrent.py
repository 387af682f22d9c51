"""Recurrent networks: a library layer, a loop over cells, a state kept on the module."""

import torch
import torch.nn as nn


class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        output, (hidden, _) = self.rnn(x)
        return self.head(output), hidden


class CellLoop(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.cell = nn.GRUCell(width, width)

    def forward(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for step in range(x.size(1)):
            state = self.cell(x[:, step], state)
            states.append(state)
        return torch.stack(states, dim=1)


class Remembering(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.register_buffer("memory", torch.zeros(width))
        self.last = None

    def forward(self, x):
        mixed = self.mix(x) + self.memory
        self.memory.mul_(0.5).add_(mixed.detach().mean(0), alpha=0.5)
        self.last = mixed.detach()
        return mixed


TESTCASES = [
    (Tagger, lambda: ([4], {}), lambda: ([torch.rand([2, 3, 4])], {}), True),
    (CellLoop, lambda: ([4], {}), lambda: ([torch.rand([2, 3, 4])], {}), True),
    (Remembering, lambda: ([4], {}), lambda: ([torch.rand([3, 4])], {}), False),
]
