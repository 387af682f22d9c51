"""Copies that move runs of elements, as heads of a layer: which of them a kernel of ours makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx import Node as FxNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from magjit_dvm.alone import gains_alone
from magjit_dvm.instructions import DType
from magjit_dvm.program import Program
from tests.dvm.checking import load, output, tensor
from tests.dvm_cuda.checking import check_words
from tests.dvm_cuda.test_encoder import values

aten = torch.ops.aten


def copy(x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> FxNode:
    node = Graph().placeholder("x")
    node.meta["val"] = x
    made = node.graph.call_function(aten.clone.default, (node,), {"memory_format": memory_format})
    made.meta["val"] = x.clone(memory_format=memory_format)
    return made


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 12, 64).permute(0, 2, 1, 3)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (heads, True),
        (lambda x: heads(x).transpose(2, 3), False),
        (lambda x: x, False),
        (lambda x: x[..., :700], True),
        (lambda x: x[..., :702], False),
        (lambda x: x.transpose(0, 1), True),
        (lambda x: x.t() if x.dim() == 2 else x.flatten(0, 1).t(), False),
        (lambda x: x[:1, 0, 0], False),
        (lambda x: x.double()[:, ::2], False),
        (lambda x: x.bool()[:, ::2], False),
        (lambda x: x[..., None].expand(-1, -1, -1, 1), False),
    ],
)
def test_which_copies_are_ours(view: Callable[[Tensor], Tensor], expected: bool) -> None:
    for mode in (FakeTensorMode(shape_env=ShapeEnv()), FakeTensorMode()):
        outer = mode.from_tensor(torch.empty(5, 161)).shape
        with mode:
            x = torch.empty(*outer, 768, dtype=torch.float16)
            assert gains_alone(copy(view(x))) is expected


def test_a_copy_that_keeps_strides_is_atens() -> None:
    x = torch.empty(5, 161, 768, device="meta").transpose(0, 1)
    assert not gains_alone(copy(x, torch.preserve_format))


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32, DType.BF16, DType.I32])
def test_heads_are_copied(dtype: DType) -> None:
    dims = 0, 1, 2, 3
    program = Program(4, (tensor(dtype, *dims),), (load(0, dtype),), (output(0, *dims),))
    for rows in (1, 7, 33):
        given = values(dtype, 3, rows, 4 * 64).view(3, rows, 4, 64).permute(0, 2, 1, 3)
        assert check_words(program, [given]) is not None
