"""The benchmark of macro-kernels, on made-up times: rows as they come, limits, failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import limits
import macro_groups
import macro_kernels
import macro_peers

HERE = str(Path(__file__).parent)


class Small(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x).relu()
        return found


class Broken(Small):
    """A layer that cannot run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("a reason that is told")


class Timer:
    """Peers in the order in which they are asked for."""

    def __init__(self, ahead_s: float) -> None:
        self.late: dict[str, float] = {}

    def medians(self, calls: dict[str, Any], value: Any, rounds: int) -> dict[str, float]:
        for call in calls.values():
            call(value)
        return {name: 1e-5 * (number + 1) for number, name in enumerate(calls)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "made up")
    monkeypatch.setattr(macro_groups, "DEVICE", "cpu")
    monkeypatch.setattr(macro_peers, "DeviceTimer", Timer)
    monkeypatch.setattr(macro_groups, "GROUPS", {"broken": (Broken, 16), "small": (Small, 16)})


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """MagJIT and torch.compile give the model back: nothing is compiled."""
    given = SimpleNamespace(captures=1)
    monkeypatch.setattr(macro_peers.magjit, "compile", lambda model, **_: model)
    monkeypatch.setattr(macro_peers.magjit, "stats", lambda _: given)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)


def rows_of(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["case"], row["metric"]): row for row in json.loads(path.read_text())["rows"]}


