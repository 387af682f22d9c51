"""What is captured, replayed, reset and dropped leaves nothing behind."""

from __future__ import annotations

import gc
import itertools
import linecache
import statistics
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import magjit


class Small(nn.Module):
    """Guards, an output class, a side effect on itself, and a result that escapes in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.options = {"scale": 2.0, "names": ["a", "b"]}
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x) * self.options["scale"]
        self.last = [len(self.options["names"]), y.detach()]
        return {"y": y, "all": [y, x]}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def objects_by_type() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__qualname__ for one in gc.get_objects())


def growth(task: Callable[[int], object], warm: int, count: int) -> tuple[dict[str, int], float]:
    """How many more objects of each type, and bytes, there are after ``count`` more calls.

    Bytes are four times those of the median quarter: a leak grows in every quarter, while a heap
    that other tests have left in pieces grows at some moment.
    """
    for i in range(warm):
        task(i)
    before, memory = objects_by_type(), [resident_bytes()]
    for i in range(count):
        task(i)
        if (i + 1) % (count // 4) == 0:
            gc.collect()
            memory.append(resident_bytes())
    after = objects_by_type()  # last, because the list of all objects takes memory itself
    more = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    return more, 4 * statistics.median(later - one for one, later in itertools.pairwise(memory))


def check_growth(task: Callable[[int], object], warm: int, count: int, megabytes: float) -> None:
    more, memory = growth(task, warm, count)
    # A few objects come and go with caches; a leak is at least one object in ten calls.
    assert {name: n for name, n in more.items() if n > max(10, count / 10)} == {}
    assert memory < megabytes * 2**20, f"{memory / 2**20:.1f} MiB more"


def test_captures_and_resets() -> None:
    model = Small()
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)

    def task(i: int) -> None:
        compiled(x)
        magjit.reset(compiled)

    check_growth(task, 100, 500, 6)
    assert magjit.stats(compiled).captures == 600


def test_compiled_objects_come_and_go() -> None:
    x = torch.randn(2, 4)

    def task(i: int) -> None:
        compiled = magjit.compile(Small(), backend="eager", fullgraph=True)
        compiled(x)
        compiled(x)

    check_growth(task, 50, 200, 8)


def test_functions_and_closures_come_and_go() -> None:
    x = torch.randn(2, 4)

    def task(i: int) -> None:
        @magjit.compile(backend="eager", fullgraph=True)
        def program(x: torch.Tensor) -> torch.Tensor:
            return x * i

        program(x)
        program(x)

    check_growth(task, 50, 200, 8)


def test_replays() -> None:
    model = Small()
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    with torch.no_grad():
        check_growth(lambda i: compiled(x), 1000, 100_000, 8)
    assert magjit.stats(compiled).replays == 100_999


def test_replays_with_gradients() -> None:
    model = Small()
    compiled = magjit.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    check_growth(lambda i: compiled(x)["y"].sum().backward(), 500, 5_000, 8)


def test_misses_splits_and_exceptions() -> None:
    def program(x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "raises":
            raise ValueError
        return x * 2 if kind == "fine" else x * x.sum().item()

    x = torch.randn(2, 4)

    def task(i: int) -> None:
        compiled = magjit.compile(program, backend="eager", fullgraph=True)
        for kind in ("raises", "fine", "splits"):
            try:
                compiled(x, kind)
            except (ValueError, magjit.errors.GraphBreakError):
                pass

    check_growth(task, 50, 200, 8)


@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_deleting_the_compiled_object_frees_the_model(calls: int, backend: str) -> None:
    model = Small()
    compiled = magjit.compile(model, backend=backend)
    x = torch.randn(2, 4, requires_grad=True)
    for _ in range(calls):
        compiled(x)
    watched = [weakref.ref(one) for one in (model, compiled, model.linear.weight, x)]
    del compiled, model, x
    gc.collect()
    assert [reference() for reference in watched] == [None] * 4


def test_a_record_keeps_no_arguments_alive() -> None:
    compiled = magjit.compile(Small(), backend="eager")
    for _ in range(2):
        x = torch.randn(2, 4)
        watched = weakref.ref(x)
        out = compiled(x)
        del x, out
        compiled.last = None
        gc.collect()
        assert watched() is None


def test_a_reset_frees_what_the_records_held() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x * table["w"]

    table = {"w": torch.ones(4)}
    compiled = magjit.compile(program, backend="eager")
    compiled(torch.ones(2, 4))
    watched = weakref.ref(table.pop("w"))
    magjit.reset(compiled)
    gc.collect()
    assert watched() is None


def test_generated_sources_are_dropped() -> None:
    model = Small()
    compiled = magjit.compile(model, backend="eager")
    x = torch.randn(2, 4)
    counts = []
    for i in range(40):
        compiled(x)
        magjit.reset(compiled)
        if i in (9, 39):
            gc.collect()
            counts.append((len(linecache.cache), len(sys.modules)))
    assert counts[0] == counts[1]
