"""Networks whose convolutions are in channels-last memory: as near to exact as eager mode's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import magjit
from tests.dvm.scheduled import scheduled

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LAST = torch.channels_last
CONVOLUTION = torch.ops.aten.convolution.default
WIDTH = 64
MODES = ["default", "reduce-overhead"]


class Network(nn.Module):
    """Blocks with norms, one at half the size, and what looks at all of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False)
        strides = (1, 2, 1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, 3, stride, 1, bias=False) for stride in strides
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in strides)
        self.up = nn.ConvTranspose2d(WIDTH, WIDTH, 2, 2)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x), 3, 2, 1)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = F.relu(norm(convolution(x)))
            x = y + x if y.shape == x.shape else y
        x = torch.cat([self.up(x), F.interpolate(x, scale_factor=2)], 3)
        return self.last(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@pytest.fixture
def graphs() -> Iterator[list[GraphModule]]:
    with scheduled() as found:
        yield found


def check_order(graphs: list[GraphModule]) -> None:
    """Images of all convolutions lie as kernels read them."""
    nodes = [node for gm in graphs for node in gm.graph.nodes if node.target is CONVOLUTION]
    assert nodes and all(node.args[0].meta["val"].stride(1) == 1 for node in nodes)


def networks(dtype: torch.dtype) -> list[nn.Module]:
    """One to compile, one for eager mode, one in double precision."""
    made = []
    for kind in (dtype, dtype, torch.float64):
        torch.manual_seed(0)
        made.append(Network().cuda().to(kind))
    return made


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-3))


def check_near(found: list[Tensor], wanted: list[Tensor], exact: list[Tensor]) -> None:
    for one, other, third in zip(found, wanted, exact, strict=True):
        assert one.stride() == other.stride() or 1 in one.shape
        assert apart(one, third) < 1.5 * apart(other, third) + 0.02


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_inference(dtype: torch.dtype, mode: str, graphs: list[GraphModule]) -> None:
    ours, eager, exact = (one.eval() for one in networks(dtype))
    compiled = magjit.compile(ours, backend="dvm", mode=mode, fullgraph=True)
    for batch in (8, 8, 3, 8):
        x = torch.randn(batch, 3, 60, 44, device="cuda")
        with torch.no_grad():
            found, wanted, third = compiled(x.to(dtype)), eager(x.to(dtype)), exact(x.double())
        check_near([found], [wanted], [third])
    check_order(graphs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("order", [torch.contiguous_format, LAST], ids=str)
def test_training(
    dtype: torch.dtype | None, mode: str, order: torch.memory_format, graphs: list[GraphModule]
) -> None:
    """With autocast, or without; of a program that is in this order itself as well."""
    models = [one.train().to(memory_format=order) for one in networks(torch.float32)]  # type: ignore[call-overload]
    calls: list[Callable[[Tensor], Tensor]] = list(models)
    calls[0] = magjit.compile(models[0], backend="dvm", mode=mode, fullgraph=True)

    def run(number: int, x: Tensor) -> list[Tensor]:
        x = x.to(torch.float64 if number == 2 else torch.float32)
        x = x.contiguous(memory_format=order).requires_grad_()
        how = dtype if dtype is not None and number != 2 else None
        with torch.autocast("cuda", how, enabled=how is not None):
            loss = calls[number](x).float().square().sum()
        loss.backward()
        assert x.grad is not None
        gradients = [one.grad for one in models[number].parameters() if one.grad is not None]
        found = [loss.detach(), x.grad, *gradients]
        found += [one.clone() for one in models[number].buffers()]
        models[number].zero_grad()
        return found

    for _ in range(3):
        x = torch.randn(16, 3, 60, 44, device="cuda")
        found, wanted, exact = (run(number, x.clone()) for number in range(3))
        check_near(found, wanted, [one.double() for one in exact])
    check_order(graphs)
