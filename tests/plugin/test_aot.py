"""AOTAutograd and partition helpers, as a backend uses them."""

from __future__ import annotations

import operator

import pytest
import torch

from magjit.plugin import BackendContext, conformance, partition
from magjit.plugin.aot import aot, core_aten_decompositions

from .graphs import compile_for

POINTWISE = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.relu.default,
    torch.ops.aten.sigmoid.default,
}


class Pointwise:
    """Takes chains of pointwise operators; ATen does the rest."""

    name = "pointwise"
    exact_random = True

    def __init__(self) -> None:
        self.parts: list[list[str]] = []

    def supports(self, gm):
        return []

    def compile(self, gm, example_inputs, context):
        def compile_aten(aten, inputs):
            split = partition(aten, lambda node: node.target in POINTWISE, self.compile_part)
            return split.forward

        return aot(gm, example_inputs, context, forward=compile_aten)

    def compile_part(self, part):
        nodes = [node for node in part.graph.nodes if node.op == "call_function"]
        assert all(node.target in POINTWISE | {operator.getitem} for node in nodes)
        self.parts.append([node.target._overloadpacket.__name__ for node in nodes])
        return part.forward


def test_partition_takes_what_it_can() -> None:
    backend = Pointwise()
    x, y = torch.randn(4, 4), torch.randn(4, 4)

    def program(x, y):
        return torch.sigmoid((x + y).relu() @ y) * 2

    with torch.no_grad():
        compiled = compile_for(backend, program, [x, y])
        torch.testing.assert_close(compiled(x, y)[0], program(x, y))
    assert sorted(map(sorted, backend.parts)) == [["add", "relu"], ["mul", "sigmoid"]]


test_partitioned = conformance.pytest_suite(Pointwise())


def test_graphs_are_functional_and_dumped() -> None:
    class Functional(Pointwise):
        def compile(self, gm, example_inputs, context):
            def check(aten, inputs):
                for node in aten.graph.nodes:
                    if node.op == "call_function" and hasattr(node.target, "_schema"):
                        assert not node.target._schema.is_mutable, node
                return aten.forward

            return aot(gm, example_inputs, context, forward=check)

    x = torch.randn(3, requires_grad=True)
    context = BackendContext(want_dumps=True)
    compiled = compile_for(Functional(), lambda x: (x * 2).add_(1).view(-1), [x], context=context)
    compiled(x)[0].sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    assert {"aten_forward.py", "aten_backward.py"} <= set(context.dumps)


@pytest.mark.parametrize("mutations_in_graph", [False, True])
def test_input_mutation(mutations_in_graph: bool) -> None:
    seen = []

    class Mutating(Pointwise):
        def compile(self, gm, example_inputs, context):
            def look(aten, inputs):
                seen.extend(str(node.target) for node in aten.graph.nodes)
                return aten.forward

            return aot(
                gm, example_inputs, context, forward=look, mutations_in_graph=mutations_in_graph
            )

    x = torch.ones(3)
    with torch.no_grad():
        compiled = compile_for(Mutating(), lambda x: x.add_(1) * 2, [x])
        assert compiled(x)[0].tolist() == [4, 4, 4]
    assert x.tolist() == [2, 2, 2]
    assert ("aten.copy_.default" in seen) == mutations_in_graph


def test_decompositions() -> None:
    seen = set()

    class Decomposing(Pointwise):
        def compile(self, gm, example_inputs, context):
            def look(aten, inputs):
                seen.update(str(node.target) for node in aten.graph.nodes)
                return aten.forward

            return aot(
                gm,
                example_inputs,
                context,
                forward=look,
                decompositions=core_aten_decompositions(),
            )

    x = torch.randn(3)
    compiled = compile_for(Decomposing(), lambda x: torch.nn.functional.silu(x), [x])
    torch.testing.assert_close(compiled(x)[0], torch.nn.functional.silu(x))
    assert "aten.silu.default" not in seen and "aten.sigmoid.default" in seen
