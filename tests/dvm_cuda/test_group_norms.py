"""Group norms in parts, and what is computed again between two reductions rather than written."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from magjit_dvm import group_norms
from magjit_dvm.fuser import fuse
from magjit_dvm.groups import Fusion
from magjit_dvm.lowering import decompositions
from magjit_dvm.repeating import repeat_between_reductions

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
aten = torch.ops.aten
F16, F32 = torch.float16, torch.float32

SHAPES = [((3, 12, 5, 7), 4), ((2, 6, 40), 1), ((2, 6, 3, 4, 5), 6), ((1, 4, 9, 9), 2)]


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_parts_are_norms(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, affine: bool
) -> None:
    torch.manual_seed(0)
    x, dy = (torch.randn(shape) * 2 + 3).to(dtype), torch.randn(shape).to(dtype)
    images, channels = shape[:2]
    sizes = images, channels, x.numel() // (images * channels), groups
    weight, bias = (torch.rand(channels) + 0.5 for _ in range(2)) if affine else (None, None)
    wide = [None if one is None else one.double() for one in (weight, bias)]
    found = group_norms._in_parts(x, weight, bias, *sizes, 1e-4)
    wanted = aten.native_group_norm.default(x.double(), *wide, *sizes, 1e-4)
    eager = aten.native_group_norm.default(x, weight, bias, *sizes, 1e-4)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is F32 else {"rtol": 1e-2, "atol": 1e-2}
    for one, other, like in zip(found, wanted, eager, strict=True):
        torch.testing.assert_close(one.double(), other, **close)
        assert one.dtype == like.dtype and one.stride() == like.stride()
    mean, root = wanted[1:]
    mask = [True, affine, affine]
    given = dy, x, mean.float(), root.float(), weight
    gradients = group_norms._gradients_in_parts(*given, *sizes, mask)
    expected = aten.native_group_norm_backward.default(
        dy.double(), x.double(), mean, root, wide[0], *sizes, mask
    )
    for one, other, asked in zip(gradients, expected, mask, strict=True):
        assert (one is not None) is asked
        if one is not None:
            scale = other.abs().max().item()
            torch.testing.assert_close(one.double(), other, rtol=0, atol=close["rtol"] * scale)


S = (4, 64, 128, 128)


def traced(function: Any, *kinds: tuple[tuple[int, ...], torch.dtype]) -> GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(shape, device="cuda", dtype=dtype) for shape, dtype in kinds]
        graph: GraphModule = make_fx(function, decomposition_table=decompositions())(*given)
    graph.graph.eliminate_dead_code()
    return graph


def large(nodes: Any) -> list[FxNode]:
    return [
        node
        for node in nodes
        if isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].numel() >= 1 << 20
    ]


def fused(graph: GraphModule) -> Fusion:
    repeat_between_reductions(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return fuse(graph.graph)


def between(fusion: Fusion) -> list[FxNode]:
    """Large tensors that a group writes for others."""
    return [
        node
        for group in fusion.groups
        for node in large(group.outputs)
        if any(user.op != "output" for user in node.users)
    ]


def forward(conv: torch.Tensor, offset: torch.Tensor, weight: torch.Tensor) -> Any:
    """Behind a convolution under autocast, which has its bias apart."""
    x = (conv + offset.view(1, -1, 1, 1)).float()
    sizes = S[0], S[1], S[2] * S[3], 8
    out, mean, root = aten.native_group_norm.default(x, weight, weight, *sizes, 1e-5)
    return torch.nn.functional.silu(out).half(), mean, root


def backward(dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *stats: torch.Tensor) -> Any:
    """Of a norm with a GELU behind it, whose input is computed again."""
    mean, root = stats
    x = x.float()
    scale = (root.unsqueeze(2) * weight.view(1, 8, 8)).reshape(*S[:2], 1, 1)
    u = (x - mean.repeat_interleave(8, 1).view(*S[:2], 1, 1)) * scale
    dy = aten.gelu_backward.default(dz.float(), u)
    sizes = S[0], S[1], S[2] * S[3], 8
    norm = aten.native_group_norm_backward.default
    return norm(dy, x, mean, root, weight, *sizes, [True, True, True])


IMAGES, VECTOR, STATS = (S, F16), ((64,), F32), ((4, 8), F32)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [(forward, (IMAGES, ((64,), F16), VECTOR)), (backward, (IMAGES, IMAGES, VECTOR, STATS, STATS))],
)
def test_nothing_large_is_written_between_parts(function: Any, kinds: Any) -> None:
    """Each reads what is there in 16 bits; only results are written."""
    before = between(fuse(traced(function, *kinds).graph))
    graph = traced(function, *kinds)
    fusion = fused(graph)
    assert before and not between(fusion)
    assert sum(bool(large(group.arguments)) for group in fusion.groups) == 2
    assert {
        node.meta["val"].dtype for group in fusion.groups for node in large(group.arguments)
    } == {F16}


def test_what_is_made_again_is_the_same() -> None:
    torch.manual_seed(0)
    given = [torch.randn(S).half(), torch.randn(64).half(), torch.rand(64) + 0.5]
    graph = traced(forward, *((tuple(one.shape), one.dtype) for one in given))
    count = len(graph.graph.nodes)
    fused(graph)
    assert len(graph.graph.nodes) > count
    for found, wanted in zip(graph(*given), forward(*given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_what_is_made_again_is_not_made_where_its_operands_are() -> None:
    """What it is made of is a result of the sums' group, which would write it as well."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x = x + y
        wide = x.float()
        total = wide.sum((2, 3)).sum(1)
        return x, (wide * total.view(-1, 1, 1, 1)).half()

    graph = traced(function, (S, F16), (S, F16))
    repeat_between_reductions(graph.graph)
    groups = fuse(graph.graph).groups
    assert [[node.meta["val"].dtype for node in large(one.outputs)] for one in groups] == [
        [F16], [], [F16]
    ]  # fmt: skip


