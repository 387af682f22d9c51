"""Run a scene eagerly and compiled, call after call, and compare everything after each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .twin import Scene, differ, outcome


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
    text = (lambda: printed.readouterr().out) if printed else (lambda: "")
    for number in range(calls):
        expected = outcome(eager, eager.fn, number, backward=backward, printed=text)
        actual = outcome(jit, compiled, number, backward=backward, printed=text)
        found = differ(expected, actual)
        assert found is None, f"call {number}: {found}"
    return compiled


def compile_now(fn: Callable[..., Any], *, fullgraph: bool) -> Any:
    import magjit

    return magjit.compile(fn, backend="eager", fullgraph=fullgraph)
