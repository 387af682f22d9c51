"""Programs that write what they read elsewhere, or show several times, do as eager mode does."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import magjit
from magjit.plugin import compiling
from magjit.plugin.functional import changes
from magjit.plugin.overlapping import may_overlap, overlapping_write

BACKENDS = ["aot_eager", "dvm", "triton", pytest.param("inductor", marks=pytest.mark.slow)]


def shifted(x: Tensor) -> Tensor:
    """Of a network of shifts and layers: each row of some channels is the one before it."""
    quarter = x.shape[-1] // 4
    x[:, 1:, :, :quarter] = x[:, :-1, :, :quarter]
    x[:, :, :-1, quarter : 2 * quarter] = x[:, :, 1:, quarter : 2 * quarter]
    return x * 2


def added(x: Tensor) -> Tensor:
    x[:, 1:, ::2].add_(x[:, :-1, ::2])
    return x + 1


def of_made(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:, ::2] = y[:, :-1, ::2]
    return y + x


def of_channels(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    x[..., :half] = x[..., half : 2 * half]
    return x * 2


def of_rows(x: Tensor) -> Tensor:
    x[:, :2] += x[:, 2:4]
    return x * 2


def between(x: Tensor) -> Tensor:
    x[:, ::2].mul_(x[:, 1::2])
    return x * 2


def of_itself(x: Tensor) -> Tensor:
    x[:, 1:] *= x[:, 1:]
    return x * 2


def of_a_copy(x: Tensor) -> Tensor:
    x[:, 1:] = x[:, :-1].clone()
    return x * 2


def by_a_layer(x: Tensor) -> Tensor:
    x[:, 1:] = torch.matmul(x, x.transpose(-1, -2))[:, :-1, :, :1]
    return x * 2


def twice_in_a_list(x: Tensor) -> Tensor:
    y = x * 2
    torch._foreach_add_([y, y], 1)
    return y


def rows_of_itself(x: Tensor) -> Tensor:
    x.index_copy_(1, torch.tensor([1, 2]), x[:, :2])
    return x * 2


def row_of_many(x: Tensor) -> Tensor:
    """The row is infinite before it is written."""
    many = (x[:1] / 0).expand(3, -1, -1, -1)
    many[0] = 1
    return many + x[0]


def part_of_many(x: Tensor) -> Tensor:
    first, _ = torch.broadcast_tensors(x[:1] * 2, torch.empty(3, 1, 1, 1))
    first[1, :2].mul_(3)
    return first + x[0]


def before_many(x: Tensor) -> Tensor:
    """A cache that is written, and read for several heads, again and again."""
    cache, read = x * 2, []
    for row in range(2):
        cache[:, row] = x[:, row] + 1
        read.append(cache[:, :2, None].expand(-1, -1, 3, -1, -1).sum(2))
    return torch.cat(read)


def many_of_one(x: Tensor) -> Tensor:
    x[:, :1] += x[:1, :1, :1].sum((1, 2, 3), keepdim=True).expand(1, 1, *x.shape[2:])
    return x[:1].expand(3, -1, -1, -1) * 2


OVERLAPPING = [shifted, added, of_made, twice_in_a_list, row_of_many, part_of_many]
APART = [
    *(of_channels, of_rows, between, of_itself, of_a_copy, by_a_layer),
    *(before_many, many_of_one),
]


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [*OVERLAPPING, *APART])
@pytest.mark.parametrize("dynamic", [None, True])
def test_results_are_those_of_eager_mode(
    function: Callable[[Tensor], Tensor], backend: str, dynamic: bool | None
) -> None:
    call = magjit.compile(function, backend=backend, dynamic=dynamic)
    for batch, rows in ((2, 4), (3, 4), (2, 4), (3, 6)):
        x = inputs(batch, rows, 4, 4)
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(call(mine), function(theirs))
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("backend", ["aot_eager", "dvm"])
def test_gradients_are_those_of_eager_mode(backend: str) -> None:
    call = magjit.compile(of_made, backend=backend)
    for _ in range(3):
        mine, theirs = (inputs(2, 4, 4, 4).requires_grad_() for _ in range(2))
        call(mine).square().sum().backward()
        of_made(theirs).square().sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What is found of each graph that is compiled; no guard is added meanwhile."""
    found = []

    def noted(gm: GraphModule, given: Sequence[Any], mode: FakeTensorMode) -> str | None:
        assert mode.shape_env is not None
        before = len(mode.shape_env.guards)
        found.append(overlapping_write(gm, given, mode))
        assert len(mode.shape_env.guards) == before
        return found[-1]

    monkeypatch.setattr(compiling, "overlapping_write", noted)
    return found


@pytest.mark.parametrize("function", [*OVERLAPPING, *APART, rows_of_itself])
def test_which_programs_overlap(
    function: Callable[[Tensor], Tensor], said: list[str | None]
) -> None:
    magjit.compile(function, backend="aot_eager")(inputs(2, 4, 4, 4))
    (found,) = said
    assert (found is None) == (function in APART), found


@pytest.mark.parametrize("function", [shifted, *APART])
@pytest.mark.parametrize("dims", [(0,), (0, 1), (0, 1, 2, 3)])
def test_sizes_that_are_symbols(
    function: Callable[[Tensor], Tensor], dims: tuple[int, ...], said: list[str | None]
) -> None:
    """What is apart within dimensions of known sizes is, whatever the other sizes are."""
    x = inputs(2, 6, 5, 8)
    for dim in dims:
        torch._dynamo.mark_dynamic(x, dim)
    magjit.compile(function, backend="aot_eager")(x)
    (found,) = said
    told = {of_channels: len(dims) < 4, of_rows: 1 not in dims, between: 1 not in dims}
    assert (found is None) == (function is not shifted and told.get(function, True)), found


