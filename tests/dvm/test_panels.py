"""Products by panels: the same results as eager's, without the product in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import magjit
import magjit_dvm
from magjit_dvm import panels, vm
from magjit_dvm.panels import Panels
from tests.dvm.checking import machine

Program = Callable[..., Any]

CONV = torch.randn(6, 3, 3, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def small_caches() -> Iterator[None]:
    with machine((4096, 4096, 64)), torch.no_grad():
        yield


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many panels each product was computed in."""
    counts: list[int] = []
    original = Panels._by_panels

    def counted(self: Panels, given: Any, found: Any, others: Any) -> Any:
        parts = list(found)
        counts.append(len(parts))
        return original(self, given, iter(parts), others)

    monkeypatch.setattr(Panels, "_by_panels", counted)
    return counts


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def agree(program: Program, compiled: Program, *args: Any) -> None:
    results, expected = compiled(*args), program(*args)
    if not isinstance(results, tuple):
        results, expected = (results,), (expected,)
    for got, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert got.stride() == wanted.stride()


PROGRAMS: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "linear": (
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        (randn(2000, 8), randn(40, 8), randn(40)),
    ),
    "linear without bias": (lambda x, w: F.linear(x, w).tanh(), (randn(2000, 8), randn(40, 8))),
    "linear of a batch": (lambda x, w: F.linear(x, w).relu() + 1, (randn(500, 4, 8), randn(40, 8))),
    "linear of long rows": (
        lambda x, w, y: F.linear(x, w) * 2 + y,
        (randn(3, 700, 8), randn(40, 8), randn(3, 700, 40)),
    ),
    "linear of one long row": (
        lambda x, w, y: F.linear(x, w) * 2 + y,
        (randn(1, 2000, 8), randn(40, 8), randn(2000, 40)),
    ),
    "linear of four dimensions": (
        lambda x, w: F.silu(F.linear(x, w)),
        (randn(40, 20, 3, 8), randn(40, 8)),
    ),
    "a residual, a norm": (
        lambda x, w, y, s: F.layer_norm(y + F.linear(x, w), (40,), s),
        (randn(2000, 8), randn(40, 8), randn(2000, 40), randn(40)),
    ),
    "broadcast operands": (
        lambda x, w, row, column, one: F.linear(x, w) * row + column - one,
        (randn(2000, 8), randn(40, 8), randn(40), randn(2000, 1), randn(1, 1)),
    ),
    "several results": (
        lambda x, w: (F.linear(x, w).exp(), F.linear(x, w).relu(), F.linear(x, w).sum(-1)),
        (randn(2000, 8), randn(40, 8)),
    ),
    "results of parts": (
        lambda x, w, y: torch.cat([F.linear(x, w) + 1, y * 2], -1),
        (randn(2000, 8), randn(40, 8), randn(2000, 40)),
    ),
    "mm": (lambda a, b: torch.mm(a, b).sigmoid(), (randn(2000, 8), randn(8, 40))),
    "mm of a transposed matrix": (
        lambda a, b: torch.mm(a.t(), b).sigmoid(),
        (randn(8, 2000), randn(8, 40)),
    ),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a, b).relu(),
        (randn(40), randn(2000, 8), randn(8, 40)),
    ),
    "scores": (
        lambda q, k: F.softmax(torch.bmm(q, k) * 0.3, -1),
        (randn(80, 30, 8), randn(80, 8, 30)),
    ),
    "scores over columns": (
        lambda q, k: F.softmax(torch.bmm(q, k) * 0.3, 1),
        (randn(80, 30, 8), randn(80, 8, 30)),
    ),
    "convolution": (
        lambda x, w, s: F.relu(F.conv2d(x, w, padding=1) * s + 0.5),
        (randn(80, 3, 12, 12), CONV, randn(6, 1, 1)),
    ),
    "channels last": (
        lambda x, w: F.relu(F.conv2d(x, w, padding=1) + 0.5),
        (randn(80, 3, 12, 12).to(memory_format=torch.channels_last), CONV),
    ),
    "halves": (
        lambda x, w: F.linear(x, w).float() * 2,
        (randn(4000, 8).bfloat16(), randn(40, 8).bfloat16()),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_panels(name: str, dynamic: bool, cut: list[int]) -> None:
    program, args = PROGRAMS[name]
    compiled = magjit.compile(program, backend="dvm", dynamic=dynamic)
    for _ in range(2):
        agree(program, compiled, *args)
    assert cut
    assert all(count > 1 for count in cut)


WHOLE: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "a small product": (lambda x, w: F.linear(x, w).relu(), (randn(30, 8), randn(40, 8))),
    "a sum over rows": (lambda x, w: F.linear(x, w).relu().sum(0), (randn(2000, 8), randn(40, 8))),
    "positions of rows": (
        lambda x, w: F.linear(x, w) * torch.arange(2000)[:, None],
        (randn(2000, 8), randn(40, 8)),
    ),
    "used twice": (
        lambda x, w: (lambda y: (y.relu(), torch.mm(y, w)))(F.linear(x, w)),
        (randn(2000, 8), randn(40, 8)),
    ),
    "the product is a result": (
        lambda x, w: (lambda y: (y, y.relu()))(F.linear(x, w)),
        (randn(2000, 8), randn(40, 8)),
    ),
    "a weight that is dear to pack": (
        lambda x, w: F.linear(x, w).relu(),
        (randn(2000, 1000), randn(40, 1000)),
    ),
}


