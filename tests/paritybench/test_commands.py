"""The commands end to end, on our own corpus and on files that hang and crash."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paritybench_runner.cli import main
from paritybench_runner.corpus import MINICORPUS
from paritybench_runner.store import Store

RUNNER = [sys.executable, "-m", "paritybench_runner"]
# Whatever else becomes whole is welcome; these have to be.
NOT_WHOLE = {"test_acme_dynamic.py:0", "test_acme_dynamic.py:2", "test_acme_random.py:2"}


def call(*arguments: object, status: int = 0) -> str:
    done = subprocess.run(
        [*RUNNER, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def here(*arguments: object, status: int = 0) -> str:
    """The same in this process, for commands that run no program."""
    printed, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        assert main([*map(str, arguments)]) == status
    return printed.getvalue() + told.getvalue()


of_one_run = pytest.mark.xdist_group("minicorpus")
"""Tests of the same results, which a process makes once."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of a run, merged."""
    folder = tmp_path_factory.mktemp("results")
    for part in ("1/2", "2/2"):
        call("run", "--out", folder / part[0], "--part", part)
    here("merge", folder / "whole", folder / "1", folder / "2")
    return folder / "whole"


@of_one_run
def test_a_run_finds_what_the_minicorpus_holds(results: Path) -> None:
    store = Store(results)
    files = {row.file: row.status for row in store.files()}
    assert len(files) == 12
    assert [name for name, status in files.items() if status != "loaded"] == [
        "test_acme_unimportable.py"
    ]
    cases = {f"{row.file}:{row.index}": row.eager for row in store.cases()}
    assert cases["test_acme_broken.py:0"].status == "construct"
    assert cases["test_acme_broken.py:1"].status == "eager"
    assert cases["test_acme_broken.py:2"].status == "inputs"
    assert "not installed" in cases["test_acme_not_installed.py:1"].reason
    dynamic = {key for key, eager in cases.items() if eager.dynamic}
    assert dynamic == {f"test_acme_dynamic.py:{i}" for i in range(3)}
    assert not cases["test_acme_random.py:2"].deterministic
    outcomes = {f"{f}:{i}": r.outcome for (f, i), r in store.results()["magjit"].items()}
    assert set(outcomes.values()) <= {"whole", "splits"}
    assert NOT_WHOLE <= {key for key, outcome in outcomes.items() if outcome == "splits"}
    assert sum(outcome == "whole" for outcome in outcomes.values()) >= 21


@of_one_run
def test_report_compare_and_reasons(results: Path, tmp_path: Path) -> None:
    printed = here("report", results, "--to", tmp_path)
    assert "static cases" in printed
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["static"]["magjit"]["cases"] == 25
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") >= 3 and "<script" not in page and "href=" not in page
    assert "| whole |" in (tmp_path / "report.md").read_text()
    assert "0 gained, 0 lost" in here("compare", tmp_path / "report.json", results)
    found["outcomes"]["magjit"]["test_acme_dynamic.py:0"] = "whole"
    (tmp_path / "before.json").write_text(json.dumps(found))
    lost = here("compare", tmp_path / "before.json", results, "--fail-on-loss", status=1)
    assert "test_acme_dynamic.py:0" in lost
    assert "data of a tensor" in here("reasons", results)


@of_one_run
def test_a_run_goes_on_where_it_stopped(results: Path) -> None:
    assert "12 of 12 files are done already" in here("run", "--out", results)
    told = here("run", "--out", results, "--steps", "3", status=2)
    assert "another run: steps 6, not 3" in told


@pytest.mark.slow
def test_later_steps_alone(tmp_path: Path) -> None:
    """The reports say what was tested, and nothing of what was not."""
    corpus, out = tmp_path / "corpus", tmp_path / "results"
    corpus.mkdir()
    source = MINICORPUS / "test_acme_plain_networks.py"
    (corpus / source.name).write_text(source.read_text())
    call("run", "--corpus", corpus, "--out", out, "--steps", "5-6")
    for result in Store(out).results()["magjit"].values():
        assert result.steps.keys() == {5, 6} and not result.whole
    printed = here("report", out)
    assert "training and its gradients: right" in printed
    assert "whole" not in printed and "left out" not in printed
    assert "steps 1 and 5–6" in (out / "report.md").read_text()
    told = here("run", "--corpus", corpus, "--out", out, "--steps", "6", status=2)
    assert "another run: steps '5-6', not 6" in told
    for wrong in ("7", "3-4", "6-5", "all"):
        with pytest.raises(SystemExit):
            here("run", "--out", out, "--steps", wrong)


