"""``mode="reduce-overhead"`` of whole programs without a GPU: graphs are replayed in Python."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import magjit
from control_flow import BlockDrop, Decoder, LoopedLSTM, image_inputs, prompt_inputs
from magjit import decisions
from magjit.plugin import cuda_graphs
from tests.plugin.test_cuda_graphs import Captures

pytestmark = pytest.mark.filterwarnings("error::magjit.MagJITWarning")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    made = Captures()
    magjit.list_backends()
    import magjit_dvm  # noqa: F401  (the name is the backend's)

    module = sys.modules["magjit_dvm.backend"]
    monkeypatch.setattr(module, "can_be_captured", lambda gm, **_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda_graphs, "_capture", made.capture)
    monkeypatch.setattr(cuda_graphs, "current_stream", lambda: made.stream)
    monkeypatch.setattr(cuda_graphs, "device_seconds", made.timed)
    decisions.serve(decisions.CPU)
    yield made
    decisions.serve(*decisions.DEVICES)


def check(compiled: Callable[..., Any], program: Callable[..., Any], *given: torch.Tensor) -> Any:
    wanted, made = program(*given), compiled(*given)
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    return made


def test_a_loop_of_any_length(captures: Captures) -> None:
    torch.manual_seed(0)
    model, chosen = LoopedLSTM(width=32, layers=3).eval(), random.Random(1)
    compiled = magjit.compile(model, backend="dvm", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(10):
            check(compiled, model, torch.randn(chosen.randint(8, 24), 4, 32))
    # All but the first steps are one graph, into which the states are copied.
    assert captures.replayed > 100
    assert captures.captured <= 4
    assert all(len(moving) <= 7 for moving in captures.moving)


def test_blocks_that_are_skipped(captures: Captures) -> None:
    torch.manual_seed(0)
    model, chosen = BlockDrop(channels=4, depth=6).eval(), random.Random(1)
    compiled = magjit.compile(model, backend="dvm", mode="reduce-overhead")
    with torch.no_grad():
        results = [
            (check(compiled, model, x), model(x)) for x in (image_inputs(chosen) for _ in range(30))
        ]
    for made, wanted in results:  # Nobody has written over them.
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    # A graph for each block, which copies what goes from block to block; stem and head. By chance
    # what goes in lies twice in the same place first: one more then, which copies nothing.
    copies = [len(moving) for moving in captures.moving]
    assert set(copies) <= {0, 1}
    assert 6 <= copies.count(1) <= 8 and copies.count(0) <= 8


def test_a_cache_that_grows(captures: Captures) -> None:
    torch.manual_seed(0)
    model, chosen = Decoder(width=32, depth=2).eval(), random.Random(1)
    compiled = magjit.compile(model, backend="dvm", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            given = prompt_inputs(chosen)
            assert compiled(given) == model(given)


def test_results_share_memory_as_in_eager_mode(captures: Captures) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x + 1).exp()
        return x.t(), y, y[0], y[:, 3]

    compiled = magjit.compile(program, backend="dvm", mode="reduce-overhead")
    with torch.no_grad():
        kept = []
        for _ in range(6):
            x = torch.randn(8, 8)
            kept.append((check(compiled, program, x), program(x)))
            first, y, row, column = kept[-1][0]
            assert first.data_ptr() == x.data_ptr()
            assert row.data_ptr() == y.data_ptr() == column.data_ptr() - 12
    for results, wanted in kept:
        torch.testing.assert_close(results, wanted)
    assert captures.captured == 1
    assert captures.replayed == 3


def test_sizes_that_come_again(captures: Captures) -> None:
    torch.manual_seed(0)
    layer, norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        y = layer(x).view(batch * length, width).softmax(-1) * length
        return y.view(batch, length, width).transpose(0, 1), norm(x) + y.sum()

    compiled = magjit.compile(program, backend="dvm", mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        check(compiled, program, torch.randn(2, 3, 8))
        before = captures.captured
        for _ in range(5):
            for length in (4, 5, 7):
                first, _ = check(compiled, program, torch.randn(2, length, 8))
                assert first.shape == (length, 2, 8)
        # A graph for each size from its third call on, or two where x was in one place at first.
        made = captures.captured - before
        assert 3 <= made <= 6
        assert captures.replayed >= 6
        for length in range(8, 60):  # none comes again
            check(compiled, program, torch.randn(2, length, 8))
        assert captures.captured - before == made
    assert magjit.stats(compiled).captures == 1


def test_sizes_that_numbers_say(captures: Captures) -> None:
    def program(x: torch.Tensor, first: int) -> torch.Tensor:
        return (x[:first] + 1).exp() * first

    compiled = magjit.compile(program, backend="dvm", mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        for _ in range(5):
            for first in (2, 3, 5):
                x = torch.randn(9)
                torch.testing.assert_close(compiled(x, first), program(x, first))
    assert captures.replayed >= 6


def test_a_float_that_varies(captures: Captures) -> None:
    def program(x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * scale + 1).exp()

    compiled = magjit.compile(program, backend="dvm", mode="reduce-overhead", dynamic=True)
    with torch.no_grad():
        for turn in range(12):
            x = torch.randn(4 + turn % 2)
            scale = turn / 8
            torch.testing.assert_close(compiled(x, scale), program(x, scale))
    assert 2 <= captures.captured <= 4  # the number is a tensor, which is copied in
