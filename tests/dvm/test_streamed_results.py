"""Large results are written past the caches: the same bytes, wherever they begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
import magjit_dvm
from tests.dvm.checking import machine

FAR = (1 << 16, 4096, 64, 64)
NEAR = (1 << 16, 4096, 64, 1 << 40)

PROGRAMS: dict[str, Callable[..., Any]] = {
    "a chain": lambda x: (x * 2 + 1).relu(),
    "a copy": lambda x: x.clone(),
    "one value twice": lambda x: ((y := x.exp()), y * 2, y),
    "layer norm": lambda x: F.layer_norm(x.float(), x.shape[-1:]),
    "a cast": lambda x: (x.to(torch.float64), x.to(torch.float16), x > 0),
    "parts at odd places": lambda x: torch.cat([x[:, :7] * 3, x * 2, x[:, 3:] + 1], 1),
    "parts of groups": lambda x: torch.cat([x.sin(), x.softmax(0), x.sum(0, keepdim=True)]),
    "column sums": lambda x: (x - x.sum(0), x.cumsum(1)),
    "transposed": lambda x: (x.t() * 2 + 1, x * 3),
    "expanded": lambda x: x[:, None] + x[:1, :40].reshape(1, 40, 1) * x[:, None],
}


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "contiguous": torch.randn(33, 301),
        "rows apart": torch.randn(20, 700)[:, 5:555],
        "transposed": torch.randn(290, 31).t(),
        "halves": torch.randn(9, 1031).to(torch.float16),
        "doubles": torch.randn(5, 257).double(),
        "one row": torch.randn(1, 5003),
        "whole lines": torch.randn(16, 512),
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_results(name: str, threads: int) -> None:
    """Bit for bit what is written through the caches."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    program = PROGRAMS[name]
    try:
        compiled = magjit.compile(program, backend="dvm", dynamic=False)
        for what, x in inputs().items():
            with torch.no_grad():
                with machine(NEAR):
                    compiled(x)
                    wanted = compiled(x)
                with machine(FAR):
                    found = compiled(x)
                torch.testing.assert_close(found, wanted, rtol=0, atol=0, msg=what)
                error = 4e-3 if x.dtype == torch.float16 else 1e-5
                torch.testing.assert_close(found, program(x), rtol=error, atol=error, msg=what)
    finally:
        torch.set_num_threads(before)


def test_where_it_happens() -> None:
    """Results of at least half of the cache, in runs of at least 1 KB."""

    def text(cached: int, *shape: int) -> str:
        compiled = magjit.compile(lambda x: x.softmax(-1), backend="dvm", dynamic=False)
        with torch.no_grad(), machine((1 << 16, 4096, 64, cached)):
            return str(magjit_dvm.disassemble(compiled, torch.randn(*shape)))

    line = "results written past the caches"
    assert line in text(2 * 64 * 256 * 4, 64, 256)
    assert line not in text(2 * 64 * 256 * 4 + 4, 64, 256)
    assert line not in text(64, 64, 255), "lines that are not whole cost more than they save"
    assert "view_store" in text(64, 64, 256) and "view_store" not in text(1 << 40, 64, 256)