def test_one_case(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        command = [*RUNNER, "case", "test_acme_plain_networks.py:0"]
        subprocess.run(command, stdout=out, check=True, timeout=300)
    printed = log.read_text()
    assert "magjit: whole" in printed and "step 6: held" in printed


HEADER = "import os, signal, time, torch\nfrom torch import nn\n"
CASE = "lambda: ([], {}), lambda: ([torch.rand([4, 4])], {}), True"
HANGS_AND_CRASHES = f"""{HEADER}
class Hangs(nn.Module):
    def forward(self, x):
        time.sleep(100)

class Dies(nn.Module):
    def forward(self, x):
        os.kill(os.getpid(), signal.SIGSEGV)

class Greedy(nn.Module):
    def forward(self, x):
        return torch.ones(2_000_000_000)

class Fine(nn.Module):
    def forward(self, x):
        return x + 1

TESTCASES = [(c, {CASE}) for c in (Hangs, Dies, Greedy, Fine)]
"""


def test_hanging_and_crashing_cases_leave_the_others_alone(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(HANGS_AND_CRASHES)
    (tmp_path / "test_hanging_import.py").write_text(f"{HEADER}time.sleep(100)")
    arguments = ("--timeout", 4, "--memory", 2, "--jobs", 2)
    call("run", "--corpus", tmp_path, "--out", tmp_path / "out", *arguments)
    store = Store(tmp_path / "out")
    found = [(row.eager.status, row.eager.reason) for row in store.cases()]
    assert found[0] == ("timeout", "longer than 4 s")
    assert found[1] == ("eager", "the process ended with SIGSEGV")
    assert found[2][0] == "eager" and "memory" in found[2][1]
    assert found[3][0] == "runs"
    assert store.results()["magjit"]["test_bad.py", 3].outcome == "whole"
    assert store.files()[1].reason == "timed out: longer than 4 s"


LEAVES_MEMORY = f"""{HEADER}
kept = []

class Keeps(nn.Module):
    def forward(self, x):
        if not kept:
            kept.append(torch.ones(300_000_000))
        return x + 1

class Large(nn.Module):
    def forward(self, x):
        return x + torch.ones(300_000_000)[:4]

TESTCASES = [(c, {CASE}) for c in (Keeps, Large, Large)]
"""


@pytest.mark.slow
def test_a_case_has_the_memory_of_a_new_process(tmp_path: Path) -> None:
    (tmp_path / "test_large.py").write_text(LEAVES_MEMORY)
    call("run", "--corpus", tmp_path, "--out", tmp_path / "out", "--steps", 2, "--memory", 2)
    store = Store(tmp_path / "out")
    assert [row.eager.status for row in store.cases()] == ["runs"] * 3
    assert len(store.results()["magjit"]) == 3


def test_an_interrupted_run_leaves_nothing_behind_and_goes_on(tmp_path: Path) -> None:
    for i in range(3):
        text = f"{HEADER}TESTCASES = [(nn.Tanh, {CASE})]\nif {i} == 1: time.sleep(3600)\n"
        (tmp_path / f"test_{i}.py").write_text(text)
    out = tmp_path / "out"
    command = [*RUNNER, "run", "--corpus", tmp_path, "--out", out, "--timeout", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not has_files(out, 1):
            time.sleep(0.1)
        time.sleep(0.5)
        workers = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(run.pid)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert workers
        run.send_signal(signal.SIGINT)
        printed, _ = run.communicate(timeout=30)
    assert run.returncode == 130 and "goes on from here" in printed
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    (tmp_path / "test_1.py").write_text("TESTCASES = []")
    call(*command[3:])
    assert has_files(out, 3)


def has_files(out: Path, count: int) -> bool:
    if not (out / "results.sqlite").is_file():
        return False
    store = Store(out)
    found = len(store.files())
    store.close()
    return found == count
