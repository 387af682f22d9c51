"""NumPy's numbers decide the dtype of the tensors that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import magjit

pytestmark = pytest.mark.filterwarnings("ignore")

NUMBERS = [
    np.float64(0.75),
    np.float32(0.75),
    np.float16(0.75),
    np.int64(3),
    np.int32(-3),
    np.int8(3),
    np.uint8(200),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.complex128(1 - 2j),
    np.array(0.5),
    np.array(7, dtype=np.int16),
]


def alone(number: Any, x: Tensor) -> Any:
    return torch.tensor(number), torch.as_tensor(number), x.new_tensor(number)


def in_lists(number: Any, x: Tensor) -> Any:
    return torch.tensor([[number, 1], [0, number]]), torch.as_tensor([number]), x * 2


def with_dtype(number: Any, x: Tensor) -> Any:
    given = torch.tensor([number], dtype=torch.complex64)
    return given, torch.as_tensor([number], dtype=torch.complex128), x * 2


def mixed(number: Any, x: Tensor) -> Any:
    return torch.tensor([np.float32(1.5), number]), torch.tensor([2, number]), x * 2


def in_arithmetic(number: Any, x: Tensor) -> Any:
    return x * number, x.to(torch.int32) + number, torch.full((2,), number), x + number


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number.dtype}-{number.ndim}")
@pytest.mark.parametrize("program", [alone, in_lists, with_dtype, mixed, in_arithmetic])
def test_dtypes_and_values(program: Callable[..., Any], number: Any) -> None:
    x = torch.rand(3)
    try:
        expected = program(number, x)
    except (TypeError, RuntimeError) as error:
        with pytest.raises(type(error)):
            magjit.compile(program, backend="eager")(number, x)
        return
    compiled = magjit.compile(program, backend="eager")
    for _ in range(3):
        torch.testing.assert_close(compiled(number, x), expected, rtol=0, atol=0)


def test_another_type_of_number_is_another_record() -> None:
    def program(number: Any, x: Tensor) -> Any:
        return torch.tensor([number, 1]), x + 1

    compiled = magjit.compile(program, backend="eager")
    for number in (np.float32(0.5), np.float64(0.5), 0.5, np.float32(0.5), np.float64(0.5), 0.5):
        x = torch.rand(3)
        torch.testing.assert_close(compiled(number, x), program(number, x), rtol=0, atol=0)
    assert magjit.stats(compiled).replays >= 3


def test_between_regions() -> None:
    """Numbers that come out of an array between two regions of a program."""

    def program(places: Tensor) -> Tensor:
        given = places.numpy()
        rows: list[list[Any]] = [[], [], []]
        for i in range(3):
            for j in range(int(given[i][1])):
                rows[i].append(1 - (given[i][0] - j) / 4)
            for _ in range(int(given[i][1]), 4):
                rows[i].append(0)
        return torch.tensor(rows)

    compiled = magjit.compile(program, backend="eager")
    for k in range(8):
        first = [k, 2] if k % 2 else [1, 1]
        places = torch.tensor([first, [1, 1], [1, 1 + 2 * (k % 2)]])
        torch.testing.assert_close(compiled(places), program(places), rtol=0, atol=0)
