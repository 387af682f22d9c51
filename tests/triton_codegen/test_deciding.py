"""Blocks of generated kernels: what is tried, taken and remembered."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

sys.path.insert(0, str(Path(__file__).parent))

from cases import CASES, Case, graph_of

from magjit import config
from magjit_triton.codegen import deciding as module
from magjit_triton.codegen import tuning
from magjit_triton.codegen.compiler import compile_graph, plan_kernels
from magjit_triton.codegen.deciding import Deciding
from magjit_triton.codegen.fusion import Group, Plan
from magjit_triton.codegen.kernel import Kernel
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.codegen.matmul.fusing import ProductFusion
from magjit_triton.codegen.tuning import candidates, tuned
from magjit_triton.decisions import Decisions
from magjit_triton.measuring import Stopwatch
from magjit_triton.settings import Settings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
AUTOTUNE = Settings("max-autotune-no-cudagraphs")
NAMES = ("pointwise", "softmax", "softmax_long", "layer_norm", "window_attention", "convolution")


def kernels_of(name: str) -> list[Kernel]:
    torch.manual_seed(0)
    return plan_kernels(graph_of(CASES[name], CASES[name].arguments()), devices=("cpu",))


def hint(expr) -> int:
    return int(expr)


class Preferring:
    """A stopwatch that finds one way of cutting faster than any other."""

    on_gpu = False

    def __init__(self, wanted) -> None:
        self.wanted = wanted
        self.tried: list = []
        self.arguments: tuple = ()

    def is_over(self) -> bool:
        return False

    def is_faster(self, one, other, *arguments) -> bool:
        self.tried.append(one.kernel.blocks)
        self.arguments = arguments
        if len(self.tried) == 1:
            raise RuntimeError("out of resources: shared memory")
        return one.kernel.blocks == self.wanted


@pytest.mark.parametrize("name", NAMES)
def test_candidates_are_ways_to_cut_the_same_kernel(name: str) -> None:
    for kernel in kernels_of(name):
        found = list(candidates(kernel))
        assert found[0] == kernel.blocks
        assert 2 <= len(found) <= 10
        assert len(set(found)) == len(found)
        for blocks in found:
            for size in (blocks.p, blocks.inner, blocks.warps):
                assert size >= 1
                assert size & (size - 1) == 0
            assert (blocks.looped, blocks.wide) == (kernel.blocks.looped, kernel.blocks.wide)


@pytest.mark.parametrize("name", NAMES)
def test_the_fastest_candidate_is_taken(name: str) -> None:
    (kernel, *_) = kernels_of(name)
    wanted = list(candidates(kernel))[-1]
    watch = Preferring(wanted)
    found = tuned(kernel, hint, watch)  # type: ignore[arg-type]
    assert watch.tried == list(candidates(kernel))[1:]
    # The first one failed, and is none.
    assert found == (wanted if wanted != watch.tried[0] else kernel.blocks)


def test_what_is_measured_with_is_no_fake_tensor() -> None:
    (kernel, *_) = kernels_of(NAMES[0])
    watch = Preferring(kernel.blocks)
    with FakeTensorMode():  # as while a graph is compiled
        tuned(kernel, hint, watch)  # type: ignore[arg-type]
    tensors = [value for value in watch.arguments if isinstance(value, torch.Tensor)]
    assert tensors
    assert not any(isinstance(tensor, FakeTensor) for tensor in tensors)


def test_blocks_are_remembered(tmp_path, monkeypatch) -> None:
    calls = []

    def fastest(kernel, hint, watch):
        calls.append(kernel.name)
        return list(candidates(kernel))[-1]

    monkeypatch.setattr(module, "tuned", fastest)
    monkeypatch.setattr(module, "interpreting", lambda: False)
    (kernel,) = kernels_of("pointwise")
    with config.override(cache_dir=tmp_path):
        found = []
        for _ in range(2):
            gm = graph_of(CASES["pointwise"], CASES["pointwise"].arguments())
            one = Deciding(gm, AUTOTUNE, Decisions.of(gm, AUTOTUNE, "kernels"))
            found.append(one.cut(kernel, hint).blocks)
            one.finish()
    assert calls == [kernel.name]
    assert found == [list(candidates(kernel))[-1]] * 2
    assert found[0] != kernel.blocks


def test_nothing_is_cut_otherwise_unasked(monkeypatch) -> None:
    monkeypatch.setattr(module, "tuned", lambda *_: pytest.fail("it was measured"))
    (kernel,) = kernels_of("pointwise")
    gm = graph_of(CASES["pointwise"], CASES["pointwise"].arguments())
    assert Deciding(gm, Settings(), Decisions()).cut(kernel, hint) is kernel


def test_places_are_measured_as_whole_programs(tmp_path, monkeypatch) -> None:
    """No kernel runs here: products alone fill the cat."""
    compared = []

    def is_faster(self, one, other, *arguments) -> bool:
        results = [run(*self.inputs)[0] for run in (one, other)]
        torch.testing.assert_close(*results)
        compared.append(results)
        return False

    monkeypatch.setattr(Stopwatch, "is_faster", is_faster)
    monkeypatch.setattr("magjit_triton.codegen.compiler.interpreting", lambda: True)
    monkeypatch.setattr("magjit_triton.codegen.program_parts.interpreting", lambda: True)
    refined = module.refined
    monkeypatch.setattr(module, "refined", lambda *args: refined(*args, close=1e9))
    monkeypatch.setattr(tuning, "_arguments", lambda *_: None)
    monkeypatch.setattr("magjit_triton.codegen.runtime.Launcher.__call__", launched)
    case = CASES["products_in_a_cat"]
    arguments = case.arguments()
    with config.override(cache_dir=tmp_path):
        for _ in range(2):
            compiled = compile_graph(graph_of(case, arguments), arguments, AUTOTUNE)
            assert str(compiled.plan).count(" in cat") == 2
            torch.testing.assert_close(compiled(*arguments), case.function(*arguments))
    assert compared
    count = len(compared)
    with config.override(cache_dir=tmp_path):
        compile_graph(graph_of(case, arguments), arguments, AUTOTUNE)
    assert len(compared) == count


def launched(self, stream, *arguments) -> None:
    """Copies parts of a cat of six and four columns, as its kernel would."""
    *parts, whole = arguments[: self.pointers]
    for part in parts:
        first = part.shape[1] == 6
        (whole[:, :6] if first else whole[:, 6:]).copy_(part)


def product_fusion(dtype: torch.dtype = torch.float32) -> tuple[ProductFusion, Plan, Group]:
    arguments = [torch.empty(64, 32, dtype=dtype), torch.empty(48, 32, dtype=dtype)]
    case = Case(lambda x, w: [torch.nn.functional.linear(x, w).relu()], lambda: arguments)
    fusion = ProductFusion(graph_of(case, arguments), ("cpu",), setting="triton")
    plan = fusion.plan()
    (group,) = (one for one in plan.units if isinstance(one, Group))
    return fusion, plan, group


def test_products_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process and in the next one."""
    cut = Configuration(32, 16, 32, 4, 4, 2, 1, 7, described=True)
    calls = []

    def measured(fusion, group, plan):
        calls.append(group)
        fusion.cuts.update(dict.fromkeys(fusion.products_in(group.nodes), cut))
        return 1e-3, 2e-3

    monkeypatch.setattr(module, "measured", measured)
    with config.override(cache_dir=tmp_path):
        for process in range(2):
            fusion, plan, group = product_fusion()
            decisions = Decisions.of(fusion.gm, AUTOTUNE, "kernels")
            assert decisions.found == bool(process)
            deciding = Deciding(fusion.gm, AUTOTUNE, decisions)
            for _ in range(2):
                fusion.cuts.clear()
                assert deciding.times(fusion, group, plan) == (1e-3, 2e-3)
                assert set(fusion.cuts.values()) == {cut}
            deciding.finish()
    assert len(calls) == 1


def test_what_was_not_measured_is_not_measured_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measured", lambda fusion, group, plan: None)
    fusion, plan, group = product_fusion()
    found = Deciding(fusion.gm, AUTOTUNE, Decisions(found=True))
    monkeypatch.delattr(module, "measured")
    assert found.times(fusion, group, plan) is None
    for numbers in ([1, 2], [15, 16, 16, 8, 4, 3, 1, 0, 0]):
        found.decisions.products = dict.fromkeys(found.decisions.products, (1.0, 2.0, numbers))
        place = {node: number for number, node in enumerate(fusion.gm.graph.nodes)}
        nodes = sorted(place[node] for node in group.nodes)
        stored = sorted(place[node] for node in group.nodes if node in plan.stored)
        found.decisions.products[f"{nodes} {stored}"] = (1.0, 2.0, numbers)
        assert found.times(fusion, group, plan) is None
        assert not fusion.cuts
