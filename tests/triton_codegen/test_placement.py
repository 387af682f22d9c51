"""What kernels compute in each other's memory, and that no kernel only moves data."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case, graph_of, r

import magjit
from magjit.plugin.aot import aot
from magjit.plugin.fx_helpers import copy_graph_module
from magjit_triton.codegen.compiler import plan_kernels
from magjit_triton.codegen.decompositions import decompositions
from magjit_triton.codegen.fusion import Fusion
from magjit_triton.codegen.passes import PASSES
from magjit_triton.codegen.placement import Choices, find_choices, searched
from vt_blocks import BLOCKS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def planned(gm: GraphModule, objective: str = "latency") -> Fusion:
    for rewrite in PASSES:
        rewrite(gm)
    fusion = Fusion(gm, ("cpu",), objective)
    fusion.units_in_order = fusion.plan()  # type: ignore[attr-defined]
    return fusion


def fused(function, *sizes, objective: str = "latency", arguments=None) -> Fusion:
    given = [r(*one) for one in sizes] if arguments is None else arguments
    return planned(graph_of(Case(function, lambda: given), given), objective)


def plan_of(function, *sizes, **options) -> str:
    return str(fused(function, *sizes, **options).units_in_order)  # type: ignore[attr-defined]


def test_products_are_computed_in_their_cat() -> None:
    plan = plan_of(
        lambda x, a, b, w: [torch.cat([x @ a, x @ b], 1) @ w], (9, 8), (8, 6), (8, 4), (10, 3)
    )
    assert plan.splitlines() == ["mm -> mm in cat", "mm -> mm_1 in cat", "mm -> mm_2"]


def test_what_kernels_read_is_read_in_pieces() -> None:
    """The cat has no other reader: it is nowhere."""
    plan = plan_of(lambda x, a, b: [torch.cat([x @ a, x @ b], 1).sum(1)], (9, 8), (8, 6), (8, 4))
    assert plan.splitlines() == ["mm -> mm", "mm -> mm_1", "kernel (9, 10r) -> sum_1"]


def test_pointwise_parts_stay_one_kernel() -> None:
    """Two stores would be two launches."""
    plan = plan_of(lambda x, y, w: [torch.cat([x.exp(), y.exp()], 1) @ w], (9, 6), (9, 4), (10, 3))
    assert plan.splitlines() == ["kernel (9, 10) -> cat", "mm -> mm"]


def test_parts_that_a_result_shows_are_not_placed() -> None:
    """Nobody else's memory is shown to the caller."""
    plan = plan_of(
        lambda x, a, b, w: (lambda one: [torch.cat([one, x @ b], 1) @ w, one.view(-1)])(x @ a),
        *((9, 8), (8, 6), (8, 4), (10, 3)),
    )
    assert "mm in cat" not in plan
    assert "mm_1 in cat" in plan


def look_ups(x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
    found = x.gather(1, index)
    return [found.sum(1), found.amax(0), found.prod(1)]


@pytest.mark.parametrize(("rows", "kept"), [(64, False), (1 << 14, True)])
def test_what_is_looked_up_often_is_looked_up_once(rows: int, kept: bool) -> None:
    """Rows and columns are reduced by different kernels; each look-up moves a whole sector."""
    arguments = [torch.empty(rows, 1024), torch.zeros(rows, 1024, dtype=torch.int64)]
    assert ("-> gather" in plan_of(look_ups, arguments=arguments)) is kept


def test_memory_is_saved_where_it_is_asked() -> None:
    """A sum that two kernels read is computed by both, unless that keeps more alive."""

    def shared(x, y, w):
        total = x + y
        return [total.sum(1), total.t() @ w, total.amax(0)]

    def without_product(x, y):
        total = x + y
        return [total.sum(1), total.amax(0)]

    sizes = ((64, 48), (64, 48))
    assert "add" in plan_of(without_product, *sizes)
    assert "add" not in plan_of(without_product, *sizes, objective="memory")
    # A product reads memory: nothing is saved.
    assert "add" in plan_of(shared, *sizes, (64, 3), objective="memory")


def test_the_search_never_costs_more_than_no_search() -> None:
    seen: list[tuple[float, float]] = []

    def watching(choices: Choices):
        found = searched(choices)
        seen.append((choices.model.total(found), choices.model.total(choices.base)))
        return found

    for function, sizes in (
        (lambda x, a, b, w: [torch.cat([x @ a, x @ b], 1) @ w], ((9, 8), (8, 6), (8, 4), (10, 3))),
        (lambda x, y, w: [torch.cat([x.exp(), y], 1) @ w], ((9, 6), (9, 4), (10, 3))),
    ):
        arguments = [r(*one) for one in sizes]
        gm = graph_of(Case(function, lambda given=arguments: given), arguments)
        for rewrite in PASSES:
            rewrite(gm)
        Fusion(gm, ("cpu",), decide=watching).plan()
    assert len(seen) == 2
    assert all(found <= base for found, base in seen)
    assert any(found < base for found, base in seen)


def test_graphs_without_a_choice_are_not_searched() -> None:
    fusion = fused(lambda x: [x.exp().t().reshape(-1)], (4, 6))
    assert find_choices(fusion.gm.graph, fusion) is None


# The benchmark's blocks.

MOVES = {"load", "index", "const", "where", "and", "or", "not", "eq", "ne", "lt", "le", "gt", "ge"}
# Block → kernels, and those of them that compute nothing.
KERNELS = {
    "Llama-3-8B decode": (6, 0),
    "Gemma-2-9B decode": (7, 0),
    "QKV prefill": (2, 0),
    "EfficientViT attention": (4, 1),  # a padded cat of what convolutions made
    "YOLOv11n C3k2": (4, 0),
    "ShuffleNet unit": (3, 0),
    "Swin window attention": (4, 0),
    "DenseNet block": (13, 5),  # the result, a cat of what convolutions made; weights' layouts
    "U-Net skip": (3, 0),
}


class Planning:
    """Plans a program as the backend would for a GPU, and runs it in eager mode."""

    name = "planning"

    def __init__(self) -> None:
        self.kernels: list[list[str]] = []

    def supports(self, gm: GraphModule) -> list[str]:
        return []

    def compile(self, gm, example_inputs, context):
        def forward(graph, inputs):
            plain = copy_graph_module(graph)
            for kernel in plan_kernels(graph, devices=("cpu",)):
                live = kernel.builder.live()
                self.kernels.append([kernel.builder.instructions[one].op for one in live])
            return plain.forward

        return aot(
            gm,
            example_inputs,
            context,
            forward=forward,
            mutations_in_graph=True,
            decompositions=decompositions(),
        )


@pytest.mark.parametrize("name", BLOCKS)
def test_kernels_of_a_block(name: str) -> None:
    block = BLOCKS[name].build(2, "cpu")
    planning = Planning()
    with torch.no_grad():
        magjit.compile(block.module, backend=planning)(*block.arguments)
    moving = [ops for ops in planning.kernels if set(ops) <= MOVES]
    assert (len(planning.kernels), len(moving)) == KERNELS[name], planning.kernels
