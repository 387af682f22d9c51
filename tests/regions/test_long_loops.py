"""A loop over a size of an input that is too long to be unrolled is a region from the start."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import magjit
from magjit import config
from magjit.bytecode import decode
from magjit.refgraph.long_loops import is_over_size

LIMIT = 20


@pytest.fixture(autouse=True)
def _short_limit() -> Iterator[None]:
    with config.override(unroll_limit=LIMIT):
        yield


# -- which loops ----------------------------------------------------------------------------------


def shape(x: Tensor) -> None:
    for _ in range(x.shape[0]):
        pass


def size(x: Tensor) -> None:
    for _ in range(1, x.size(1)):
        pass


def length(x: Tensor) -> None:
    for _ in range(len(x)):
        pass


def attribute(self: Any) -> None:
    for _ in range(self.x.y.shape[-1]):
        pass


def local(x: Tensor) -> None:
    steps = x.size(0)
    for _ in range(steps):
        pass


def unpacked(x: Tensor) -> None:
    batch, steps, _ = x.shape
    for _ in range(0, steps, 2):
        pass


def unpacked_call(x: Tensor) -> None:
    steps, batch = x.size()
    for _ in range(steps):
        print(batch)


def all_sizes(x: Tensor) -> None:
    for _ in range(x.size()[0]):
        pass


def constant(x: Tensor) -> None:
    for _ in range(12):
        pass


def argument(x: Tensor, steps: int) -> None:
    for _ in range(steps):
        pass


def depth(self: Any, x: Tensor) -> None:
    for _ in range(self.depth):
        pass


def items(x: Tensor) -> None:
    for _ in x:
        pass


def assigned_twice(x: Tensor, steps: int) -> None:
    if steps > 3:
        steps = x.size(0)
    else:
        steps = 3
    for _ in range(steps):
        pass


def other_call(x: Any) -> None:
    for _ in range(x.count(0)):
        pass


YES = [shape, size, length, attribute, local, unpacked, unpacked_call, all_sizes]
NO = [constant, argument, depth, items, assigned_twice, other_call]


@pytest.mark.parametrize("function", YES + NO, ids=lambda function: function.__name__)
def test_which_loops_are_over_a_size(function: types.FunctionType) -> None:
    info = decode(function.__code__)
    (offset,) = [2 * raw.unit for raw in info.raw if raw.opname == "FOR_ITER"]
    assert is_over_size(info, offset) == (function in YES)


# -- what becomes of them -------------------------------------------------------------------------


class Cell(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.given(x) + self.kept(h))


class Recurrent(nn.Module):
    """Several layers whose states begin as one tensor."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        states = [x.new_zeros(x.shape[1], 4)] * len(self.cells)
        y = states[0]
        for step in range(x.shape[0]):
            y = x[step]
            for k, cell in enumerate(self.cells):
                y = states[k] = cell(y, states[k])
        return y


class Gathering(Recurrent):
    """Every step leaves something; every third is another."""

    def forward(self, x: Tensor) -> Tensor:
        found, y = [], x[0]
        for step in range(x.shape[0]):
            for cell in self.cells:
                y = cell(x[step], y)
            if step % 3 == 0:
                y = y * 2
            found.append(y)
        return torch.stack(found)


class Unlike(Recurrent):
    """A layer a step."""

    def __init__(self) -> None:
        super().__init__(12)

    def forward(self, x: Tensor) -> Tensor:
        y = x[0]
        for step in range(x.shape[0]):
            y = self.cells[step](x[step], y) * 2 - 1
        return y


class Alternating(Recurrent):
    """Like at first; in the end there are too many ways."""

    def forward(self, x: Tensor) -> Tensor:
        y, factors = x[0], [float(k) for k in range(20)]
        for step in range(x.shape[0]):
            y = self.cells[0](x[step], y) * 2 - 1
            if step > 2:
                y = self.cells[step % 3](y, y) + factors[step]
                if step % 4 == 1:
                    y = y.relu()
                if step % 5 == 3:
                    y = y.cos()
                if step > 7:
                    y = y.sin() if step > 8 else y.exp()
        return y


class Writing(Recurrent):
    """Into a tensor that the call made, and into one that it was given."""

    def forward(self, x: Tensor) -> Tensor:
        out, y = torch.zeros_like(x), x[0]
        for step in range(len(x)):
            y = self.cells[0](x[step], y) * 2 + 1
            out[step] = y
            x[step] -= 1
        return out


MODELS = [Recurrent, Gathering, Unlike, Alternating, Writing]


def inputs(steps: int, call: int) -> Tensor:
    return torch.randn(steps, 2, 4, generator=torch.Generator().manual_seed(call))


