"""NumPy arrays in a program: constants, tensors made of them, memory that is shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..twin import call
from .table import FeatureTable

ROWS = FeatureTable()
SCALES = np.array([1.0, 2.0])
CHANGED = np.array([1.0, 2.0])
COUNTS = np.arange(6).reshape(2, 3)


@ROWS.program()
def array_from_outside(x: torch.Tensor) -> Any:
    for scale in SCALES:
        x = x * float(scale)
    return x * len(SCALES) + SCALES.sum() + COUNTS[1, 2], COUNTS.T


@ROWS.program()
def tensors_that_copy_an_array(x: torch.Tensor) -> Any:
    y = torch.tensor(SCALES, dtype=torch.float32).sum() + torch.FloatTensor(SCALES)[0]
    return x + y, torch.tensor(COUNTS), torch.Tensor(COUNTS), torch.tensor(COUNTS[0] * 2)


@ROWS.program()
def tensor_that_shares_an_array_of_the_run(x: torch.Tensor) -> Any:
    anchors = np.zeros((2, 4))
    anchors[:, 2:] = SCALES * np.tile(SCALES, (2, 1))
    anchors[:, 0::2] -= np.tile(anchors[:, 2] * 0.5, (2, 1)).T
    return x.sum() * torch.from_numpy(anchors.astype(np.float32)), torch.from_numpy(anchors)


@ROWS.program()
def array_behind_attributes_and_in_containers(x: torch.Tensor) -> Any:
    y = x * float(SCALES.T.sum() + SCALES.flat[1] + SCALES.real[0])
    rows = np.array([1, 0])
    return y + float(np.array([SCALES, SCALES])[1, 0]), x[rows], x[[0, 1], rows]


@ROWS.program(split=True)
def changes_through_a_transposed_array(x: torch.Tensor) -> Any:
    CHANGED.T[:] = 3.0
    return x * float(CHANGED[0])


@ROWS.program(split=True)
def changes_through_a_memoryview(x: torch.Tensor) -> Any:
    memoryview(CHANGED)[0] = 3.0
    return x * float(CHANGED[0])


@ROWS.program(split=True)
def changes_by_a_positional_out(x: torch.Tensor) -> Any:
    np.add.reduce(np.ones((2, 2)), 0, None, CHANGED)
    return x * float(CHANGED[0])


@ROWS.program(split=True)
def legacy_tensor_over_an_array(x: torch.Tensor) -> Any:
    array = np.ones(3, dtype=np.float32)
    t = torch.FloatTensor(array)
    array[0] = 9.0
    return x.sum() * t


@ROWS.program(split=True)
def array_and_tensor_over_it(x: torch.Tensor) -> Any:
    array = np.ones(3, dtype=np.float32)
    return array, torch.from_numpy(array), x


@ROWS.program(split=True)
def index_of_two_dimensions(x: torch.Tensor) -> Any:
    return x[np.array([[0, 1], [1, 1]])]


@ROWS.program(split=True)
def index_that_is_a_mask_of_bytes(x: torch.Tensor) -> Any:
    return x[np.arange(x.shape[0], dtype=np.uint8) % 2]


@ROWS.program(split=True)
def tensor_that_shares_an_array_from_outside(x: torch.Tensor) -> Any:
    return x.sum() * torch.from_numpy(COUNTS)


@ROWS.program(split=True)
def view_of_an_outside_array_changed(x: torch.Tensor) -> Any:
    view = CHANGED[:1]
    view[0] = 3.0
    return x * float(CHANGED[0])


@ROWS.program(split=True)
def flat_view_changed(x: torch.Tensor) -> Any:
    array = np.ones((2, 2), dtype=np.float32)
    t = torch.from_numpy(array)
    array.flat[1] = 5.0
    return x.sum() * t


@ROWS.program(split=True)
def array_changed_through_its_tensor(x: torch.Tensor) -> Any:
    array = np.ones(3, dtype=np.float32)
    torch.from_numpy(array).add_(1)
    return x * float(array[0])


@ROWS.program(split=True)
def array_changed_behind_its_tensor(x: torch.Tensor) -> Any:
    array = np.ones(3, dtype=np.float32)
    t = torch.from_numpy(array)
    np.add(array, 1.0, out=array)
    return x * t[0]


@ROWS.program(lambda: call(torch.randn(4, 4)))
def tensor_indexed_by_arrays(x: torch.Tensor) -> Any:
    turned, chosen = np.arange(4)[::-1].copy(), np.array([True, False, True, False])
    y = x.clone()
    y[:, turned] = x
    y[chosen] = 0
    return x[:, turned], x[chosen], x[..., turned], x[None, turned], x[turned, turned], y
