"""Everything else that can be called: functions, methods, decorators, objects, partials."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import operator
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import magjit

X = torch.linspace(-1, 1, 12).reshape(3, 4)
ours = functools.partial(magjit.compile, backend="eager")


def times(
    x: torch.Tensor, factor: float = 2.0, *rest: float, shift: float = 0.0, **more: float
) -> Any:
    """Doc of the function."""
    return x * factor + shift + sum(rest) + sum(more.values())


class Scaler:
    scale = 2.0

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @classmethod
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.scale

    @staticmethod
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + 1


@dataclass
class Adder:
    value: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 3.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value


def closure() -> Callable[..., Any]:
    held = {"scale": 3.0}

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * held["scale"]

    return inner


def nested(depth: int = 3) -> Callable[..., Any]:
    fn: Callable[..., Any] = closure()
    for _ in range(depth):
        fn = functools.wraps(fn)(functools.partial(lambda inner, x: inner(x) + 1, fn))
    return fn


def undecorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


linear = nn.Linear(4, 4)
CALLABLES: dict[str, Callable[..., Any]] = {
    "function": times,
    "lambda": lambda x: x.relu() + 1,
    "closure": closure(),
    "bound method": Scaler().method,
    "class method": Scaler.of_class,
    "static method": Scaler.static,
    "function of a class": lambda x: Scaler.method(Scaler(), x),
    "callable object": Scaler(),
    "data class object": Adder(2.0),
    "object with slots": Slotted(),
    "partial of a function": functools.partial(times, factor=3.0),
    "partial with positions": functools.partial(operator.mul, 3),
    "partial of a method": functools.partial(Scaler().method),
    "partial of a module": functools.partial(linear),
    "partials in partials": functools.partial(functools.partial(times, shift=1.0), factor=2.0),
    "wrapped function": undecorated(times),
    "wrapped partials": nested(),
    "method of a module": linear.forward,
    "__call__ of a module": linear.__call__,
    "single dispatch": functools.singledispatch(times),
    "builtin operator": torch.relu,
    "function of torch": nn.functional.relu,
    "method of Tensor": torch.Tensor.relu,
    "operator overload": torch.ops.aten.relu.default,
    "cached function": functools.cache(times),
    "list of modules": nn.Sequential(linear, nn.ReLU()).forward,
}


@pytest.mark.filterwarnings("ignore::magjit.MagJITWarning")
@pytest.mark.parametrize("name", CALLABLES)
def test_callables(name: str) -> None:
    fn = CALLABLES[name]
    compiled = ours(fn)
    for step in range(4):
        x = X + step % 2
        torch.testing.assert_close(compiled(x), fn(x))
    stats = magjit.stats(compiled)
    assert stats.captures + stats.splits >= 1
    assert stats.replays >= 2 or stats.splits >= 1
    for attribute in ("__name__", "__doc__", "__module__", "__qualname__"):
        if isinstance(fn, type(times)):
            assert getattr(compiled, attribute) == getattr(fn, attribute)
    assert "magjit.compile" in repr(compiled)


def test_signatures() -> None:
    compiled = ours(times, fullgraph=True)
    assert inspect.signature(compiled) == inspect.signature(times)
    calls: list[tuple[Any, Any]] = [
        ((X,), {}),
        ((X, 3.0), {}),
        ((X, 3.0, 1.0, 2.0), {}),
        ((X,), {"factor": 3.0}),
        ((), {"x": X}),
        ((), {"factor": 2.0, "x": X}),
        ((X,), {"shift": 1.0, "a": 1.0, "b": 2.0}),
        ((X,), {"b": 2.0, "a": 1.0, "shift": 1.0}),
    ]
    for _ in range(2):
        for args, kwargs in calls:
            torch.testing.assert_close(compiled(*args, **kwargs), times(*args, **kwargs))
    assert magjit.stats(compiled).replays >= len(calls) - 1


# --- decorators ---------------------------------------------------------------------------------


@magjit.compile(backend="eager", fullgraph=True)
def decorated(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Doc of the decorated."""
    return x * scale


