"""What is recorded as a CUDA graph, and when; with graphs that are replayed in Python."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from magjit_triton.codegen import graphs_cuda
from magjit_triton.codegen.graphs_cuda import GraphedProgram
from magjit_triton.codegen.memory_plan import Planned, with_memory

Run = Callable[..., Sequence[Any]]


def program(x, w):
    """As programs are written."""
    inner = __empty_strided(x.shape, (x.shape[1], 1), dtype=x.dtype, device=x.device)  # noqa: F821
    torch.add(x, 1, out=inner)
    made = product(inner, w)  # noqa: F821
    del inner
    return [made]


program.__globals__.update(__empty_strided=torch.empty_strided, product=torch.mm)


class Graphs:
    """In place of CUDA: a graph runs its program again, on the tensors it was recorded with."""

    def __init__(self) -> None:
        self.made: list[Graph] = []
        self.stream, self.device_seconds = 1, 0.0
        self.error: str = ""

    @property
    def replayed(self) -> int:
        return sum(one.replayed for one in self.made)

    def with_memory(self, run: Run, products: Any, memory: Any) -> Run:
        changed = with_memory(run, products, memory)
        if not isinstance(memory, Planned):
            return changed

        def recorded(*taken: Any) -> Sequence[Any]:
            graph = self.made[-1]
            if self.error:
                raise RuntimeError(self.error)
            graph.run, graph.taken = run, taken
            graph.outputs = changed(*(one.clone() for one in taken))
            for one in graph.outputs:
                one.fill_(torch.nan)
            return graph.outputs

        return recorded

    def timed(self, task: Callable[..., Any], *given: Any) -> tuple[Any, float]:
        return task(*given), self.device_seconds


class Graph:
    def __init__(self) -> None:
        self.replayed = 0
        self.run: Any = None
        self.taken: Sequence[Any] = ()
        self.outputs: Sequence[Any] = ()

    def replay(self) -> None:
        self.replayed += 1
        made = self.run(*self.taken)
        for place, one in zip(self.outputs, made, strict=True):
            place.copy_(one)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Graphs()

    def graph() -> Graph:
        made.made.append(Graph())
        return made.made[-1]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(graphs_cuda, "capturing", lambda graph, **_: contextlib.nullcontext())
    monkeypatch.setattr(graphs_cuda, "current_stream", lambda: made.stream)
    monkeypatch.setattr(graphs_cuda, "device_seconds", made.timed)
    monkeypatch.setattr(graphs_cuda, "with_memory", made.with_memory)
    monkeypatch.setattr(GraphedProgram, "_graphable", staticmethod(lambda value: True))
    return made


def graphed(**options: Any) -> GraphedProgram:
    return GraphedProgram(program, {"product": torch.mm}, **options)


def check(call: GraphedProgram, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (made,) = call(x, w)
    torch.testing.assert_close(made, (x + 1) @ w)
    return made


def test_the_fourth_call_is_recorded(graphs: Graphs) -> None:
    call, x, w = graphed(static=frozenset([1])), torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(6):
        x.normal_(), w.normal_()
        check(call, x, w)
    assert (len(graphs.made), graphs.replayed) == (1, 3)


def test_inputs_that_move_are_copied(graphs: Graphs) -> None:
    call, w = graphed(), torch.randn(4, 4)
    kept = []
    for _ in range(6):
        x = torch.randn(4, 4)
        kept.append(x)
        check(call, x, w)
    assert (len(graphs.made), graphs.replayed) == (1, 3)


def test_results_in_use_are_left_alone(graphs: Graphs) -> None:
    call, w = graphed(), torch.randn(4, 4)
    kept = [(x, check(call, x, w)) for x in (torch.randn(4, 4) for _ in range(10))]
    for x, made in kept:
        torch.testing.assert_close(made, (x + 1) @ w)
    assert (len(graphs.made), graphs.replayed) == (3, 3)
    kept.clear()
    check(call, x, w)
    assert (len(graphs.made), graphs.replayed) == (3, 4)


def test_a_view_of_a_result_keeps_it(graphs: Graphs) -> None:
    call, x, w = graphed(), torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(4):
        check(call, x, w)
    part = check(call, x, w)[1:]
    expected = part.clone()
    x.normal_()
    check(call, x, w)
    torch.testing.assert_close(part, expected, rtol=0, atol=0)
    assert len(graphs.made) == 2


def test_each_shape_and_stream_has_its_own(graphs: Graphs) -> None:
    call, w = graphed(), torch.randn(4, 4)
    kept = []  # or another call's input might lie at the same address

    def another(rows: int) -> torch.Tensor:
        kept.append(torch.randn(rows, 4))
        return kept[-1]

    for _ in range(5):
        for rows in (2, 3):
            check(call, another(rows), w)
    assert len(graphs.made) == 2
    graphs.stream = 2
    for _ in range(4):
        check(call, another(2), w)
    assert len(graphs.made) == 3


def test_shapes_have_an_end(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_cuda, "_MOST_SHAPES", 2)
    call, w = graphed(), torch.randn(4, 4)
    kept = []  # or another call's input might lie at the same address
    for _ in range(5):
        for rows in (1, 2, 3):
            kept.append(torch.randn(rows, 4))
            check(call, kept[-1], w)
    assert len(graphs.made) == 2


def test_what_is_written_is_never_copied(graphs: Graphs) -> None:
    call, w = graphed(changed=frozenset([0])), torch.randn(4, 4)
    xs = [torch.randn(4, 4) for _ in range(2)]
    for turn in range(9):
        check(call, xs[turn % 2], w)
    assert (len(graphs.made), graphs.replayed) == (2, 6)


@pytest.mark.parametrize(("seconds", "replayed"), [(0.0, 3), (1e3, 2)])
def test_a_graph_that_saves_nothing_is_given_up(
    graphs: Graphs, seconds: float, replayed: int
) -> None:
    graphs.device_seconds = seconds
    call, x, w = graphed(), torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(6):
        x.normal_()
        check(call, x, w)
    assert (len(graphs.made), graphs.replayed) == (1, replayed)


def test_a_busy_host_keeps_no_graph(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that is watched may be slow for other reasons; the next one is not."""
    made = graphs.with_memory

    def slowly(run: Run, products: Any, memory: Any) -> Run:
        changed = made(run, products, memory)
        if isinstance(memory, Planned):
            return changed

        def watched(*taken: Any) -> Sequence[Any]:
            time.sleep(1)
            return changed(*taken)

        return watched

    monkeypatch.setattr(graphs_cuda, "with_memory", slowly)
    graphs.device_seconds = 1.0
    call, x, w = graphed(), torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(6):
        check(call, x, w)
    assert (len(graphs.made), graphs.replayed) == (1, 2)


def test_a_recording_that_fails_is_the_last(graphs: Graphs) -> None:
    graphs.error = "operation not permitted when stream is capturing"
    call, x, w = graphed(), torch.randn(4, 4), torch.randn(4, 4)
    for _ in range(5):
        check(call, x, w)
    assert call.refusal == graphs.error
    assert len(graphs.made) == 1
