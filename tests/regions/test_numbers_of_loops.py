"""Loops whose steps compute with a number in C code: one record for all steps, not one a step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magjit


def by_function(x: Tensor, n: int) -> Tensor:
    y = x if x.max() > 0.5 else -x
    for i in range(n):
        y = y + math.exp(-i / 3)
    return y


def by_two_functions(x: Tensor, n: int) -> Tensor:
    y = x if x.max() > 0.5 else -x
    for i in range(n):
        y = y.relu() * 2
        y = y + math.sqrt(i) * round(i / 7, 1)
    return y


FACTORS = [0.5 + i / 7 for i in range(64)]


def by_index(x: Tensor, n: int) -> Tensor:
    y = x if x.max() > 0.5 else -x
    for i in range(n):
        y = y * FACTORS[i] + FACTORS[i + 1]
    return y


def by_key(x: Tensor, n: int) -> Tensor:
    """Numbers as keys: each is another entry."""
    known = {i: float(i) for i in range(40)}
    y = x if x.max() > 0.5 else -x
    for i in range(n):
        y = y + known[i]
    return y


def by_negative_index(x: Tensor, n: int) -> Tensor:
    y = x if x.max() > 0.5 else -x
    for i in range(1, n + 1):
        y = y - FACTORS[-i]
    return y


def raising(x: Tensor, n: int) -> Tensor:
    """The number that a C function refuses comes late."""
    y = x if x.max() > 0.5 else -x
    try:
        for i in range(n):
            y = y + math.log(20 - i)
    except ValueError:
        y = y * 3
    return y


@pytest.mark.parametrize("program", [by_function, by_two_functions, by_index, by_negative_index])
def test_records_do_not_grow_with_the_steps(program: Callable[[Tensor, int], Tensor]) -> None:
    compiled = magjit.compile(program, backend="eager")
    known = 0
    for number, n in enumerate((3, 9, 7, 30, 11, 0, 1, 50, 13)):
        x = torch.rand(5)
        torch.testing.assert_close(compiled(x, n), program(x, n))
        found = magjit.stats(compiled)
        assert found.eager_calls == 0
        if number == 3:
            known = found.records
        assert number < 3 or n < 2 or found.records <= known + 2
    assert known <= 12


@pytest.mark.filterwarnings("ignore::magjit.MagJITWarning")
@pytest.mark.parametrize("program", [by_key, raising])
def test_equal_to_eager(program: Callable[[Tensor, int], Tensor]) -> None:
    compiled = magjit.compile(program, backend="eager")
    for n in (3, 9, 7, 30, 11, 0, 1, 35, 13, 21, 20):
        for x in (torch.rand(5), torch.zeros(5)):
            torch.testing.assert_close(compiled(x, n), program(x, n))


def test_an_index_out_of_range_raises_as_in_eager() -> None:
    compiled = magjit.compile(by_index, backend="eager")
    for n in (3, 9, 7):
        compiled(torch.rand(5), n)
    with pytest.raises(IndexError, match="list index out of range"):
        compiled(torch.rand(5), 70)
    x = torch.rand(5)
    torch.testing.assert_close(compiled(x, 12), by_index(x, 12))


class Bins(nn.Module):
    """A loss that weighs by how many values lie in each bin, with a running mean of the counts."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins
        self.edges = [i / bins for i in range(bins + 1)]
        self.counts = [0.0] * bins

    def forward(self, given: Tensor, target: Tensor) -> Tensor:
        weights = torch.zeros_like(given)
        distance = (given.sigmoid().detach() - target).abs()
        for i in range(self.bins):
            inside = (distance >= self.edges[i]) & (distance < self.edges[i + 1])
            count = inside.sum().item()
            if count > 0:
                self.counts[i] = 0.5 * self.counts[i] + 0.5 * count
                weights[inside] = given.numel() / self.counts[i]
        return F.binary_cross_entropy_with_logits(given, target, weights)


def test_lists_that_are_read_and_written_by_the_number_of_the_step() -> None:
    eager = Bins(30)
    module: Any = copy.deepcopy(eager)
    compiled = magjit.compile(module, backend="eager")
    records = []
    for _ in range(6):
        given, target = torch.randn(4, 64), torch.rand(4, 64)
        torch.testing.assert_close(compiled(given, target), eager(given, target))
        assert module.counts == eager.counts
        records.append(magjit.stats(compiled).records)
    assert magjit.stats(compiled).eager_calls == 0
    assert records[0] < 25 and records[-1] <= records[0] + 3
