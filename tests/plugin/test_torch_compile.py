"""MagJIT backends under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from magjit.plugin import BackendContext, CustomGuard, ExampleInputs, for_torch_compile
from magjit.plugin.aot import aot


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Probe:
    name = "probe"

    def __init__(self) -> None:
        self.contexts: list[BackendContext] = []
        self.examples: list[object] = []

    def supports(self, gm):
        return ["no sin"] if "sin" in gm.code else []

    def compile(self, gm, example_inputs, context):
        self.contexts.append(context)
        self.examples = list(example_inputs)
        return aot(gm, example_inputs, context, forward=lambda gm, inputs: gm.forward)


def test_context_is_filled_in() -> None:
    probe = Probe()
    linear = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4)
    compiled = torch.compile(linear, backend=for_torch_compile(probe))
    compiled(x).sum().backward()
    assert linear.weight.grad is not None
    (context,) = probe.contexts
    assert context.tracing_context is not None and context.fake_mode is not None
    assert {one.size for one in context.inputs} == {(3, 4), (3,), (2, 4)}


def test_dynamic_shapes_are_dynamos() -> None:
    probe = Probe()
    compiled = torch.compile(
        lambda x: x * 2, backend=for_torch_compile(probe), dynamic=True, fullgraph=True
    )
    for size in (3, 5, 7):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), x * 2)
    assert len(probe.contexts) == 1


def test_added_guards_are_checked_at_each_call() -> None:
    class Guarding(Probe):
        def compile(self, gm, example_inputs, context):
            context.add_guard(CustomGuard((0,), lambda x: bool(x[0] == 0), "x begins with 0"))
            return lambda x: (x + 100,)

    compiled = torch.compile(lambda x: x + 1, backend=for_torch_compile(Guarding()))
    assert compiled(torch.zeros(2)).tolist() == [100, 100]
    assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_copies_for_those_who_ask() -> None:
    class Executing(Probe):
        example_inputs = ExampleInputs.COPIES

        def compile(self, gm, example_inputs, context):
            gm(*example_inputs)
            return gm.forward

    x = torch.zeros(2)
    compiled = torch.compile(lambda x: x.add_(1), backend=for_torch_compile(Executing()))
    compiled(x)
    assert x.tolist() == [1, 1]


def test_refusal_is_an_error_with_the_reason() -> None:
    compiled = torch.compile(torch.sin, backend=for_torch_compile(Probe()))
    with pytest.raises(Exception, match="no sin"):
        compiled(torch.ones(2))
