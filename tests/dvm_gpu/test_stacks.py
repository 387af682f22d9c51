"""Several fused operators in one launch on a GPU."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import magjit
from dvm_cases import balanced
from magjit_dvm.backend import schedules
from magjit_dvm.cuda.forms import STACKED
from magjit_dvm.cuda.launch import DeviceFused, gpu
from magjit_dvm.stacking import Stack
from magjit_dvm.vm import run_stacked
from tests.dvm_cuda.chained import by_rows, product, summed
from tests.dvm_gpu.exact import require_as_near

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def compiled_kernels() -> None:
    for each in (8, 16, 32):
        gpu(0).function(each, False, STACKED)


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


# -- of operators that depend on one another ------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_small_operators_that_depend_on_one_another_are_one_kernel(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    compiled = magjit.compile(balanced, backend="dvm", dynamic=True)
    with torch.no_grad():
        for rows, cols in ((5, 7), (16, 16), (3, 90), (15, 15), (40, 50), (300, 257)):
            x = torch.randn(rows, cols, device="cuda", dtype=dtype)
            compiled(x)  # the first one is the program's own
            found = compiled(x)
            # Eager rounds each sum.
            require_as_near([found], [balanced(x)], [balanced(x.double())])
            for _ in range(20):
                assert torch.equal(compiled(x), found)
        x = torch.randn(15, 16, device="cuda", dtype=dtype)
        kernels = launches(lambda: compiled(x))
        assert set(kernels) == {"mj_dvm_stack"}
        assert kernels.total() <= (1 if dtype is torch.float32 else 2), "of 4 KB"


def test_chains_in_graphs_and_on_streams() -> None:
    compiled = magjit.compile(balanced, backend="dvm")
    x = torch.randn(12, 14, device="cuda")
    with torch.no_grad():
        wanted = balanced(x)
        compiled(x)
        made = []
        for _ in range(5):
            with torch.cuda.stream(torch.cuda.Stream()):
                made += [compiled(x) for _ in range(20)]
        torch.cuda.synchronize()
        for one in made:
            torch.testing.assert_close(one, wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(result, balanced(x))


@pytest.mark.parametrize("seed", range(12))
def test_drawn_stacks(seed: int) -> None:
    """Members that take results of any before them, small ones and large ones."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(10):
        rows = drawn.choice((1, 5, 16, 17, 300))
        x = torch.rand(rows, drawn.choice((1, 33, 250, 257, 5000)), device="cuda") + 0.5
        vectors: list[Any] = [torch.rand(rows, device="cuda")]
        wholes: list[Any] = [x]
        members, arguments = [], []
        for number in range(drawn.randint(2, 8)):
            kind = drawn.choice((summed, by_rows, product))
            given = {
                summed: [drawn.choice(wholes)],
                by_rows: [drawn.choice(wholes), drawn.choice(vectors)],
                product: [drawn.choice(vectors), drawn.choice(vectors)],
            }[kind]
            (wholes if kind is by_rows else vectors).append(number)
            members.append(DeviceFused(kind()))
            arguments.append(given)
        wanted: list[Any] = []
        for fused, given in zip(members, arguments, strict=True):
            wanted.append(fused(*(wanted[one] if type(one) is int else one for one in given)))
        for _ in range(5):
            results = run_stacked(tuple(members), *(one for given in arguments for one in given))
            torch.testing.assert_close(list(results), wanted)
