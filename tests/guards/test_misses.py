"""What is said of a call that fits no record: what was compared, as it was and is, and the line."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import magjit


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Net(torch.nn.Module):
    shift = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.names = ["a"]
        self.table = {"a": 1}
        self.kinds = {1, 2}
        self.flag = True
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: torch.Tensor, mode: str = "plain") -> torch.Tensor:
        y = self.inner(x) + self.offset
        if len(self.names) > 1 or len(list(self.table)) > 4 or 7 in self.kinds:
            y = y + 1
        if self.flag is True and mode == "plain":
            y = y * helper(y) + self.shift
        return y


def helper(y: torch.Tensor) -> float:
    return FACTOR


def twice(y: torch.Tensor) -> float:
    return FACTOR * 2


FACTOR = 2.0
X = torch.ones(3)
Change = Callable[[Net, pytest.MonkeyPatch], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    change: Change
    expected: tuple[str, ...]
    line: str | None = None


ROWS: dict[str, Row] = {
    "attribute": Row(
        lambda m, p: setattr(m, "flag", False), (".flag: True -> False",), "Net.forward"
    ),
    "attribute of a submodule": Row(
        lambda m, p: setattr(m.inner, "gain", 3.0), (".inner.gain: 1.0 -> 3.0",), "Inner.forward"
    ),
    "type": Row(
        lambda m, p: setattr(m.inner, "gain", 1), (".inner.gain: 1.0 -> 1 ",), "Inner.forward"
    ),
    "length": Row(lambda m, p: m.names.append("b"), ("length of", ".names: 1 -> 2"), "Net.forward"),
    "keys": Row(
        lambda m, p: m.table.update(b=2), ("keys of", ".table: ('a',) -> ('a', 'b')"), "Net.forward"
    ),
    "members": Row(lambda m, p: m.kinds.add(3), ("{1, 2} -> {1, 2, 3}",), "Net.forward"),
    "global": Row(
        lambda m, p: p.setitem(globals(), "FACTOR", 5.0), ("['FACTOR']: 2.0 -> 5.0",), "helper"
    ),
    "function": Row(
        lambda m, p: p.setitem(globals(), "helper", twice),
        ("['helper']: helper -> twice",),
        "Net.forward",
    ),
    "class attribute": Row(
        lambda m, p: p.setattr(Net, "shift", 2.0), ("shift as defined -> shift defined anew",)
    ),
    "removed": Row(
        lambda m, p: m.__dict__.pop("flag"), (".flag: there -> missing",), "Net.forward"
    ),
    "shape": Row(lambda m, p: [torch.ones(1, 3)], ("args[0]: shape (3) -> shape (1, 3)",)),
    "dtype": Row(lambda m, p: [X.double()], ("args[0]: dtype float32 -> dtype float64",)),
    "class": Row(
        lambda m, p: [torch.nn.Parameter(X)],
        ("class Tensor", "class Parameter"),
    ),
    "keyword": Row(lambda m, p: {"mode": "plain"}, ("1 positional -> 1 positional and mode",)),
    "buffer": Row(
        lambda m, p: m.register_buffer("offset", torch.zeros(1)),
        (".offset: shape (3) -> shape (1)",),
        "Net.forward",
    ),
    "grad mode": Row(
        lambda m, p: p.setattr(torch, "seen", torch.set_grad_enabled(False), raising=False),
        ("grad_mode 1 -> grad_mode 0",),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_said(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = ROWS[name]
    model = Net()
    compiled = magjit.compile(model, backend="eager", dynamic=False)
    compiled(X)
    compiled(X)
    assert magjit.stats(compiled).replays == 1
    before = torch.is_grad_enabled()
    try:
        given = row.change(model, monkeypatch)
        args = given if isinstance(given, list) else [X]
        kwargs = given if isinstance(given, dict) and "mode" in given else {}
        notes = []
        if "flag" in vars(model):
            notes = magjit.explain(compiled)(*args, **kwargs).notes
        with caplog.at_level(logging.INFO, "magjit"):
            try:
                compiled(*args, **kwargs)
            except AttributeError:
                assert name == "removed"
    finally:
        torch.set_grad_enabled(before)
    (text,) = [one.message for one in caplog.records if "captured again" in one.message]
    for said in [text, *notes]:
        for part in row.expected:
            assert part in said, said
        if row.line:
            assert row.line in said and "test_misses.py:" in said
        else:
            assert "(read at" not in said
