"""Shape of the call, and aliasing of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..twin import Call, Scene, call
from .table import RECAPTURED, RIGHT, new_table

ROWS = new_table()


def total(*args: Any, **kwargs: Any) -> Any:
    out = 0.0
    for position, item in enumerate((*args, *kwargs.values())):
        out = out + (position + 1) * item
    return out


def names(x: torch.Tensor, **kwargs: Any) -> Any:
    return x * 2, list(kwargs)


def optional(x: torch.Tensor, y: Any = 2.0, *, z: Any = 3.0) -> Any:
    return x * y + z


def nested(x: Any) -> Any:
    if type(x) is tuple:
        return x[0] * 2
    return x[0] * 3


def tree(x: Any) -> Any:
    return x["a"][0] + x["a"][1] * 2


def consumed(x: torch.Tensor, items: Any) -> torch.Tensor:
    for item in items:
        x = x * item
    return x


def one() -> torch.Tensor:
    return torch.randn(4)


# name -> (program, call before, call after, what it leads to)
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Call], Callable[[], Call], str]] = {
    "count of varargs": (
        total,
        lambda: call(one(), one()),
        lambda: call(one(), one(), one()),
        RECAPTURED,
    ),
    "keyword present": (optional, lambda: call(one()), lambda: call(one(), z=5.0), RECAPTURED),
    "keyword names": (names, lambda: call(one(), a=1), lambda: call(one(), b=1), RECAPTURED),
    "keyword order": (
        names,
        lambda: call(one(), a=1, b=2),
        lambda: call(one(), b=2, a=1),
        RECAPTURED,
    ),
    "keyword value": (optional, lambda: call(one(), y=2.0), lambda: call(one(), y=4.0), RECAPTURED),
    "tensor by position or by keyword": (
        optional,
        lambda: call(one(), 2.0),
        lambda: call(x=one(), y=one()),
        RECAPTURED,
    ),
    "tuple or list": (nested, lambda: call((one(),)), lambda: call([one()]), RECAPTURED),
    "nested tensors shape": (
        tree,
        lambda: call({"a": [one(), one()]}),
        lambda: call({"a": [one(), torch.randn(2, 4)]}),
        RECAPTURED,
    ),
    "iterator argument": (
        consumed,
        lambda: call(one(), iter([1, 2])),
        lambda: call(one(), iter([1, 5])),
        RIGHT,
    ),
    "generator argument": (
        consumed,
        lambda: call(one(), (i for i in (1, 2))),
        lambda: call(one(), (i for i in (1, 5))),
        RIGHT,
    ),
    "range argument": (
        consumed,
        lambda: call(one(), range(1, 3)),
        lambda: call(one(), range(1, 4)),
        RECAPTURED,
    ),
    "slice argument": (
        lambda x, s: x[s].sum(),
        lambda: call(one(), slice(0, 2)),
        lambda: call(one(), slice(0, 3)),
        RECAPTURED,
    ),
    "index argument": (
        lambda x, i: x[i] * 2,
        lambda: call(one(), 0),
        lambda: call(one(), 1),
        RECAPTURED,
    ),
    "dtype argument": (
        lambda x, d: x.to(d),
        lambda: call(one(), torch.float32),
        lambda: call(one(), torch.float64),
        RECAPTURED,
    ),
    "function argument": (
        lambda x, f: f(x),
        lambda: call(one(), torch.sin),
        lambda: call(one(), torch.cos),
        RECAPTURED,
    ),
    "wrong arguments then right": (optional, lambda: call(one()), lambda: call(), RIGHT),
}


def call_scene(program: Any, before: Any, after: Any) -> Scene:
    return Scene(
        functools.wraps(program)(lambda *a, **k: program(*a, **k)),
        args=before,
        change=lambda s: setattr(s, "args", after),
    )


for row_name, (*entry, leads_to) in CALLS.items():
    ROWS.add(f"call {row_name}", functools.partial(call_scene, *entry), after=leads_to)


# --- aliasing -------------------------------------------------------------------------------


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return y * 2


def append_and_count(a: list[Any], b: list[Any]) -> Any:
    a.append(torch.ones(4))
    return sum(b) + len(b)


def apart() -> Call:
    return call(one(), one())


def together() -> Call:
    x = one()
    return call(x, x)


def viewed() -> Call:
    z = torch.randn(2, 2)
    return call(z, z.view(-1))


def lists(shared: bool) -> Callable[[], Call]:
    def make() -> Call:
        a, b = [one()], [one()]
        return call(a, a if shared else b)

    return make


def halves(overlap: int) -> Callable[[], Call]:
    def make() -> Call:
        base = torch.randn(8)
        return call(base[: 4 + overlap], base[4:])

    return make


# name -> (program, call before, call after, what it leads to)
ALIASES: dict[str, tuple[Callable[..., Any], Callable[[], Call], Callable[[], Call], str]] = {
    "same tensor twice with mutation": (add_in_place, apart, together, RECAPTURED),
    "same tensor twice no longer": (add_in_place, together, apart, RECAPTURED),
    "same tensor compared": (lambda x, y: x * (2 if x is y else 3), apart, together, RECAPTURED),
    "same list twice": (append_and_count, lists(False), lists(True), RECAPTURED),
    "overlapping storage with mutation": (
        lambda x, y: (x.add_(1), y * 2)[1],
        lambda: call(torch.randn(2, 2), torch.randn(4)),
        viewed,
        RECAPTURED,
    ),
    "overlapping parts of one base": (add_in_place, halves(0), halves(2), RECAPTURED),
}

for row_name, (*entry, leads_to) in ALIASES.items():
    ROWS.add(f"alias {row_name}", functools.partial(call_scene, *entry), after=leads_to)


@ROWS.row()
def alias_argument_and_parameter() -> Scene:
    weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def program(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return weight * 2 + (1 if x is weight else 0)

    return Scene(
        program,
        args=lambda: call(torch.nn.Parameter(one(), requires_grad=False)),
        change=lambda s: setattr(s, "args", lambda: call(weight)),
    )


@ROWS.row()
def alias_argument_and_global_list() -> Scene:
    items = [1.0]

    def program(x: torch.Tensor, given: list[float]) -> torch.Tensor:
        given.append(2.0)
        out = x * sum(items)
        given.pop()
        return out

    return Scene(
        program,
        args=lambda: call(one(), [1.0]),
        change=lambda s: setattr(s, "args", lambda: call(one(), items)),
    )


@ROWS.row()
def alias_nested_in_arguments() -> Scene:
    def program(a: dict[str, Any], b: dict[str, Any]) -> torch.Tensor:
        a["x"].mul_(2)
        return b["x"] + 1

    def shared() -> Call:
        x = one()
        return call({"x": x}, {"x": x})

    return Scene(
        program,
        args=lambda: call({"x": one()}, {"x": one()}),
        change=lambda s: setattr(s, "args", shared),
    )
