"""Matrix products and attention of few rows of the backend's own, on a GPU against float64."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, graph_of
from decoding_cases import DECODING, LARGE_DECODING
from product_cases import DESCRIBED_CASES, DTYPES, LARGE, PRODUCTS, arguments_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]

CASES = {**PRODUCTS, **LARGE, **DECODING, **LARGE_DECODING}


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).abs().max()) if exact.numel() else 0.0


@pytest.mark.parametrize("label", ["float16", "bfloat16"])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("name", list(DESCRIBED_CASES))
def test_described_operands(
    name: str, label: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors load what begins at a multiple of 16 bytes; all else is read by pointers."""
    from magjit_triton.codegen.compiler import compile_graph
    from magjit_triton.codegen.matmul import steps
    from magjit_triton.codegen.matmul.configuration import Configuration
    from magjit_triton.codegen.matmul.kernel import MatmulKernel
    from magjit_triton.settings import Settings

    cut = Configuration(*DESCRIBED_CASES[name])
    monkeypatch.setattr(steps, "default", lambda extent, work, multiprocessors: cut)
    case = CASES[name]
    arguments = []
    for one in arguments_of(case, DTYPES[label]):
        memory = torch.empty(one.numel() + start, dtype=one.dtype, device="cuda")
        arguments.append(memory[start:].view(one.shape).copy_(one))
    with torch.device("cuda"):
        graph = graph_of(Case(case.function, lambda: arguments), arguments)
        made = compile_graph(graph, arguments, Settings(matmul="triton"))
        found, eager = made(*arguments), case.function(*arguments)
        exact = case.function(*(one.double() for one in arguments))
    products = [one for one in made.kernels if isinstance(one, MatmulKernel)]
    assert products
    assert all(one.configuration.described for one in products)
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        least = torch.finfo(ours.dtype).eps * max(float(right.abs().max()), 1.0)
        assert distance(ours, right) <= 2 * distance(theirs, right) + least
    for ours, again in zip(found, made(*arguments), strict=True):
        torch.testing.assert_close(ours, again, rtol=0, atol=0)


def test_described_operands_in_cuda_graphs() -> None:
    """A graph reads inputs where they are now: a descriptor in it has a place of its own."""
    import magjit

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.GELU()).cuda().bfloat16()
    with torch.no_grad():
        call = magjit.compile(
            layer, backend="triton", mode="reduce-overhead", options={"matmul": "triton"}
        )
        kept = []
        for _ in range(12):
            x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)
            kept.append((x, call(x)))
        for x, found in kept:
            torch.testing.assert_close(found, layer(x), rtol=2e-2, atol=2e-2)


def test_rows_of_any_number() -> None:
    """One described kernel for all of them."""
    import magjit

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(1024, 2048), torch.nn.ReLU()).cuda().half()
    with torch.no_grad():
        call = magjit.compile(layer, backend="triton", dynamic=True, options={"matmul": "triton"})
        for rows in (2048, 1000, 7, 4097, 128):
            x = torch.randn(rows, 1024, device="cuda", dtype=torch.float16)
            torch.testing.assert_close(call(x), layer(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("label", list(DTYPES))
@pytest.mark.parametrize("name", list(CASES))
def test_as_near_as_the_library(name: str, label: str) -> None:
    """At most twice as far from float64 as eager mode is; the same at every call."""
    # Imported late: Triton is only there on some machines.
    from magjit_triton.codegen.compiler import compile_graph
    from magjit_triton.settings import Settings

    case = CASES[name]
    arguments = [one.cuda() for one in arguments_of(case, DTYPES[label])]
    with torch.device("cuda"):
        graph = graph_of(Case(case.function, lambda: arguments), arguments)
        made = compile_graph(graph, arguments, Settings(matmul="triton"))
        found, eager = made(*arguments), case.function(*arguments)
        exact = case.function(*(one.double() for one in arguments))
    for ours, theirs, right in zip(found, eager, exact, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (
            theirs.dtype,
            theirs.shape,
            theirs.stride(),
        )
        largest = float(right.abs().max()) if right.numel() else 0.0
        least = torch.finfo(ours.dtype).eps * max(largest, 1.0)
        # The library cuts long sums; the roundings of one chain grow like the root of its length.
        depth = arguments[0].shape[-1]
        least *= max(4, 2 * math.sqrt(depth)) if ours.dtype == torch.float32 else 1
        assert distance(ours, right) <= 2 * distance(theirs, right) + least
    for ours, again in zip(found, made(*arguments), strict=True):
        torch.testing.assert_close(ours, again, rtol=0, atol=0)
