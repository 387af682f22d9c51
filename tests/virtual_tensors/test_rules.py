"""Every rule, each direction and shape kind, against torch and the element-by-element reference."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from magjit.plugin.virtual_tensors import VirtualTensor, directions_of, moved
from magjit.plugin.virtual_tensors.calls import operand_nodes
from magjit.plugin.virtual_tensors.reference import evaluate
from magjit.plugin.virtual_tensors.rules import rules
from tests.virtual_tensors.building import Built
from tests.virtual_tensors.samples import samples

aten = torch.ops.aten
SAMPLES = list(samples())
NAMES = [f"{target}-{number}" for number, (target, _) in enumerate(SAMPLES)]
FIRST = {target: number for number, (target, _) in reversed(list(enumerate(SAMPLES)))}
CASES = [
    pytest.param(
        *sample,
        symbolic,
        id=f"{name}-{'symbolic' if symbolic else 'static'}",
        # With symbols, an operator's first sample and every eighth one.
        marks=pytest.mark.slow if symbolic and (number - FIRST[sample[0]]) % 8 else [],
    )
    for number, (sample, name) in enumerate(zip(SAMPLES, NAMES, strict=True))
    for symbolic in (False, True)
]


def physical(node: Node, value: torch.Tensor | None = None) -> VirtualTensor:
    held = node.meta["val"] if value is None else value
    return VirtualTensor.physical(node, held.shape, held.stride())


def built(target: Any, args: tuple[Any, ...], symbolic: bool) -> tuple[Built, Node]:
    made = Built(symbolic)
    nodes = tree_map(lambda one: made.input(one) if isinstance(one, torch.Tensor) else one, args)
    try:
        return made, made.call(target, *nodes)
    except RuntimeError as error:
        if symbolic:
            pytest.skip(f"torch has no symbolic shapes for it: {error}")
        raise


@pytest.mark.parametrize(("target", "args", "symbolic"), CASES)
def test_results_are_virtual_tensors_of_the_operands(
    target: Any, args: tuple[Any, ...], symbolic: bool
) -> None:
    made, node = built(target, args, symbolic)
    directions = directions_of(node)
    assert directions is not None
    if not directions.results:
        assert directions.reason
        return
    value = made.values[node]
    expected = list(value) if isinstance(value, list | tuple) else [value]
    operands = [physical(one) for one in operand_nodes(node)]
    assert len(directions.results) == len(expected)
    for movement, want in zip(directions.results, expected, strict=True):
        virtual = moved(movement, operands)
        tensors = [made.values[one] for one in virtual.sources]
        actual = evaluate(virtual.mapping, tensors, made.sizes)
        assert actual.dtype == want.dtype
        assert torch.equal(actual, want), f"{virtual.mapping}"


@pytest.mark.parametrize(("target", "args", "symbolic"), CASES)
def test_operands_are_virtual_tensors_of_the_results(
    target: Any, args: tuple[Any, ...], symbolic: bool
) -> None:
    made, node = built(target, args, symbolic)
    directions = directions_of(node)
    assert directions is not None
    operands = operand_nodes(node)
    if len(directions.operands) < len(operands):
        skipped = any(made.values[one].shape == (0,) for one in operands)
        lends_shape = target in (aten.reshape_as.default, aten.view_as.default)
        assert directions.reason or skipped or lends_shape
    value = made.values[node]
    results = list(value) if isinstance(value, list | tuple) else [value]
    items = [made.graph.call_function(operator.getitem, (node, k)) for k in range(len(results))]
    fakes = node.meta["val"] if isinstance(value, list | tuple) else [node.meta["val"]]
    for item, fake, result in zip(items, fakes, results, strict=True):
        item.meta["val"] = fake
        made.values[item] = result
    for position, movement in directions.operands.items():
        virtual = moved(movement, [physical(item) for item in items])
        tensors = [made.values[one] for one in virtual.sources]
        want = made.values[operands[position]]
        assert torch.equal(evaluate(virtual.mapping, tensors, made.sizes), want)


def test_every_rule_has_a_sample() -> None:
    sampled = {target for target, _ in SAMPLES}
    assert sorted(str(one) for one in rules.keys() ^ sampled) == []
