"""What is captured as a CUDA graph, and when; with graphs that are replayed in Python."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from magjit.plugin import cuda_graphs
from magjit.plugin.capturable import Varying
from magjit.plugin.cuda_graphs import Replaying, ReplayingByModule, saves_nothing

Function = Callable[..., Sequence[Any]]


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address, which keeps no memory alive."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return tensor.clone()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


class Captures:
    """In place of CUDA: a captured graph reads and writes the memory it was captured with."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.moving: list[list[int]] = []
        self.pools: list[Any] = []
        self.stream = 1
        self.host_seconds, self.device_seconds = 2e-4, 1e-4

    def capture(
        self,
        function: Function,
        inputs: Sequence[Any],
        moving: Sequence[int],
        pools: Any,
        *,
        lends: bool,
    ) -> Any:
        self.moving.append(list(moving))
        self.pools.append(pools)
        given = [unowned(one) if isinstance(one, torch.Tensor) else one for one in inputs]
        for k in moving:
            given[k] = inputs[k].clone()
        self.captured += 1
        # As in a capture, nothing that runs now counts.
        copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
        outputs = [torch.empty_like(one) for one in function(*copies)]

        def replay() -> None:
            self.replayed += 1
            with torch.inference_mode():  # Memory has no mode.
                for place, made in zip(outputs, function(*given), strict=True):
                    place.copy_(made)

        static = [given[k] for k in moving]
        spent = self.host_seconds
        return cuda_graphs._Captured(replay, static, outputs, self.stream, spent, lends=lends)

    def timed(self, task: Callable[..., Any], *given: Any) -> tuple[Any, float]:
        return task(*given), self.device_seconds


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    made = Captures()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_graphs, "_capture", made.capture)
    monkeypatch.setattr(cuda_graphs, "current_stream", lambda: made.stream)
    monkeypatch.setattr(cuda_graphs, "device_seconds", made.timed)
    return made


