"""Under another tracer a compiled object is the program itself: it passes straight through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import magjit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu() * 2


def compiled_module() -> tuple[Any, Any]:
    model = Net()
    return model, magjit.compile(model, backend="eager")


def compiled_function() -> tuple[Any, Any]:
    model = Net()

    def program(x: torch.Tensor) -> torch.Tensor:
        return model(x) + 1

    return program, magjit.compile(program, backend="eager")


def submodule() -> tuple[Any, Any]:
    model, plain = nn.Sequential(Net(), nn.Tanh()), Net()
    plain.load_state_dict(model[0].state_dict())
    model[0] = magjit.compile(model[0], backend="eager")
    return nn.Sequential(plain, model[1]), model


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture(params=[compiled_module, compiled_function, submodule], ids=lambda f: f.__name__)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A program and what is compiled of it."""
    torch.manual_seed(0)
    return request.param()


@pytest.fixture(params=["before any call", "with a record"])
def twins(pair: tuple[Any, Any], request: pytest.FixtureRequest) -> tuple[Any, Any]:
    if request.param == "with a record":
        for _ in range(2):
            pair[1](torch.randn(3, 4))
    return pair


def needs_modules(plain: Any) -> None:
    """Skips a function: to this tracer, a module that it closes over is no part of the model."""
    if not isinstance(plain, nn.Module):
        pytest.skip("eager cannot be traced either")


def as_module(fn: Callable[..., Any]) -> nn.Module:
    if isinstance(fn, nn.Module):
        return fn

    class Wrapper(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return fn(x)

    return Wrapper()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_torch_compile(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    outer = torch.compile(compiled, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(outer(X), plain(X))


def test_torch_compile_of_a_caller(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins

    def caller(x: torch.Tensor) -> torch.Tensor:
        return compiled(x.sin()).cos()

    outer = torch.compile(caller, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(outer(X), plain(X.sin()).cos())


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export(twins: tuple[Any, Any], strict: bool) -> None:
    plain, compiled = twins
    if strict:
        needs_modules(plain)
    program = torch.export.export(as_module(compiled), (X,), strict=strict)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("linear" in target for target in targets)
    torch.testing.assert_close(program.module()(X), plain(X))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(twins: tuple[Any, Any], mode: str) -> None:
    plain, compiled = twins
    graph = make_fx(compiled, tracing_mode=mode, _allow_non_fake_inputs=True)(X)
    assert any("relu" in str(node.target) for node in graph.graph.nodes)
    torch.testing.assert_close(graph(X), plain(X))


def test_symbolic_trace(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    needs_modules(plain)
    graph = torch.fx.symbolic_trace(as_module(compiled))
    torch.testing.assert_close(graph(X), plain(X))
    torch.testing.assert_close(graph(X * 2), plain(X * 2))


def test_jit_trace(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    needs_modules(plain)
    traced = torch.jit.trace(compiled, (X,), check_trace=False)
    assert "relu" in str(traced.inlined_graph)
    torch.testing.assert_close(traced(X * 2), plain(X * 2))


def test_fake_tensors(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = compiled(mode.from_tensor(X))
    assert type(out).__name__ == "FakeTensor" and out.shape == plain(X).shape


def test_fake_tensors_outside_their_mode(
    twins: tuple[Any, Any], recwarn: pytest.WarningsRecorder
) -> None:
    plain, compiled = twins
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    out = compiled(mode.from_tensor(X))
    assert type(out).__name__ == "FakeTensor" and out.shape == plain(X).shape
    assert not [w for w in recwarn if w.category is magjit.MagJITWarning]


def test_meta_tensors(twins: tuple[Any, Any]) -> None:
    _, compiled = twins
    meta = compiled
    if isinstance(compiled, nn.Module):
        meta.to("meta")
        assert meta(X.to("meta")).shape == (3, 4)


def test_vmap(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    batch = torch.stack([X, X + 1])
    torch.testing.assert_close(torch.vmap(compiled)(batch), torch.vmap(plain)(batch))


def test_functional_transforms(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins

    def loss(fn: Any) -> Any:
        return lambda x: fn(x).square().sum()

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(transform(loss(compiled))(X), transform(loss(plain))(X))


def test_functional_call() -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager")
    compiled(X)
    other = {name: value * 2 for name, value in model.state_dict().items()}
    for _ in range(3):
        torch.testing.assert_close(
            torch.func.functional_call(compiled, other, (X,)),
            torch.func.functional_call(model, other, (X,)),
        )
        torch.testing.assert_close(compiled(X), model(X))


def test_a_dispatch_mode(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    counts = []
    for call in (plain, compiled):
        with FlopCounterMode(display=False) as counter:
            call(X)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_function_mode(twins: tuple[Any, Any]) -> None:
    """Another mode sees every operation, on each call."""
    from torch.overrides import TorchFunctionMode

    plain, compiled = twins

    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    def names(call: Any) -> list[str]:
        with Names() as mode:
            call(X)
        return [name for name in mode.seen if name in ("linear", "relu", "mul", "__mul__")]

    expected = names(plain)
    for _ in range(3):
        assert names(compiled) == expected


def test_checkpoint(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    gradients = []
    for call in (plain, compiled, compiled):
        x = X.clone().requires_grad_()
        checkpoint(call, x, use_reentrant=False).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], gradients[2])


def test_jvp_and_forward_mode(twins: tuple[Any, Any]) -> None:
    from torch.autograd import forward_ad

    plain, compiled = twins
    tangents = []
    for call in (plain, compiled):
        with forward_ad.dual_level():
            out = call(forward_ad.make_dual(X, torch.ones_like(X)))
            tangents.append(forward_ad.unpack_dual(out).tangent)
    assert tangents[1] is not None
    torch.testing.assert_close(tangents[0], tangents[1])


def test_double_backward(twins: tuple[Any, Any]) -> None:
    plain, compiled = twins
    seconds = []
    for call in (plain, compiled, compiled):
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.sum(), x)[0])
    torch.testing.assert_close(seconds[0], seconds[1])
    torch.testing.assert_close(seconds[0], seconds[2])