def test_inputs_that_share_memory(said: list[str | None]) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return x.copy_(y)

    base = torch.empty(4, 4, 4)
    pairs = [
        (base[1:, ::2], base[:-1, ::2]),
        (base[2:, ::2], base[:-2, ::2]),
        (base[1:, ::2], base[:-1, 1::2]),
    ]
    for pair in pairs:
        magjit.compile(program, backend="aot_eager")(*pair)
        magjit.reset()
    assert [found is None for found in said] == [False, True, True]


def test_parts_that_stay_one_call(said: list[str | None]) -> None:
    """What is written there may be an input, which shares memory with another one."""

    def copied(x: Tensor, y: Tensor) -> Tensor:
        return x.copy_(y) * 2

    def program(x: Tensor, y: Tensor) -> Any:
        return checkpoint(copied, x, y, use_reentrant=False)

    base = inputs(4, 4, 4)
    magjit.compile(program, backend="aot_eager")(base[1:, ::2], base[:-1, ::2])
    magjit.reset()
    magjit.compile(program, backend="aot_eager")(base[2:, ::2], base[:-2, ::2])
    first, second = said
    assert first is not None and "in other places" in first and second is None


def test_the_log_and_the_report_say_where(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "magjit")
    report = magjit.explain(shifted, backend="dvm")(inputs(2, 4, 4, 4))
    line = shifted.__code__.co_firstlineno + 3
    for text in (caplog.text, str(report)):
        assert "runs as it is: aten::copy_ writes memory that it reads in other places" in text
        assert f"test_overlapping.py:{line}" in text


def test_what_eager_mode_refuses_is_refused() -> None:
    def program(x: Tensor) -> Tensor:
        x[1:] = x[:-1]
        return x

    call = magjit.compile(program, backend="dvm")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            call(inputs(4, 4))


views = st.tuples(
    st.integers(0, 12),
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 7)), min_size=0, max_size=3),
)


@given(views, views)
def test_places_in_common_are_found(one: Any, other: Any) -> None:
    storage = torch.empty(64)

    def view(drawn: Any) -> tuple[Tensor, set[int]]:
        at, dims = drawn
        sizes, steps = [size for size, _ in dims], [step for _, step in dims]
        elements = itertools.product(*(range(size) for size in sizes))
        places = {at + sum(i * s for i, s in zip(one, steps, strict=True)) for one in elements}
        return storage.as_strided(sizes, steps, at), places

    (a, of_a), (b, of_b) = view(one), view(other)
    assert may_overlap(a, b) == bool(of_a & of_b)


def test_other_dtypes_of_a_storage() -> None:
    whole = torch.empty(8)
    assert may_overlap(whole[:2], whole.view(torch.float16)[3:])
    assert not may_overlap(whole[:2], whole.view(torch.float16)[4:])


def test_which_calls_write() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    calls = [
        (True, graph.call_function(operator.iadd, (x, y))),
        (True, graph.call_function(operator.setitem, (x, 0, y))),
        (True, graph.call_method("add_", (x, y))),
        (True, graph.call_function(F.dropout, (x, 0.5, True, True))),
        (True, graph.call_function(F.relu, (x,), {"inplace": True})),
        (True, graph.call_function(torch.ops.aten.add_.Tensor, (x, y))),
        (True, graph.call_function(torch.ops.aten.index_put_, (x, [y], y))),
        (True, graph.call_function(torch.add, (x, y), {"out": x})),
        (False, graph.call_function(F.dropout, (x, 0.5, True))),
        (False, graph.call_function(F.linear, (x, y))),
        (False, graph.call_function(torch.ops.aten.relu.default, (x,))),
        (False, graph.call_method("__add__", (x, y))),
    ]
    assert [changes(node) for _, node in calls] == [expected for expected, _ in calls]


def copied_behind_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.mul_(2).view(x.shape)
    kept = y.contiguous()
    x.copy_(x.flip(0))
    return kept, kept + 1


def flattened_behind_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    x += 1
    rows = x.t().reshape(-1)
    x.zero_()
    return rows, x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [copied_behind_a_write, flattened_behind_a_write])
@pytest.mark.parametrize("step", [1, 2])
def test_what_is_copied_of_an_input_with_gaps(
    program: Callable[[Tensor], tuple[Tensor, Tensor]], backend: str, step: int
) -> None:
    call = magjit.compile(program, backend=backend)
    for _ in range(3):
        mine, theirs = (inputs(8, 2)[::step, :1] for _ in range(2))
        torch.testing.assert_close(call(mine), program(theirs))
        torch.testing.assert_close(mine, theirs)


def test_only_what_is_written_is_asked_for_gaps(said: list[str | None]) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return torch.relu(x.contiguous()).reshape(-1) + torch.exp(y).reshape(-1)

    magjit.compile(program, backend="aot_eager")(inputs(4, 4)[:, ::2], inputs(4, 2))
    magjit.compile(program, backend="aot_eager")(inputs(4, 2), inputs(4, 4)[:, ::2])
    magjit.compile(flattened_behind_a_write, backend="aot_eager")(inputs(4, 4)[:, ::2])
    assert said[:2] == [None, None]
    assert said[2] is not None and said[2].startswith("reshape of an input that is written")