def step(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept = (x + h @ w).tanh()
    return kept, kept * 2


def total(given: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([*given]).sum()


def test_states_that_move_are_copied_in(captures: Captures) -> None:
    w, h, expected = torch.randn(4, 4), torch.zeros(2, 4), torch.zeros(2, 4)
    run = Replaying(step, 3, writes=False, static=[2])
    results = []
    for _ in range(8):
        x = torch.randn(2, 4)
        (h, twice), (expected, wanted) = run(x, h, w), step(x, expected, w)
        results.append((h, twice, expected, wanted))
    for h, twice, expected, wanted in results:
        torch.testing.assert_close(h, expected)
        torch.testing.assert_close(twice, wanted)
    assert (captures.captured, captures.replayed) == (1, 6)


def test_results_are_lent_where_they_have_been_out_of_use(captures: Captures) -> None:
    x = torch.randn(2, 4)
    run = Replaying(lambda x: (x * 2, x + 1), 1, writes=False)
    places = set()
    for _ in range(6):
        x.normal_()
        results = run(x)
        torch.testing.assert_close(results, (x * 2, x + 1))
        if captures.replayed:
            places.add(results[1].data_ptr())
        del results
    assert captures.captured == 1 and captures.replayed == 5 and len(places) == 1
    view = run(x)[1][0]  # which keeps the whole alive
    wanted = view.clone()
    for _ in range(4):
        x.normal_()
        kept = run(x)
        torch.testing.assert_close(kept, (x * 2, x + 1))
        torch.testing.assert_close(view, wanted)
    assert captures.captured == 2 and captures.replayed == 10
    assert kept[1].data_ptr() not in places  # where the view is


def test_results_that_are_used_later_are_never_lent(captures: Captures) -> None:
    x, kept, wanted = torch.randn(2, 4), [], []
    run = Replaying(lambda x: (x * 2,), 1, writes=False)
    for _ in range(6):
        x.normal_()
        kept.append(run(x)[0])
        wanted.append(x * 2)
    torch.testing.assert_close(kept, wanted)
    assert captures.captured == 1 and captures.replayed == 5


def test_nothing_is_lent_that_somebody_else_holds(captures: Captures) -> None:
    """Such as the program itself, which could let it go unnoticed."""
    kept: list[torch.Tensor] = []

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        kept[:] = [y.detach()]
        return (y,)

    captured = cuda_graphs._Captured(lambda: None, [], program(torch.zeros(2)), 1, lends=True)
    assert not captured.lends
    shared = torch.zeros(4)
    captured = cuda_graphs._Captured(lambda: None, [], (shared[:2], shared[2:]), 1, lends=True)
    assert not captured.lends
    captured = cuda_graphs._Captured(lambda: None, [], (torch.zeros(2),), 1, lends=True)
    assert captured.lends and captured.is_free()
    (result,) = captured.run(())
    assert not captured.is_free()
    del result
    assert captured.is_free()


def test_what_is_lent_may_be_written(captures: Captures) -> None:
    x = torch.randn(2, 4)
    run = Replaying(lambda x: (x * 2,), 1, writes=False)
    for _ in range(6):
        (result,) = run(x)
        version = result._version
        torch.testing.assert_close(result, x * 2)
        result.zero_()
        assert result._version == version + 1
        del result


def test_inference_tensors_are_copied_out(captures: Captures) -> None:
    x = torch.randn(2, 4)
    run = Replaying(lambda x: (x * 2,), 1, writes=False)
    for _ in range(4):
        with torch.inference_mode():
            assert run(x)[0].is_inference()
    for _ in range(3):
        result = run(x)[0]
        assert not result.is_inference()
        torch.testing.assert_close(result, x * 2)
        del result


def test_inputs_that_stay_are_read_where_they_lie(captures: Captures) -> None:
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    run = Replaying(lambda x, w: (x @ w,), 2, writes=False)
    for _ in range(4):
        x.normal_(), w.normal_()
        torch.testing.assert_close(run(x, w)[0], x @ w)
    assert (captures.captured, captures.replayed) == (1, 3)
    other = torch.randn(4, 4)
    for _ in range(3):
        torch.testing.assert_close(run(x, other)[0], x @ other)
    assert captures.captured == 2


def test_the_same_place_laid_out_otherwise(captures: Captures) -> None:
    x = torch.randn(3, 3)
    run = Replaying(lambda x: (x * torch.arange(3.0),), 1, writes=False)
    for _ in range(3):
        for given in (x, x.t()):
            torch.testing.assert_close(run(given)[0], given * torch.arange(3.0))
    assert captures.captured == 2


def test_what_is_written_is_never_copied(captures: Captures) -> None:
    def add(x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor]:
        total += x
        return (total * 2,)

    run = Replaying(add, 2, writes=True)
    total, expected, xs = torch.zeros(3), torch.zeros(3), [torch.randn(3) for _ in range(2)]
    for turn in range(8):
        (made,), (wanted,) = run(xs[turn % 2], total), add(xs[turn % 2], expected)
        torch.testing.assert_close(made, wanted)
        torch.testing.assert_close(total, expected)
    assert (captures.captured, captures.replayed) == (2, 6)


def test_inputs_that_nobody_reads_may_be_anything(captures: Captures) -> None:
    run = Replaying(lambda x, _: (x + 1,), 2, writes=False, unread=[1])
    for unread in (None, 3, torch.zeros(2), None):
        x = torch.randn(3)
        torch.testing.assert_close(run(x, unread)[0], x + 1)
    assert captures.captured == 1


def test_other_streams_and_threads_run_it_as_it_is(captures: Captures) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> tuple[torch.Tensor]:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go.wait(10)
        return (x + 1,)

    run, x = Replaying(slow, 1, writes=False), torch.zeros(3)
    for _ in range(3):
        run(x)
    replayed = captures.replayed
    worker = threading.Thread(target=run, args=(x,))  # replays, and waits in there
    worker.start()
    assert inside.wait(10)
    torch.testing.assert_close(run(x)[0], x + 1)
    assert captures.replayed == replayed + 1
    go.set()
    worker.join()
    captures.stream = 2
    torch.testing.assert_close(run(x)[0], x + 1)
    assert captures.replayed == replayed + 1


@pytest.mark.parametrize(("device_seconds", "replayed"), [(5.9e-4, 4), (6.1e-4, 2)])
def test_a_graph_that_saves_nothing_is_given_up(
    captures: Captures, device_seconds: float, replayed: int
) -> None:
    """Not by the first replay, which is as slow as it is to bring the graph to the device."""
    captures.device_seconds = device_seconds
    run, x = Replaying(lambda x: (x + 1,), 1, writes=False), torch.zeros(3)
    for k in range(5):
        x += k
        torch.testing.assert_close(run(x)[0], x + 1)
    assert (captures.captured, captures.replayed) == (1, replayed)


@pytest.mark.parametrize(
    ("replayed", "launched", "given_up"),
    [
        (3.1, math.inf, True),
        (2.9, math.inf, False),
        (2.9, 3.0, True),
        (2.9, 3.1, False),
        (1.9, 1.9, False),
    ],
)
def test_a_graph_is_weighed_by_what_was_seen(
    replayed: float, launched: float, given_up: bool
) -> None:
    assert saves_nothing(replayed, host=1.0, launched=launched) is given_up


def test_a_capture_that_fails_is_tried_once(monkeypatch, caplog) -> None:
    tried = []

    def failing(*given: Any, **options: Any) -> Any:
        tried.append(given)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "_capture", failing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    run, x = Replaying(lambda x: (x + 1,), 1, writes=False), torch.zeros(3)
    for _ in range(5):
        torch.testing.assert_close(run(x)[0], x + 1)
    assert len(tried) == 1
    assert "not permitted" in caplog.text


def test_inputs_that_keep_moving_one_by_one_end_the_captures(captures: Captures) -> None:
    count = cuda_graphs._MOST_CAPTURES + 4
    run = Replaying(lambda *given: (total(given),), count, writes=False)
    given = [torch.randn(1 + k) for k in range(count)]
    for k in range(count):
        given[k] = torch.randn(1 + k)
        for _ in range(3):
            torch.testing.assert_close(run(*given)[0], total(given))
    assert captures.captured == cuda_graphs._MOST_CAPTURES


def test_what_looks_like_an_input_that_moves_moves_too(captures: Captures) -> None:
    """But for parameters, of which one may well have the shape of a state."""
    states, weight = [torch.randn(4, 4) for _ in range(5)], torch.randn(4, 4)
    run = Replaying(
        lambda w, *states: (sum(states) @ w,), 6, writes=False, static=[1], parameters=[0]
    )
    for turn in range(12):
        states[1 + turn % 4] = torch.randn(4, 4)  # One after the other; the first is static.
        torch.testing.assert_close(run(weight, *states)[0], sum(states) @ weight)
    assert captures.moving == [[2, 3, 4, 5]]


def test_modules_that_share_code_have_graphs_of_their_own(captures: Captures) -> None:
    """Neither their parameters nor their buffers are copied."""
    modules = [(torch.randn(4, 4), torch.randn(4)) for _ in range(6)]
    run = ReplayingByModule(lambda x, w, b: (x @ w + b,), 3, parameters=[1])
    for turn in range(5):
        for w, b in modules[turn % 2 :]:
            x = torch.randn(2, 4)
            torch.testing.assert_close(run(x, w, b)[0], x @ w + b)
            w.mul_(0.9)
    assert captures.captured == len(modules)
    assert captures.moving == [[0]] * len(modules)
    assert len({id(pools) for pools in captures.pools}) == 1


def test_parameters_that_are_always_new_are_not_captured_forever(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_MODULES", 3)
    run, kept = ReplayingByModule(lambda x, w: (x * w,), 2, parameters=[1]), []
    for _ in range(8):
        kept.append(torch.randn(4))
        for _ in range(4):
            x = torch.randn(4)
            torch.testing.assert_close(run(x, kept[-1])[0], x * kept[-1])
    assert captures.captured == len(run._of_module) == 3


def test_sizes_that_vary_have_graphs_of_their_own(
    captures: Captures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers tell them apart, too; those that have not come for longest are given up."""
    monkeypatch.setattr(cuda_graphs, "_MOST_SIZES", 3)
    varying = Varying(tensors=(0,), numbers=(1,))
    weight = torch.randn(())
    run = ReplayingByModule(
        lambda x, n, w: (x * n * w,), 3, parameters=[2], unread={1}, varying=varying
    )

    def call(size: int, n: int) -> None:
        x = torch.randn(size)
        torch.testing.assert_close(run(x, n, weight)[0], x * n * weight)

    for _ in range(6):
        for size, n in ((2, 1), (2, 3), (5, 1)):
            call(size, n)
    captured = captures.captured
    assert len(run._of_module) == 3 <= captured
    for size, n in ((2, 3), (5, 1), (7, 1), (2, 3), (5, 1)):  # two by one makes way
        replayed = captures.replayed
        call(size, n)
        assert captures.replayed - replayed == (size != 7)
    assert captures.captured == captured
