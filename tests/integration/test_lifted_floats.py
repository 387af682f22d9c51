"""Floats that change, with backends that take tensors only: two captures, and eager's results."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit.plugin import BackendContext, FloatInputs
from tests.integration.test_lifting import FLOATS, PROGRAMS, outcome, same

T = torch.Tensor
BACKENDS = ["aot_eager", "dvm", "triton"]
MANY = [0.1 + 0.37 * step for step in range(40)]


def arithmetic(x: T, y: T, a: float) -> Any:
    b = a * 0.5 + 1
    return x * a, a - x, x / b, a / (x.abs() + 1), (x + y) * (b - a) + max(a, 0.5)


def in_place(x: T, y: T, a: float) -> Any:
    z = x.clone().mul_(a).add_(y, alpha=-a)
    z -= a
    z.addcmul_(x, y, value=a).addcdiv_(x, y.abs() + 1, value=-a)
    x.sub_(y, alpha=a * 1e-2)
    return z.lerp_(x, a / 40).clamp_(-a, a)


def choices(x: T, y: T, a: float) -> Any:
    picked = torch.where(x > a, x, a)
    return picked, x.masked_fill(y > 0, a), x.clamp(min=-a, max=3.0), (y < a) | (x == a)


def made(x: T, y: T, a: float) -> Any:
    return torch.full((2, 3), a), torch.full_like(x, -a), x.new_full((4,), a), torch.tensor(a) + y


def powers(x: T, y: T, a: float) -> Any:
    return (2 + a) ** x.tanh(), x.abs() ** (a + 3.01)


def no_dimensions(x: T, y: T, a: float) -> Any:
    total = x.sum()
    return total * a, total.bfloat16() * a, total - a, y[0, 0].double() / a


def other_types(x: T, y: T, a: float) -> Any:
    half, whole = (y * 8).bfloat16(), (y * 8).int()
    return half * a, half / a, whole * a, (y > 0) * a, whole > a, y.double().add(x, alpha=1) * a


def beside_an_int(x: T, y: T, a: float, n: int = 3) -> Any:
    return x * n + y * a * n


ALL = [arithmetic, in_place, choices, made, powers, no_dimensions, other_types, beside_an_int]
NOT_EVERY_BIT = {powers}


def given(step: int) -> tuple[T, T]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(3, 5, generator=made), torch.randn(3, 5, generator=made)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True)


def calls(program: Callable[..., Any], values: Any, **options: Any) -> tuple[Any, list[Any]]:
    """What a compiled program did, and each of its results beside eager's."""
    compiled, found = magjit.compile(program, **options), []
    with warnings.catch_warnings():
        warnings.simplefilter("error", magjit.MagJITWarning)
        for step, value in enumerate(values):
            more = (step,) if program is beside_an_int else ()
            pairs = [
                (fn(*inputs, value, *more), inputs)
                for fn, inputs in ((compiled, given(step)), (program, given(step)))
            ]
            found.append(tuple(pairs))
    return magjit.stats(compiled), found


