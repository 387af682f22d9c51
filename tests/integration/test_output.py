"""Printed text and warnings: shown at each call as eager shows them."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit


def deeper(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("of the caller", FutureWarning, stacklevel=2)
    return x * 2


def warns_of_itself(x: torch.Tensor) -> torch.Tensor:
    warnings.warn(f"{x.dim()} dimensions", stacklevel=1)
    return x + 1


def warns_of_a_caller(x: torch.Tensor) -> torch.Tensor:
    y = deeper(x)
    warnings.warn("old", DeprecationWarning)  # noqa: B028
    return y + 1


def ignores(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return deeper(x)


@pytest.mark.parametrize("action", ["always", "default", "ignore", "once", "error"])
@pytest.mark.parametrize(
    "program", [warns_of_itself, warns_of_a_caller, ignores], ids=lambda p: p.__name__
)
def test_warnings(program: Callable[..., Any], action: Any) -> None:
    told = []
    x = torch.randn(3)
    for call in (program, magjit.compile(program, backend="eager", fullgraph=True)):
        globals().pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            for _ in range(3):
                try:
                    call(x)
                except Warning as warning:
                    caught.append(repr(warning))  # type: ignore[arg-type]
        told.append(
            [
                w if isinstance(w, str) else (str(w.message), w.category, w.filename, w.lineno)
                for w in caught
            ]
        )
    assert told[0] == told[1]
    assert bool(told[0]) == (action != "ignore" and program is not ignores)


def test_a_warning_of_the_caller_of_the_compiled_function() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("whose line?", stacklevel=2)
        return x + 1

    compiled = magjit.compile(program, backend="eager")
    for _ in range(2):
        with pytest.warns(UserWarning, match="whose line") as caught:
            compiled(torch.ones(2))
        assert [str(w.message) for w in caught] == ["whose line?"]
    assert magjit.stats(compiled).records == 2  # the warning is made between two regions


def prints(x: torch.Tensor) -> torch.Tensor:
    print("one", 2, 3.5, [x.shape, {"k": (None, True)}], end="!\n", flush=True)
    print("wrong", file=sys.stderr)
    return x + 1


def test_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    compiled = magjit.compile(prints, backend="eager", fullgraph=True)
    for call in (prints, compiled, compiled):
        call(torch.ones(2))
        shown.append(capsys.readouterr())
    assert shown[0] == shown[1] == shown[2]
    assert shown[0].out and shown[0].err == "wrong\n"


class Named:
    def __init__(self) -> None:
        self.asked = 0

    def __str__(self) -> str:
        self.asked += 1
        return f"asked {self.asked} times"


@pytest.mark.parametrize("value", [Named, lambda: torch.ones(2), object])
def test_what_only_running_code_can_print(
    value: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    values = [value(), value()]

    def program(x: torch.Tensor, value: Any) -> torch.Tensor:
        print("got", value)
        return x + 1

    compiled = magjit.compile(program, backend="eager")
    for _ in range(3):
        shown = []
        for call, printed in ((program, values[0]), (compiled, values[1])):
            call(torch.ones(2), printed)
            shown.append(capsys.readouterr().out.partition(" at 0x")[0])
        assert shown[0] == shown[1]


def redirects(x: torch.Tensor) -> torch.Tensor:
    with contextlib.redirect_stdout(io.StringIO()):
        print("hidden")
    return x + 1


def catches(x: torch.Tensor) -> torch.Tensor:
    try:
        warnings.warn("an error, perhaps", stacklevel=1)
    except UserWarning:
        return x * 3
    return x * 2


def test_output_that_goes_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = magjit.compile(redirects, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2))
    assert capsys.readouterr().out == ""


def test_warnings_that_become_errors() -> None:
    compiled = magjit.compile(catches, backend="eager")
    x = torch.ones(2)
    for action in ("ignore", "error", "error", "always", "ignore", "error"):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter(action)  # type: ignore[arg-type]
            torch.testing.assert_close(compiled(x), catches(x))


def test_the_order_of_a_set(capsys: pytest.CaptureFixture[str]) -> None:
    def program(x: torch.Tensor, value: set[int]) -> torch.Tensor:
        print(value)
        return x + len(f"{value}")

    compiled = magjit.compile(program, backend="eager")
    for value in ({8, 0}, {0, 8}, {8, 0}):
        shown = []
        for call in (program, compiled):
            call(torch.ones(2), value)
            shown.append(capsys.readouterr().out)
        assert shown[0] == shown[1]
