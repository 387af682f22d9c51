"""More kinds of calls than records: eager from then on, with one warning that names the guards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import magjit
from magjit.plugin import StreamingBackend
from magjit.plugin.registry import EagerBackend


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.step = 0
        self.options = {"scale": 1.0}

    def forward(self, x: torch.Tensor, flag: bool = False) -> torch.Tensor:
        return self.linear(x) * self.options["scale"] + self.step


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if w.category is magjit.MagJITWarning]


def test_the_limit() -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager", fullgraph=True, dynamic=False)
    x = torch.randn(2, 4)
    limit = magjit.config.current().record_limit
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(limit + 4):
            model.step = step
            torch.testing.assert_close(compiled(x), model(x))
    (text,) = texts(caught)
    assert f"{limit} records" in text and "Net" in text
    assert "step" in text and "record_limit" in text
    assert "scale" not in text and "weight" not in text
    assert [w.filename for w in caught if w.category is magjit.MagJITWarning] == [__file__]
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.records, stats.eager_calls) == (limit, limit, 4)
    model.step = 3
    torch.testing.assert_close(compiled(x), model(x))
    assert magjit.stats(compiled).replays == stats.replays + 1


KINDS = {
    "shape": (lambda m, i: torch.ones(1 + i, 4), "args[0]"),
    "option": (
        lambda m, i: m.options.update(scale=float(i)) or torch.ones(1, 4),
        "scale",
    ),
    "attribute": (lambda m, i: setattr(m, "step", i) or torch.ones(1, 4), "step"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_failing_guard_is_named(kind: str) -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager", dynamic=False)
    vary, name = KINDS[kind]
    with magjit.config.override(record_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(4):
            x = vary(model, i)
            torch.testing.assert_close(compiled(x), model(x))
    (text,) = texts(caught)
    failing = [line for line in text.splitlines() if line.startswith("  - ")]
    assert failing and all(name in line for line in failing), text


def test_the_limit_is_each_objects_own() -> None:
    model = Net()
    first, second = (magjit.compile(model, backend="eager") for _ in range(2))
    with magjit.config.override(record_limit=1), pytest.warns(magjit.MagJITWarning):
        first(torch.ones(1, 4))
        first(torch.ones(2, 4))
    assert magjit.stats(second).captures == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second(torch.ones(1, 4))
    assert magjit.stats(second).captures == 1


def test_a_reset_gives_new_records() -> None:
    model = Net()
    compiled = magjit.compile(model, backend="eager")
    with magjit.config.override(record_limit=1), pytest.warns(magjit.MagJITWarning):
        for rows in (1, 2, 3):
            compiled(torch.ones(rows, 4))
    magjit.reset(compiled)
    compiled(torch.ones(3, 4))
    compiled(torch.ones(3, 4))
    assert magjit.stats(compiled).records == 1
    assert magjit.stats(compiled).replays == 1


class Streams(EagerBackend):
    """Streams calls of an even number of rows; each context is written down."""

    name = "streams"

    def __init__(self) -> None:
        self.programs = 0
        self.log: list[Any] = []

    def stream(self) -> Streams:
        self.programs += 1
        return self

    def context(self, values: Sequence[Any]) -> AbstractContextManager[None] | None:
        return self._logged(values) if len(values[0]) % 2 == 0 else None

    @contextmanager
    def _logged(self, values: Sequence[Any]) -> Iterator[None]:
        self.log.append([tuple(one.shape) for one in values])
        try:
            yield
        finally:
            self.log.append("end")


def test_a_backend_that_streams() -> None:
    backend = Streams()
    assert isinstance(backend, StreamingBackend)
    assert not isinstance(EagerBackend(), StreamingBackend)
    seen = []

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(backend.log))
        if len(x) == 10:
            raise ValueError("ten")
        return x + y

    compiled = magjit.compile(program, backend=backend, dynamic=False)
    with magjit.config.override(record_limit=2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in range(1, 7):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x, y=x), x + x)
        with pytest.raises(ValueError, match="ten"):
            compiled(torch.ones(10, 4), torch.ones(10, 4))
    (text,) = [one for one in texts(caught) if "limit" in one]
    assert "calls that fit none are streamed by 'streams'" in text
    inside = [[(4, 4), (4, 4)], "end", [(6, 4), (6, 4)], "end", [(10, 4), (10, 4)], "end"]
    assert backend.log == inside and seen == [0, 0, 0, 1, 2, 3, 5]
    stats = magjit.stats(compiled)
    assert (backend.programs, stats.eager_calls, stats.streamed_calls) == (1, 5, 3)
    assert "streamed_calls=3" in repr(stats) and "streamed" not in repr(magjit.Stats())
    magjit.reset(compiled)
    compiled(torch.ones(8, 4), torch.ones(8, 4))
    assert backend.log == inside and magjit.stats(compiled).records == 1


def test_regions_are_streamed_on_their_own() -> None:
    backend = Streams()

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.double().float()
        magjit.graph_break()
        return y * 2 + 1

    compiled = magjit.compile(program, backend=backend, dynamic=False)
    with magjit.config.override(record_limit=2), warnings.catch_warnings():
        warnings.simplefilter("ignore", magjit.MagJITWarning)
        for rows in (2, 3, 4, 6, 8):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), program(x))
    assert backend.log.count("end") == magjit.stats(compiled).streamed_calls == 3
