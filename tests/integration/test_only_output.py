"""Graphs of one output whose backend has a way to give it as it is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import magjit
from magjit_dvm.backend import schedules


class Giving:
    """Interprets graphs; those of one output have a shorter way that leaves the last input out."""

    name = "giving"

    def __init__(self) -> None:
        self.whole = self.only = 0
        self.holds: list[weakref.ref[Any]] = []

    def supports(self, gm: GraphModule) -> list[str]:
        return []

    def compile(self, gm: GraphModule, inputs: Any, context: Any) -> Callable[..., Any]:
        count = sum(node.op == "placeholder" for node in gm.graph.nodes)
        (results,) = gm.graph.output_node().args

        def call(*given: Any) -> Any:
            self.whole += 1
            assert len(given) == count
            return gm(*given)

        def only(*given: Any) -> Any:
            self.only += 1
            (made,) = gm(*given[::-1], *[None] * (count - len(given)))
            return made

        if len(results) == 1:
            unused = [not node.users for node in gm.graph.nodes if node.op == "placeholder"]
            taken = range(count - sum(unused))
            call.only = only, tuple(taken[::-1])  # type: ignore[attr-defined]
        self.holds.append(weakref.ref(call))
        return call


PROGRAMS: dict[str, Callable[..., Any]] = {
    "the output": lambda x, y: x - y,
    "in a tuple": lambda x, y: (x - y,),
    "twice": lambda x, y: [x - y] * 2,
    "with a number": lambda x, y: (x - y, 3),
    "none": lambda x, y: (x - y, None)[1],
    "two": lambda x, y: (x - y, x + y),
    "an input": lambda x, y: (x - y, x)[1],
    "with a change": lambda x, y: x.add_(y) - y,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_called_where_a_call_returns_the_output(name: str, dynamic: bool) -> None:
    backend, program = Giving(), PROGRAMS[name]
    compiled = magjit.compile(program, backend=backend, dynamic=dynamic)
    for rows in (3, 3, 4, 5):
        x, y = torch.randn(2, rows, 4)
        wanted = program(x.clone(), y)
        torch.testing.assert_close(compiled(x, y), wanted, rtol=0, atol=0)
    assert (backend.only > 0) is (name in ("the output", "with a change"))
    assert (backend.whole > 0) is (backend.only == 0)


def test_what_was_compiled_lives_as_long_as_its_record() -> None:
    backend = Giving()
    compiled = magjit.compile(PROGRAMS["the output"], backend=backend)
    for _ in range(3):
        compiled(torch.ones(2), torch.ones(2))
    gc.collect()
    assert backend.only and all(one() is not None for one in backend.holds)
    magjit.reset(compiled)
    gc.collect()
    assert all(one() is None for one in backend.holds)


def test_what_it_raises_is_what_the_graph_raises() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x[y]

    compiled = magjit.compile(program, backend=Giving())
    x = torch.randn(4)
    for _ in range(2):
        assert compiled(x, torch.tensor([1])) == x[1]
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([7]))
    assert compiled(x, torch.tensor([2])) == x[2]


def compiled_with_only(program: Callable[..., Any], *given: Any) -> tuple[Any, Any]:
    """A program compiled by dvm, and what its graph has besides itself, after some calls."""
    before = {id(one) for one in schedules()}
    compiled = magjit.compile(program, backend="dvm", dynamic=True)
    for _ in range(3):
        torch.testing.assert_close(compiled(*given), program(*given))
    (schedule,) = (one for one in schedules() if id(one) not in before)
    return compiled, schedule.only


def test_one_fused_operator() -> None:
    x, y = torch.randn(3, 5), torch.randn(5)
    whole, (_, taken) = compiled_with_only(lambda x, y: (x * y).relu().softmax(-1), x, y)
    assert sorted(taken) == [0, 1]
    for rows in (1, 2, 7):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(whole(x, y), (x * y).relu().softmax(-1))
        torch.testing.assert_close(whole(x.conj().neg(), y), (-x * y).relu().softmax(-1))
    for other in (
        lambda x, y: (x.exp() * y, x.exp() + 1),
        lambda x, y: x.exp() @ torch.ones(5, 2),
    ):
        assert compiled_with_only(other, x, y)[1] is None
