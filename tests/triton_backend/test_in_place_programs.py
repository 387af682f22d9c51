"""Random in-place programs: values, strides, offsets and shared memory of eager mode.

Some go through the code generator in ``tests/triton_codegen/regressions.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import magjit
from tests.triton_backend.in_place_programs import InPlaceProgram
from tests.triton_backend.returned_views import memory
from tests.triton_backend.running import compiled


def places(tensors: list[torch.Tensor]) -> list[Any]:
    """As ``memory``, without the strides of dimensions of size 1.

    AOTAutograd leaves to what was changed in place the strides of the operator's functional form.
    """
    return [
        (sizes, [s for size, s in zip(sizes, strides, strict=True) if size > 1], offset, owner)
        for sizes, strides, offset, owner in memory(tensors)
    ]


def check_program(seed: int) -> None:
    program = InPlaceProgram(seed)
    call = compiled(program)
    with torch.no_grad():
        for _ in range(3):
            eager = program.arguments()
            given = program.copies(eager)
            expected = [*eager, *program(*eager)]
            actual = [*given, *call(*given)]
            for one, other in zip(expected, actual, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5, equal_nan=True)
            assert places(actual) == places(expected), str(program)
    magjit.reset()


@pytest.mark.parametrize("seed", range(60))
def test_in_place_program(seed: int) -> None:
    check_program(seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1000, 5000))
def test_many_in_place_programs(seed: int) -> None:
    check_program(seed)
