"""Contiguity (Definitions 4 and 5), the VTOG with its conflict sets, and the greedy search."""

from __future__ import annotations

from itertools import product

import pytest
import sympy
import torch
from torch.fx import Node

from magjit.plugin.virtual_tensors import Mapping, Movement, index_symbols
from magjit.plugin.virtual_tensors.contiguity import Contiguous, contiguity
from magjit.plugin.virtual_tensors.costs import PLACING, CostModel, left_to_move
from magjit.plugin.virtual_tensors.indexing import Mod
from magjit.plugin.virtual_tensors.opportunities import Movements, find_opportunities
from magjit.plugin.virtual_tensors.search import Strategy, greedy, search
from tests.virtual_tensors.building import Built

aten = torch.ops.aten
i0, i1, i2 = index_symbols(3)


@pytest.mark.parametrize(
    ("mapping", "kind", "dimension", "run"),
    [
        (Mapping.physical((4, 6, 8)), Contiguous.FULLY, 0, 192),
        (Mapping.physical((4, 6, 8), offset=48), Contiguous.FULLY, 0, 192),
        (Mapping.physical((4, 6, 8), (96, 8, 1)), Contiguous.PARTIALLY, 1, 48),
        (Mapping.physical((4, 6, 8), (48, 1, 6)), Contiguous.NOT, 3, 1),
        (Mapping.physical((4, 6, 4), (30, 5, 1)), Contiguous.NOT, 2, 4),
        (Mapping.physical((1, 6, 8), (7, 8, 1)), Contiguous.FULLY, 0, 48),
    ],
)
def test_contiguity(mapping: Mapping, kind: Contiguous, dimension: int, run: int) -> None:
    found = contiguity(mapping, element_bytes=4)
    assert (found.kind, found.dimension, found.run) == (kind, dimension, run)
    assert found.always_pays == (kind is Contiguous.FULLY)


def test_an_expanded_tensor_is_contiguous_behind_what_repeats() -> None:
    """The example of Remark 2."""
    base = Mapping.physical((2, 3, 16))
    repeated = Movement.of((2, 9, 16), (i0, Mod(i1, 3), i2)).over([base])
    found = contiguity(repeated, element_bytes=4)
    assert (found.kind, found.dimension, found.run) == (Contiguous.PARTIALLY, 2, 16)


def test_contiguity_with_symbols() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    mapping = Mapping.physical((size, size, 8), (16 * size, 8, 1))
    assert contiguity(mapping, 4).dimension == 1
    assert contiguity(mapping, 4).kind is Contiguous.PARTIALLY
    assert contiguity(Mapping.physical((size, 8)), 4).always_pays


def viewed_and_joined() -> tuple[Built, dict[str, Node]]:
    """x → sin → view → (a, exp(a)) → cat → cos."""
    made = Built()
    x = made.input(torch.randn(4, 6))
    y = made.call(aten.sin.default, x)
    a = made.call(aten.view.default, y, [2, 12])
    e = made.call(aten.exp.default, a)
    c = made.call(aten.cat.default, [a, e], 1)
    z = made.call(aten.cos.default, c)
    made.graph.output(z)
    return made, {"x": x, "y": y, "a": a, "e": e, "c": c, "z": z}


def test_opportunities_and_conflicts() -> None:
    made, names = viewed_and_joined()
    found = find_opportunities(made.graph, {})
    letters = {node: letter for letter, node in names.items()}
    assert {letters[u] + letters[v] for u, v in found.graph.edges()} == set(
        ("ay", "ya", "ac", "ca", "ce", "ec")
    )
    assert found.fixed.keys() >= {names["x"], names["z"]}
    assert len(found.conflicts(names["a"])) == 1, "of its operand and of its result at once"
    assert not found.conflicts(names["c"]), "both edges are one way to make it virtual"
    both = {
        names["a"]: next(one for one in found.choices[names["a"]] if one.backward),
        names["c"]: found.choices[names["c"]][0],
    }
    assert not found.is_points_to_graph(both)


def test_what_no_kernel_writes_gets_no_place_in_a_result() -> None:
    made, names = viewed_and_joined()
    found = find_opportunities(made.graph, {}, can_write=lambda tensor: tensor is names["e"])
    backward = {one.tensor for own in found.choices.values() for one in own if one.backward}
    assert backward == {names["e"]}


class AnyKernels:
    """Kernels that read and write everything everywhere."""

    def run(self, node: object, strategy: Strategy) -> float:
        return 0.0

    def move(self, node: object, strategy: Strategy, whole: bool) -> float:
        return 0.0


def test_the_search_finds_the_best_points_to_graph_of_a_small_case() -> None:
    made, names = viewed_and_joined()
    movements = Movements.of(made.graph)
    model = CostModel(made.graph, movements, AnyKernels())
    found = find_opportunities(made.graph, {}, movements=movements)
    tensors = list(found.choices)
    costs = []
    for picks in product(*([None, *found.choices[one]] for one in tensors)):
        chosen = {one: pick for one, pick in zip(tensors, picks, strict=True) if pick is not None}
        if found.is_points_to_graph(chosen):
            costs.append(model.total(Strategy(chosen)))
    for results_first in (True, False):
        one = greedy(found, model.gain, results_first=results_first)
        assert found.is_points_to_graph(one.chosen)
        assert model.total(one) < model.total(Strategy())
    strategy = search(found, model.gain, model.total)
    assert model.total(strategy) <= min(costs) + 2 * PLACING
    assert not left_to_move(names["c"], movements, strategy)


def test_a_split_operand_lies_in_its_results() -> None:
    made = Built()
    x = made.input(torch.randn(4, 6))
    y = made.call(aten.sin.default, x)
    parts = made.call(aten.split.Tensor, y, 3, 1)
    items = [made.call(lambda pair, k: pair[k], parts, k) for k in range(2)]
    for item in items:
        item.target = __import__("operator").getitem
    joined = made.call(aten.cat.default, items, 1)
    made.graph.output(made.call(aten.cos.default, joined))
    found = find_opportunities(made.graph, {})
    chosen = {y: found.choices[y][0]}
    for item in items:
        chosen[item] = next(one for one in found.choices[item] if one.backward)
    affine = Strategy(chosen).place(y).mapping.affine()
    assert affine is not None and affine.strides == (6, 1) and affine.offset == 0
