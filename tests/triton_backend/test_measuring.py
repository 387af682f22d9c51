"""``mode="max-autotune"``: what is tried and taken, and that results stay those of eager mode."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from magjit import config
from magjit.plugin.virtual_tensors.refining import (
    alternatives,
    is_legal,
    named,
    refined,
    with_names,
)
from magjit.plugin.virtual_tensors.search import Strategy, search
from magjit_triton import measuring, passes
from magjit_triton.measuring import MARGIN, Stopwatch, example_inputs
from magjit_triton.settings import Settings
from tests.triton_backend.running import run_beside_eager
from vt_blocks import BLOCKS


@pytest.fixture
def own_cache(tmp_path):
    with config.override(cache_dir=tmp_path):
        yield


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = torch.cat([x.sin(), y.transpose(1, 2).reshape(x.shape) + 1], 2)
    return both.transpose(0, 1).reshape(-1, 12) @ both.new_ones(12, 5)


ARGUMENTS = (torch.rand(64, 4, 6), torch.rand(64, 4, 6))


def searching(function=joined, arguments=ARGUMENTS) -> passes._Search:
    gm = make_fx(function, tracing_mode="fake")(*arguments)
    passes.merge_items(gm.graph)
    return passes._Search.of(gm, Settings())


def found_by(one: passes._Search) -> Strategy:
    return search(one.opportunities, one.model.gain, one.model.total)


def test_alternatives_are_legal_and_differ_in_one_tensor() -> None:
    one = searching()
    strategy = found_by(one)
    seen = 0
    for tensor in one.opportunities.choices:
        for other in alternatives(strategy, tensor, one.opportunities, one.model, close=10):
            seen += 1
            assert is_legal(other, one.opportunities, one.model)
            pairs = set(strategy.chosen.items()) ^ set(other.chosen.items())
            assert {node for node, _ in pairs} == {tensor}
    assert seen > 2


def test_what_is_clear_is_not_tried() -> None:
    one = searching()
    strategy = found_by(one)

    def tried(close: float) -> int:
        return sum(
            len(list(alternatives(strategy, tensor, one.opportunities, one.model, close)))
            for tensor in one.opportunities.choices
        )

    assert tried(-1.0) == 0
    assert tried(-1.0) < tried(0.5) < tried(10)


def test_the_faster_one_is_taken() -> None:
    """Here it is the one with the fewest virtual tensors."""
    one = searching()
    strategy = found_by(one)

    def faster(new: Strategy, old: Strategy) -> bool:
        return len(new.chosen) < len(old.chosen)

    found = refined(strategy, one.opportunities, one.model, faster, close=10)
    assert len(found.chosen) < len(strategy.chosen)
    assert is_legal(found, one.opportunities, one.model)
    kept = refined(strategy, one.opportunities, one.model, lambda new, old: False, close=10)
    assert kept is strategy


def test_when_the_time_is_over_the_best_so_far_is_taken() -> None:
    one = searching()
    strategy = found_by(one)
    answers = [True, None]
    found = refined(strategy, one.opportunities, one.model, lambda *_: answers.pop(0), close=10)
    assert answers == []
    assert found is not strategy


def test_strategies_are_data() -> None:
    one = searching()
    strategy = found_by(one)
    names = named(strategy, one.model.order)
    again = with_names(names, one.opportunities, one.model.order)
    assert again is not None and again.chosen == strategy.chosen
    assert with_names([*names, (999, 999, True)], one.opportunities, one.model.order) is None
    assert with_names(names * 2, one.opportunities, one.model.order) is None


def test_medians_are_compared_in_turns(monkeypatch) -> None:
    times = {"slow": 1e-2, "fast": 1e-2 * (1 - 2 * MARGIN), "same": 1e-2 * (1 - MARGIN / 2)}
    order: list[str] = []

    def timed(self, run, arguments) -> float:
        order.append(run)
        # An interruption now and then is no reason.
        return times[run] * (50 if len(order) % 7 == 0 else 1)

    monkeypatch.setattr(Stopwatch, "_timed", timed)
    watch = Stopwatch([torch.ones(1)])
    assert watch.is_faster("fast", "slow")
    assert order[:4] == ["fast", "slow", "fast", "slow"]
    assert not watch.is_faster("slow", "fast")
    assert not watch.is_faster("same", "slow")
    assert watch.runs == 6


def test_the_budget_ends(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    watch = Stopwatch([], budget=10.0)
    assert not watch.is_over()
    now[0] = 9.0
    assert watch.is_over()


def test_nothing_is_measured_where_there_is_no_time(own_cache, monkeypatch) -> None:
    monkeypatch.setattr(Stopwatch, "is_over", lambda self: True)
    monkeypatch.setattr(Stopwatch, "is_faster", lambda *_: pytest.fail("it was measured"))
    run_beside_eager(joined, ARGUMENTS, mode="max-autotune")


def test_memory_is_not_measured_by_the_clock(own_cache, monkeypatch) -> None:
    monkeypatch.setattr(Stopwatch, "is_faster", lambda *_: pytest.fail("it was measured"))
    options = {"objective": "memory"}
    run_beside_eager(joined, ARGUMENTS, mode="max-autotune", options=options)


def test_example_inputs_are_like_the_fake_ones() -> None:
    arguments = (torch.rand(4, 6).t(), torch.rand(9)[3:], torch.ones(3, dtype=torch.int64))
    gm = make_fx(lambda x, y, i: x.sum() + y.sum() + y[i].sum(), tracing_mode="fake")(*arguments)
    made = example_inputs(gm)
    assert made is not None
    for real, given in zip(made, arguments, strict=True):
        assert (real.shape, real.stride(), real.dtype) == (
            given.shape,
            given.stride(),
            given.dtype,
        )
    assert made[0].std() > 0
    assert not made[2].any()


def test_measuring_draws_no_random_numbers(own_cache) -> None:
    def noisy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return joined(x, y) + torch.rand(256, 5)

    run = []
    for mode in ("default", "max-autotune"):
        torch.manual_seed(3)
        call = passes_compiled(noisy, mode)
        with torch.no_grad():
            run.append([call(*ARGUMENTS), call(*ARGUMENTS)])
    for one, other in zip(*run, strict=True):
        assert torch.equal(one, other)


def passes_compiled(function, mode: str):
    from tests.triton_backend.running import compiled

    return compiled(function, mode=mode)


def test_inputs_that_are_updated_are_updated_once(own_cache) -> None:
    def update(cache: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cache[1:2] += x.mean((0, 1))
        return joined(x, y) + cache.sum()

    run_beside_eager(update, (torch.zeros(3, 6), *ARGUMENTS), 1e-5, mode="max-autotune")


@pytest.mark.parametrize("name", ["QKV prefill", "Swin window attention", "DenseNet block"])
def test_blocks(own_cache, name: str) -> None:
    block = BLOCKS[name].build(2, "cpu")
    run_beside_eager(block.module, block.arguments, tolerance=1e-5, mode="max-autotune")