class Model(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    @magjit.compile(backend="eager", fullgraph=True)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Service:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @magjit.compile(backend="eager", fullgraph=True)
    def run(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return x * self.scale + shift

    @classmethod
    @magjit.compile(backend="eager", fullgraph=True)
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * len(cls.__name__)

    @staticmethod
    @magjit.compile(backend="eager", fullgraph=True)
    def static(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    @property
    @magjit.compile(backend="eager", fullgraph=True)
    def doubled(self) -> torch.Tensor:
        return X * self.scale


class Derived(Service):
    def run(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return super().run(x, shift=shift) + 1


def test_a_decorated_function() -> None:
    for _ in range(3):
        torch.testing.assert_close(decorated(X), X * 2)
    torch.testing.assert_close(decorated(X, scale=3.0), X * 3)
    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Doc of the decorated."
    assert magjit.stats(decorated).replays == 2
    assert inspect.unwrap(decorated) is decorated.__wrapped__


def test_decorated_methods() -> None:
    first, second = Service(2.0), Service(3.0)
    for _ in range(3):
        for service in (first, second):
            torch.testing.assert_close(service.run(X), X * service.scale)
            torch.testing.assert_close(service.run(X, shift=1.0), X * service.scale + 1)
            torch.testing.assert_close(service.of_class(X), X * 7)
            torch.testing.assert_close(service.static(X), X * 5)
            torch.testing.assert_close(service.doubled, X * service.scale)
    torch.testing.assert_close(Service.run(first, X), X * 2)
    torch.testing.assert_close(Derived(2.0).run(X), X * 2 + 1)
    assert magjit.stats(Service.run).replays >= 6
    first.scale = 7.0
    torch.testing.assert_close(first.run(X), X * 7)


def test_a_decorated_forward() -> None:
    models = [Model(2.0), Model(3.0)]
    for _ in range(3):
        for model in models:
            torch.testing.assert_close(model(X), X * model.scale)
    assert magjit.stats(Model.forward).replays >= 4
    whole = ours(models[0], fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(whole(X), X * 2)
    assert magjit.stats(whole).replays == 1


def test_a_decorator_may_be_used_again() -> None:
    decorate = magjit.compile(backend="eager", fullgraph=True)
    first, second = decorate(lambda x: x + 1), decorate(lambda x: x + 2)
    torch.testing.assert_close(first(X), X + 1)
    torch.testing.assert_close(second(X), X + 2)
    assert magjit.stats(first).captures == magjit.stats(second).captures == 1


def test_disabled() -> None:
    assert magjit.compile(times, disable=True) is times
    assert magjit.compile(disable=True)(times) is times
    model = nn.Linear(2, 2)
    assert magjit.compile(model, disable=True) is model


def test_compiled_functions_are_copied_and_pickled() -> None:
    compiled = ours(times)
    compiled(X)
    for other in (
        copy.deepcopy(compiled),
        copy.copy(compiled),
        pickle.loads(pickle.dumps(compiled)),
    ):
        torch.testing.assert_close(other(X), times(X))
        assert magjit.stats(other).captures == 1
    assert ours(compiled)(X).shape == X.shape
    adder = ours(Adder(1.0))
    other = copy.deepcopy(adder)
    other.value = 2.0
    assert adder.value == 1.0
    torch.testing.assert_close(other(X), X + 2)
    torch.testing.assert_close(adder(X), X + 1)


def test_attributes_of_callable_objects_are_shared() -> None:
    adder = Adder(1.0)
    compiled = ours(adder, fullgraph=True)
    torch.testing.assert_close(compiled(X), X + 1)
    adder.value = 2.0
    assert compiled.value == 2.0
    torch.testing.assert_close(compiled(X), X + 2)
    compiled.value = 3.0
    assert adder.value == 3.0
    torch.testing.assert_close(compiled(X), X + 3)


# --- generators and coroutines: they run when they are driven, so calling them is no graph ------


def generates(x: torch.Tensor) -> Iterator[torch.Tensor]:
    for i in range(3):
        yield x * i


async def awaits(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return x + 1


async def generates_awaiting(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    for i in range(2):
        await asyncio.sleep(0)
        yield x + i


@pytest.mark.filterwarnings("ignore::magjit.MagJITWarning")
def test_generator_functions() -> None:
    compiled = ours(generates)
    for step in range(4):
        x = X + step
        made = compiled(x)
        assert inspect.isgenerator(made)
        torch.testing.assert_close(list(made), list(generates(x)))
    one, other = compiled(X), compiled(X + 1)
    torch.testing.assert_close(next(one), X * 0)
    torch.testing.assert_close(next(other), X * 0)
    torch.testing.assert_close(next(one), X)
    torch.testing.assert_close(next(other), X + 1)


@pytest.mark.filterwarnings("ignore::magjit.MagJITWarning")
def test_coroutine_functions() -> None:
    compiled = ours(awaits)

    async def gather() -> list[torch.Tensor]:
        return await asyncio.gather(*(compiled(X + i) for i in range(3)))

    for _ in range(3):
        for i, out in enumerate(asyncio.run(gather())):
            torch.testing.assert_close(out, X + i + 1)

    async def collect() -> list[torch.Tensor]:
        return [out async for out in ours(generates_awaiting)(X)]

    torch.testing.assert_close(asyncio.run(collect()), [X, X + 1])


def test_recursion() -> None:
    @magjit.compile(backend="eager", fullgraph=True)
    def power(x: torch.Tensor, n: int) -> torch.Tensor:
        return x if n == 1 else x * power(x, n - 1)

    for _ in range(3):
        torch.testing.assert_close(power(X, 4), X**4)
    assert magjit.stats(power).captures == 1


def test_callables_as_arguments_and_results() -> None:
    def program(x: torch.Tensor, fn: Callable[..., Any]) -> Callable[..., Any]:
        y = fn(x)
        return lambda z: y + z

    compiled = ours(program, fullgraph=True)
    for fn in (torch.relu, torch.sin, torch.relu, lambda x: x * 2):
        torch.testing.assert_close(compiled(X, fn)(X), fn(X) + X)
