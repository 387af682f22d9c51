"""Nodes made at less cost are torch's own nodes; what has an effect is no dead code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx import Graph

from magjit.plugin.fx_nodes import new_call, remove_unused

aten = torch.ops.aten


@pytest.mark.parametrize("kwargs", [None, {}, {"alpha": 2}, {"out": [None, slice(1, None)]}])
@pytest.mark.parametrize("target", [torch.add, "add", torch.ops.aten.add.Tensor])
@pytest.mark.parametrize("name", [None, "sum"])
def test_same_node(target: Any, kwargs: dict[str, Any] | None, name: str | None) -> None:
    made = []
    for own in (True, False):
        graph = Graph()
        x, y = graph.placeholder("x"), graph.placeholder("y")
        args = (x, [y, (x, 3)])
        for _ in range(2):
            if own:
                node = new_call(graph, target, args, kwargs, name)
            else:
                op = "call_method" if isinstance(target, str) else "call_function"
                node = graph.create_node(op, target, args, kwargs, name)
        assert node.all_input_nodes == [x, y] and len(x.users) == len(y.users) == 2
        made.append((str(graph), node.name, str(node.args), str(node.kwargs), type(node.args[1])))
    assert made[0] == made[1]


def test_what_has_an_effect_stays() -> None:
    library = torch.library.Library("magjit_test_effects", "DEF")
    library.define("told(Tensor x) -> Tensor")
    told = torch.ops.magjit_test_effects.told.default
    handle = _register_effectful_op("magjit_test_effects::told", _EffectType.ORDERED)
    graph = Graph()
    x = graph.placeholder("x")
    kept = [
        graph.call_function(aten._linalg_check_errors.default, (x, "inv"), {"is_matrix": True}),
        graph.call_function(aten.add_.Tensor, (x, x)),
        graph.call_function(aten.bernoulli.default, (x,)),
        graph.call_function(told, (x,)),
    ]
    unused = graph.call_function(aten.sin.default, (x,))
    graph.call_function(aten.cos.default, (unused,))
    graph.call_function(aten._assert_tensor_metadata.default, (x,))
    output = graph.output(x)
    remove_unused(graph)
    handle.destroy()
    assert list(graph.nodes) == [x, *kept, output]
