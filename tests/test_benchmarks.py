"""The benchmarks' own parts: what they write, when they refuse, and what they find different."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

import agreement
import dvm_cases
import dvm_peers
import harness
import profiling

BENCHMARKS = Path(harness.__file__).parent


def options(**values: object) -> argparse.Namespace:
    return argparse.Namespace(**({"json": None, "force": True} | values))


def test_a_benchmark_writes_rows_in_the_common_format(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(harness, "load_of_others", lambda: 0.0)
    file = tmp_path / "results" / "file.json"
    benchmark = harness.Benchmark.start(options(json=file))
    values = {"magjit": 1.23456, "eager": 2.0, "torch.compile": 3.0}
    benchmark.add(harness.Row.of("a case", "call_us", "µs", values))
    benchmark.add(harness.Row("a case", "graphs", "count", 1, note="why"))
    benchmark.finish()
    content = json.loads(file.read_text())
    assert content.keys() == {"machine", "versions", "rows"}
    assert content["versions"]["torch"] == torch.__version__
    first, second = content["rows"]
    assert first == {
        "case": "a case",
        "metric": "call_us",
        "unit": "µs",
        "magjit": 1.235,
        "peers": {"eager": 2.0, "torch.compile": 3.0},
    }
    assert second["note"] == "why"
    assert second["peers"] == {}


def test_a_busy_machine_is_refused(monkeypatch, capsys) -> None:
    monkeypatch.setattr(harness, "load_of_others", lambda: 0.9)
    with pytest.raises(SystemExit) as stopped:
        harness.Benchmark.start(options(force=False))
    assert stopped.value.code == 3
    assert "0.90 cores" in capsys.readouterr().err
    assert harness.Benchmark.start(options(force=True)).busy == 0.9


def test_times_are_those_of_the_task() -> None:
    tasks = {"slow": lambda: time.sleep(0.002), "quick": lambda: None}
    times = harness.median_times(tasks, rounds=3, seconds=0.004)
    assert times["slow"] > 2000 > times["quick"]
    (difference,) = harness.median_differences(
        {"pair": (tasks["slow"], tasks["quick"])}, rounds=3, seconds=0.004
    ).values()
    assert difference > 1900


def test_peak_counts_what_is_alive_at_once() -> None:
    kilobytes = 1024

    def task() -> None:
        for _ in range(3):
            first = torch.ones(kilobytes // 4)
            del first
        second = torch.ones(kilobytes // 4)
        third = torch.ones(kilobytes // 4)
        del second, third

    assert profiling.peak_bytes(task) == 2 * kilobytes


def test_operators_are_counted_without_views() -> None:
    x = torch.ones(4)
    counted = profiling.aten_operators(lambda: x.view(2, 2).t().relu().add(x[0]))
    assert counted == Counter({"aten::relu": 1, "aten::clamp_min": 1, "aten::add": 1})


@dataclass
class Output:
    value: object
    rest: object = None


@pytest.mark.parametrize(
    ("expected", "actual", "found"),
    [
        (1, 1, ""),
        (1, 2, "result: 2 in place of 1"),
        (1, True, "result: bool in place of int"),
        ([1, 2], [1], "result: 1 items in place of 2"),
        ([1, (2, 3)], [1, (2, 4)], "result[1][1]: 4 in place of 3"),
        ({"a": 1}, {"b": 1}, "result: without ['a'], with ['b'] more"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the order of keys"),
        (Output(1), Output(2), "result['value']: 2 in place of 1"),
        (torch.ones(2), torch.ones(2), ""),
        (Output([torch.ones(2)]), Output([torch.zeros(2)]), "Tensor-likes are not close"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(2, 2), torch.ones(2, 2).t(), "stride"),
    ],
)
def test_differences_are_found(expected, actual, found) -> None:
    said = "; ".join(agreement.differences(expected, actual))
    assert (found in said) if found else not said


def test_state_that_a_call_leaves_is_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = agreement.module_state(model)
    model[0].last = torch.ones(1)
    assert agreement.module_state(model).keys() - before.keys() == {"0.last"}
    assert {"1.running_mean", "0.weight.grad"} <= before.keys()


def test_opaque_nodes_are_found() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def users_function(x: torch.Tensor) -> torch.Tensor:
        return x

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.add, (x, 1))
    y = graph.call_function(torch.nn.functional.gelu, (y,))
    y = graph.call_function(torch.ops.aten.mm.default, (y, y))
    y = graph.call_method("relu", (y,))
    assert not agreement.opaque_nodes(torch.fx.GraphModule({}, graph_with_output(graph, y)))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_module("inner", (x,))
    y = graph.call_function(users_function, (y,))
    opaque = agreement.opaque_nodes(
        torch.fx.GraphModule({"inner": Inner()}, graph_with_output(graph, y))
    )
    assert len(opaque) == 2


def graph_with_output(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Graph:
    graph.output(value)
    return graph


def test_operator_differences_have_signs() -> None:
    eager, replay = Counter({"aten::mm": 2, "aten::add": 1}), Counter({"aten::mm": 3})
    assert agreement.operator_differences(eager, replay) == "-1 aten::add +1 aten::mm"
    assert not agreement.operator_differences(eager, eager)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_dvm_benchmark_says_that_there_is_no_gpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "dvm.py"), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no NVIDIA GPU" in done.stderr and not done.stdout


@pytest.mark.slow
def test_the_dvm_benchmark_runs(tmp_path) -> None:
    file = tmp_path / "dvm.json"
    kept = {"case": "models: a model", "metric": "run_ms", "unit": "ms", "magjit": 1, "peers": {}}
    dropped = kept | {"case": "sets: old"}
    file.write_text(json.dumps({"rows": [kept, dropped]}))
    words = ["--quick", "--force", "--keep", "--rounds", "1", "--threads", "1"]
    words += ["--peers", "eager", "numexpr", "clone", "--only", "sets", "chains", "shapes"]
    words += ["--sizes", "64 KB", "--json", str(file)]
    command = [sys.executable, str(BENCHMARKS / "dvm.py"), *words]
    # A benchmark imports its neighbours.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {(row["case"], row["metric"]): row for row in json.loads(file.read_text())["rows"]}
    assert ("models: a model", "run_ms") in rows and ("sets: old", "run_ms") not in rows
    for program in dvm_cases.CHAINS:
        chain = rows[f"chains: {program.name}, 64 KB, 1 thread", "run_ms"]
        assert chain["magjit"] > 0 and {"eager", "clone"} <= chain["peers"].keys()
        installed = importlib.util.find_spec("numexpr") is not None
        assert ("numexpr" in chain["peers"]) == bool(installed and program.expression)
    for name in ("LayerNorm", "if-else-add"):
        case = f"sets: {name}, 1 thread"
        assert 0 < rows[case, "encode_us_p50"]["magjit"] <= rows[case, "encode_us_p99"]["magjit"]
        assert 0 < rows[case, "compile/run ratio"]["magjit"] < 1
    assert rows["shapes: 200, 1 thread", "rss_growth_mb"]["magjit"] < 20


def test_percentiles() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    shares = [0.01, 0.25, 0.5, 0.99]
    assert [dvm_peers.percentile(values, share) for share in shares] == [1, 1, 2, 4]


def test_drawn_shapes_are_the_same_each_time_and_small_enough() -> None:
    first, second = (list(dvm_cases.drawn(dvm_cases.SETS[1], 3, 3, 1 << 20)) for _ in range(2))
    assert all(one[0].equal(other[0]) and one[2] == other[2] for one, other in zip(first, second))
    chosen = random.Random(1)
    for _ in range(200):
        batch, length, width = dvm_cases.cube(chosen, range(64, 4097), 1 << 22)
        assert 4 * batch * length * width <= 1 << 22


def test_a_wrong_dropout_is_found() -> None:
    x, residual = torch.randn(64, 64), torch.randn(64, 64)
    kept = torch.rand(64, 64) >= dvm_cases.DROPPED
    right = x * kept / (1 - dvm_cases.DROPPED) + residual
    assert not dvm_cases.check_dropout((x, residual), right)
    assert "scaled" in dvm_cases.check_dropout((x, residual), x * kept + residual)
    assert "dropped" in dvm_cases.check_dropout((x, residual), residual.clone())


@pytest.mark.parametrize(("microseconds", "uncounted"), [(4000, 1), (100, 0)])
def test_turns_of_few_calls_begin_with_one_that_does_not_count(
    monkeypatch: pytest.MonkeyPatch, microseconds: float, uncounted: int
) -> None:
    called: list[str] = []
    timed: list[tuple[str, int]] = []
    tasks = {name: (lambda name=name: called.append(name)) for name in ("a", "b")}

    def time_calls(task: Callable[[], object], calls: int) -> float:
        before = len(called)
        task()
        timed.append((called.pop(), calls))
        assert len(called) == before
        return microseconds

    monkeypatch.setattr(harness, "time_calls", time_calls)
    results = harness.alternate(tasks, rounds=2, seconds=0.01)
    calls = int(1e4 / microseconds)
    # After one call of each, and what tells how many calls a turn has.
    assert timed[2:] == [("a", calls), ("b", calls), ("b", calls), ("a", calls)]
    assert called[2:] == ["a", "b", "b", "a"] * uncounted
    assert results == {"a": [microseconds] * 2, "b": [microseconds] * 2}
