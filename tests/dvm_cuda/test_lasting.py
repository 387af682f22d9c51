"""Tensors that no cache holds: what is read of them stays longer than what is written."""

from __future__ import annotations

import struct
from typing import Any

import pytest
import torch

from magjit_dvm.cuda.words import INPUTS_AT, LASTING, LASTING_BYTES, OF_ROWS
from magjit_dvm.instructions import DType
from magjit_dvm.program import Node, NodeKind, Program
from tests.dvm.checking import compute, load, output, reduce, tensor
from tests.dvm_cuda.checking import addresses
from tests.dvm_cuda.test_columns import image_of

F32 = DType.F32


def kinds(program: Program, *arguments: torch.Tensor) -> list[int]:
    """What an image says of the elements of each input that comes through the ring."""
    image = image_of(program, list(arguments))
    packed = image.pack(addresses([*arguments, *[torch.zeros(8)] * 4]))
    places = (INPUTS_AT + 16 * k + 8 for k in range(len(image.inputs)))
    return [struct.unpack_from("<I", packed, at)[0] for at in places]


def unread(*sizes: int, dtype: torch.dtype = torch.float32) -> Any:
    """So large a tensor has no memory until somebody reads it."""
    return torch.empty(*sizes, dtype=dtype)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_by_a_tensors_bytes(more: int) -> None:
    """Each by itself: a mask of as many elements is not large."""
    count = LASTING_BYTES // 4 + more
    nodes = (load(0, F32), load(1, DType.BOOL), Node(NodeKind.CAST, F32, (1,)))
    nodes += (compute("mul", F32, 0, 2),)
    program = Program(1, (tensor(F32, 0), tensor(DType.BOOL, 0)), nodes, (output(3, 0),))
    found = kinds(program, unread(count), unread(count, dtype=torch.bool))
    assert found == [4 | LASTING * (more >= 0), 1]


@pytest.mark.parametrize("columns", [1024, 65536])
def test_rows(columns: int) -> None:
    """Not those in chunks, which are read again; nor what has an element for each row."""
    nodes = (load(0, F32), load(1, F32), compute("mul", F32, 0, 1), reduce("sum", F32, 2, 1))
    nodes += (compute("sub", F32, 2, 3),)
    program = Program(2, (tensor(F32, 0, 1), tensor(F32, 0)), nodes, (output(4, 0, 1),))
    rows = 2 * LASTING_BYTES // 4 // columns
    first, *others = kinds(program, unread(rows, columns), unread(rows))
    assert first == 4 | LASTING * (columns == 1024)
    assert all(one == 4 | OF_ROWS for one in others)