def test_of_symbolic_sizes_the_examples_count() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    symbols = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(S))
    sizes = mode.from_tensor(torch.empty(S, device="meta"), symbolic_context=symbols).shape
    assert all(isinstance(one, torch.SymInt) for one in sizes)
    with mode:
        x = torch.empty(sizes, dtype=F16, device="cuda")
        graph = make_fx(lambda x: twice_reduced(x, operator.mul))(x)
    before = len(graph.graph.nodes)
    repeat_between_reductions(graph.graph)
    assert len(graph.graph.nodes) > before


def twice_reduced(x: torch.Tensor, reader: Any) -> Any:
    """A sum of rows, one of sums, and what reads both that and x."""
    x = x.float() * 2
    return reader(x, (x.sum((2, 3)).sum(1, keepdim=True)).view(-1, 1, 1, 1))


def stored(x: torch.Tensor, total: torch.Tensor) -> Any:
    return x * total, torch.bmm(x.view(-1, 128, 128), x.view(-1, 128, 128))


def once(x: torch.Tensor) -> Any:
    x = x.float() * 2
    return x * x.sum(3, keepdim=True)


def small(x: torch.Tensor) -> Any:
    return twice_reduced(x[:1], lambda x, total: x * total)


def result(x: torch.Tensor) -> Any:
    return twice_reduced(x, lambda x, total: (x * total, x))


@pytest.mark.parametrize(
    ("function", "repeated"),
    [
        (lambda x: twice_reduced(x, operator.mul), True),
        (lambda x: twice_reduced(x, stored), False),
        (once, False),
        (result, False),
    ],
    ids=["read again", "stored anyway", "one reduction", "a result"],
)
def test_what_is_made_again(function: Any, repeated: bool) -> None:
    graph = traced(function, IMAGES)
    before = len(graph.graph.nodes)
    repeat_between_reductions(graph.graph)
    assert (len(graph.graph.nodes) > before) is repeated


def test_what_is_written_meanwhile_is_not_read_again() -> None:
    """Neither a tensor nor a view of it."""

    def function(x: torch.Tensor, writes: torch.Tensor) -> Any:
        y = x.view(S) * 2.0
        total = y.sum((2, 3)).sum(1)
        aten.copy_.default(writes, writes * total.sum())
        return y * total.view(-1, 1, 1, 1)

    def count(shared: bool) -> int:
        flat = (S[0] * S[1] * S[2], S[3])
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = [torch.empty(flat, device="cuda") for _ in range(2)]
            program = (lambda x, _: function(x, x)) if shared else function
            graph = make_fx(program, decomposition_table=decompositions())(*given)
        before = len(graph.graph.nodes)
        repeat_between_reductions(graph.graph)
        return len(graph.graph.nodes) - before

    assert count(shared=False) > 0 and count(shared=True) == 0


def test_what_would_be_more_to_read_is_not_made_again() -> None:
    """Of 16 bits, made of three tensors."""

    def function(*given: torch.Tensor) -> Any:
        x = given[0] * given[1] + given[2]
        return x * x.float().sum((2, 3)).sum(1).view(-1, 1, 1, 1)

    graph = traced(function, IMAGES, IMAGES, IMAGES)
    before = len(graph.graph.nodes)
    repeat_between_reductions(graph.graph)
    assert len(graph.graph.nodes) == before


@pytest.mark.parametrize(
    ("shape", "dtype", "parts"),
    [
        ((4, 64, 128, 128), F16, True),
        ((4, 64, 64, 64), F32, True),
        ((2, 64, 64, 64), F32, False),
        ((1024, 64, 5, 5), F32, False),
        ((4, 64, 128, 128), torch.float64, False),
    ],
)
def test_which_are_in_parts(shape: tuple[int, ...], dtype: torch.dtype, parts: bool) -> None:
    with FakeTensorMode():
        x = torch.empty(shape, device="cuda", dtype=dtype)
        assert group_norms._pays(x) is parts
        last = torch.empty(shape, device="cuda", dtype=dtype)
        assert not group_norms._pays(last.to(memory_format=torch.channels_last))
