"""The machine for GPUs is asked for; words run in two ways."""

from __future__ import annotations

from typing import Any

import pytest

from magjit_dvm.instructions import DType
from tests.dvm_cuda import checking
from tests.dvm_cuda.ptx_machine import run_ptx

COSTLY = frozenset(
    {
        "test_more_dimensions",
        "test_offsets",
        "test_operators_of_rows",
        "test_rows_of_a_table",
        "test_sums",
        "test_with_a_row_a_column_and_a_number",
    }
)
"""Tests of which the kernel's own lines take minutes in all dtypes."""
SIMULATED = frozenset(
    {
        "test_a_norm_of_rows",
        "test_a_softmax_below_the_diagonal",
        "test_casts_of_rows",
        "test_columns_with_space_between_them",
        "test_gradients_of_losses_of_classes",
        "test_losses_of_classes",
        "test_more_dimensions",
        "test_offsets",
        "test_operators_of_rows",
        "test_other_sizes_come_element_by_element",
        "test_second_operands_are_asked_for_ahead",
        "test_two_transposed_operands_and_several_results",
    }
)
"""Costly tests of words whose lines others run as well: by these they are slow in every dtype."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Of costly tests the kernel's own lines run one dtype; in the others they are slow.

    It is float16 where that is among them, else the first.  The simulator runs all.
    """
    dtypes: dict[str, list[str]] = {}
    for item in items:
        if dtype := _dtype_of_lines(item):
            dtypes.setdefault(item.originalname, []).append(dtype)
    for item in items:
        way = item.callspec.params.get("way") if hasattr(item, "callspec") else None
        if way == "PTX" and item.originalname in SIMULATED:
            item.add_marker(pytest.mark.slow)
        dtype = _dtype_of_lines(item)
        found = dtypes.get(item.originalname, []) if dtype else []
        if found and dtype != ("f16" if "f16" in found else found[0]):
            item.add_marker(pytest.mark.slow)


def _dtype_of_lines(item: Any) -> str:
    """Of a costly test that runs the kernel's own lines; else empty."""
    if getattr(item, "originalname", "") not in COSTLY or not hasattr(item, "callspec"):
        return ""
    given = item.callspec.params
    dtype = given.get("dtype")
    return dtype.text if given.get("way") == "PTX" and isinstance(dtype, DType) else ""


@pytest.fixture(autouse=True)
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGJIT_DVM_CUDA", "1")


@pytest.fixture(params=["simulator", "PTX"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Words by what they mean, and by the kernel's own lines."""
    if request.param == "PTX":
        monkeypatch.setattr(checking, "run_image", run_ptx)
    return str(request.param)
