"""Floats of the CPU that operators of another device use; tensors are fake, there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from magjit.plugin.floats_on_device import floats_on_device

T = torch.Tensor


def scaled(x: T, a: T, b: T) -> Any:
    z = torch.addcmul(x * a, x, b)
    return torch.where(z > a, z, a).clamp_min(b), b - x / a, x.pow(a)


def graph_of(device: str, function: Any = scaled, table: Any = None) -> GraphModule:
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(3, 4, device=device), torch.empty(()), torch.empty(())]
        return make_fx(function, table)(*given)


def copies(gm: GraphModule) -> list[Any]:
    return [node for node in gm.graph.nodes if node.target is torch.ops.aten._to_copy.default]


def test_one_copy_for_each_float() -> None:
    gm = graph_of("cuda")
    floats_on_device(gm.graph)
    gm.graph.lint()
    made = copies(gm)
    assert len(made) == 2
    for node in made:
        assert node.meta["val"].device.type == "cuda"
        assert node.kwargs["non_blocking"] is True
    for node in gm.graph.nodes:
        if node.op == "call_function" and node not in made:
            used = [one.meta["val"].device.type for one in node.all_input_nodes]
            assert set(used) == {"cuda"}, node


def test_none_on_the_cpu() -> None:
    gm = graph_of("cpu")
    before = str(gm.graph)
    floats_on_device(gm.graph)
    assert str(gm.graph) == before


def test_operators_of_the_cpu_are_left_alone() -> None:
    gm = graph_of("cuda", lambda x, a, b: (torch.stack([a, b]), a + b, x.masked_fill(x > 0, b)))
    floats_on_device(gm.graph)
    (made,) = copies(gm)
    assert [str(user.target) for user in made.users] == ["aten.masked_fill.Tensor"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_triton_backend_computes_all_in_kernels() -> None:
    from magjit_triton.codegen.decompositions import decompositions
    from magjit_triton.codegen.fusion import Fusion

    gm = graph_of("cuda", table=decompositions())
    alone = Fusion(gm)
    left = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert not all(map(alone.fusible, left))
    floats_on_device(gm.graph)
    fusion = Fusion(gm)
    kept = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [n for n in kept if not fusion.fusible(n)] == copies(gm)
