"""Casts before what moves elements, and behind what takes parts; gradients of biases apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_dvm.casts import cast_where_least_moves
from magjit_dvm.fuser import fuse
from magjit_dvm.simplify import simplify

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
aten = torch.ops.aten
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def traced(function: Any, *given: torch.Tensor) -> GraphModule:
    """The graph on a GPU; it can be run on the CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda")
            for one in given
        ]
        graph = make_fx(function)(*fakes)
    for node in graph.graph.nodes:  # which torch would have taken apart
        if node.target is aten.reflection_pad2d.default:
            node.target = aten.upsample_nearest2d.default
            node.args = (node.args[0], list(node.meta["val"].shape[2:]))
    graph.recompile()
    return graph


def exchanged(function: Any, *given: torch.Tensor) -> GraphModule:
    """The graph after the pass, whose results are the same to the bit, and lie alike."""
    graph = traced(function, *given)
    wanted = graph(*given)
    cast_where_least_moves(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for one, other in zip(graph(*given), wanted, strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        assert torch.equal(one, other)
    return graph


def moved(graph: GraphModule) -> dict[str, list[torch.dtype]]:
    """Dtypes of what each operator but casts makes, by its name."""
    found: dict[str, list[torch.dtype]] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            found.setdefault(node.target.__name__.split(".")[0], []).append(value.dtype)
    return found


def images(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def test_what_is_concatenated_is_cast_before() -> None:
    """Through upsampling, too; of what others read in float32 they get that."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        y = torch.sigmoid(y)
        twice = aten.reflection_pad2d.default(x, [2, 2, 2, 2])
        return torch.cat([twice, y], 1).to(F16), y * 2

    found = moved(exchanged(function, images(2, 3, 4, 4), images(2, 5, 8, 8)))
    assert found["upsample_nearest2d"] == found["cat"] == [F16]
    assert found["sigmoid"] == found["mul"] == [F32]


@pytest.mark.parametrize("other", [F16, BF16])
def test_parts_of_other_dtypes_are_not_rounded_otherwise(other: torch.dtype) -> None:
    """What has 16 bits already stays as it is; a bfloat16 would be another float16."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return (torch.cat([x, y], 1).to(F16),)

    found = moved(exchanged(function, images(2, 3, 4, 4), images(2, 5, 4, 4, dtype=other)))
    assert found["cat"] == [F16 if other is F16 else F32]


def test_what_somebody_else_reads_is_moved_as_it_is() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        both = torch.cat([x, y], 1)
        return both.to(F16), both

    assert moved(exchanged(function, images(2, 3, 4, 4), images(2, 5, 4, 4)))["cat"] == [F32]


def test_parts_of_what_is_cast_are_cast() -> None:
    def function(x: torch.Tensor) -> Any:
        first, second = parts(x, 0, 3)
        return first * 2, aten.upsample_nearest2d_backward.default(second, [4, 4], [2, 3, 2, 2])

    found = moved(exchanged(function, images(2, 6, 4, 4, dtype=F16)))
    assert found["slice"] == [F16, F16] and "clone" not in found


def parts(x: torch.Tensor, *firsts: int) -> list[torch.Tensor]:
    wide = x.to(F32)
    return [aten.slice.Tensor(wide, 1, at, at + 3) for at in firsts]


def whole_as_well(x: torch.Tensor) -> Any:
    wide = x.to(F32)
    return aten.slice.Tensor(wide, 1, 0, 3) * 2, wide * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tuple(parts(x, 0, 3)),
        lambda x: tuple(one.view(-1) * 2 for one in parts(x, 0, 3)),
        lambda x: tuple(one * 2 for one in parts(x, 0, 1, 3)),
        whole_as_well,
    ],
    ids=["results", "views", "more than the whole", "the whole as well"],
)
def test_parts_that_stay(function: Any) -> None:
    graph = exchanged(function, images(1, 6, 4, 4, dtype=F16))
    assert set(moved(graph)["slice"]) == {F32}


def test_a_part_that_is_summed_up_is_copied_by_itself() -> None:
    shape = (2, 32, 256, 256)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        first, second = (aten.slice.Tensor(x.to(F32), 1, at, at + 32) for at in (0, 32))
        z = first * y
        return z.sum((2, 3)), z * 2, second * y

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 64, *shape[2:], dtype=F16, device="cuda")
        graph = make_fx(function)(x, torch.empty(shape, device="cuda"))
    cast_where_least_moves(graph.graph)
    (copy,) = (node for node in graph.graph.nodes if node.target is aten.clone.default)
    groups = fuse(graph.graph).groups
    (own,) = (group for group in groups if copy in group.nodes)
    assert own.nodes == [copy]
    assert any(copy in group.arguments and len(group.nodes) > 3 for group in groups)


def gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
    others = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
    return aten.convolution_backward.default(dy, x, weight, [weight.shape[0]], *others)


@pytest.mark.parametrize(
    ("shape", "last", "apart"),
    [
        ((4, 16, 128, 128), False, True),
        ((4, 16, 128, 128), True, False),
        ((1, 16, 64, 64), False, False),
    ],
)
def test_gradients_of_biases_are_sums_of_images(
    shape: tuple[int, ...], last: bool, apart: bool
) -> None:
    torch.manual_seed(0)
    given = images(*shape), images(shape[0], 2, *shape[2:]), images(16, 2, 3, 3)
    if last:
        given = given[0].contiguous(memory_format=torch.channels_last), *given[1:]
    graph = traced(gradients, *given)
    simplify(graph.graph)
    graph.graph.lint()
    graph.recompile()
    names = moved(graph)
    assert ("sum" in names) is apart
    for one, other in zip(graph(*given), gradients(*given), strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * scale)
        assert one.dtype == other.dtype and one.shape == other.shape
