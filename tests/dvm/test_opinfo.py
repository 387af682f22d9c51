"""The operators that the backend claims, on torch's own samples, against eager.

``SHORT`` operators run a few samples at each change; all operators of torch's table, with all
of their samples, are marked slow.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's table of operators needs expecttest")

from torch.testing._internal.common_methods_invocations import op_db

from magjit_dvm.operators import HANDLERS
from tests.dvm.checking import SMALL, machine
from tests.dvm.opinfo import DTYPES, Counts, check_sample, samples_of

_MOST = 60

_ROUNDED = "eager rounds after each of five operators, and a wider run draws other masks"
EXCEPTIONS: dict[tuple[str, torch.dtype | None], str] = {
    ("nn_functional_alpha_dropout", torch.bfloat16): _ROUNDED,
    ("nn_functional_alpha_dropout", torch.float16): _ROUNDED,
    ("nn_functional_feature_alpha_dropout_with_train", torch.bfloat16): _ROUNDED,
    ("nn_functional_feature_alpha_dropout_with_train", torch.float16): _ROUNDED,
}
"""Operators, and dtypes of operators, whose results may differ from eager's, and why."""

CLAIMED = frozenset(str(target).split(".")[1] for target in HANDLERS if "aten." in str(target))


def _claims(info: Any) -> bool:
    """Whether a handler bears the operator's own name."""
    names = {info.name, info.aten_name, info.name.rpartition(".")[2]}
    names |= {f"_{name}" for name in names} | {f"native_{name}" for name in names}
    return not names.isdisjoint(CLAIMED)


SHORT = [info for info in op_db if _claims(info)]


def _pairs(infos: list[Any], quick: bool = False) -> list[Any]:
    """Operators with their dtypes; if quick, all but float32 and every second other are slow."""
    return [
        pytest.param(
            info,
            dtype,
            id=f"{info.formatted_name}-{str(dtype)[6:]}",
            marks=pytest.mark.slow
            if quick and dtype != torch.float32 and (number + place) % 2
            else [],
        )
        for number, info in enumerate(infos)
        for place, dtype in enumerate(DTYPES)
        if dtype in info.dtypes
    ]


def _check(info: Any, dtype: torch.dtype, most: int) -> Counts:
    reason = EXCEPTIONS.get((info.formatted_name, dtype)) or EXCEPTIONS.get(
        (info.formatted_name, None)
    )
    if reason:
        pytest.skip(reason)
    counts, failures = Counts(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sampled in enumerate(samples_of(info, dtype, most)):
            try:
                outcome = check_sample(sampled)
            except Exception as error:
                failures.append(f"sample {number}: {' '.join(str(error).split())[:400]}")
                continue
            counts.compared += outcome == "compared"
            counts.fused += outcome == "fused"
            counts.left_out += outcome == "left out"
    assert not failures, "\n".join(failures)
    return counts


@pytest.mark.parametrize(("info", "dtype"), _pairs(SHORT, quick=True))
def test_claimed(info: Any, dtype: torch.dtype) -> None:
    _check(info, dtype, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("info", "dtype"), _pairs(op_db))
def test_all(info: Any, dtype: torch.dtype) -> None:
    counts = _check(info, dtype, _MOST)
    if not counts.compared + counts.fused:
        pytest.skip("no sample has anything that the backend claims, or torch cannot trace it")


@pytest.mark.slow
@pytest.mark.parametrize(("info", "dtype"), _pairs(SHORT))
def test_claimed_in_small_tiles(info: Any, dtype: torch.dtype) -> None:
    with machine(SMALL):
        _check(info, dtype, _MOST)


def test_few_exceptions() -> None:
    known = {info.formatted_name for info in op_db}
    assert {name for name, _ in EXCEPTIONS} <= known
    assert len(EXCEPTIONS) <= 0.02 * len(_pairs(op_db))
    assert len(SHORT) >= 100
