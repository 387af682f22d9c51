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


class Calls:
    """Garbage whose end calls the operator for another shape."""

    def __init__(self, operator, log: list[int]) -> None:
        self.operator, self.log, self.itself = operator, log, self

    def __del__(self) -> None:
        result = self.operator(torch.ones(7))
        self.log.append(int((result == 2).all()))


def test_a_finalizer_that_calls_a_fused_operator() -> None:
    operator = doubled()
    log: list[int] = []
    before = gc.get_threshold()
    given = [torch.randn(n) for n in (1000, 33, 64, 5000)]
    try:
        gc.set_threshold(1)
        for _ in range(50):
            for one in given:
                Calls(operator, log)
                assert torch.equal(operator(one), one + one)
    finally:
        gc.set_threshold(*before)
    assert log and all(log)
