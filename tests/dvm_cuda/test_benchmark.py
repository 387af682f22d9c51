"""What ``benchmarks/dvm_gpu.py`` takes for eager's result; words of GPUs give it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dvm_gpu
import dvm_gpu_cases
import magjit
from magjit_dvm.cuda.launch import DeviceFused
from magjit_dvm.fuser import fuse
from magjit_dvm.schedule import Schedule
from tests.dvm_cuda.checking import simulated

HALVES = (torch.float16, torch.bfloat16)
SPECIAL = {one.name: one for one in dvm_gpu_cases.cases() if one.group == "special"}
PRODUCTS = [name for name in SPECIAL if name.endswith("of a product")]


def numbers(name: str, dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 of them; of the largest, torch's own gelu on the CPU is infinite or no number."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[~(x.float().abs() > 2.0**100)] if name.startswith("gelu") else x


def by_words(case: dvm_gpu_cases.Case, x: torch.Tensor) -> torch.Tensor:
    """The result that a GPU's words give."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        graph = make_fx(lambda x: (case.function(x),))(given)
    ((_, fused),) = Schedule(graph, fuse(graph.graph)).programs()
    assert isinstance(fused, DeviceFused)
    (result,) = simulated(fused.program, [x])[1]
    return result


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_words_agree_for_all_numbers(name: str, dtype: torch.dtype) -> None:
    """With the benchmark's factor: what is rounded is the result, not the product before it."""
    case, x = SPECIAL[name], numbers(name, dtype)
    found = by_words(case, x)
    assert found.dtype is dtype and dvm_gpu.agrees(found, case.function(x.float()))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_wrong_is_found(name: str, dtype: torch.dtype) -> None:
    """One element that is a hundredth off (a tenth in bfloat16), or lost NaN or an infinity."""
    case, x = SPECIAL[name], numbers(name, dtype)
    wanted = case.function(x.float())
    right = wanted.to(dtype)
    assert dvm_gpu.agrees(right, wanted)
    off = 1.01 if dtype is torch.float16 else 1.1
    at = int((x.float() == 3.0).nonzero()[0])
    nan = int(right.isnan().nonzero()[0])
    wrongs: list[tuple[int, Any]] = [(at, right[at] * off), (at, math.nan), (nan, 0.0)]
    wrongs += [(int(k[0]), 1.0) for k in right.isinf().nonzero()[:1]]
    for where, value in wrongs:
        found = right.clone()
        found[where] = value
        assert not dvm_gpu.agrees(found, wanted), (where, value)


def test_what_is_compared_is_a_replay() -> None:
    """Of the first call, eager mode's own result, float16 would be too coarse for a logarithm."""
    case = SPECIAL["log of a product"]
    given = [numbers(case.name, torch.float16)]

    def slightly_wrong(module: Any, _: Any) -> Callable[..., Any]:
        return lambda *inputs: tuple(one * 1.01 for one in module(*inputs))

    with torch.no_grad():
        for backend, said in ((slightly_wrong, "not eager's"), ("dvm", "")):
            compiled = magjit.compile(case.function, backend=backend)
            found, note = dvm_gpu.replayed(case, compiled, given)
            assert said in note and bool(note) is bool(said)
        wanted = case.function(given[0].float())
        assert dvm_gpu.agrees(found, wanted) and not dvm_gpu.agrees(case.function(*given), wanted)
        with magjit.set_stance("force_eager"):
            assert dvm_gpu.replayed(case, compiled, given)[1] == "magjit: runs eagerly"


def test_programs_are_chosen_by_parts_of_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(dvm_gpu, "measure", lambda _, case, *rest: seen.append(case.name))
    given = ["--dtypes", "float16", "--sizes", "64 MB", "--only", "a row", "log_softmax 4"]
    dvm_gpu.part_gpu(None, dvm_gpu.chosen(given))  # type: ignore[arg-type]
    assert seen == ["log_softmax 4096", "add, a row"]


def test_each_turn_begins_with_another() -> None:
    entrants = [(name, lambda: None) for name in "abc"]
    orders = ["".join(name for name, _ in dvm_gpu.rotated(entrants, turn)) for turn in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]
