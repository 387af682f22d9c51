"""Reductions that ATen does better are refused, by both encoders for the same reason."""

from __future__ import annotations

import pytest
import torch

from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import cast, compute, load, output, reduce, tensor
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG
from tests.dvm_cuda.drawn_programs import BLOCK
from tests.dvm_cuda.test_encoder import softmax

F32, F16 = DType.F32, DType.F16


def filled(*shape: int) -> torch.Tensor:
    """A tensor whose memory nobody touches."""
    count = torch.Size(shape).numel()
    return BLOCK.view(torch.float16)[:count].view(shape)


def weighted() -> Program:
    """What experts answer (batch, expert, width), by a gate's shares (batch, expert), summed."""
    nodes = (
        load(0, F16),
        cast(F32, 0),
        load(1, F16),
        cast(F32, 2),
        compute("mul", F32, 1, 3),
        reduce("sum", F32, 4, 1),
        cast(F16, 5),
    )
    inputs = tensor(F16, 0, 1, 2), tensor(F16, 0, 1)
    return Program(3, inputs, nodes, (output(6, 0, 2),))


@pytest.mark.parametrize("experts", [8, 64])
def test_the_larger_operand_decides_how_rows_lie(experts: int) -> None:
    """A gate's shares lie in the order of what is reduced, the answers do not."""
    given = [filled(4096, experts, 256), filled(4096, experts)]
    assert "along columns" in check_encoders(weighted(), given, BIG)
    small = [filled(8, experts, 16), filled(8, experts)]
    assert check_encoders(weighted(), small, BIG) == "encoded"
    turned = [filled(512, 256, experts).transpose(1, 2), filled(512, experts)]
    expected = "encoded" if experts > 16 else "refused: a reduction of narrow rows"
    assert check_encoders(weighted(), turned, BIG) == expected


@pytest.mark.parametrize(("cols", "verdict"), [(8, "narrow rows"), (16, "narrow rows"), (17, "")])
def test_narrow_rows(cols: int, verdict: str) -> None:
    found = check_encoders(softmax(F16), [filled(100_000, cols)], BIG)
    assert verdict in found if verdict else found == "encoded"
    assert check_encoders(softmax(F16), [filled(1000, cols)], BIG) == "encoded"
