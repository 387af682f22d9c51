"""Floats that a program reads of tensors, and texts of them: part of the one graph and its mock."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import magjit

from ..twin import differ

T = torch.Tensor
log = logging.getLogger("tests.values")


class Meter:
    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.history: list[float] = []
        self.last: Any = None
        self.texts: dict[str, str] = {}

    def update(self, value: float, n: int = 1) -> None:
        self.total += value * n
        self.count += n
        self.history.append(value)

    @property
    def average(self) -> float:
        return self.total / max(self.count, 1)


@dataclass(frozen=True)
class Row:
    program: Callable[[T, Meter], Any]
    records: int = 1
    regions: int = 0


ROWS: dict[str, Row] = {}


def row(records: int = 1, regions: int = 0) -> Callable[[Any], Any]:
    def add(program: Any) -> Any:
        ROWS[program.__name__.replace("_", " ")] = Row(program, records, regions)
        return program

    return add


@row()
def item_into_a_tensor(x: T, m: Meter) -> Any:
    return x / x.abs().max().item()


@row()
def float_of_a_tensor(x: T, m: Meter) -> Any:
    scale = float(x.norm())
    return x * scale - scale


@row()
def unbound_item(x: T, m: Meter) -> Any:
    return torch.Tensor.item(x.sum()) * x


@row()
def item_is_returned(x: T, m: Meter) -> Any:
    n = x.sum().item()
    return n, [n + 1, n * 2.5 - 1], {"n": -n}, x * n


@row()
def item_of_a_changed_tensor(x: T, m: Meter) -> Any:
    y = x.clone()
    before = y.sum().item()
    y.add_(1)
    return before, y.sum().item(), y * before


@row()
def item_of_half_and_double(x: T, m: Meter) -> Any:
    return x.double().mean().item() * x.half(), x.half().max().item() * x.half() * 0.1


@row()
def item_stored(x: T, m: Meter) -> Any:
    m.last = x.max().item()
    return x + 1


@row()
def item_in_a_meter(x: T, m: Meter) -> Any:
    loss = (x * x).mean()
    m.update(loss.item(), 2)
    return loss


@row()
def item_in_an_operator_of_a_function(x: T, m: Meter) -> Any:
    n = x.sum().item()
    return torch.add(x, n), torch.full_like(x, n), torch.clamp(x, max=n), torch.where(x > n, x, n)


@row()
def item_of_infinity(x: T, m: Meter) -> Any:
    return (x / 0.0).max().item(), x * (x - x).mean().div(0.0).item()


@row(records=3, regions=1)
def item_decides(x: T, m: Meter) -> Any:
    if x.sum().item() > 0:
        return x + 1
    return x - 1


@row(records=2, regions=1)
def item_in_unknown_c_code(x: T, m: Meter) -> Any:
    n = math.exp(x.mean().item())
    return x * n, n


@row(records=2, regions=1)
def item_divided(x: T, m: Meter) -> Any:
    n = x.abs().sum().item()
    return x * (1.0 / n)


@row(records=2, regions=1)
def math_of_a_tensor(x: T, m: Meter) -> Any:
    return x * math.floor(x.sum() * 0 + 2.5)


@row()
def printed(x: T, m: Meter) -> Any:
    print("sum", x.sum().item(), 3, True)
    return x * 2


@row()
def printed_in_an_f_string(x: T, m: Meter) -> Any:
    n = x.sum().item()
    print(f"sum {n} {n:.3f} {n!r:>30} {n:{'>' + str(12)}.2f}", end="|\n")
    return x * 2


@row()
def printed_twice_around_a_change(x: T, m: Meter) -> Any:
    y = x.clone()
    print(f"{y.mean().item():.4f}")
    y.mul_(3)
    print("then %.4f and %s" % (y.mean().item(), "more"))  # noqa: UP031
    return y


@row()
def text_returned_and_stored(x: T, m: Meter) -> Any:
    n = x.mean().item()
    m.last = "mean: " + str(n)
    m.texts["mean"] = "{:.2f}/{}".format(n, 3)  # noqa: UP032
    return "%.1e" % n, repr(n), format(n, ".2f"), round(n, 2), x  # noqa: UP031


@row()
def texts_of_one_character(x: T, m: Meter) -> Any:
    digit = f"{x.abs().mean().item():.0f}"
    return digit + "0", ["0", "1", "2", digit], x


@row(records=3, regions=1)
def text_is_taken_apart(x: T, m: Meter) -> Any:
    whole, _, rest = f"{x.sum().item():.3f}".partition(".")
    return whole, rest, x


@row(records=2, regions=1)
def text_is_logged(x: T, m: Meter) -> Any:
    n = x.sum().item()
    log.info("sum %.3f", n)
    return x * n


@row(records=3, regions=1)
def text_lives_across_a_break(x: T, m: Meter) -> Any:
    text = f"{x.sum().item():.3f}"
    magjit.graph_break()
    return text + "!", x


@row()
def average_of_a_meter(x: T, m: Meter) -> Any:
    m.update(x.mean().item())
    print(f"average {m.total:.3f} of {m.count}")
    return x


@row()
def text_of_a_counter(x: T, m: Meter) -> Any:
    m.count += 1
    m.last = f"step {m.count}"
    print("step", m.count, f"({m.count:03d})")
    return x


class Seen(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def outcome(program: Any, x: T, meter: Meter) -> Any:
    shown, seen = io.StringIO(), Seen()
    log.addHandler(seen)
    log.setLevel(logging.INFO)
    try:
        with contextlib.redirect_stdout(shown):
            result = program(x, meter)
    finally:
        log.removeHandler(seen)
    return {"result": result, "meter": vars(meter), "shown": shown.getvalue(), "log": seen.texts}


@pytest.mark.parametrize("name", ROWS)
def test_equal_to_eager_with_few_records(name: str) -> None:
    row = ROWS[name]
    compiled = magjit.compile(row.program, backend="eager")
    ours, theirs = Meter(), Meter()
    for call in range(12):
        torch.manual_seed(call)
        x = torch.randn(4)
        found = differ(outcome(row.program, x, theirs), outcome(compiled, x, ours))
        assert found is None, f"call {call}: {found}"
    stats = magjit.stats(compiled)
    assert (stats.records, stats.regions, stats.eager_calls) == (row.records, row.regions, 0)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.regions])
def test_one_graph(name: str) -> None:
    compiled = magjit.compile(ROWS[name].program, backend="eager", fullgraph=True)
    for _ in range(3):
        with contextlib.redirect_stdout(io.StringIO()):
            compiled(torch.randn(4), Meter())
    assert magjit.stats(compiled).captures == 1


def test_fullgraph_says_which_line_needs_the_value() -> None:
    compiled = magjit.compile(ROWS["item decides"].program, backend="eager", fullgraph=True)
    with pytest.raises(magjit.errors.GraphBreakError, match="reads the data of a tensor") as raised:
        compiled(torch.randn(4), Meter())
    assert "item_decides" in str(raised.value)


def test_another_backend_cuts_at_the_item() -> None:
    program = ROWS["item into a tensor"].program
    compiled = magjit.compile(program, backend="aot_eager")
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x, Meter()), program(x, Meter()))
    assert magjit.stats(compiled).operations >= 1


def test_gradients_through_a_scaled_loss() -> None:
    def program(w: T, x: T) -> tuple[T, float]:
        y = (w * x).sin()
        scale = y.abs().max().item()
        loss = (y / scale).sum()
        return loss, loss.item()

    compiled = magjit.compile(program, backend="eager", fullgraph=True)
    for seed in range(4):
        torch.manual_seed(seed)
        w, x = torch.randn(4, requires_grad=True), torch.randn(4)
        expected, value = program(w, x)
        (wanted,) = torch.autograd.grad(expected, w)
        loss, read = compiled(w, x)
        (grad,) = torch.autograd.grad(loss, w)
        assert torch.equal(grad, wanted) and read == value
    assert magjit.stats(compiled).captures == 1
