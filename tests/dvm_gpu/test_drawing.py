"""Random numbers on a GPU are eager's own, and leave its generator as eager does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import magjit

pytestmark = pytest.mark.gpu

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x * 2, 0.3).relu() + 1,
    "two dropouts": lambda x: F.dropout(F.dropout(x, 0.5).exp(), 0.25),
    "dropout of a transposed operand": lambda x: F.dropout(x.t() * 2, 0.5) * 3,
    "dropout of everything and of nothing": lambda x: F.dropout(x, 1.0) + F.dropout(x, 0.0),
    "not in training": lambda x: F.dropout(x * 2, 0.5, training=False) + 1,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, training=True) + 1,
    "dropout1d": lambda x: F.dropout1d(x, 0.5) * 2,
    "rand_like": lambda x: x * torch.rand_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()) + 1,
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_eagers(name: str, dtype: torch.dtype, grad: bool) -> None:
    program = PROGRAMS[name]
    compiled = magjit.compile(program, backend="dvm")
    # Eager mode rounds after each operator, which alpha_dropout has several of.
    tolerance = (1e-5, 1e-5) if dtype == torch.float32 else (1e-2, 4e-3)
    rounding = dict(zip(("rtol", "atol"), tolerance, strict=True))
    for seed in range(3):
        x = torch.randn(37, 129, device="cuda", dtype=dtype, requires_grad=grad)
        y = x.detach().clone().requires_grad_(grad)
        torch.manual_seed(seed)
        made = compiled(x)
        drawn = torch.rand(3, device="cuda")
        torch.manual_seed(seed)
        expected = program(y)
        torch.testing.assert_close(made, expected, **rounding)
        torch.testing.assert_close(drawn, torch.rand(3, device="cuda"), rtol=0, atol=0)
        if grad:
            made.sum().backward()
            expected.sum().backward()
            torch.testing.assert_close(x.grad, y.grad, **rounding)
