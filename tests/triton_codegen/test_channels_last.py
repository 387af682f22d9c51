"""Operands of convolutions in channels-last memory: the rewrite alone, which needs no Triton."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from magjit_triton.codegen.channels_last import in_channels_last
from tests.memory_order import in_order_of_memory

CONVOLUTION = torch.ops.aten.convolution.default
COPY = torch.ops.prims.convert_element_type.default


def traced(function: Callable[..., object], *arguments: Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(function, tracing_mode=mode)(*arguments)


def operands(gm: GraphModule) -> list[Tensor]:
    """Images and weights of the convolutions, as the graph has them."""
    nodes = [node for node in gm.graph.nodes if node.target is CONVOLUTION]
    return [one.meta["val"] for node in nodes for one in node.args[:2]]


def is_last(value: Tensor) -> bool:
    return value.is_contiguous(memory_format=torch.channels_last)


def results(gm: GraphModule) -> list[Tensor]:
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    found = output.args[0] if isinstance(output.args[0], list | tuple) else [output.args[0]]
    return [one.meta["val"] for one in found]


def weights(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.1


def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    y = F.conv2d(x, first, padding=1).relu()
    return F.conv2d(torch.cat([x, y * 2], 1), second, padding=1) + 1


CHAIN = (torch.randn(2, 64, 9, 7), weights(96, 64, 3, 3), weights(32, 160, 3, 3))


def test_operands_are_brought_there_once_and_results_come_back() -> None:
    gm = traced(chain, *CHAIN)
    before = [one.stride() for one in results(gm)]
    in_channels_last(gm)
    assert all(is_last(one) for one in operands(gm))
    assert [one.stride() for one in results(gm)] == before
    # x and two weights on the way in, the result on the way out: what lies between follows.
    assert sum(node.target is COPY for node in gm.graph.nodes) == 4
    torch.testing.assert_close(gm(*CHAIN), chain(*CHAIN))


def test_what_makes_a_result_reads_the_input_itself() -> None:
    def residual(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        inner = F.conv2d(F.conv2d(x, first).relu(), second)
        return (inner * 2 + x).relu()

    given = (torch.randn(2, 64, 9, 7), weights(128, 64, 1, 1), weights(64, 128, 1, 1))
    gm = traced(residual, *given)
    in_channels_last(gm)
    x = next(node for node in gm.graph.nodes if node.op == "placeholder")
    (copied,) = (node for node in x.users if node.target is COPY)
    assert [node.target for node in copied.users] == [CONVOLUTION]
    assert len(x.users) == 2
    torch.testing.assert_close(gm(*given), residual(*given))


def test_operators_of_others_are_given_what_they_know() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return in_order_of_memory(F.conv2d(x, weight).relu())

    given = (torch.randn(2, 64, 9, 7), weights(64, 64, 3, 3))
    gm = traced(function, *given)
    in_channels_last(gm)
    assert not any(is_last(one) for one in operands(gm)[:1])
    torch.testing.assert_close(gm(*given), function(*given))


def test_views_that_are_none_in_this_order_are_copies() -> None:
    def flat(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight).view(2, -1).sum(1)

    given = (torch.randn(2, 64, 5, 4), weights(64, 64, 3, 3))
    gm = traced(flat, *given)
    in_channels_last(gm)
    assert all(is_last(one) for one in operands(gm))
    assert any(node.target is torch.ops.aten.reshape.default for node in gm.graph.nodes)
    torch.testing.assert_close(gm(*given), flat(*given))


def strided(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight).as_strided((4,), (1,)) * 2


def several(x: Tensor, weight: Tensor) -> list[Tensor]:
    y = F.conv2d(x, weight)
    return [y + 1, y * 2, y.relu()]


def grouped(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight[:, :1], groups=64)


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x[:, :16], weight[:, :16]).relu()


@pytest.mark.parametrize("function", [strided, several, grouped, narrow])
def test_graphs_that_stay_as_they_are(function: Callable[..., object]) -> None:
    given = (torch.randn(2, 64, 6, 5), weights(64, 64, 3, 3))
    gm = traced(function, *given)
    nodes = [str(node) for node in gm.graph.nodes]
    strides = [
        one.meta["val"].stride()
        for one in gm.graph.nodes
        if isinstance(one.meta.get("val"), torch.Tensor)
    ]
    in_channels_last(gm)
    gm.graph.lint()
    assert [str(node) for node in gm.graph.nodes] == nodes
    assert strides == [
        one.meta["val"].stride()
        for one in gm.graph.nodes
        if isinstance(one.meta.get("val"), torch.Tensor)
    ]
    torch.testing.assert_close(gm(*given), function(*given))


def test_sizes_that_are_not_known_stay_as_they_are() -> None:
    gm = traced(chain, *CHAIN, mode="symbolic")
    in_channels_last(gm)
    assert not any(node.target is COPY for node in gm.graph.nodes)


def test_what_lies_so_already_is_not_copied() -> None:
    given = tuple(one.contiguous(memory_format=torch.channels_last) for one in CHAIN)
    gm = traced(chain, *given)
    in_channels_last(gm)
    assert not any(node.target is COPY for node in gm.graph.nodes)
