"""Convolutions in channels-last memory: which programs they are in, and that nothing else changes.

On a CPU, which the backend leaves in their order: here it is told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import magjit
from magjit_dvm import channels_last
from tests.dvm.scheduled import scheduled
from tests.memory_order import in_order_of_memory

LAST = torch.channels_last
WIDTH = 64
CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)

GRAPHS: list[GraphModule] = []


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`GRAPHS` gets what is scheduled."""
    monkeypatch.setattr(channels_last, "DEVICES", ("cpu",))
    with scheduled() as graphs:
        monkeypatch.setattr(f"{__name__}.GRAPHS", graphs)
        yield


def are_last() -> list[bool]:
    """Of each convolution that was scheduled, whether its images and filters lie so."""
    found = []
    for node in (one for gm in GRAPHS for one in gm.graph.nodes if one.target in CONVOLUTIONS):
        operands = node.args[: 3 - (node.target is CONVOLUTIONS[0])]
        found.append(all(one.meta["val"].stride(1) == 1 for one in operands))
    return found


def weight(*sizes: int) -> Tensor:
    return (torch.randn(sizes) / 24).bfloat16()


def images(*sizes: int) -> Tensor:
    return torch.randn(sizes).bfloat16()


W1, W2 = weight(WIDTH, WIDTH, 3, 3), weight(WIDTH, WIDTH, 3, 3)


def check(function: Callable[..., Any], *arguments: Tensor, moved: bool = True, **how: Any) -> None:
    """Values, strides and memory of results are eager mode's."""
    compiled = magjit.compile(function, backend="dvm", fullgraph=True, **how)
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = function(*arguments)
        torch.manual_seed(seed)
        found = compiled(*arguments)
        pairs = list(zip(_all(found), _all(wanted), strict=True))
        for one, other in pairs:
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        storages = [
            [one.untyped_storage()._cdata for one in each] for each in zip(*pairs, strict=True)
        ]
        first, second = ([each.index(one) for one in each] for each in storages)
        assert first == second
    assert are_last() == [moved] * len(are_last()) != []


def _all(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def two(x: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, W1, padding=1).relu(), W2, padding=1) + x


def test_between_convolutions_nothing_is_rearranged() -> None:
    check(two, images(2, WIDTH, 9, 7))
    (graph,) = GRAPHS
    copies = [node for node in graph.graph.nodes if node.kwargs.get("memory_format") is LAST]
    assert len(copies) == 3  # of the image and of two filters


@pytest.mark.parametrize("pooled", [False, True])
def test_other_operators_follow(pooled: bool) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.max_pool2d(F.conv2d(x, W1, padding=1), 2)
        y = torch.cat([F.interpolate(y, scale_factor=2), x], 1)[:, :WIDTH]
        y = F.conv2d(y, W2, stride=2)
        z = F.adaptive_avg_pool2d(y, 1) if pooled else y
        return torch.flatten(z, 1), y.mean((2, 3))

    check(function, images(2, WIDTH, 12, 8))


def test_results_in_an_order_of_their_own() -> None:
    check(
        lambda x: (F.conv2d(x, W1).permute(0, 2, 3, 1), F.conv2d(x, W2)[0]), images(2, WIDTH, 5, 6)
    )


def test_results_that_share_memory() -> None:
    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.conv2d(x, W1)
        return y, y.flatten(1)

    check(views, images(2, WIDTH, 5, 6), moved=False)


def test_convolutions_that_are_transposed() -> None:
    def function(x: Tensor) -> Tensor:
        return F.conv_transpose2d(F.conv2d(x, W1), W2, stride=2).sigmoid()

    check(function, images(2, WIDTH, 5, 6))


def test_programs_that_are_in_this_order_themselves() -> None:
    x = images(2, WIDTH, 5, 6).contiguous(memory_format=LAST)
    first, second = (one.contiguous(memory_format=LAST) for one in (W1, W2))
    check(lambda x: F.conv2d(F.conv2d(x, first).relu(), second), x)
    assert not any("clone" in str(node.target) for gm in GRAPHS for node in gm.graph.nodes)


def strided(x: Tensor) -> Tensor:
    return F.conv2d(x, W1).as_strided((4, 5), (5, 1)) * 2


def drawn(x: Tensor) -> Tensor:
    return F.dropout(F.conv2d(x, W1), 0.5)


def seen(x: Tensor) -> Tensor:
    y = F.conv2d(x, W1)
    y.flatten(1).mul_(2)  # of y as well, where that is a view
    return y + 1


def narrow(x: Tensor) -> Tensor:
    return F.conv2d(x[:, :16], W1[:, :16])


def grouped(x: Tensor) -> Tensor:
    return F.conv2d(x, W1[:, :8], groups=8)


def normed(x: Tensor) -> Tensor:
    return F.group_norm(F.conv2d(x, W1), 8)


def double(x: Tensor) -> Tensor:
    return F.conv2d(x.double(), W1.double())


def shuffled(x: Tensor) -> Tensor:
    for _ in range(3):
        y = F.conv2d(x, W1, padding=1)
        x = y.reshape(x.shape[0], -1).view(x.shape) * 2
    return x


