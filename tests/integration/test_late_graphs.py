"""Graphs that are likely to be replaced are compiled by the first call that needs them."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import magjit
from magjit import MagJITWarning, config
from magjit.errors import BackendError
from magjit.plugin import CustomGuard


class Counting:
    """Interprets graphs; notes how many operators each that it compiled has."""

    name = "counting"

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.refuses = False
        self.guards: list[CustomGuard] = []

    def supports(self, gm: GraphModule) -> list[str]:
        return []

    def compile(self, gm: GraphModule, inputs: Any, context: Any) -> Callable[..., Any]:
        self.compiled.append(
            sum(node.op not in ("placeholder", "output") for node in gm.graph.nodes)
        )
        if self.refuses:
            raise RuntimeError("no room")
        for guard in self.guards:
            context.add_guard(guard)
        return gm.forward


class Recurrent(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[1:])
        for t in range(x.shape[0]):
            h = (self.given(x[t]) + self.kept(h)).tanh()
        return h


@pytest.fixture
def backend() -> Counting:
    return Counting()


def inputs(steps: int = 5) -> torch.Tensor:
    return torch.randn(steps, 2, 4)


def test_an_unrolled_loop_is_compiled_by_the_first_call_that_needs_it(backend: Counting) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    for count in (0, 1, 1):
        x = inputs()
        assert torch.equal(compiled(x), model(x))
        assert len(backend.compiled) == count
    stats = magjit.stats(compiled)
    assert (stats.captures, stats.replays, stats.eager_calls, stats.records) == (1, 2, 0, 1)


def test_a_loop_of_another_length_replaces_it(backend: Counting) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    for steps in (12, 9, 7, 10):
        x = inputs(steps)
        torch.testing.assert_close(compiled(x), model(x))
    assert backend.compiled
    assert max(backend.compiled) < 12, "the unrolled loop was compiled, which no call needed"


def test_the_setting_compiles_at_once(backend: Counting) -> None:
    compiled = magjit.compile(Recurrent(), backend=backend)
    with config.override(compile_late=False):
        compiled(inputs())
    assert len(backend.compiled) == 1


def test_a_program_of_one_graph_is_compiled_at_once(backend: Counting) -> None:
    backend.refuses = True
    compiled = magjit.compile(Recurrent(), backend=backend, fullgraph=True)
    with pytest.raises(BackendError, match="no room"):
        compiled(inputs())


def test_explain_shows_what_was_compiled(backend: Counting) -> None:
    magjit.explain(Recurrent(), backend=backend)(inputs())
    assert len(backend.compiled) == 1


def test_what_a_run_fills_is_not_compiled_for(backend: Counting) -> None:
    class Filled(nn.Module):
        mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = (torch.arange(4) > 1).float() + 1
            return x * self.mask

    model = Filled()
    compiled = magjit.compile(model, backend=backend)
    for _ in range(3):
        x = torch.randn(4)
        assert torch.equal(compiled(x), model(x))
    assert backend.compiled == [1], "the first record's graph makes the mask as well"


def test_layers_are_no_loop_over_an_input(backend: Counting) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(5, 5) for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x).relu()
            return x

    magjit.compile(Layers(), backend=backend)(torch.randn(5, 5))
    assert len(backend.compiled) == 1


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x[0])
    for row in x:
        total = total * 0.5 + row
    return total


def _by_columns(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x[:, 0])
    for k in range(x.shape[1]):
        total = total * 0.5 + x[:, k]
    return total


def _backwards(x: torch.Tensor) -> torch.Tensor:
    kept = []
    for k in reversed(range(len(x))):
        kept.append(x[k : k + 1] * 2)
    return torch.cat(kept)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    for k in range(x.size(0)):
        made[k] = x.sum() + k
    return made


def _by_pieces(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for piece in x.split(1):
        total = total + piece.sum()
    return total


@pytest.mark.parametrize(
    "program", [_by_rows, _by_columns, _backwards, _in_place, _by_pieces], ids=lambda f: f.__name__
)
def test_loops_over_inputs_are_known(
    program: Callable[[torch.Tensor], torch.Tensor], backend: Counting
) -> None:
    compiled = magjit.compile(program, backend=backend)
    for count in (0, 1):
        x = torch.randn(6, 7)
        torch.testing.assert_close(compiled(x), program(x))
        assert len(backend.compiled) == count


def test_a_backend_that_fails_later_leaves_the_program_running(backend: Counting) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    backend.refuses = True
    compiled(inputs())
    x = inputs()
    with pytest.warns(MagJITWarning, match="no room") as caught:
        assert torch.equal(compiled(x), model(x))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(x), model(x))
    stats = magjit.stats(compiled)
    assert (stats.records, stats.eager_calls, len(backend.compiled)) == (0, 2, 1)


def test_what_the_backend_assumes_later_is_part_of_the_guard(backend: Counting) -> None:
    asked = []

    def holds(*tensors: torch.Tensor) -> bool:
        asked.append(len(tensors))
        return allowed[0]

    allowed = [True]
    backend.guards = [CustomGuard((0,), holds, "what is allowed")]
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    for _ in range(3):
        x = inputs()
        assert torch.equal(compiled(x), model(x))
    assert magjit.stats(compiled).captures == 1
    assert asked
    allowed[0] = False
    compiled(inputs())
    assert magjit.stats(compiled).captures == 2


def test_a_guard_that_fails_at_once_is_another_capture(backend: Counting) -> None:
    backend.guards = [CustomGuard((0,), lambda tensor: False, "nothing is allowed")]
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    for _ in range(2):
        x = inputs()
        assert torch.equal(compiled(x), model(x))
    assert magjit.stats(compiled).replays == 0
    assert magjit.stats(compiled).captures == 2


def test_threads_that_need_it_at_the_same_time(
    backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    compiled(inputs())
    compiles = backend.compile

    def slow(*given: Any) -> Callable[..., Any]:
        time.sleep(0.2)
        return compiles(*given)

    monkeypatch.setattr(backend, "compile", slow)
    together, failures = threading.Barrier(4), []

    def work() -> None:
        together.wait(30)
        for _ in range(5):
            x = inputs()
            if not torch.equal(compiled(x), model(x)):
                failures.append(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    stats = magjit.stats(compiled)
    assert (len(backend.compiled), stats.captures, stats.records) == (1, 1, 1)
    assert stats.replays + stats.eager_calls == 20


def test_a_graph_that_waits_keeps_no_tensor(backend: Counting) -> None:
    compiled = magjit.compile(Recurrent(), backend=backend)
    x = inputs()
    kept = weakref.ref(x)
    compiled(x)
    del x
    assert not backend.compiled
    assert kept() is None


def test_training(backend: Counting) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend="inductor")
    for steps in (5, 5, 5, 8, 8, 6):
        x = inputs(steps).requires_grad_()
        y = x.detach().clone().requires_grad_()
        compiled(x).sum().backward()
        found = [x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
        model(y).sum().backward()
        torch.testing.assert_close(found, [y.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()


def test_a_backward_is_not_the_time_to_compile(backend: Counting) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(compiled, x, use_reentrant=False).sum()

    for count in (0, 1):
        x = inputs().requires_grad_()
        y = x.detach().clone().requires_grad_()
        loss(x).backward()
        model(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        assert len(backend.compiled) == count


def test_nothing_is_compiled_where_another_tracer_is_at_work(backend: Counting) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    compiled(inputs())
    x = inputs()
    torch.testing.assert_close(
        torch.compile(lambda x: compiled(x) + 1, backend="eager")(x), model(x) + 1
    )
    assert not backend.compiled


def test_records_that_are_dropped_meanwhile(
    backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Recurrent()
    compiled = magjit.compile(model, backend=backend)
    compiled(inputs())
    compiles = backend.compile

    def resetting(*given: Any) -> Callable[..., Any]:
        magjit.reset()
        return compiles(*given)

    monkeypatch.setattr(backend, "compile", resetting)
    for _ in range(3):
        x = inputs()
        assert torch.equal(compiled(x), model(x))
