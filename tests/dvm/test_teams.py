"""Long reductions of few rows: all cores share them, and each result is one core's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
from tests.dvm.checking import machine


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    """Small grain: a second core always pays."""
    before = torch.get_num_threads()
    with machine((1 << 16, 8192, 16)), torch.no_grad():
        yield
    torch.set_num_threads(before)


def exact(*shape: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=made) / 4


def unit(*shape: int) -> torch.Tensor:
    return 1 + exact(*shape) / 1024


Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]

CASES: dict[str, Case] = {
    "sum": (lambda x: x.sum(), (exact(50_001),)),
    "mean of squares": (lambda x: (x * x).mean(), (exact(3, 20_000),)),
    "largest and smallest": (lambda x: (x.amax(), x.amin()), (exact(50_001),)),
    "product": (lambda x: x.double().prod(), (unit(3000),)),
    "of ints": (lambda x: (x.sum(), x.amax(), x.amin()), ((exact(40_000) * 4).long(),)),
    "of bytes": (lambda x: (x.amax(), x.amin()), ((exact(40_000) + 2).to(torch.uint8),)),
    "any and all": (lambda x: ((x > 1.9).any(), (x > -2).all()), (exact(40_000),)),
    "one row": (lambda x: F.softmax(x, -1), (exact(1, 30_000),)),
    "two rows": (lambda x: F.softmax(x, -1), (exact(2, 30_000),)),
    "one column": (lambda x: F.log_softmax(x, 0), (exact(30_000, 1),)),
    "few columns": (lambda x: (x * 2).sum(0), (exact(9000, 5),)),
    "softmax over columns": (lambda x: F.softmax(x, 0), (exact(9000, 5),)),
    "in the middle": (lambda x: x.sum((0, 2)), (exact(30, 3, 500),)),
    "few in the middle": (lambda x: x.sum((0, 2)), (exact(2, 3, 9000),)),
    "three phases": (lambda x: F.layer_norm(x, (20_000,)), (exact(1, 20_000),)),
    "an expensive value is kept": (
        lambda x: F.softmax(x.exp().tanh(), -1) * x.exp(),
        (exact(1, 2000),),
    ),
    "broadcast": (lambda x, y: (x + y).sum(), (exact(300, 1), exact(1, 200))),
    "running sums": (lambda x: (x.cumsum(-1), x.cumsum(-1).amax(-1)), (exact(2, 30_000),)),
    "running sums of columns": (lambda x: x.cumsum(0) * 2, (exact(9000, 5),)),
    "strided": (lambda x: (x.t() * 2).sum(), (exact(300, 200)[:, ::2],)),
    "where the largest is": (lambda x: x.argmax(), (exact(30_000),)),
    "fewer than cores": (lambda x: x.sum(-1), (exact(1, 17),)),
    "not finite": (lambda x: (x.amax(), x.sum()), (torch.full((20_000,), float("nan")),)),
}


@pytest.mark.parametrize("name", list(CASES))
def test_teams(name: str) -> None:
    program, given = CASES[name]
    compiled = magjit.compile(program, backend="dvm")
    expected = program(*given)
    for number in (1, 2, 3, 5, 8):
        torch.set_num_threads(number)
        for _ in range(3):
            results = compiled(*given)
            torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_position_out_of_bounds() -> None:
    """In one core's part: the error is eager's, the team goes on to the end."""

    def program(table: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return F.embedding(at, table).sum()

    table, at = exact(100, 8), torch.arange(5000) % 100
    compiled = magjit.compile(program, backend="dvm")
    torch.set_num_threads(3)
    compiled(table, at)
    for place in (0, 2500, 4999):
        wrong = at.clone()
        wrong[place] = 100
        with pytest.raises(IndexError):
            compiled(table, wrong)
        torch.testing.assert_close(compiled(table, at), program(table, at))


def test_teams_of_several_threads() -> None:
    program, given = CASES["three phases"]
    compiled = magjit.compile(program, backend="dvm")
    torch.set_num_threads(2)
    expected = program(*given)
    compiled(*given)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(30):
                    torch.testing.assert_close(compiled(*given), expected, rtol=1e-5, atol=1e-6)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not failures, failures[0]
