"""Programs that draw random numbers, which have to be eager mode's, in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import magjit

SHAPES = [(6, 8), (33, 65)]


def several(x: Tensor) -> Tensor:
    """What is fused with the first softmax waits for the second draw."""
    first = F.dropout(torch.softmax(x, -1), 0.5)
    second = torch.softmax(x + torch.rand_like(x), -1)
    return first @ x.t() + second @ x.t()


def of_each_kind(x: Tensor) -> Tensor:
    noise = torch.randn_like(x) * torch.rand(x.shape[-1], device=x.device)
    kept = torch.bernoulli(torch.sigmoid(noise))
    return F.dropout(torch.softmax(x * kept, -1), 0.25) @ torch.rand_like(x).t()


def of_probabilities(x: Tensor) -> Tensor:
    mask = torch.bernoulli(0.7 * (x.detach().new(x.shape[0], 1).zero_() + 1)) / 0.7
    return (mask.expand_as(x) * x) @ x.t()


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "several": several,
    "of each kind": of_each_kind,
    "of probabilities": of_probabilities,
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) * x,
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3) * x,
    "bernoulli_ of a tensor": lambda x: (
        torch.empty_like(x).bernoulli_(torch.sigmoid(x.detach())) * x
    ),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2) * x,
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2) * x,
    "exponential_": lambda x: torch.empty_like(x).exponential_(2) * x,
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3) * x,
    "log_normal_": lambda x: torch.empty_like(x).log_normal_() * x,
    "random_": lambda x: torch.empty_like(x).random_(5) * x,
    "normal": lambda x: torch.normal(x.detach(), torch.sigmoid(x.detach())) * x,
    "randint": lambda x: torch.randint(0, 10, x.shape, device=x.device) + x,
    "randperm": lambda x: x[torch.randperm(x.shape[0], device=x.device)],
    "multinomial": lambda x: torch.multinomial(torch.sigmoid(x.detach()), 2) + x.sum(),
    "poisson": lambda x: torch.poisson(torch.sigmoid(x.detach())) * x,
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1, hard=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of everything": lambda x: F.dropout(x, 1.0) + torch.rand_like(x),
    "dropout of nothing": lambda x: F.dropout(x, 0.0) + torch.rand_like(x),
    "dropout of a part": lambda x: F.dropout(x[:, 1:], 0.3),
    "dropout of columns": lambda x: F.dropout(torch.relu(x.t() + 1), 0.3),
    "dropout of copies": lambda x: F.dropout(x[:, None].expand(-1, 3, -1), 0.3),
    "dropout2d": lambda x: F.dropout2d(x[None, :, :, None], 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x[None, :, :, None], 0.3, True),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None], dropout_p=0.3
    ),
}


def check(name: str, backend: Any, device: str = "cpu") -> None:
    """Results, gradients and the numbers drawn afterwards are eager mode's."""
    program = PROGRAMS[name]
    for shape in SHAPES:
        for needs_grad in (False, True):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
            x.requires_grad_(needs_grad)
            compiled = magjit.compile(program, backend=backend)
            for call in range(3):
                expected, found = (_called(one, x, call) for one in (program, compiled))
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _called(function: Callable[[Tensor], Tensor], x: Tensor, seed: int) -> list[Tensor | None]:
    torch.manual_seed(seed)
    x.grad = None
    result = function(x)
    if result.requires_grad:
        result.sum().backward()
    return [result.detach(), x.grad, torch.rand(3, device=x.device)]
