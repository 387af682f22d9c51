"""Nodes made at less cost are torch's own nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from magjit.plugin.fx_nodes import new_call


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
