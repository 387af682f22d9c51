"""What counts as equal, as dynamic, and as the same operators."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx, nn

from paritybench_runner.dynamic import Watch
from paritybench_runner.operators import Dispatched, opaque_nodes, unexplained
from paritybench_runner.values import first_difference, without_graph

Pair = collections.namedtuple("Pair", ["left", "right"])
X = torch.arange(4.0)


@pytest.mark.parametrize(
    ("expected", "actual", "where"),
    [
        (X, X.clone(), None),
        (X, X + 1e-7, None),
        (X, X + 1e-2, "result: "),
        (X, X.double(), "dtype"),
        (X, X.view(2, 2), "shape"),
        (X, X.clone().requires_grad_(), "requires_grad"),
        (X, nn.Parameter(X), "Parameter in place of Tensor"),
        (torch.tensor(math.nan), torch.tensor(math.nan), None),
        ([X, (1, "a")], [X.clone(), (1, "b")], "result[1][1]"),
        ([1], (1,), "tuple in place of list"),
        ([1], [1, 2], "2 items in place of 1"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "keys"),
        (Pair(1, X), Pair(1, X + 1), "result[1]"),
        (1.0, 1.0 + 1e-9, None),
        (math.nan, math.nan, None),
        (True, 1, "int in place of bool"),
        (np.ones(2), np.ones(2), None),
        (np.ones(2), np.zeros(2), "arrays"),
    ],
)
def test_first_difference(expected: Any, actual: Any, where: str | None) -> None:
    found = first_difference(expected, actual)
    assert found is None if where is None else where in str(found)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (lambda: X * 2, None),
        (lambda: X[torch.tensor([1, 0])], None),
        (lambda: X[X > 1], "aten.index.Tensor"),
        (lambda: X.nonzero(), "aten.nonzero.default"),
        (lambda: X.sum().item(), "Tensor.item"),
        (lambda: bool(X.sum() > 1), "Tensor.__bool__"),
        (lambda: X.numpy(), "Tensor.numpy"),
        (lambda: np.asarray(X), "Tensor.__array__"),
        (lambda: X.tolist(), "Tensor.tolist"),
        (lambda: len(X) + X.shape[0], None),
    ],
)
def test_dynamic_is_told_by_what_is_dispatched(program: Any, why: str | None) -> None:
    with Watch() as watch:
        program()
    assert watch.found == why


def dispatched(task: Any) -> collections.Counter[str]:
    with Dispatched() as found:
        task()
    return found.counts


def test_operators_left_out_count_when_they_are_used() -> None:
    def eager() -> torch.Tensor:
        X.cos()
        return X.sin().exp()

    def without_unused() -> torch.Tensor:
        return X.sin().exp()

    def without_used() -> torch.Tensor:
        X.cos()
        return X.sin()

    def more() -> torch.Tensor:
        return eager().tan()

    counts = dispatched(eager)
    assert unexplained(counts, dispatched(eager), eager) is None
    assert unexplained(counts, dispatched(without_unused), eager) is None
    assert unexplained(counts, dispatched(without_used), eager) == "-1 aten::exp"
    assert unexplained(counts, dispatched(more), eager) == "+1 aten::tan"


def test_opaque_nodes() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.sin, (x,))
    y = graph.call_method("add", (y, 1))
    graph.output(graph.call_function(own, (y,)))
    module = fx.GraphModule(nn.Module(), graph)
    assert [name.rpartition(".")[2] for name in opaque_nodes(module)] == ["own"]


def test_a_result_keeps_no_autograd_graph() -> None:
    """What eager has saved for a backward pass must not fill the memory of the other world."""
    x = torch.ones(2, requires_grad=True)
    parameter = nn.Parameter(torch.ones(2))
    result = {"y": [x * 2, (x.detach(), parameter)], "n": 1}
    found = without_graph(result)
    assert first_difference(result, found) is None
    assert found["y"][0].grad_fn is None and found["y"][0].requires_grad
    assert found["y"][1][1] is parameter
