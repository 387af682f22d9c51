"""Run a scene eagerly and compiled, call after call, and compare everything after each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .twin import Call, Scene, call, differ, one_tensor, outcome

SHAPES = ((3, 4), (5, 4), (3, 4), (2, 4), (3, 4))
DTYPES = (torch.float32, torch.float32, torch.float64, torch.float32, torch.float32)


def check(
    make: Callable[[], Scene],
    calls: int,
    *,
    split: bool = False,
    backward: bool = False,
    printed: pytest.CaptureFixture[str] | None = None,
    compiler: Callable[..., Any] | None = None,
) -> Any:
    """Return the compiled object, for its statistics; the call number seeds the inputs."""
    eager, jit = make(), make()
    compiled = (compiler or compile_now)(jit.fn, fullgraph=not split)
    return keep_step(eager, jit, compiled, calls, backward, printed)


def keep_step(
    eager: Scene,
    jit: Scene,
    compiled: Any,
    calls: int,
    backward: bool = False,
    printed: pytest.CaptureFixture[str] | None = None,
) -> Any:
    text = (lambda: printed.readouterr().out) if printed else (lambda: "")
    for number in range(calls):
        expected = outcome(eager, eager.fn, number, backward=backward, printed=text)
        actual = outcome(jit, compiled, number, backward=backward, printed=text)
        found = differ(expected, actual)
        assert found is None, f"call {number}: {found}"
    return compiled


def over_shapes(rows: list[Any]) -> list[Any]:
    """The rows whose programs take one float tensor of any shape."""
    return [row for row in rows if row.make().args is one_tensor]


def every_other(rows: list[Any]) -> list[Any]:
    """The rows by their names; every second one, which its neighbours are much like, is slow."""
    return [
        pytest.param(row, id=row.name, marks=[] if number % 2 == 0 else pytest.mark.slow)
        for number, row in enumerate(rows)
    ]


def check_shapes(make: Callable[[], Scene], compiler: Callable[..., Any] | None = None) -> None:
    """The same over inputs whose shape and dtype come and go: a stale constant is seen."""
    eager, jit = make(), make()
    for scene in (eager, jit):
        scene.args = other_shapes()
    compiled = (compiler or compile_now)(jit.fn, fullgraph=False)
    keep_step(eager, jit, compiled, len(SHAPES))


def other_shapes() -> Callable[[], Call]:
    kinds = iter(zip(SHAPES, DTYPES, strict=True))

    def make() -> Call:
        shape, dtype = next(kinds)
        return call(torch.randn(shape, dtype=dtype))

    return make


def compile_now(fn: Callable[..., Any], *, fullgraph: bool) -> Any:
    import magjit

    return magjit.compile(fn, backend="eager", fullgraph=fullgraph)
