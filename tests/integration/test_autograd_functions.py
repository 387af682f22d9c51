"""Autograd functions in ways that their users find: a replay's gradients are those of eager."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import magjit


class Tenfold(torch.autograd.Function):
    """A backward that is not the derivative, so that a lost one shows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 10


def _takes_keywords() -> bool:
    """Older releases (2.11) take arguments by position alone."""
    try:
        Tenfold.apply(x=torch.ones(1))
    except TypeError:
        return False
    return True


WEIGHT = torch.ones(4, requires_grad=True)


class OfAWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * WEIGHT

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * len(ctx.needs_input_grad) + (5 if ctx.needs_input_grad[-1] else 0)


class WithDefaults(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return w * x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w * len(ctx.needs_input_grad), grad * x * 100, None


SETTINGS = [2.0]


class Sharing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.settings = SETTINGS
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        SETTINGS[0] += 1
        return grad * ctx.settings[0]


Pair = collections.namedtuple("Pair", "a b")


class Kinds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.pair = Pair(x * 2, x * 3)
        ctx.ordered = collections.OrderedDict(a=x)
        return Pair(x * 4, x * 5)

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.ordered.move_to_end("a")
        return a * ctx.pair.a + b * ctx.pair.b


class WithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, box: list[Any]) -> torch.Tensor:
        with torch.enable_grad():
            box.append(WEIGHT * 2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 10, None


def with_grad(x: torch.Tensor) -> torch.Tensor:
    box: list[Any] = []
    return WithGrad.apply(x, box) + box[0]


class ByVjp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * WEIGHT

    @staticmethod
    def vjp(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 10


class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.more = 1
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 7 + ctx.more


def told_later(x: torch.Tensor) -> torch.Tensor:
    y = Told.apply(x)
    y.grad_fn.more = 100
    return y


class Noted(torch.autograd.Function):
    subclasses: list[str] = []

    def __init_subclass__(cls) -> None:
        Noted.subclasses.append(cls.__name__)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 7


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Counted.calls += 1
        return scaled(grad)


def scaled(grad: torch.Tensor) -> torch.Tensor:
    return grad * SETTINGS[0]


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise ValueError

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad


def raising(x: torch.Tensor) -> torch.Tensor:
    try:
        return Raising.apply(x)
    except ValueError:
        return Tenfold.apply(x * 2)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda x: Tenfold.apply(x) + Tenfold.apply(x * 2),
    "map": lambda x: sum(map(Tenfold.apply, [x, x * 3])),
    "partial": functools.partial(Tenfold.apply),
    "apply itself": Tenfold.apply,
    "star": lambda x: Tenfold.apply(*[x], **{}),
    "checkpoint": lambda x: checkpoint(lambda t: Tenfold.apply(t).sin(), x, use_reentrant=False),
    "re-entrant": lambda x: checkpoint(lambda t: Tenfold.apply(t).sin(), x, use_reentrant=True),
    "weight from outside": lambda x: OfAWeight.apply(x) * WEIGHT,
    "no gradient needed": lambda x: OfAWeight.apply(x.detach()) * x,
    "no grad around": lambda x: torch.no_grad()(Tenfold.apply)(x) * x,
    "defaults": lambda x: WithDefaults.apply(x, x * 3),
    "shared list": Sharing.apply,
    "kinds of containers": lambda x: Kinds.apply(x)[0] + Kinds.apply(x)[1] * 2,
    "graph of its own": with_grad,
    "vjp": ByVjp.apply,
    "context changed later": told_later,
    "noted subclasses": lambda x: Noted.apply(x),
    "state in the backward": lambda x: Counted.apply(x),
    "raises": raising,
}
ONE_GRAPH = ["plain", "weight from outside", "defaults", "star"]
if _takes_keywords():
    PROGRAMS["keywords"] = lambda x: WithDefaults.apply(w=x * 2, x=x)
    ONE_GRAPH.append("keywords")


def state() -> tuple[Any, ...]:
    return list(SETTINGS), list(Noted.subclasses), Counted.calls


def reset() -> None:
    SETTINGS[0] = 2.0
    Counted.calls = 0
    Noted.subclasses.clear()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name: str, backend: str) -> None:
    program = PROGRAMS[name]
    told = []
    for call in (program, magjit.compile(program, backend=backend)):
        reset()
        steps = []
        for step in range(3):
            WEIGHT.grad = None
            x = torch.linspace(-1, 1, 4).add(step).requires_grad_()
            y = call(x)
            y = y if isinstance(y, torch.Tensor) else y[0]
            if y.requires_grad:
                y.sum().backward()
            steps.append((y.detach(), y.requires_grad, x.grad, WEIGHT.grad, *state()))
        told.append(steps)
    for expected, actual in zip(*told, strict=True):
        assert actual[4:] == expected[4:]
        for value, other in zip(actual[:4], expected[:4], strict=True):
            # Under AOTAutograd an unused leaf may get zeros in place of None.
            if backend == "eager" or (value is not None and other is not None):
                assert type(value) is type(other)
                torch.testing.assert_close(value, other)


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_is_one_graph(name: str) -> None:
    compiled = magjit.compile(PROGRAMS[name], backend="eager", fullgraph=True)
    for _ in range(3):
        compiled(torch.ones(4, requires_grad=True))
    assert magjit.stats(compiled).captures == 1