def test_groups_are_measured_and_what_fails_is_told(
    machine: None, eager: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--parts", "groups", "--shapes", "4", "--json", str(path), "--force"]
    assert macro_kernels.main(arguments) == 1
    found = rows_of(path)
    assert "a reason that is told" in found["broken, float16", "failed"]["note"]
    assert "a reason that is told" in capsys.readouterr().out
    assert found["small, float16", "speedup over eager"]["magjit"] == pytest.approx(0.5)
    assert found["small, float16", "speedup over torch.compile"]["magjit"] == pytest.approx(1.5)
    assert "captures 1, compiled after call 2: 0" in found["small, float16", "kernel_ms"]["note"]
    assert ("all groups, float16", "kernel_ms") not in found  # one of them is missing
    # Measured again, its rows take the place of the old ones.
    assert macro_kernels.main([*arguments, "--groups", "small"]) == 1
    assert rows_of(path).keys() == found.keys()


def test_a_peer_that_takes_too_long_leaves_what_is_known(
    machine: None, eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(model: nn.Module, **_: Any) -> Callable[[Any], Any]:
        def call(value: Any) -> Any:
            try:
                time.sleep(60)
            except Exception:
                return None

        return call

    monkeypatch.setattr(torch, "compile", slow)
    path = tmp_path / "rows.json"
    arguments = ["--parts", "groups", "--groups", "small", "--shapes", "3", "--seconds", "10"]
    begin = time.perf_counter()
    assert macro_kernels.main([*arguments, "--json", str(path), "--force"]) == 1
    assert time.perf_counter() - begin < 50
    found = rows_of(path)
    assert "OverTimeError" in found["small, float16", "torch.compile failed"]["note"]
    assert ("small, float16", "speedup over eager") in found
    assert ("small, float16", "speedup over torch.compile") not in found


def test_what_differs_from_eager_mode_is_told(
    machine: None, eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: nn.Module, **_: Any) -> Callable[[Any], Any]:
        return lambda value: model(value) + 1

    monkeypatch.setattr(macro_peers.magjit, "compile", wrong)
    path = tmp_path / "rows.json"
    arguments = ["--parts", "groups", "--groups", "small", "--shapes", "3", "--peers"]
    assert macro_kernels.main([*arguments, "--json", str(path), "--force"]) == 1
    note = rows_of(path)["small, float16", "kernel_ms"]["note"]
    assert "magjit: result[0]: Tensor-likes are not close" in note


def test_a_lost_device_ends_the_run(
    machine: None, eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    path = tmp_path / "rows.json"
    arguments = ["--parts", "groups", "models", "--shapes", "3", "--json", str(path), "--force"]
    assert macro_kernels.main(arguments) == 1
    assert list(rows_of(path)) == [("broken, float16", "failed")]


WORKER = """
import sys
from pathlib import Path
import test_benchmark
from magjit_triton.macro import cli
test_benchmark.simulated()
raise SystemExit(cli.main(sys.argv[1:]))
"""


def simulated() -> None:
    """The shipped kernels of the H200; twice as fast as the library where rows are 3, 6, 9, …"""
    from magjit_triton.macro import campaign, sources
    from magjit_triton.macro.device import DEVICES, Device
    from magjit_triton.macro.space import Space
    from magjit_triton.macro.tuning import Table

    def recorded(family: Any, plan: Any, entry: Any, *, shapes: Any, progress: Any) -> Table:
        library = [1e-5] * len(shapes)
        row = [5e-6 if m % 3 == 0 else 2e-5 for _, m, _, _ in shapes]
        times = {one.configuration: row for one in entry.stored}
        space = Space.small(family.work, DEVICES["h200"])
        return Table(space, tuple(shapes), times, library, {"family": str(family)})

    Device.current = classmethod(lambda _: DEVICES["h200"])  # type: ignore[assignment, method-assign]
    sources.default_path = lambda: Path("nothing is here")
    campaign.recorded = recorded  # type: ignore[assignment]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's commands in processes of their own, on the simulation."""
    whole = subprocess.Popen

    def started(line: list[str], **options: Any) -> Any:
        assert line[1:3] == ["-m", "magjit_triton"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *sys.path])}
        return whole([line[0], "-c", WORKER, *line[3:]], env=environment, **options)

    monkeypatch.setattr(macro_kernels, "NEEDS_GPU", set())
    monkeypatch.setattr(macro_kernels.subprocess, "Popen", started)


@pytest.mark.slow
def test_choices_of_the_shipped_kernels_are_recorded(commands: None, tmp_path: Path) -> None:
    path, table = tmp_path / "rows.json", tmp_path / "linear.json"
    arguments = ["--parts", "select", "--shapes", "9", "--dtypes", "float16", "--force"]
    files = ["--table", str(table), "--json", str(path)]
    assert macro_kernels.main([*arguments, *files, "--layers", "Phi 3B up", "GPT-2 up"]) == 0
    found = rows_of(path)
    assert found["all layers, float16", "select_ns"]["magjit"] > 0
    assert 0 < found["Phi 3B up, float16", "selector_fraction"]["magjit"] <= 1
    # Of the first layer's sizes the table has none: plain products are the library's there.
    assert "ours at 0 of 9" in found["Phi 3B up, float16", "gemm_speedup"]["note"]
    assert found["GPT-2 up, float16", "gemm_speedup"]["magjit"] == 1.0
    kept = tmp_path / "select-0-float16" / "linear.float16.Phi-3B-up.json"
    assert len(json.loads(kept.read_text())["shapes"]) == 9
    # No time at all: the reason is told.
    assert macro_kernels.main([*arguments, *files, "--seconds", "0"]) == 1
    assert "not done in 0 s" in rows_of(path)["all layers, float16", "failed"]["note"]


def test_where_ours_is_chosen_it_is_told_by_how_much() -> None:
    def choice(m: int, chosen: int, ours: float) -> dict[str, Any]:
        seconds = {"chosen_s": ours, "best_s": min(ours, 1e-5), "library_s": 1e-5}
        told = {"configuration": "64x64x64", "predicted_s": 8e-6}
        return {"shape": [1, m, 1024, 1024], "chosen": chosen, **told, **seconds}

    seen = [choice(16, 0, 8e-6), choice(32, 2, 1.25e-5), choice(64, -1, 1e-5)]
    rows = {row.metric: row for row in macro_kernels.selected("linear", seen)}
    assert rows["gemm_speedup"].magjit == pytest.approx(1.0)
    assert "ours at 2 of 3: 1.000 there, least 0.800 (32 rows" in str(rows["gemm_speedup"].note)
    assert rows["selector_fraction"].magjit == pytest.approx((1 + 0.8 + 1) / 3)


@pytest.mark.slow
def test_tables_for_fitting_again(commands: None, tmp_path: Path) -> None:
    arguments = ["--parts", "tables", "--shapes", "2", "--dtypes", "float16", "--force"]
    files = ["--table", str(tmp_path / "linear.json"), "--json", str(tmp_path / "rows.json")]
    assert macro_kernels.main([*arguments, *files]) == 0
    names = {path.name for path in (tmp_path / "tables-float16").iterdir()}
    families = (*macro_groups.FAMILIES, *macro_groups.FAMILIES_OF_MODELS)
    assert names == {f"{name}.float16.grid.json" for name in ("linear", *families)}
    kept = json.loads((tmp_path / "tables-float16" / "swiglu.float16.grid.json").read_text())
    assert len(kept["shapes"]) > 13 * 5 * 4
    found = rows_of(tmp_path / "rows.json")
    assert found["swiglu float16", "recorded_s"]["note"] == f"{len(kept['shapes'])} shapes"


def test_a_budget_is_shared() -> None:
    budget = limits.Budget(90.0, 3)
    assert budget.share() == pytest.approx(45.0, abs=1.0)
    assert budget.share() == pytest.approx(60.0, abs=1.0)
    assert budget.share() == pytest.approx(90.0, abs=1.0)
    with pytest.raises(limits.OverTimeError), limits.within(0.01):
        time.sleep(5)
