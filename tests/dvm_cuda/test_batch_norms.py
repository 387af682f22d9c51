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
from magjit_dvm.channel_sums import (
    GRADIENTS,
    MOMENTS,
    ChannelGradients,
    ChannelMoments,
    absorb_masks,
)
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
        ((8, 63, 56, 56), torch.channels_last, False),
        ((2, 8, 14, 14), torch.channels_last, True),
        ((4096, 1021), torch.contiguous_format, False),
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


@pytest.mark.parametrize(
    ("shape", "dtype", "way"),
    [
        ((8, 64, 56, 56), torch.float16, Way.SUMS),
        ((8, 64, 56, 56), torch.float32, Way.SUMS),
        ((32, 68, 28, 28), torch.float32, Way.SUMS),
        ((32, 68, 28, 28), torch.bfloat16, Way.KERNEL),
        ((4, 64, 16, 28, 28), torch.bfloat16, Way.SUMS),
        ((4096, 1024), torch.float16, Way.SUMS),
        ((4096, 1021), torch.float16, Way.KERNEL),
        ((2, 64, 28, 28), torch.float16, Way.PROGRAM),
        ((8, 64, 56, 56), torch.float64, Way.KERNEL),
    ],
)
def test_ways_of_channels_side_by_side(
    shape: tuple[int, ...], dtype: torch.dtype, way: Way
) -> None:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda", dtype=dtype)
        x = x.to(memory_format=order or torch.contiguous_format)
        assert batch_norms._way(x, training=True) is way
        if order is not None and way is Way.SUMS:
            strides = [stride if stride == 1 else 2 * stride for stride in x.stride()]
            gaps = torch.empty_strided(shape, strides, device="cuda", dtype=dtype)
            assert batch_norms._way(gaps, training=True) is Way.KERNEL


