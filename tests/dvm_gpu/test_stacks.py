"""Fused operators that do not depend on one another, in one launch on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magjit
from magjit_dvm.backend import schedules
from magjit_dvm.cuda.launch import gpu
from magjit_dvm.stacking import Stack
from tests.dvm_gpu.exact import require_as_near

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def compiled_kernels() -> None:
    for each in (8, 16, 32):
        gpu(0).compile_for_stacks(each, False)


def launches(call: Callable[[], Any]) -> Counter[str]:
    """Kernels of the interpreter that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = (one.name for one in seen.events())
    return Counter(name.rpartition("_")[0] for name in names if name.startswith("mj_dvm"))


def apart(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x.exp() + 1, torch.softmax(y, -1), z * 2 - 1, F.layer_norm(z, z.shape[-1:]).relu()


SHAPES = {
    "alike": ((40, 50), (30, 70), (20, 10)),
    "one large": ((3, 5), (4000, 5120), (7, 2)),
    "all large": ((3000, 301), (2560, 512), (5111, 257)),
    "nothing in one": ((0, 4), (5, 6), (9, 1)),
    "one element": ((1, 1), (1, 1), (1, 1)),
    "few long rows": ((3, 5), (40, 30000), (7, 2000)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", list(SHAPES))
def test_results(shapes: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = [torch.randn(shape, device="cuda", dtype=dtype) for shape in SHAPES[shapes]]
    before = set(schedules())
    compiled = magjit.compile(apart, backend="dvm", dynamic=True)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(*given), apart(*given))
        (schedule,) = set(schedules()) - before
        assert any(isinstance(one, Stack) for one in schedule._steps)
        # Others' memory is not written.
        fresh = [torch.randn_like(one) for one in given]
        results, wanted = [], []
        for _ in range(20):
            results.append(compiled(*fresh))
            wanted.append(apart(*fresh))
        torch.testing.assert_close(results, wanted)


def test_small_operators_are_one_kernel() -> None:
    def norms(*given: Tensor) -> list[Tensor]:
        return [torch.softmax(one * 2, -1) for one in given]

    given = [torch.randn(rows, 256, device="cuda") for rows in (8, 16, 24, 32)]
    compiled = magjit.compile(norms, backend="dvm")
    with torch.no_grad():
        compiled(*given)
        found = launches(lambda: torch.testing.assert_close(compiled(*given), norms(*given)))
    assert found == {"mj_dvm_stack": 1}


def test_gradients_of_a_layer() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True).cuda()
    compiled = magjit.compile(layer, backend="dvm", dynamic=True)
    exact = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    exact = exact.cuda().double()
    exact.load_state_dict({name: one.double() for name, one in layer.state_dict().items()})
    for rows in (100, 130):
        x = torch.randn(3, rows, 256, device="cuda")
        gradients = []
        for module, given in ((compiled, x), (layer, x), (exact, x.double())):
            given = given.detach().requires_grad_()
            module(given).square().mean().backward()
            parameters = list((exact if module is exact else layer).parameters())
            gradients.append([given.grad, *(one.grad for one in parameters)])
            for one in parameters:
                one.grad = None
        require_as_near(*gradients)


def test_streams_and_graphs() -> None:
    def chains(*given: Tensor) -> list[Tensor]:
        return [
            (one * number).sin() + one.sum(-1, keepdim=True) for number, one in enumerate(given)
        ]

    given = [torch.randn(64, 300, device="cuda") for _ in range(5)]
    compiled = magjit.compile(chains, backend="dvm")
    with torch.no_grad():
        wanted = chains(*given)
        compiled(*given)
        made = []
        for _ in range(5):
            with torch.cuda.stream(torch.cuda.Stream()):
                made += [compiled(*given) for _ in range(20)]
        torch.cuda.synchronize()
        for results in made:
            torch.testing.assert_close(results, wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = compiled(*given)
        for one in given:
            one.copy_(torch.randn_like(one))
        graph.replay()
        torch.testing.assert_close(results, chains(*given))
