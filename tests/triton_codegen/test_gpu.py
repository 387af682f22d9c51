"""Generated kernels and CUDA graphs on a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, graph_of

import magjit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


@pytest.mark.parametrize("name", list(CASES))
def test_equal_to_eager(name: str) -> None:
    from magjit_triton.codegen.compiler import compile_graph

    case = CASES[name]
    torch.manual_seed(0)
    arguments = [one.cuda() if isinstance(one, torch.Tensor) else one for one in case.arguments()]
    with torch.device("cuda"):
        compiled = compile_graph(graph_of(case, arguments), arguments)
        found, expected = compiled(*arguments), case.function(*arguments)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        rounding = {}
        if one.dtype == torch.float32:
            rounding = {"rtol": 2e-4, "atol": max(2e-5, case.tolerance or 0)}
        elif case.tolerance is not None:
            rounding = {"rtol": case.tolerance, "atol": case.tolerance}
        torch.testing.assert_close(one, other, equal_nan=True, **rounding)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).cuda()


def test_graphs_see_changed_inputs_and_leave_results_alone() -> None:
    module = model()
    with torch.no_grad():
        compiled = magjit.compile(module, backend="triton", mode="reduce-overhead")
        kept = []
        for _ in range(12):
            x = torch.randn(16, 64, device="cuda")
            kept.append((x, compiled(x)))
        for x, y in kept:
            torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-4)


def test_results_of_one_shape_survive_calls_with_another() -> None:
    """What a graph has in between may not lie where another one's results are."""

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.softmax(x @ w, -1) * 3
        return x @ w

    compiled = magjit.compile(chain, backend="triton", mode="reduce-overhead", dynamic=True)
    w = torch.randn(64, 64, device="cuda")
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(5):
        for rows in (48, 16, 32, 64):
            x = torch.randn(rows, 64, device="cuda")
            kept = [*kept[-3:], (x, compiled(x, w))]
            for one, made in kept:
                torch.testing.assert_close(made, chain(one, w), rtol=1e-4, atol=1e-4)


def test_graphs_hold_the_memory_that_they_need() -> None:
    def held() -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        private = [one for one in torch.cuda.memory_snapshot() if one["segment_pool_id"] != (0, 0)]
        return sum(one["total_size"] for one in private)

    modules = [model() for _ in range(3)]
    x = torch.randn(4096, 64, device="cuda")
    with torch.no_grad():
        expected = [module(x) for module in modules]
        compiled = [
            magjit.compile(module, backend="triton", mode="reduce-overhead") for module in modules
        ]
        results, counts, allocated = [], [], []
        for call in compiled:
            for _ in range(4):
                made = call(x)
            results.append(made)
            counts.append(held())
            allocated.append(torch.cuda.memory_allocated())
    for made, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
    # One block for what is in between, of 1 MiB, and results of 128 KiB each; a pool of their own
    # for what the library needs, of one small segment.
    assert counts[2] - counts[1] <= 2 << 20
    assert allocated[2] - allocated[1] <= 4096 * 8 * 4 + (64 << 10)


def test_graphs_of_several_streams() -> None:
    module = model()
    x = torch.randn(512, 64, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    with torch.no_grad():
        compiled = magjit.compile(module, backend="triton", mode="reduce-overhead")
        expected, results = module(x), []
        torch.cuda.synchronize()
        for _ in range(6):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(compiled(x))
            torch.cuda.synchronize()
            for made in results:
                torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
            results.clear()


def test_graphs_see_changed_parameters() -> None:
    module = model()
    x = torch.randn(16, 64, device="cuda")
    with torch.no_grad():
        compiled = magjit.compile(module, backend="triton", mode="reduce-overhead")
        for step in range(6):
            y = compiled(x)
            torch.testing.assert_close(y, module(x), rtol=1e-4, atol=1e-4)
            for parameter in module.parameters():
                parameter.mul_(1.1)
            if step == 3:
                module[0].weight.data = module[0].weight.data.clone()


def test_graphs_change_inputs_once_a_call() -> None:
    def step(count: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count

    compiled = magjit.compile(step, backend="triton", mode="reduce-overhead")
    count = torch.zeros(4, device="cuda")
    for number in range(1, 9):
        x = torch.full((4,), float(number), device="cuda")
        torch.testing.assert_close(compiled(count, x), x * number)
        assert count.tolist() == [number] * 4


def test_training_with_graphs() -> None:
    module, other = model(), model()
    compiled = magjit.compile(module, backend="triton", mode="reduce-overhead")
    steps = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, other)]
    for _ in range(8):
        x = torch.randn(16, 64, device="cuda")
        for run, optimizer in zip((compiled, other), steps, strict=True):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_another_shape_needs_no_other_kernel() -> None:
    from magjit_triton.codegen import runtime

    compiled = magjit.compile(lambda x: torch.softmax(x * 2, -1), backend="triton", dynamic=True)
    counts = []
    for rows, columns in ((32, 128), (64, 256), (96, 512), (160, 1024)):
        x = torch.randn(rows, columns, device="cuda")
        torch.testing.assert_close(compiled(x), torch.softmax(x * 2, -1))
        counts.append(runtime.load_function.cache_info().currsize)
    assert counts[-1] == counts[1]


def test_an_index_out_of_range_is_reported() -> None:
    import subprocess

    program = (
        "import torch, magjit\n"
        "look_up = torch.nn.functional.embedding\n"
        "f = magjit.compile(lambda w, i: look_up(i, w) * 2, backend='triton')\n"
        "f(torch.ones(4, 4, device='cuda'), torch.tensor([1, 2], device='cuda'))\n"
        "f(torch.ones(4, 4, device='cuda'), torch.tensor([1, 9], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0
    assert "out of bounds" in done.stderr + done.stdout or "assert" in done.stderr