def laid(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Images whose channels lie side by side, about 1."""
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    x = torch.randn(shape) * 2 + 1
    return x.to(dtype).contiguous(memory_format=order or torch.contiguous_format)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 8, 5, 6), (40, 8), (2, 8, 3, 4, 5)])
def test_sums_of_channels_are_norms(
    shape: tuple[int, ...], dtype: torch.dtype, tracks: bool, affine: bool
) -> None:
    """What is left to kernels, by ATen's operators, and what is made of it."""
    x, dy = laid(*shape, dtype=dtype), laid(*shape, dtype=dtype)
    channels = shape[1]
    weight, bias, *running = (torch.rand(channels) + 0.5 for _ in range(4))
    given: list[Any] = [weight, bias] if affine else [None, None]
    before = [one.clone() for one in running]
    others = [*given, *running, True, 0.3, 1e-4] if tracks else [*given, True, 0.3, 1e-4]
    found = batch_norms._by_sums(x, *others)
    assert all(torch.equal(one, old) for one, old in zip(running, before, strict=True))
    wide = x.double().requires_grad_()
    wides = [None if one is None else one.double().requires_grad_() for one in given]
    stats = [one.double() for one in running] if tracks else [None, None]
    wanted = torch.nn.functional.batch_norm(wide, *stats, *wides, True, 0.3, 1e-4)
    close = (
        {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    torch.testing.assert_close(found[0], wanted.to(dtype), **close)
    assert found[0].stride() == x.stride() and len(found) == (5 if tracks else 3)
    for one, new in zip(found[3:], stats, strict=False):
        torch.testing.assert_close(one, new.float())
    wanted.backward(dy.double())
    mean, root = found[1:3]
    mask = [True, affine, affine]
    gradients = batch_norms._gradients_by_sums(
        dy, x, given[0], None, None, mean, root, True, 1e-4, mask
    )
    torch.testing.assert_close(gradients[0], wide.grad.to(dtype), **close)
    for one, other in zip(gradients[1:], wides, strict=True):
        assert (one is None) is not affine
        if affine:
            torch.testing.assert_close(one, other.grad.float(), rtol=1e-4, atol=1e-3)


def behind_relu(others: int, threshold: float = 0.0) -> Any:
    """The backward of a norm in front of a ReLU, whose gradient so many others read."""

    def program(dy: torch.Tensor, y: torch.Tensor, x: torch.Tensor, *rest: torch.Tensor) -> Any:
        g = aten.threshold_backward.default(dy, y, threshold)
        found = aten.native_batch_norm_backward.default(
            g, x, rest[0], None, None, *rest[1:], True, 1e-5, [True, True, True]
        )
        return *found, *(g + k for k in range(others))

    return program


@pytest.mark.parametrize("affine", [False, True])
def test_backwards_by_sums_with_and_without_weights(affine: bool) -> None:
    def program(dy: torch.Tensor, x: torch.Tensor, *stats: torch.Tensor) -> Any:
        weight = stats[2] if affine else None
        norm = aten.native_batch_norm_backward.default
        mask = [True, affine, affine]
        return norm(dy, x, weight, None, None, *stats[:2], True, 1e-5, mask)[: 1 + 2 * affine]

    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [
            torch.empty(8, 64, 56, 56, device="cuda").to(memory_format=torch.channels_last)
            for _ in range(2)
        ]
        given += [torch.empty(64, device="cuda") for _ in range(3)]
        graph = make_fx(program, decomposition_table=decompositions())(*given)
    assert len(graph.graph.find_nodes(op="call_function", target=GRADIENTS)) == 1
    real = [laid(2, 64, 5, 6) for _ in range(2)] + [torch.rand(64) + 0.5 for _ in range(3)]
    for found, wanted in zip(graph(*real), program(*real), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("others", "threshold", "other_order", "absorbed"),
    [(0, 0.0, False, True), (1, 0.0, False, False), (0, 0.5, False, False), (0, 0.0, True, False)],
)
def test_gradients_behind_a_relu_are_not_written_for_sums(
    others: int, threshold: float, other_order: bool, absorbed: bool
) -> None:
    program = behind_relu(others, threshold)
    shape = 8, 64, 56, 56
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [
            torch.empty(shape, device="cuda").to(memory_format=torch.channels_last)
            for _ in range(3)
        ]
        if other_order:
            given[1] = torch.empty(shape, device="cuda")
        given += [torch.empty(64, device="cuda") for _ in range(3)]
        graph = make_fx(program, decomposition_table=decompositions())(*given)
    absorb_masks(graph.graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    (sums,) = graph.graph.find_nodes(op="call_function", target=GRADIENTS)
    assert isinstance(kernel_of(sums), ChannelGradients)
    assert (sums.args[1] is not None) is absorbed
    real = [laid(2, 64, 5, 6) for _ in range(3)] + [torch.rand(64) + 0.5 for _ in range(3)]
    for found, wanted in zip(graph(*real), program(*real), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_statistics_are_written_by_kernels_of_sums() -> None:
    def program(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        norm = aten._native_batch_norm_legit_functional.default
        out, mean, root, *new = norm(x, *rest, True, 0.1, 1e-5)
        for old, one in zip(rest[2:], new, strict=True):
            aten.copy_.default(old, one)
        return out, mean, root

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(8, 64, 56, 56, device="cuda").to(memory_format=torch.channels_last)
        rest = [torch.empty(64, device="cuda") for _ in range(4)]
        graph = make_fx(program, decomposition_table=decompositions())(x, *rest)
    write_together(graph.graph)
    assert aten.copy_.default not in {node.target for node in graph.graph.nodes}
    (sums,) = graph.graph.find_nodes(op="call_function", target=MOMENTS)
    made = kernel_of(sums)
    assert isinstance(made, ChannelMoments)
    _, *arguments = given_for((8, 64, 4, 4))
    images = laid(8, 64, 4, 4)
    old = [one.clone() for one in arguments[2:]]
    found = made(images, *arguments, 0.1, 1e-5)
    wanted = aten._native_batch_norm_legit_functional.default(
        images, *arguments[:2], *old, True, 0.1, 1e-5
    )
    assert found[3] is arguments[2] and found[4] is arguments[3], "where the old ones were"
    for one, new in zip(arguments[2:], wanted[3:], strict=True):
        torch.testing.assert_close(one, new)


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
