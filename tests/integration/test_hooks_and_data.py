"""Hooks on a program's own tensors, and tensors whose data is replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import magjit


class OldBackwardHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_backward_hook(self.hook)  # type: ignore[arg-type]
        self.seen: list[Any] = []

    def hook(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        self.seen.append(outputs[0].sum().item())
        return tuple(None if g is None else g * 2 for g in inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, 4).tril())
        self.handle: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class TensorHook(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.register_hook(lambda grad: grad * 3)
        return y.sin()


class HookOfAnInput(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda grad: grad * 3)
        return self.linear(x)


class RemovedHook(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.register_hook(lambda grad: grad * 3).remove()
        return y.sin()


class KeptHook(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.handle = y.register_hook(lambda grad: grad * 3)
        return y.sin()


class HookThenInPlace(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.register_hook(lambda grad: grad * 3)
        return y.mul_(2).sin()


class MaskedData(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data *= self.mask
        return self.linear(x)


class ReplacedData(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.weight.data = self.linear.weight.data * 0.9
        return self.linear(x)


WHOLE = (OldBackwardHook, TensorHook, HookOfAnInput, MaskedData, ReplacedData)
PARTS = (RemovedHook, KeptHook, HookThenInPlace)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("cls", WHOLE + PARTS, ids=lambda cls: cls.__name__)
def test_like_eager(cls: type[nn.Module], backend: str) -> None:
    eager, model = cls(), cls()
    model.load_state_dict(copy.deepcopy(eager.state_dict()))
    compiled = magjit.compile(model, backend=backend)
    for _ in range(3):
        x = torch.randn(2, 4)
        grads = []
        for module, call in ((eager, eager), (model, compiled)):
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            y = call(leaf)
            y.sum().backward()
            grads.append([y, leaf.grad, *[p.grad for p in module.parameters()]])
        torch.testing.assert_close(grads[1], grads[0])
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
        torch.testing.assert_close(getattr(model, "seen", []), getattr(eager, "seen", []))
    if backend == "eager":
        expected = (1, 2) if cls in WHOLE else (0, 0)
        stats = magjit.stats(compiled)
        assert (stats.captures, stats.replays) == expected


def test_other_backends_say_that_they_cannot() -> None:
    compiled = magjit.compile(MaskedData(), backend="aot_eager", fullgraph=True)
    with pytest.raises(magjit.errors.GraphBreakError, match="would not see"):
        compiled(torch.randn(2, 4))
