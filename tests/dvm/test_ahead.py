"""Memory asked for before it is wanted changes no result, and happens where it is meant to."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from magjit_dvm import vm
from tests.dvm.checking import machine

SLOW = pytest.mark.slow
PROGRAMS = {
    "softmax": lambda x: torch.softmax(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "one phase before the last": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1),
    "two results": lambda x: (torch.softmax(x, -1), torch.log_softmax(x, -1)),
    "an output of rows": lambda x: (torch.logsumexp(x, -1), x - x.amax(-1, keepdim=True)),
    "column means": lambda x: x - x.mean(0, keepdim=True),
}


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = torch.randn(60, 400)
    return {
        "contiguous": torch.randn(67, 129),
        "rows apart": wide[:, 3:290],
        "every second row": wide[1::2],
        "transposed": torch.randn(200, 64).t(),
        "reversed batches": torch.randn(5, 7, 96).transpose(0, 1),
        "one row": torch.randn(1, 6000),
        "narrow rows": torch.randn(2500, 3),
        "halves": torch.randn(50, 300).to(torch.float16),
        "doubles": torch.randn(50, 100).double(),
    }


CACHED = (64, 4096, 16384, 1 << 30)


def settings() -> list[Any]:
    """Each program with all threads and caches; with two of them in turn, the others slow."""
    return [
        pytest.param(
            name,
            threads,
            cached,
            marks=[] if k % 2 == number % 2 and (k + number) // 2 % 2 == threads - 1 else SLOW,
        )
        for number, name in enumerate(PROGRAMS)
        for threads in (1, 2)
        for k, cached in enumerate(CACHED)
    ]


@pytest.mark.parametrize(("name", "threads", "cached"), settings())
def test_results(name: str, threads: int, cached: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = magjit.compile(PROGRAMS[name], backend="dvm")
        with machine((1 << 16, 4096, 64, cached)), torch.no_grad():
            for what, x in inputs().items():
                compiled(x)
                error = 2e-3 if x.dtype == torch.float16 else 1e-5
                torch.testing.assert_close(
                    compiled(x), PROGRAMS[name](x), rtol=error, atol=error, msg=what
                )
    finally:
        torch.set_num_threads(before)


def encoded(function: Callable[..., Any], cached: int, *given: torch.Tensor) -> dict[str, Any]:
    """The bytecode of a function that is one operator, on a machine with such caches."""
    compiled = magjit.compile(function, backend="dvm")
    seen: list[tuple[Any, ...]] = []
    with torch.no_grad(), machine((1 << 18, 1 << 15, 1 << 30, cached)):
        compiled(*given)
        vm.observe(seen)
        try:
            compiled(*given)
        finally:
            vm.observe(None)
        operator, *arguments = seen[0]
        return operator.encode(*arguments)


def test_only_between_the_caches_and_memory_alone() -> None:
    # Softmax reads and writes 1 KB a row, so 512 KB.
    x = torch.randn(512, 128)
    found = [encoded(PROGRAMS["softmax"], size << 10, x) for size in (1024, 256, 64)]
    assert [one["ahead"] for one in found] == [False, True, False]
    near, between, far = (one["tiles"] for one in found)
    assert between > near == far


def test_chains_take_shorter_steps_when_their_operands_are_far() -> None:
    given = torch.randn(2, 1 << 16).unbind()
    near, far = (
        encoded(lambda x, y: (x + y) * y - x, cached, *given)["phases"][0][4]
        for cached in (1 << 30, 1 << 16)
    )
    assert far < near * 2 / 3