@pytest.mark.parametrize(
    "function",
    [strided, drawn, seen, narrow, grouped, normed, double, shuffled],
    ids=lambda one: one.__name__,
)
def test_programs_that_stay_as_they_are(function: Callable[[Tensor], Tensor]) -> None:
    check(function, images(2, WIDTH, 12, 10), moved=False)


def test_modes_are_left_where_a_view_is_none_in_this_order() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv2d(x, W1.float()).view(2, -1)

    check(function, torch.randn(2, WIDTH, 6, 5), moved=False)
    assert not torch.is_autocast_enabled("cpu")
    results = [node for node in GRAPHS[0].graph.nodes if node.target is CONVOLUTIONS[0]]
    assert results[0].meta["val"].dtype == torch.bfloat16


def test_operators_of_others_are_given_what_they_know() -> None:
    check(
        lambda x: in_order_of_memory(F.conv2d(x, W1).float()), images(2, WIDTH, 6, 5), moved=False
    )


class InOrderOfMemory(torch.autograd.Function):
    """Whose gradient depends on how the one that comes lies in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        numbers = torch.arange(gradient.numel(), dtype=gradient.dtype) / gradient.numel()
        strides = gradient.stride()
        return gradient + numbers.as_strided(gradient.shape, strides)


def test_gradients_of_the_programs_own_are_given_what_they_know() -> None:
    def function(x: Tensor) -> Tensor:
        result: Tensor = InOrderOfMemory.apply(F.conv2d(x, W1))
        return F.conv2d(result, W2)

    compiled = magjit.compile(function, backend="dvm")
    for _ in range(3):
        x = images(2, WIDTH, 7, 8).requires_grad_()
        found = torch.autograd.grad(compiled(x).float().square().sum(), x)[0]
        wanted = torch.autograd.grad(function(x).float().square().sum(), x)[0]
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_numbers_are_drawn_as_in_eager_mode_where_no_order_counts() -> None:
    check(lambda x: F.dropout(F.conv2d(x, W1).mean((2, 3)), 0.5), images(4, WIDTH, 6, 5))
    GRAPHS.clear()
    check(lambda x: F.conv2d(F.dropout2d(F.conv2d(x, W1), 0.5), W2), images(4, WIDTH, 6, 5))


def test_what_is_written_in_place() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.relu(F.conv2d(x, W1), inplace=True)
        y += 1
        return F.conv2d(y, W2).mul_(2)

    check(function, images(2, WIDTH, 6, 5))


def test_batches_of_any_size_share_a_graph() -> None:
    def function(x: Tensor) -> Tensor:
        y = F.interpolate(F.conv2d(x, W1), scale_factor=2)
        return torch.flatten(F.conv2d(y, W2), 1)

    compiled = magjit.compile(function, backend="dvm", dynamic=True, fullgraph=True)
    for batch in (2, 3, 5, 17, 33):
        x = images(batch, WIDTH, 6, 5)
        found, wanted = compiled(x), function(x)
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    assert are_last() == [True, True]  # of one graph


class Network(nn.Module):
    """Two blocks, the first from narrow images; their ends, and what pooling leaves."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(2))
        self.relu = nn.ReLU(inplace)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = x + self.relu(norm(convolution(x)))
        return self.last(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


@pytest.mark.parametrize("rounded", [False, True])
def test_float32_is_in_this_order_where_it_may_be_rounded(rounded: bool) -> None:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=rounded):
        check(lambda x: F.conv2d(x.float(), W1.float()), images(2, WIDTH, 6, 5), moved=rounded)


def test_kernels_of_atens_own_read_the_usual_order() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        check(two, images(2, WIDTH, 6, 5), moved=False)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_training(inplace: bool, autocast: bool) -> None:
    def run(
        call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, autocast: bool = autocast
    ) -> list[Tensor]:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(x).float().square().sum()
        loss.backward()
        found = [loss.detach()]
        for one in (x, *model.parameters()):
            assert one.grad is not None
            found.append(one.grad)
        model.zero_grad()
        return [*found, *(one.clone() for one in model.buffers())]

    dtype = torch.float32 if autocast else torch.bfloat16
    models = []
    for kind in (dtype, dtype, torch.float32):
        torch.manual_seed(0)
        models.append(Network(inplace).to(dtype).to(kind).train())
    compiled = magjit.compile(models[0], backend="dvm", fullgraph=True)
    calls = [compiled, *models[1:]]
    for _ in range(3):
        x = torch.randn(8, 3, 16, 14).to(dtype)
        found, wanted = (run(*one, x) for one in zip(calls[:2], models[:2], strict=True))
        exact = run(models[2], models[2], x.float(), autocast=False)
        for one, other, third in zip(found, wanted, exact, strict=True):
            assert one.stride() == other.stride() or 1 in one.shape
            assert apart(one, third) < 1.5 * apart(other, third) + 0.02
    assert are_last() == [True] * 6


def apart(found: Tensor, exact: Tensor) -> float:
    return float((found.float() - exact).norm() / exact.float().norm().clamp(min=1e-3))
