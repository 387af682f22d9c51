"""Addresses that ``id`` gives: a replay has other objects, at other ones."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magjit
from magjit.errors import GraphBreakError


def copies_into(x: Tensor, items: list[int], memo: dict[int, Any]) -> Tensor:
    return x + len(copy.deepcopy(items, memo))


def copies_within(x: Tensor, items: list[int]) -> tuple[Tensor, dict[int, Any]]:
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(items, memo)
    return x * copied[0], memo


@pytest.mark.parametrize("outside", [True, False])
def test_a_memo_that_outlives_the_call(outside: bool) -> None:
    compiled = magjit.compile(copies_into if outside else copies_within, backend="eager")
    x = torch.ones(2)
    kept = []
    for turn in range(4):
        items, memo = [turn], {}
        kept.append(items)
        if outside:
            torch.testing.assert_close(compiled(x, items, memo), x + 1)
        else:
            result, memo = compiled(x, items)
            torch.testing.assert_close(result, x * turn)
        assert memo[id(items)] == items
        assert memo[id(items)] is not items
        assert set(memo) == {id(items), id(memo)}


def test_a_copy_that_a_memo_has() -> None:
    compiled = magjit.compile(copies_into, backend="eager")
    x, kept = torch.ones(2), []
    for turn in range(4):
        items = [turn]
        kept.append(items)
        memo = {id(items): [7, 7, 7]} if turn % 2 else {}
        torch.testing.assert_close(compiled(x, items, memo), x + (3 if turn % 2 else 1))


def two_lists(x: Tensor, one: list[int], other: list[int]) -> Tensor:
    first, second = copy.deepcopy([one, other])
    first.append(5)
    return x * len(second)


def two_tensors(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
    first, second = copy.deepcopy([one, other])
    first.add_(1)
    return x + second


@pytest.mark.parametrize(("function", "make"), [(two_lists, lambda: [1]), (two_tensors, Tensor)])
def test_one_object_for_two(function: Callable[..., Tensor], make: Callable[..., Any]) -> None:
    compiled = magjit.compile(function, backend="eager")
    x = torch.ones(2)
    for same in (False, True, False, True, True):
        results = []
        for run in (compiled, function):
            one = torch.zeros(2) if make is Tensor else make()
            other = one if same else copy.copy(one) if make is not Tensor else one.clone()
            results.append(run(x, one, other))
        torch.testing.assert_close(*results)


def test_addresses_that_are_used_again() -> None:
    """Nothing of the last call is alive, so that its addresses are taken again."""
    compiled = magjit.compile(two_tensors, backend="eager")
    x = torch.ones(2)
    for turn in range(60):
        kept = [torch.zeros(2) for _ in range(turn % 7)]
        one, other = torch.zeros(2), torch.full((2,), 3.0)
        torch.testing.assert_close(compiled(x, one, other), x + 3)
        del kept[turn % 3 :], one, other
        gc.collect(0)
    assert magjit.stats(compiled).captures <= 4


def test_a_memo_of_the_run_is_part_of_the_graph() -> None:
    compiled = magjit.compile(two_lists, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, [1], [1, 2]), x * 2)
    assert magjit.stats(compiled).captures == 1


def test_an_address_in_one_graph_is_an_error() -> None:
    compiled = magjit.compile(copies_within, backend="eager", fullgraph=True)
    with pytest.raises(GraphBreakError, match=r"address of an object, read with id\(\)"):
        compiled(torch.ones(2), [1])


MEMO = """
def in_dict(x, known, y):
    return x + 1 if id(y) in known else x - 1

def in_set(x, known, y):
    return x + 1 if id(y) in known else x - 1

def with_a_name(x, known, y):
    return x + known.get((id(y), "weight"), 5)

def as_result(x, known, y):
    return x + 1, id(y)
"""


@pytest.mark.parametrize("name", ["in_dict", "in_set", "with_a_name", "as_result"])
def test_what_a_module_with_memos_does_with_addresses(name: str) -> None:
    namespace: dict[str, Any] = {"__name__": "copy"}
    exec(compile(MEMO, "memo.py", "exec"), namespace)
    function = namespace[name]
    compiled = magjit.compile(function, backend="eager")
    x, other, kept = torch.ones(2), [0], []
    for known in (False, True, False, True):
        y = [1]
        kept.append(y)
        keys = [id(other), id(y)] if known else [id(other)]
        container: Any = set(keys) if name == "in_set" else dict.fromkeys(keys, 1)
        if name == "with_a_name":
            container = {(key, "weight"): 2 for key in keys}
        torch.testing.assert_close(compiled(x, container, y), function(x, container, y))


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        layer = copy.deepcopy(self.layer)
        with torch.no_grad():
            layer.weight.mul_(2)
        return layer(x) + self.layer(x)


def test_a_module_that_is_copied() -> None:
    torch.manual_seed(0)
    model = Copies()
    compiled = magjit.compile(Copies(), backend="eager")
    compiled.load_state_dict(model.state_dict())
    for size in (2, 2, 5):
        x = torch.randn(size, 3)
        torch.testing.assert_close(compiled(x), model(x))
