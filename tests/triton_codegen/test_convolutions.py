"""Convolutions rewritten for the library's kernels: biases, and groups of 1 x 1."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_triton.codegen.channels_last import in_channels_last
from magjit_triton.codegen.convolutions import biases_apart, grouped_as_products

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def alike() -> Iterator[None]:
    """Products and convolutions at the same precision; the default on GPUs is not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def traced(function: Callable[..., object], *arguments: Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*arguments)


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def checked(gm: GraphModule) -> None:
    """The values that nodes are said to have are those that they have."""
    gm.graph.lint()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta["val"], Tensor):
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
        with node.meta["val"].fake_mode, torch.no_grad():
            value = node.target(*args, **kwargs)
        assert value.shape == node.meta["val"].shape
        assert value.dtype == node.meta["val"].dtype


BIASED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "2d": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(),
        (torch.randn(2, 4, 7, 6), torch.randn(5, 4, 3, 3), torch.randn(5)),
    ),
    "1d": (
        lambda x, w, b: F.conv1d(x, w, b, stride=2) * 2,
        (torch.randn(2, 4, 9), torch.randn(5, 4, 3), torch.randn(5)),
    ),
    "3d, as a result": (
        F.conv3d,
        (torch.randn(2, 4, 5, 6, 5), torch.randn(5, 4, 3, 3, 3), torch.randn(5)),
    ),
    "transposed": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2).tanh(),
        (torch.randn(2, 4, 5, 5), torch.randn(4, 3, 2, 2), torch.randn(3)),
    ),
    "1 x 1 in groups": (
        lambda x, w, b: F.conv2d(x, w, b, groups=2).relu(),
        (torch.randn(2, 8, 7, 6), torch.randn(6, 4, 1, 1), torch.randn(6)),
    ),
}


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", BIASED)
def test_biases_are_added_apart(name: str, mode: str) -> None:
    function, given = BIASED[name]
    gm = traced(function, *given, mode=mode)
    biases_apart(gm)
    if mode == "symbolic" and "groups" in name:
        assert aten.add.Tensor not in targets(gm)
        return
    assert targets(gm).count(aten.add.Tensor) == 1
    assert all(
        node.args[2] is None
        for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    )
    checked(gm)
    torch.testing.assert_close(gm(*given), function(*given))


def test_what_has_no_kernel_of_the_librarys_keeps_its_bias() -> None:
    given = (torch.randn(2, 4, 7, 6), torch.randn(4, 1, 3, 3), torch.randn(4))
    gm = traced(lambda x, w, b: F.conv2d(x, w, b, groups=4), *given)
    biases_apart(gm)
    assert aten.add.Tensor not in targets(gm)


def in_groups(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x * 2, w, b, groups=3).relu()


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("out", [6, 15])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_groups_of_one_by_one_are_products(last: bool, out: int, dtype: torch.dtype) -> None:
    x = torch.randn(4, 12, 5, 9, dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    given = (x, torch.randn(out, 4, 1, 1, dtype=dtype), torch.randn(out, dtype=dtype))
    gm = traced(in_groups, *given)
    biases_apart(gm)
    grouped_as_products(gm)
    assert aten.convolution.default not in targets(gm)
    assert targets(gm).count(aten.bmm.default) == 1
    checked(gm)
    expected = in_groups(*given)
    assert gm(*given).stride() == expected.stride()
    tolerance = {} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(gm(*given), expected, **tolerance)


def left_alone() -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    x, w = torch.randn(2, 12, 6, 6), torch.randn(6, 4, 1, 1)
    return {
        "strides": (lambda x, w: F.conv2d(x, w, groups=3, stride=2), (x, w)),
        "padding": (lambda x, w: F.conv2d(x, w, groups=3, padding=1), (x, w)),
        "larger filters": (lambda x, w: F.conv2d(x, w, groups=3), (x, torch.randn(6, 4, 3, 3))),
        "one group": (lambda x, w: F.conv2d(x, w), (x, torch.randn(6, 12, 1, 1))),
        "single channels": (lambda x, w: F.conv2d(x, w, groups=12), (x, torch.randn(12, 1, 1, 1))),
        "transposed": (
            lambda x, w: F.conv_transpose2d(x, w, groups=3),
            (x, torch.randn(12, 2, 1, 1)),
        ),
        "strided operand": (lambda x, w: F.conv2d(x[:, :, ::2], w, groups=3), (x, w)),
        "more weights than pixels": (
            lambda x, w: F.conv2d(x, w, groups=3),
            (torch.randn(2, 12, 1, 1), torch.randn(6, 4, 1, 1)),
        ),
        "float64": (lambda x, w: F.conv2d(x, w, groups=3), (x.double(), w.double())),
    }


@pytest.mark.parametrize("name", left_alone())
def test_what_is_no_such_product_stays(name: str) -> None:
    function, given = left_alone()[name]
    gm = traced(function, *given)
    before = targets(gm)
    grouped_as_products(gm)
    assert targets(gm) == before


def test_products_at_another_precision_are_none() -> None:
    torch.backends.cuda.matmul.allow_tf32 = not torch.backends.cudnn.allow_tf32
    given = (torch.randn(4, 12, 5, 9), torch.randn(6, 4, 1, 1), torch.randn(6))
    gm = traced(in_groups, *given)
    grouped_as_products(gm)
    assert aten.convolution.default in targets(gm)


def scales(x: Tensor, first: Tensor, single: Tensor, groups: Tensor) -> Tensor:
    """EfficientViT's: a wide product, filters of single channels, a product in groups."""
    y = F.conv2d(x, first)
    y = F.conv2d(F.conv2d(y, single, padding=single.shape[-1] // 2, groups=96), groups, groups=3)
    return y.relu()


@pytest.mark.parametrize("width", [3, 5])
def test_large_filters_of_single_channels_go_to_channels_last(width: int) -> None:
    shapes = ((96, 64, 1, 1), (96, 1, width, width), (96, 32, 1, 1))
    given = (torch.randn(2, 64, 9, 8), *(torch.randn(shape) * 0.1 for shape in shapes))
    gm = traced(scales, *given)
    in_channels_last(gm)
    grouped_as_products(gm)
    images = [
        node.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last)
        for node in gm.graph.find_nodes(op="call_function", target=aten.convolution.default)
    ]
    assert images == [width == 5] * 2
    assert aten.bmm.default in targets(gm)
    checked(gm)
    expected = scales(*given)
    torch.testing.assert_close(gm(*given), expected, rtol=1e-4, atol=1e-4)
    assert gm(*given).stride() == expected.stride()
