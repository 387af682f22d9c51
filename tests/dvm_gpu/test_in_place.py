"""Fused operators that store into inputs, on a GPU: values, versions, and no copies."""

from __future__ import annotations

import pytest
import torch

from tests.dvm.test_in_place import (
    STORED,
    Program,
    by_its_mean,
    copies,
    ran,
    randn,
    repeated,
    shifted,
    stores,
    turned_itself,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("program", STORED, ids=lambda one: one.__name__)
def test_what_is_computed_is_stored(program: Program, dtype: torch.dtype) -> None:
    def given(turn: int) -> tuple[torch.Tensor]:
        return (randn(260, 270, seed=turn, dtype=dtype),)

    near = 2e-3 if dtype is torch.float16 else None  # eager mode rounds each operator's result
    made = ran(program, randn(260, 270, dtype=dtype), given=given, device="cuda", near=near)
    assert copies(made) == 0 and stores(made) == len(made)


@pytest.mark.parametrize("program", STORED, ids=lambda one: one.__name__)
def test_large_ones(program: Program) -> None:
    def given(turn: int) -> tuple[torch.Tensor]:
        return (randn(2100, 4099, seed=turn),)

    ran(program, randn(2100, 4099), given=given, device="cuda", near=1e-3)


@pytest.mark.parametrize("program", [shifted, turned_itself, by_its_mean, repeated])
def test_what_is_read_otherwise(program: Program) -> None:
    made = ran(
        program,
        randn(260, 270),
        given=lambda turn: (randn(260, 270, seed=turn),),
        device="cuda",
    )
    assert stores(made) == 0
