"""What was decided is kept for the next process; what lies there wrongly is not used."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from magjit import config
from magjit.plugin.cache import disk_cache
from magjit_triton import passes
from magjit_triton.decisions import Decisions, canonical
from magjit_triton.settings import Settings
from tests.triton_backend.running import run_beside_eager


@pytest.fixture
def own_cache(tmp_path):
    with config.override(cache_dir=tmp_path):
        yield tmp_path


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.exp(), y.sin()], 1).t().contiguous() @ x


ARGUMENTS = (torch.rand(6, 4), torch.rand(6, 3))


def graph(function=joined, arguments=ARGUMENTS):
    return make_fx(function, tracing_mode="fake")(*arguments)


def entries(folder) -> list:
    return [path for path in folder.rglob("*") if path.is_file()]


class Counted:
    """Counts the searches."""

    def __init__(self, monkeypatch) -> None:
        self.calls = 0
        original = passes.search

        def counting(*args):
            self.calls += 1
            return original(*args)

        monkeypatch.setattr(passes, "search", counting)


def test_a_graph_is_searched_once(own_cache, monkeypatch) -> None:
    counted = Counted(monkeypatch)
    for _ in range(3):
        run_beside_eager(joined, ARGUMENTS)
    assert counted.calls == 1
    run_beside_eager(joined, ARGUMENTS, options={"objective": "memory"})
    assert counted.calls == 2
    run_beside_eager(joined, (torch.rand(7, 4), torch.rand(7, 3)))
    assert counted.calls == 3
    assert len(entries(own_cache)) == 3


PROGRAM = """
import sys
import torch
import magjit
from magjit_triton import measuring, passes

counts = {"search": 0, "compared": 0}
search, is_faster = passes.search, measuring.Stopwatch.is_faster

def searching(*args):
    counts["search"] += 1
    return search(*args)

def comparing(self, *args):
    counts["compared"] += 1
    return is_faster(self, *args)

passes.search, measuring.Stopwatch.is_faster = searching, comparing
torch.manual_seed(0)
x, y, w = torch.rand(64, 4, 6), torch.rand(64, 4, 6), torch.rand(12, 5)

def function(x, y, w):
    both = torch.cat([x.sin(), y.transpose(1, 2).reshape(64, 4, 6) + 1], 2)
    return both.transpose(0, 1).reshape(-1, 12) @ w

compiled = magjit.compile(function, backend="triton", mode="max-autotune")
with torch.no_grad():
    for _ in range(2):
        assert torch.equal(compiled(x, y, w), function(x, y, w))
print(counts["search"], counts["compared"])
"""


def test_a_second_process_neither_searches_nor_measures(tmp_path) -> None:
    environment = {**os.environ, "MAGJIT_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(tuple(map(int, done.stdout.split())))
    assert found[0][0] == 1
    assert found[0][1] > 0
    assert found[1] == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"not json",
        lambda content: b"[]",
        lambda content: json.dumps({**content, "schema": 99}).encode(),
        lambda content: json.dumps({**content, "key": "0" * 64}).encode(),
        lambda content: json.dumps({**content, "chosen": [[1, 2]]}).encode(),
        lambda content: json.dumps({**content, "chosen": [["a", 2, True]]}).encode(),
        lambda content: json.dumps({**content, "blocks": {"k": [0, 1, 0, 4, 2]}}).encode(),
        lambda content: json.dumps({**content, "blocks": {"k": [64]}}).encode(),
    ],
)
def test_foreign_entries_are_ignored(own_cache, monkeypatch, caplog, change) -> None:
    caplog.set_level(logging.DEBUG, "magjit_triton")
    run_beside_eager(joined, ARGUMENTS)
    decisions = Decisions.of(graph(), Settings(), "aten")
    (path,) = entries(own_cache)
    key = path.parent.name + path.name
    content = json.loads(disk_cache().get("triton_decisions", key))
    disk_cache().put("triton_decisions", key, change(content))
    counted = Counted(monkeypatch)
    run_beside_eager(joined, ARGUMENTS)
    assert counted.calls == 1
    assert "ignored" in caplog.text
    assert decisions.key is not None


def test_damaged_entries_are_ignored(own_cache, monkeypatch, caplog) -> None:
    caplog.set_level(logging.DEBUG, "magjit.plugin.cache")
    run_beside_eager(joined, ARGUMENTS)
    (path,) = entries(own_cache)
    path.write_bytes(path.read_bytes()[:-3])
    counted = Counted(monkeypatch)
    run_beside_eager(joined, ARGUMENTS)
    assert counted.calls == 1
    assert "damaged" in caplog.text


@pytest.mark.parametrize(
    "chosen",
    [
        [[2, 2, True]],  # no such opportunity
        [[99, 99, False]],
        "both",  # operands in a result that is itself virtual of them
    ],
)
def test_illegal_strategies_are_not_used(own_cache, monkeypatch, chosen) -> None:
    run_beside_eager(joined, ARGUMENTS)
    (path,) = entries(own_cache)
    key = path.parent.name + path.name
    content = json.loads(disk_cache().get("triton_decisions", key))
    if chosen == "both":
        (operand, operator, _), *rest = [one for one in content["chosen"] if one[2]]
        assert operand != operator
        chosen = [*content["chosen"], [operator, operator, False]]
    disk_cache().put("triton_decisions", key, json.dumps({**content, "chosen": chosen}).encode())
    counted = Counted(monkeypatch)
    run_beside_eager(joined, ARGUMENTS)
    assert counted.calls == 1
    assert json.loads(disk_cache().get("triton_decisions", key))["chosen"] == content["chosen"]


def test_without_a_disk_cache(tmp_path, monkeypatch) -> None:
    counted = Counted(monkeypatch)
    with config.override(cache_dir=tmp_path, disk_cache=False):
        for _ in range(2):
            run_beside_eager(joined, ARGUMENTS)
    assert counted.calls == 2
    assert not entries(tmp_path)


def test_the_text_of_a_graph_tells_what_decides() -> None:
    texts = {
        canonical(graph()),
        canonical(graph(arguments=(torch.rand(7, 4), torch.rand(7, 3)))),
        canonical(graph(arguments=(torch.rand(4, 6).t(), torch.rand(6, 3)))),
        canonical(graph(arguments=tuple(one.double() for one in ARGUMENTS))),
        canonical(graph(lambda x, y: torch.cat([x.exp(), y.cos()], 1).t().contiguous() @ x)),
        canonical(graph(lambda x, y: torch.cat([y.exp(), x.sin()], 1).t().contiguous() @ x)),
    }
    assert len(texts) == 6


def test_the_text_of_a_graph_has_no_names() -> None:
    def other(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return torch.cat([first.exp(), second.sin()], 1).t().contiguous() @ first

    assert canonical(graph(other)) == canonical(graph())
    one, two = graph(), graph()
    for number, node in enumerate(two.graph.nodes):
        node.name = f"renamed_{number}"
    assert canonical(one) == canonical(two)


def test_symbols_are_told_apart_by_place_and_example() -> None:
    def dynamic(*sizes: int) -> str:
        gm = make_fx(joined, tracing_mode="symbolic")(*(torch.rand(6, size) for size in sizes))
        return canonical(gm)

    assert dynamic(4, 3) == dynamic(4, 3)
    assert dynamic(4, 3) != dynamic(5, 3)
    assert "$0" in dynamic(4, 3)
