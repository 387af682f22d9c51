"""MagJIT backends under torch.compile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from magjit.plugin import BackendContext, CustomGuard, ExampleInputs, for_torch_compile
from magjit.plugin.aot import aot
from magjit.plugin.registry import resolve


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


def products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Lowered in C++, which asks for sizes as numbers."""
    return (q @ k.mT).softmax(-1) @ k


def shared(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    q.add_(1)
    return torch.einsum("bhnd,bhmd->bnhm", q, k) / q.shape[2]


@pytest.mark.parametrize("backend", ["dvm", "triton", "eager"])
@pytest.mark.parametrize("program", [products, shared])
@pytest.mark.parametrize("grad", [False, True])
def test_no_size_of_the_first_call_stays(backend: str, program, *, grad: bool) -> None:
    compiled = torch.compile(program, backend=for_torch_compile(resolve(backend)), dynamic=True)
    for length in (20, 33, 7):
        q, k = (torch.randn(2, 3, length, 8) for _ in range(2))
        k.requires_grad_(grad)
        other_q, other_k = q.clone(), k.detach().clone().requires_grad_(grad)
        made, expected = compiled(q, k), program(other_q, other_k)
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(q, other_q)
        if grad:
            made.square().sum().backward()
            expected.square().sum().backward()
            torch.testing.assert_close(k.grad, other_k.grad, rtol=1e-4, atol=1e-4)


def test_fake_inputs_have_dynamos_symbols() -> None:
    probe = Probe()
    compiled = torch.compile(lambda x: x * 2, backend=for_torch_compile(probe), dynamic=True)
    compiled(torch.randn(5, 6))
    (context,) = probe.contexts
    fakes = [one for one in probe.examples if isinstance(one, torch.Tensor)]
    (fake,) = fakes
    assert isinstance(fake, FakeTensor) and fake.fake_mode is context.fake_mode
    assert all(isinstance(size, torch.SymInt) for size in fake.shape)


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


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_that_are_not_functional_run_as_they_are(*, dynamic: bool) -> None:
    probe = Probe()

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += y
        x[:, 1:, ::2] = x[:, :-1, ::2]
        return x * 2

    compiled = torch.compile(program, backend=for_torch_compile(probe), dynamic=dynamic)
    for rows in (4, 4, 6):
        x, y = torch.randn(2, rows, 4), torch.randn(2, rows, 4)
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(compiled(mine, y), program(theirs, y))
        torch.testing.assert_close(mine, theirs)
    assert not probe.contexts


def test_refusal_is_an_error_with_the_reason() -> None:
    compiled = torch.compile(torch.sin, backend=for_torch_compile(Probe()))
    with pytest.raises(Exception, match="no sin"):
        compiled(torch.ones(2))
