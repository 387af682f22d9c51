"""A fused operator that is called while another one is between its encoding and its run."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from magjit_dvm.instructions import DType
from magjit_dvm.program import Input, InputKind, Node, NodeKind, Output, Program


def doubled() -> object:
    given = Input(InputKind.TENSOR, DType.F32, (0,))
    nodes = (
        Node(NodeKind.LOAD, DType.F32, aux=0),
        Node(NodeKind.COMPUTE, DType.F32, (0, 0), "add"),
    )
    return Program(1, (given,), nodes, (Output(1, (0,), (0,)),)).compiled()


def with_its_sum() -> object:
    """Two results, the second of another size."""
    given = Input(InputKind.TENSOR, DType.F32, (0, 1))
    nodes = (
        Node(NodeKind.LOAD, DType.F32, aux=0),
        Node(NodeKind.COMPUTE, DType.F32, (0, 0), "add"),
        Node(NodeKind.REDUCE, DType.F32, (0,), "sum", dims=frozenset({1})),
    )
    outputs = (Output(1, (0, 1), (0, 1)), Output(2, (0,), (0,)))
    return Program(2, (given,), nodes, outputs).compiled()


class Calls:
    """Garbage whose end calls the operator for another shape."""

    def __init__(self, operator, log: list[int]) -> None:
        self.operator, self.log, self.itself = operator, log, self

    def __del__(self) -> None:
        result = self.operator(torch.ones(7))
        self.log.append(int((result == 2).all()))


@pytest.fixture
def collecting_often():
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collecting_often")
def test_a_finalizer_that_calls_a_fused_operator() -> None:
    operator = doubled()
    log: list[int] = []
    given = [torch.randn(n) for n in (1000, 33, 64, 5000)]
    for _ in range(50):
        for one in given:
            Calls(operator, log)
            assert torch.equal(operator(one), one + one)
    assert log and all(log)


@pytest.mark.usefixtures("collecting_often")
def test_a_collection_between_two_results() -> None:
    """What is encoded in it must not become the shape of the second one."""
    operator = with_its_sum()
    log: list[int] = []

    def collected(phase: str, info: dict[str, int]) -> None:
        log.append(int((operator(torch.ones(7, 3))[1] == 3).all()))

    gc.callbacks.append(collected)
    try:
        for rows in (1, 3, 50, 700):
            one = torch.randn(rows, 40)
            for allocations in range(12):
                # So that the collection falls due at each allocation in turn.
                gc.set_threshold(gc.get_count()[0] + allocations)
                twice, total = operator(one)
                gc.set_threshold(1000)
                assert twice.shape == (rows, 40) and total.shape == (rows,)
                assert torch.equal(twice, one + one)
                torch.testing.assert_close(total, one.sum(1))
    finally:
        gc.callbacks.remove(collected)
    assert log and all(log)