@pytest.mark.parametrize("name", list(WHOLE))
def test_whole(name: str, cut: list[int]) -> None:
    program, args = WHOLE[name]
    compiled = magjit.compile(program, backend="dvm")
    for _ in range(2):
        results, expected = compiled(*args), program(*args)
        torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-3)
    assert not cut


def test_sizes_change(cut: list[int]) -> None:
    """Large and small calls of one graph: each decides by itself."""

    def program(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w).relu() + y

    compiled = magjit.compile(program, backend="dvm", dynamic=True)
    w = randn(40, 8)
    for batch, length in ((3, 700), (2, 3), (1, 2000), (2000, 1), (7, 31), (0, 700), (2, 1000)):
        agree(program, compiled, randn(batch, length, 8), w, randn(batch, length, 40))
        before = len(cut)
        agree(program, compiled, randn(batch, length, 8), w, randn(batch, length, 40))
        assert (len(cut) > before) == (batch * length > 1700)


def test_training(cut: list[int]) -> None:
    """Forward and backward of a perceptron."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    x = randn(2000, 8)
    compiled = magjit.compile(layers, backend="dvm")
    with torch.enable_grad():
        found = []
        for model in (layers, compiled, compiled):
            layers.zero_grad()
            model(x).square().sum().backward()
            found.append([one.grad.clone() for one in layers.parameters()])
    for one in found[1:]:
        torch.testing.assert_close(found[0], one, rtol=1e-4, atol=1e-4)
    assert cut


def test_observed_calls_are_whole(cut: list[int]) -> None:
    program, args = PROGRAMS["linear"]
    compiled = magjit.compile(program, backend="dvm")
    compiled(*args)
    text = magjit_dvm.disassemble(compiled, *args)
    assert "gelu" in text
    agree(program, compiled, *args)
    assert cut


def test_positions_out_of_range(cut: list[int]) -> None:
    """An error in a panel is eager's, and the next call is right."""

    def program(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w) + F.embedding(at, w.t())[:, :1]

    compiled = magjit.compile(program, backend="dvm")
    x, w, at = randn(2000, 8), randn(40, 8), torch.arange(2000) % 8
    agree(program, compiled, x, w, at)
    at[250] = 8
    with pytest.raises(IndexError):
        compiled(x, w, at)
    at[250] = 0
    agree(program, compiled, x, w, at)


# -- windows --


def _fused() -> Any:
    """The fused operator of ``x + y`` over two loops, y broadcast along the first."""
    compiled = magjit.compile(lambda x, y: x * 2 + y, backend="dvm")
    seen: list[Any] = []
    compiled(randn(6, 5), randn(5))
    vm.observe(seen)
    try:
        compiled(randn(6, 5), randn(5))
    finally:
        vm.observe(None)
    return seen[0][0]


def test_windows() -> None:
    fused, x, y = _fused(), randn(6, 5), randn(5)
    results = None
    for first, count in ((0, 2), (2, 3), (5, 1)):
        panel = x[first : first + count]
        results = fused.panel(((0, first, count, 6),), 0, results, panel, y)
    torch.testing.assert_close(results[0], x * 2 + y)


@pytest.mark.parametrize(
    "window",
    [((0, 4, 3, 6),), ((0, -1, 2, 6),), ((0, 0, 0, 6),), ((7, 0, 2, 6),), ((0, 0, 2, 6),) * 3, 5],
)
def test_windows_beyond_their_loops(window: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        _fused().panel(window, 0, None, randn(2, 5), randn(5))


def test_results_of_another_shape() -> None:
    fused, y = _fused(), randn(5)
    for wrong in ((randn(5, 5),), (randn(5, 6).t(),), (randn(6, 5).double(),), (), 3, ([],)):
        with pytest.raises(ValueError, match="results"):
            fused.panel(((0, 0, 2, 6),), 0, wrong, randn(2, 5), y)
    with pytest.raises(ValueError, match="agree"):
        fused.panel(((0, 0, 2, 6),), 0, None, randn(3, 5), y)
    with pytest.raises(ValueError, match="number of arguments"):
        fused.panel(((0, 0, 2, 6),), 0, None, randn(2, 5))
    with pytest.raises(TypeError):
        fused.panel(((0, 0, 2, 6),))


@pytest.mark.parametrize("rows", [(1000,), (1, 1000), (1000, 1), (10, 100), (100, 10), (7, 143)])
def test_ranges_cover_all(rows: tuple[int, ...]) -> None:
    found = panels.ranges(rows, 800, 0)
    assert found is not None
    seen = torch.zeros(rows)
    for panel in found:
        part = seen
        for dim, (first, count) in enumerate(panel):
            part = part.narrow(dim, first, count)
        part += 1
    assert bool((seen == 1).all())
