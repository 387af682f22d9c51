"""Kernels that differ in their names and memory alone are compiled once."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from magjit_triton.codegen.compiler import Program, plan_kernels
from magjit_triton.codegen.entry import sources
from magjit_triton.codegen.matmul.fusing import ProductFusion
from magjit_triton.codegen.passes import PASSES
from magjit_triton.strides import correct_strides

LAYERS = 3


def layers(*factors: float) -> Callable[..., Any]:
    def run(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        for factor in factors:
            x = torch.softmax((x @ w) * factor, -1)
        return [x]

    return run


def graph_of(program: Callable[..., Any], mode: str = "fake") -> GraphModule:
    return make_fx(program, tracing_mode=mode)(torch.randn(5, 8), torch.randn(8, 8))


def launched(gm: GraphModule) -> list[str]:
    """The names in the program's launches, in order."""
    correct_strides(gm)
    for rewrite in PASSES:
        rewrite(gm)
    fusion = ProductFusion(gm, ("cpu",), setting="auto")
    source = Program(gm, fusion, fusion.plan()).compiled().source
    return re.findall(r"^ +(fused_\w+)\(", source, re.MULTILINE)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_layers_that_are_alike_share_a_kernel(mode: str) -> None:
    names = launched(graph_of(layers(0.5, 0.5, 0.5), mode))
    assert len(names) == LAYERS
    assert len(set(names)) == 1


def test_what_differs_has_a_kernel_of_its_own() -> None:
    names = launched(graph_of(layers(0.5, 0.25, 0.5)))
    assert names[0] == names[2] != names[1]


def test_kernels_know_what_they_have_in_common() -> None:
    first, second, third = plan_kernels(graph_of(layers(0.5, 0.25, 0.5)), devices=("cpu",))
    assert first.name != third.name
    assert first.source != third.source
    assert first.identity == third.identity != second.identity
    assert sources([first, second, third]) == [first.source, second.source]


def test_types_and_sizes_are_part_of_it() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        return [one.relu() + 1 for one in (x, y, x.double(), y[:, :3].contiguous())]

    kernels = plan_kernels(graph_of(program), devices=("cpu",))
    assert len({one.identity for one in kernels}) == len(kernels)
