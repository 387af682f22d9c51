"""Random in-place programs: values, strides, offsets and shared memory of eager mode.

Some go through the code generator in ``tests/triton_codegen/regressions.py``.
"""

from __future__ import annotations

import pytest
import torch

import magjit
from tests.triton_backend.in_place_programs import InPlaceProgram
from tests.triton_backend.returned_views import memory
from tests.triton_backend.running import compiled


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
            assert memory(actual) == memory(expected), str(program)
    magjit.reset()


@pytest.mark.parametrize("seed", range(60))
def test_in_place_program(seed: int) -> None:
    check_program(seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1000, 5000))
def test_many_in_place_programs(seed: int) -> None:
    check_program(seed)
