"""Fused operators without bytecode for their arguments run operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from magjit.plugin import BackendError
from magjit_dvm.by_aten import by_aten
from magjit_dvm.fuser import fuse
from magjit_dvm.groups import FusedGroup

aten = torch.ops.aten


def expanded(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    """A gradient of a mean, with a size that was saved for it."""
    return ((x * 2).unsqueeze(0).expand(n, -1) / 3 + y).exp()


def of_both(x: torch.Tensor, y: torch.Tensor, n: int) -> torch.Tensor:
    return ((x[0] * 3).expand(n * x.shape[0]) + y.reshape(-1) * 2).exp()


def symbols(env: ShapeEnv) -> tuple[Any, ...]:
    """Two sizes, of 24 and 16."""
    return tuple(
        env.create_symintnode(
            env.create_symbol(hint, ConstantSource(f"s{hint}"), dynamic_dim=DimDynamic.DYNAMIC),
            hint=hint,
        )
        for hint in (24, 16)
    )


@pytest.mark.parametrize("program", [expanded, of_both])
def test_sizes_from_outside_of_the_group(program: Callable[..., torch.Tensor]) -> None:
    """That they are inputs of the graph of their own, as in a backward, is no reason to fail."""
    env = ShapeEnv()
    rows, columns = symbols(env)
    with FakeTensorMode(shape_env=env):
        given: list[Any] = [torch.empty(columns), torch.empty(rows, columns), rows]
        graph = make_fx(program, tracing_mode="symbolic")(*given)
    fusion = fuse(graph.graph)
    (group,) = fusion.groups
    read = {one for node in group.nodes for one in node.all_input_nodes}
    known = {*group.nodes, *(one for one in group.arguments if isinstance(one, torch.fx.Node))}
    assert any(isinstance(one.meta["val"], torch.SymInt) for one in read - known)
    run = by_aten(graph, group)
    for n in (24, 7):
        x, y = torch.randn(16), torch.randn(n, 16)
        around = torch.fx.Interpreter(graph, garbage_collect_values=False)
        wanted = around.run(x, y, n)
        arguments = [
            around.env[one] if isinstance(one, torch.fx.Node) else one for one in group.arguments
        ]
        results = run(*arguments)
        (output,) = group.outputs
        torch.testing.assert_close(results, around.env[output])
        torch.testing.assert_close(wanted, program(x, y, n))


def test_a_number_that_no_argument_says() -> None:
    """It is refused when the graph is compiled, so that the program runs eagerly."""
    env = ShapeEnv()
    n, m = symbols(env)
    with FakeTensorMode(shape_env=env):
        graph = make_fx(lambda x, n, m: (x + 1) * m, tracing_mode="symbolic")(torch.empty(n), n, m)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    x = next(iter(graph.graph.nodes))
    group = FusedGroup(nodes=nodes, outputs=nodes[-1:], arguments=[x])
    with pytest.raises(BackendError, match="no size of what"):
        by_aten(graph, group)


def test_what_an_operand_is_asked_for_but_its_elements() -> None:
    """The program does not take it; operator by operator, its dtype is known all the same."""

    def blank(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).new_zeros(9, 2) + 1

    with FakeTensorMode():
        graph = make_fx(blank)(torch.empty(3, 3, dtype=torch.float64))
    (group,) = fuse(graph.graph).groups
    assert not any(isinstance(one, torch.fx.Node) for one in group.arguments)
    made = by_aten(graph, group)(*group.arguments)
    torch.testing.assert_close(made, torch.ones(9, 2, dtype=torch.float64))


def test_wholes_lie_where_their_parts_do() -> None:
    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * 2, y + 1], 1)

    given = torch.empty(4, 3), torch.empty(4, 5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(joined)(*given)
    first = next(one for one in fuse(graph.graph).groups if one.values)
    assert first.program is not None
    places = dict(zip(graph.graph.find_nodes(op="placeholder"), given, strict=True))
    made = by_aten(graph, first)(
        *(
            places[one].to("meta") if isinstance(one, torch.fx.Node) else one
            for one in first.arguments
        )
    )
    whole = made if isinstance(made, torch.Tensor) else made[0]
    assert whole.is_meta and whole.shape == (4, 8)


def test_a_number_that_the_program_leaves_out() -> None:
    """Operator by operator it is needed, and said when that is asked for."""
    graph = torch.fx.Graph()
    x, number = graph.placeholder("x"), graph.placeholder("number")
    made = graph.call_function(aten.mul.Tensor, (x, number))
    with FakeTensorMode():
        x.meta["val"] = made.meta["val"] = torch.empty(3)
    number.meta["val"] = 2.0
    group = FusedGroup(nodes=[made], outputs=[made], arguments=[x])
    run = by_aten(torch.fx.GraphModule(torch.nn.Module(), graph), group)
    with pytest.raises(BackendError, match="number is nothing that"):
        run(torch.ones(3))
