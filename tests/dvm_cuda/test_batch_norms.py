"""Batch norms in training: a program with the running statistics, in parts, or ATen's kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_dvm import batch_norms
from magjit_dvm.batch_norms import BatchNorm, Way, kernel_of
from magjit_dvm.by_aten import by_aten
from magjit_dvm.cuda.rows import MOST_REGISTERS
from magjit_dvm.fuser import fuse
from magjit_dvm.groups import Fusion
from magjit_dvm.lowering import decompositions
from magjit_dvm.writes import write_together
from tests.dvm_cuda.agreeing import check_encoders
from tests.dvm_cuda.checking import BIG, check_words

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
aten = torch.ops.aten


def normed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
) -> Any:
    """As AOTAutograd has it: what the backward needs and new running statistics are results."""
    norm = aten._native_batch_norm_legit_functional.default
    out, *others = norm(x, weight, bias, mean, var, True, 0.1, 1e-5)
    return out.relu(), *others


def fusion_of(shape: tuple[int, ...], order: torch.memory_format) -> tuple[Any, Fusion]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(shape, device="cuda").to(memory_format=order)
        rest = [torch.empty(shape[1], device="cuda") for _ in range(4)]
        graph = make_fx(normed, decomposition_table=decompositions())(x, *rest)
    graph.graph.eliminate_dead_code()
    return graph, fuse(graph.graph)


def given_for(shape: tuple[int, ...]) -> list[torch.Tensor]:
    rest = [torch.rand(shape[1]) + 0.5 for _ in range(4)]
    return [torch.randn(shape) + 1, *rest]


@pytest.mark.parametrize(
    "shape", [(2, 5, 4, 4), (3, 7, 9, 3), (4, 3, 20, 40), (64, 12), (2, 3, 70), (5, 2, 70, 90)]
)
def test_with_running_statistics_it_is_one_program(shape: tuple[int, ...]) -> None:
    """It has 17 values for each channel, and a row 16 registers: some are of two, in turn."""
    graph, fusion = fusion_of(shape, torch.contiguous_format)
    (group,) = fusion.groups
    assert group.program is not None and len(group.outputs) == 5
    around, given = torch.fx.Interpreter(graph, garbage_collect_values=False), given_for(shape)
    for made, expected in zip(around.run(*given), normed(*given), strict=True):
        torch.testing.assert_close(made, expected)
    arguments = [around.env[one] for one in group.arguments]
    image = check_words(group.program, arguments)
    assert image is not None and image.numbers == MOST_REGISTERS
    assert check_encoders(group.program, arguments, BIG) == "encoded"
    for made, node in zip(by_aten(graph, group)(*arguments), group.outputs, strict=True):
        torch.testing.assert_close(made, around.env[node])


@pytest.mark.parametrize(
    ("shape", "order", "fused"),
    [
        ((8, 64, 16, 16), torch.contiguous_format, True),
        ((8, 64, 56, 56), torch.contiguous_format, False),
        ((8, 64, 56, 56), torch.channels_last, False),
        ((2, 8, 14, 14), torch.channels_last, True),
        ((4096, 1024), torch.contiguous_format, False),
        ((64, 1024), torch.contiguous_format, True),
    ],
)
def test_what_is_one_kernel_of_atens(
    shape: tuple[int, ...], order: torch.memory_format, fused: bool
) -> None:
    """Channels of large images, or many side by side: no launch of the VM's reads them as fast."""
    graph, fusion = fusion_of(shape, order)
    whole = graph.graph.find_nodes(
        op="call_function", target=aten._native_batch_norm_legit_functional.default
    )
    assert bool(whole) is not fused
    assert any(len(group.outputs) > 1 for group in fusion.groups) is fused


@pytest.mark.parametrize(
    ("shape", "dtype", "way", "backward"),
    [
        ((32, 64, 112, 112), torch.float16, Way.PARTS, True),
        ((32, 256, 56, 56), torch.float16, Way.PARTS, True),
        ((128, 512, 28, 28), torch.float32, Way.PARTS, False),
        ((32, 256, 56, 56), torch.bfloat16, Way.PARTS, True),
        ((32, 512, 28, 28), torch.float16, Way.KERNEL, False),
        ((32, 512, 28, 28), torch.bfloat16, Way.PARTS, True),
        ((16, 512, 28, 28), torch.bfloat16, Way.PARTS, False),
        ((128, 64, 32, 32), torch.float32, Way.PARTS, True),
        ((128, 2048, 7, 7), torch.float16, Way.KERNEL, False),
        ((128, 2048, 7, 7), torch.bfloat16, Way.PARTS, False),
        ((128, 2048, 4, 4), torch.bfloat16, Way.PROGRAM, False),
        ((4, 512, 28, 28), torch.bfloat16, Way.KERNEL, False),
        ((4, 2048, 7, 7), torch.float16, Way.PROGRAM, False),
        ((1, 64, 1000, 1000), torch.float16, Way.PROGRAM, False),
        ((64, 64, 0, 8), torch.float16, Way.PROGRAM, False),
        ((32, 64, 112, 112), torch.float64, Way.KERNEL, False),
    ],
)
def test_ways(shape: tuple[int, ...], dtype: torch.dtype, way: Way, backward: bool) -> None:
    """As measured: long channels in parts, gradients of few of them as well."""
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda", dtype=dtype)
        assert batch_norms._way(x, training=True) is way
        assert batch_norms._backward_in_parts(x) is backward
        assert batch_norms._way(x, training=False) is Way.PROGRAM
        assert batch_norms._way(x.to("cpu"), training=True) is Way.PROGRAM


@pytest.mark.parametrize("read", [False, True])
def test_running_statistics_are_written_by_the_kernel(read: bool) -> None:
    """Not where something else reads what they were."""

    def program(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        norm = aten._native_batch_norm_legit_functional.default
        out, mean, root, *new = norm(x, *rest, True, 0.1, 1e-5)
        before = rest[2] * 2 if read else root
        for old, one in zip(rest[2:], new, strict=True):
            aten.copy_.default(old, one)
        return out, mean, before

    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(8, 64, 56, 56, device="cuda")]
        given += [torch.empty(64, device="cuda") for _ in range(4)]
        graph = make_fx(program, decomposition_table=decompositions())(*given)
    write_together(graph.graph)
    (norm,) = graph.graph.find_nodes(
        op="call_function", target=aten._native_batch_norm_legit_functional.default
    )
    made = kernel_of(norm)
    assert isinstance(made, BatchNorm)
    targets = {node.target for node in graph.graph.nodes}
    assert aten.copy_.default not in targets
    assert (aten._foreach_copy_.default in targets) is read
    arguments = given_for((8, 64, 4, 4))
    old = [one.clone() for one in arguments[3:]]
    found = made(*arguments, True, 0.1, 1e-5)
    expected = norm.target(*arguments[:3], *old, True, 0.1, 1e-5)
    torch.testing.assert_close(list(found), list(expected))
    assert all((one is new) is not read for one, new in zip(arguments[3:], found[3:], strict=True))
    torch.testing.assert_close(arguments[3:], old if read else list(expected[3:]))
