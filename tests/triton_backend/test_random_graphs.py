"""Random programs under the backend: values, strides, inputs and aliases of eager mode."""

from __future__ import annotations

import pytest
import torch

from magjit.errors import BackendError
from tests.triton_backend.random_graphs import Program
from tests.triton_backend.running import compiled, run_beside_eager


def aliases(results: tuple[torch.Tensor, ...], inputs: list[torch.Tensor]) -> list[list[int]]:
    """Which of results and inputs share memory, and where each begins in it."""
    tensors = [*inputs, *results]
    owners = [one.untyped_storage().data_ptr() for one in tensors]
    first = [owners.index(owner) for owner in owners]
    return [first, [one.storage_offset() for one in tensors]]


def check_program(seed: int) -> None:
    program = Program(seed)
    if not program.returned:
        return
    try:
        run_beside_eager(program, program.inputs, tolerance=1e-4, functional=False)
    except BackendError as error:
        if "internal overlap" in str(error):
            pytest.skip("torch has no meaning for writes into overlapping elements")
        raise
    call = compiled(program)
    with torch.no_grad():
        call(*[one.clone() for one in program.inputs])
        eager = [one.clone() for one in program.inputs]
        ours = [one.clone() for one in program.inputs]
        assert aliases(program(*eager), eager)[0] == aliases(call(*ours), ours)[0]


# The last one reads, through a copy that could be virtual, what the same write overwrites.
@pytest.mark.parametrize(
    "seed", [*range(60), *(pytest.param(k, marks=pytest.mark.slow) for k in range(60, 150)), 3008]
)
def test_random_program(seed: int) -> None:
    check_program(seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1000, 6000))
def test_many_random_programs(seed: int) -> None:
    check_program(seed)
