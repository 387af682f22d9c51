"""Losses of classes: the look-up is fused with the softmax before it, and fails as eager does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit
from magjit_dvm.backend import schedules

F = torch.nn.functional


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return magjit.compile(function, backend="dvm")


def programs() -> dict[int, list[str]]:
    """Those of each graph that is compiled."""
    return {id(one): [str(group.program) for group in one.fusion.groups] for one in schedules()}


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    logits = torch.randn(shape, generator=made).to(dtype)
    targets = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=made)
    return logits, targets


SHAPES = ((4, 5), (70, 9), (3, 2000), (1, 7), (5, 1), (2, 5, 3), (2, 33, 4, 6), (3, 4, 2, 2, 3))


CASES = [
    pytest.param(
        weighted,
        reduction,
        shape,
        id=f"{weighted}-{reduction}-{shape}",
        # Of each shape, two: one with weights and one without, of two reductions.
        marks=[] if (number + turn) % 3 == weighted else pytest.mark.slow,
    )
    for number, shape in enumerate(SHAPES)
    for turn, reduction in enumerate(["none", "mean", "sum"])
    for weighted in (False, True)
]


@pytest.mark.parametrize(("weighted", "reduction", "shape"), CASES)
def test_cross_entropy(shape: tuple[int, ...], reduction: str, weighted: bool) -> None:
    def loss(logits: Any, targets: Any, weight: Any = None, ignored: int = -100) -> Any:
        return F.cross_entropy(logits, targets, weight, ignore_index=ignored, reduction=reduction)

    run = compiled(loss)
    logits, targets = inputs(shape)
    weight = torch.rand(shape[1]) + 0.1 if weighted else None
    targets.view(-1)[0] = -100
    for ignored in (-100, 1):
        where = targets if ignored == -100 else targets.clamp(min=0)
        for given in (logits, logits.transpose(0, 1).contiguous().transpose(0, 1)):
            wanted = loss(given, where, weight, ignored)
            with torch.no_grad():
                got = run(given, where, weight, ignored)
            torch.testing.assert_close(got, wanted, equal_nan=True)
            check_gradients(loss, run, given, where, weight, ignored)


def check_gradients(loss: Any, run: Any, given: torch.Tensor, *rest: Any) -> None:
    found = []
    for function in (loss, run):
        leaf = given.detach().requires_grad_()
        result = function(leaf, *rest)
        result.sum().backward()
        found.append((result.detach(), leaf.grad))
    for got, wanted in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    run = compiled(F.cross_entropy)
    logits, targets = inputs((9, 40), dtype)
    torch.testing.assert_close(run(logits, targets), F.cross_entropy(logits, targets))


def test_log_probabilities_are_not_written() -> None:
    logits, targets = inputs((16, 50))
    before = programs()
    with torch.no_grad():
        run = compiled(F.cross_entropy)
        run(logits, targets)
    (texts,) = (those for key, those in programs().items() if key not in before)
    assert any("IndexLoad" in text for text in texts)
    assert not any("// [d0,d1]" in text for text in texts), texts


def test_special_values() -> None:
    """A row of −∞ but for the target, NaN, and targets that are all ignored."""
    run = compiled(F.cross_entropy)
    logits, targets = inputs((6, 8))
    logits[0] = -torch.inf
    logits[0, targets[0]] = 1.0
    logits[1, 3] = torch.inf
    logits[2, 5] = torch.nan
    for where in (targets, torch.full_like(targets, -100)):
        got, wanted = run(logits, where), F.cross_entropy(logits, where)
        torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("wrong", [9, -1, 1 << 40])
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("weight", [None, torch.ones(9)], ids=["plain", "weighted"])
def test_targets_out_of_bounds(wrong: int, reduction: str, weight: Any) -> None:
    logits, targets = inputs((70, 9))
    targets[33] = wrong

    def loss(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits, targets, weight, reduction=reduction)

    run = compiled(loss)
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        loss(logits, targets)
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        run(logits, targets)


def test_gather_out_of_bounds() -> None:
    def picked(x: Any, at: Any) -> Any:
        return (x * 2).gather(1, at) + 1

    run = compiled(picked)
    x, at = torch.randn(5, 6), torch.zeros(5, 3, dtype=torch.int64)
    torch.testing.assert_close(run(x, at), picked(x, at))
    at[2, 1] = 6
    for function in (picked, run):
        with pytest.raises(RuntimeError, match="index 6 is out of bounds for dimension 1"):
            function(x, at)


CHAINS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "elementwise": lambda x, at: (x.exp() * 2).gather(1, at),
    "softmax": lambda x, at: x.softmax(1).gather(1, at),
    "both": lambda x, at: (y := x.log_softmax(1), y.gather(1, at)),
    "mean": lambda x, at: (x - x.mean(1, True)).gather(1, at).square(),
    "across": lambda x, at: (x - x.mean(0, True)).gather(1, at),
    "first": lambda x, at: (x * 3).gather(0, at[:, : x.shape[1]] % x.shape[0]),
    "outside": lambda x, at: x.gather(1, at) * 2,
    "twice": lambda x, at: x.exp().gather(1, at).gather(1, at % at.shape[1]),
    "expanded": lambda x, at: (x[:, :1] * 2).expand(x.shape).gather(1, at),
    "summed": lambda x, at: (x * 2).gather(1, at).sum(1),
    "divided": lambda x, at: (at // 2).gather(1, at % at.shape[1]),
}


@pytest.mark.parametrize("name", list(CHAINS))
def test_gathers(name: str) -> None:
    function = CHAINS[name]
    for shape, width in itertools.product(((4, 9), (70, 40), (1, 5), (6, 1)), (1, 3, None)):
        at = torch.randint(0, shape[1], (shape[0], width or shape[1]))
        for x in (torch.randn(shape), torch.randn(shape[::-1]).t()):
            run = compiled(function)
            with torch.no_grad():
                torch.testing.assert_close(run(x, at), function(x, at))