@pytest.mark.parametrize("program", ALL, ids=lambda p: p.__name__)
def test_numbers_of_eager_itself(program: Callable[..., Any]) -> None:
    stats, found = calls(program, MANY, backend="eager")
    assert (stats.captures, stats.eager_calls) == (2, 0)
    for ours, theirs in found:
        same(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", ALL, ids=lambda p: p.__name__)
def test_two_captures_serve_all_floats(program: Callable[..., Any], backend: str) -> None:
    stats, found = calls(program, MANY, backend=backend)
    assert (stats.captures, stats.eager_calls, stats.splits) == (2, 0, 0)
    exact = backend != "dvm" and program not in NOT_EVERY_BIT
    for ours, theirs in found:
        (same if exact else close)(ours, theirs)


@pytest.mark.parametrize("program", [arithmetic, in_place, choices], ids=lambda p: p.__name__)
def test_inductor(program: Callable[..., Any]) -> None:
    stats, found = calls(program, MANY, backend="inductor")
    assert (stats.captures, stats.eager_calls) == (2, 0)
    for ours, theirs in found:
        close(ours, theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_every_value_is_right(program: Callable[..., Any], backend: str) -> None:
    compiled = magjit.compile(program, backend=backend)
    with magjit.config.override(record_limit=20):
        for value in FLOATS:
            x = torch.randn(3, 2)
            ours, theirs = outcome(compiled, x, value), outcome(program, x, value)
            (same if backend != "dvm" else _nearly_same)(ours, theirs)


def _nearly_same(actual: Any, expected: Any) -> None:
    if isinstance(expected, T):
        close(actual, expected)
    elif isinstance(expected, tuple | list):
        for pair in zip(actual, expected, strict=True):
            _nearly_same(*pair)
    else:
        same(actual, expected)


def test_never_without_dynamic() -> None:
    stats, _ = calls(arithmetic, MANY[:4], backend="aot_eager", dynamic=False)
    assert stats.captures == 4


def test_an_operator_without_a_form_keeps_its_constant() -> None:
    def slopes(x: T, y: T, a: float) -> Any:
        return nn.functional.leaky_relu(x, a), x * a

    stats, found = calls(slopes, MANY[:5], backend="aot_eager")
    assert stats.captures == 5
    for ours, theirs in found:
        same(ours, theirs)


def test_a_branch_is_guarded() -> None:
    def decides(x: T, y: T, a: float) -> Any:
        return x * a if a > 1 else x - a

    stats, found = calls(decides, [0.5, 0.25, 2.0, 3.0, 0.75, 1.5], backend="aot_eager")
    assert stats.captures == 3
    for ours, theirs in found:
        same(ours, theirs)


def test_a_number_that_eager_refuses() -> None:
    def scaled(x: T, a: float) -> T:
        return x.add(x, alpha=a)

    compiled = magjit.compile(scaled, backend="aot_eager")
    for value in (0.5, 0.25, 1e300, 0.125, math.inf, math.nan):
        x = torch.ones(3)
        same(outcome(compiled, x, value), outcome(scaled, x, value))


def test_an_exponent_of_torchs_own() -> None:
    def power(x: T, a: float) -> T:
        return x**a

    compiled = magjit.compile(power, backend="aot_eager")
    for value in (1.25, 2.5, 2.0, 0.5, -1.0, 0.0, 4.5):
        x = torch.tensor([-math.inf, -0.0, 0.0, 2.0, math.nan])
        close(compiled(x, value), x**value)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_other_default_dtype(backend: str) -> None:
    for program in (made, other_types):
        with default_dtype(torch.float64):
            stats, found = calls(program, MANY[:6], backend=backend)
        assert stats.captures == 2
        for ours, theirs in found:
            close(ours, theirs)


def test_autocast() -> None:
    def scaled(x: T, y: T, a: float) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = (x * a) @ y.t()
            return product * a, product.float() + a

    stats, found = calls(scaled, MANY[:6], backend="aot_eager")
    assert stats.captures == 2
    for ours, theirs in found:
        same(ours, theirs)


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_sizes_change_too(backend: str) -> None:
    def pooled(x: T, a: float, n: int) -> T:
        return (x * (a / x.shape[0])).sum(0).add(x[0], alpha=a) * n

    compiled = magjit.compile(pooled, backend=backend)
    for step, value in enumerate(MANY[:12]):
        x = torch.randn(3 + step, 4)
        close(compiled(x, value, step), pooled(x, value, step))
    stats = magjit.stats(compiled)
    assert stats.captures <= 3
    assert stats.eager_calls == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients(backend: str) -> None:
    def loss(x: T, y: T, a: float) -> T:
        z = (x * a + y / a).clamp(max=a) + (2 + a) ** x + x.add(y, alpha=a).lerp(y, a / 40)
        return torch.where(z > a, z, a * y).square().mean() * (1 - a)

    compiled = magjit.compile(loss, backend=backend)
    for step, value in enumerate(MANY[:8]):
        ours, theirs = ([one.requires_grad_() for one in given(step)] for _ in range(2))
        for fn, inputs in ((compiled, ours), (loss, theirs)):
            fn(*inputs, value).backward()
        close([one.grad for one in ours], [one.grad for one in theirs])
    assert magjit.stats(compiled).captures == 2


class Net(nn.Module):
    """A counter, a coefficient of each epoch, a rate that comes with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.steps = 0
        self.coefficient = 1.0

    def forward(self, x: T, temperature: float) -> T:
        self.steps += 1
        h = self.layers(x) / temperature
        penalty = 1e-3 * self.steps * h.abs().mean()
        return (h.softmax(-1) * self.coefficient).square().mean() + penalty


def update(parameters: list[T], gradients: list[T], rate: float, decay: float) -> None:
    """One step of gradient descent with decay of the weights."""
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.mul_(1 - rate * decay)
            parameter.add_(gradient, alpha=-rate)


@pytest.mark.parametrize(("backend", "steps"), [("aot_eager", 200), ("dvm", 200), ("inductor", 40)])
def test_a_training_loop(backend: str, steps: int) -> None:
    torch.manual_seed(0)
    model = Net()
    eager = copy.deepcopy(model)
    compiled = magjit.compile(model, backend=backend, fullgraph=True)
    updating = magjit.compile(update, backend=backend, fullgraph=True)
    for step in range(steps):
        epoch = step // 10
        model.coefficient = eager.coefficient = 1 / (1 + epoch)
        x, rate = torch.randn(8, 4), 0.1 * (1 + math.cos(step / 50))
        for net, call, change in ((model, compiled, updating), (eager, eager, update)):
            call(x, 1 + 0.9**epoch).backward()
            parameters = list(net.parameters())
            change(parameters, [one.grad for one in parameters], rate, 1e-2)
            net.zero_grad()
    assert model.steps == eager.steps == steps
    for fn in (compiled, updating):
        stats = magjit.stats(fn)
        assert stats.captures <= 3
        assert stats.eager_calls == 0
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Runs:
    """A third party's backend that runs the graph, and remembers what it is given."""

    name = "runs"

    def __init__(self, floats: FloatInputs | None) -> None:
        if floats is not None:
            self.float_inputs = floats
        self.given: list[Any] = []

    def supports(self, gm: torch.fx.GraphModule) -> list[str]:
        return []

    def compile(self, gm: torch.fx.GraphModule, inputs: Any, context: BackendContext) -> Any:
        def call(*values: Any) -> Any:
            self.given.append(values[-1])
            return gm(*values)

        return call


@pytest.mark.parametrize(
    ("floats", "captures", "kind"),
    [
        (None, 2, torch.Tensor),
        (FloatInputs.TENSORS, 2, torch.Tensor),
        (FloatInputs.NUMBERS, 2, float),
        (FloatInputs.CONSTANTS, 4, None),
    ],
)
def test_a_backend_says_how_it_takes_floats(
    floats: FloatInputs | None, captures: int, kind: Any
) -> None:
    backend = Runs(floats)
    stats, found = calls(lambda x, y, a: x * a, MANY[:4], backend=backend)
    assert stats.captures == captures
    if kind is not None:
        assert all(type(one) is kind for one in backend.given)
        assert [float(one) for one in backend.given] == pytest.approx(MANY[2:4])
    for ours, theirs in found:
        same(ours, theirs)


class Warming(nn.Module):
    """Its factor is a counter, which is lifted in the first capture."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.5

    def forward(self, x: T) -> T:
        self.factor += 0.25
        return x.add(x, alpha=self.factor) * (1 - self.factor)


@pytest.mark.parametrize("backend", ["aot_eager", "dvm"])
def test_the_report_says_what_is_lifted(backend: str) -> None:
    report = magjit.explain(Warming(), backend=backend)(torch.ones(2))
    assert "alpha=(factor + 0.25))" in str(report)
    assert "fits_float32((factor + 0.25)) is True" in report.guard_text
    (graph,) = report.graphs
    assert "float_0" in graph.code
    assert "addcmul" in graph.code


def test_the_machine_takes_them_as_operands() -> None:
    from magjit_dvm.backend import schedules

    for program in (arithmetic, in_place, choices):
        before = set(schedules())
        calls(program, MANY[:3], backend="dvm")
        for schedule in set(schedules()) - before:
            targets = {str(getattr(step, "target", "")) for step in schedule.fusion.steps}
            assert not {one for one in targets if one.startswith("aten.")} - {
                "aten.scalar_tensor.default",  # of a constant in ``where``
                "aten.copy_.default",  # to an input that the program writes
            }
