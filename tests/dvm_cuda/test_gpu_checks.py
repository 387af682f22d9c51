"""What ``tests/dvm_gpu`` asks of a GPU, asked of the simulator: the checks themselves are right.

Memory of results on a GPU is not filled, not in deterministic mode either; here it is, with
bytes that no result has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from magjit_dvm.instructions import DType
from magjit_dvm.program import Input, InputKind, Output, Program
from tests.dvm.checking import compute, fresh, load, require_results, tensor
from tests.dvm_cuda.checking import simulated
from tests.dvm_gpu import test_gpu, test_views

F32 = DType.F32


class Simulated:
    """In place of ``DeviceFused``."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(simulated(self.program, arguments)[1])


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_gpu, "DeviceFused", Simulated)
    monkeypatch.setattr(test_gpu, "on_gpu", lambda one: one)


@pytest.mark.parametrize("part", [0, 3, 6])
def test_random_programs(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of results that other programs write the rest of."""
    test_gpu.test_random_programs(part, monkeypatch)


def test_views_of_all_kinds() -> None:
    test_views.test_rows_and_columns(DType.F16, (301, 4100))
    test_views.test_rows_and_columns(DType.I64, (3, 4))
    test_views.test_transposed(DType.F16, (256, 256))
    test_views.test_batches_of_transposed(F32)
    test_views.test_log_softmax(DType.BF16, (600, 1024))


def placed() -> Program:
    """A part of a new result of a size that a call says, where it says."""
    inputs = tensor(F32, 0), *[Input(InputKind.INT, DType.I64)] * 2
    nodes = load(0, F32), compute("neg", F32, 0)
    return Program(1, inputs, nodes, (Output(1, (0,), (0,), along=0, total=1, offset=2),))


def test_a_part_is_compared_and_nothing_else() -> None:
    program, x = placed(), torch.arange(100.0)
    given = x, 200, 4
    test_gpu.check_gpu(program, given)
    wanted, found = fresh(torch.zeros(200)), torch.full((200,), torch.nan)
    wanted[4:104] = found[4:104] = -x
    require_results(program, [found], [wanted], given, given)
    for wrong in (x[57], torch.nan):
        found[4 + 57] = wrong
        with pytest.raises(AssertionError, match="at 57 of"):
            require_results(program, [found], [wanted], given, given)


def test_what_is_written_beside_a_part_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.dvm_cuda import checking

    def beside(program: Program, arguments: Any, machine: Any) -> Any:
        image, (result,) = simulated(program, arguments, machine)
        result[3] = 0.0
        return image, [result]

    given = torch.arange(100.0), 200, 4
    assert checking.check_words(placed(), given) is not None
    monkeypatch.setattr(checking, "simulated", beside)
    with pytest.raises(AssertionError, match="beside"):
        checking.check_words(placed(), given)