@pytest.mark.parametrize("lengths", [(12, 12, 12, 9, 12, 7), (8, 12, 5, 12, 3, 1, 12)], ids=str)
@pytest.mark.parametrize("make", MODELS, ids=lambda model: model.__name__)
def test_calls_do_what_eager_does(make: Any, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make()
    compiled = magjit.compile(model, backend="eager")
    with torch.no_grad(), pytest.warns(Warning) if make is Unlike else nullcontext():
        for call, steps in enumerate(lengths):
            given, same = inputs(steps, call), inputs(steps, call)
            torch.testing.assert_close(compiled(given), model(same))
            assert torch.equal(given, same)


def test_the_other_turns_are_replayed_in_the_first_call() -> None:
    compiled = magjit.compile(Recurrent(), backend="eager")
    with torch.no_grad():
        compiled(inputs(12, 0))
        first = magjit.stats(compiled)
        compiled(inputs(9, 1))
        second = magjit.stats(compiled)
        for steps in (5, 12, 30, 9):
            compiled(inputs(steps, steps))
    assert (first.captures, first.region_replays) == (3, 10)  # before, a turn, behind
    assert second.captures == 4  # with any length; the first turn is one like the others
    assert magjit.stats(compiled).captures == 4


@pytest.mark.parametrize("options", [{"dynamic": False}, {"fullgraph": True}], ids=str)
def test_it_is_unrolled_where_that_is_asked_for(options: dict[str, Any]) -> None:
    compiled = magjit.compile(Recurrent(), backend="eager", **options)
    with torch.no_grad():
        compiled(inputs(12, 0))
    assert magjit.stats(compiled).regions == 0
    assert magjit.stats(compiled).captures == 1


def test_short_loops_are_unrolled() -> None:
    with config.override(unroll_limit=1000):
        compiled = magjit.compile(Recurrent(), backend="eager")
        with torch.no_grad():
            compiled(inputs(12, 0))
    assert magjit.stats(compiled).regions == 0


def test_unlike_turns_are_unrolled_from_the_second_call_on() -> None:
    compiled = magjit.compile(Unlike(), backend="eager")
    with torch.no_grad():
        for call in range(3):
            compiled(inputs(12, call))
    stats = magjit.stats(compiled)
    assert (stats.regions, stats.records, stats.replays) == (0, 1, 1)


def test_the_report_says_why_it_is_cut() -> None:
    with torch.no_grad():
        report = magjit.explain(Recurrent())(inputs(12, 0))
    assert any("turns of a loop over a size of an input" in cut.reason for cut in report.cuts)


def test_training() -> None:
    torch.manual_seed(0)
    one = Recurrent()
    other = copy.deepcopy(one)
    compiled = magjit.compile(other, backend="eager")
    for call, steps in enumerate((12, 12, 9, 5, 12)):
        for model, run in ((one, one), (other, compiled)):
            model.zero_grad()
            run(inputs(steps, call)).square().sum().backward()
        for wanted, found in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad)


# -- one tensor for two ---------------------------------------------------------------------------


def adds(a: Tensor, b: Tensor) -> Any:
    return a.sin() + b, a, b


def compares(a: Tensor, b: Tensor) -> Any:
    return a + b if a is b else a - b


def counts(a: Tensor, b: Tensor) -> Any:
    return a + len({a, b})


def looks_up(a: Tensor, b: Tensor) -> Any:
    known = {a: 1}
    known[b] = 2
    return a + known[a]


def copies(a: Tensor, b: Tensor) -> Any:
    first, second = copy.deepcopy([a, b])
    first.add_(1)
    return second * 2


def writes(a: Tensor, b: Tensor) -> Any:
    a.add_(1)
    return b * 2


def marks(a: Any, b: Any) -> Any:
    a.mark, b.mark = 1, 2
    return a + a.mark


def derives(a: Tensor, b: Tensor) -> Any:
    with torch.enable_grad():
        a.requires_grad_(), b.requires_grad_()
        return torch.autograd.grad((a * a * b).sum(), [a])[0]


def attends(a: Tensor, b: Tensor) -> Any:
    attention = nn.functional.scaled_dot_product_attention
    return attention(a[None], b[None], b[None])


TWO = [adds, compares, counts, looks_up, copies, writes, marks, derives, attends]


@pytest.mark.parametrize("function", TWO, ids=lambda function: function.__name__)
def test_one_tensor_for_two(function: Callable[..., Any]) -> None:
    compiled = magjit.compile(function, backend="eager")
    with torch.no_grad():
        for same in (False, False, True, True, False):
            found = []
            for run in (compiled, function):
                a = torch.arange(6.0).reshape(2, 3)
                b = a if same else a.clone()
                result = run(a, b)
                found.append((result, a, b))
                if isinstance(result, tuple):
                    assert result[1] is a
                    assert result[2] is b
            torch.testing.assert_close(found[0], found[1])


def test_no_capture_where_nothing_can_tell() -> None:
    compiled = magjit.compile(adds, backend="eager")
    with torch.no_grad():
        a, b = torch.ones(3), torch.ones(3)
        compiled(a, b), compiled(a, a)
    assert magjit.stats(compiled).captures == 1
