"""Kernels compiled before any call: which there are, what is on disk already, what goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from magjit.plugin import BackendError
from magjit_dvm.cuda import ahead, build
from magjit_dvm.cuda.channel_code import CHANNELS
from magjit_dvm.cuda.forms import ALONE, FLAT, FORMS, STACKED, SUMMING
from magjit_dvm.cuda.parts import SUMS
from magjit_dvm.cuda.warps import each_of

needs_nvrtc = pytest.mark.skipif(
    not build.compilers() or not build.compilers()[0].startswith("nvrtc"),
    reason="there is no NVRTC",
)


class Compiler:
    """One that takes no time, and its disk."""

    def __init__(self) -> None:
        self.disk: dict[tuple[Any, ...], bytes] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.error: BaseException | None = None
        self.keeps = True
        self.lock = threading.Lock()

    def compiled(self, *key: Any) -> bytes:
        with self.lock:
            self.asked.append(key)
        if self.error is not None:
            raise self.error
        if self.keeps:
            self.disk[key] = b"a cubin"
        return b"a cubin"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    one = Compiler()
    monkeypatch.setattr(ahead, "compiled", one.compiled)
    monkeypatch.setattr(ahead, "kept", lambda *key: one.disk.get(key))
    monkeypatch.setattr(ahead, "compilers", lambda: ["nvrtc 13.0"])
    return one


def test_all_that_calls_may_ask_for() -> None:
    found = ahead.kernels_of("sm_90")
    assert len(set(found)) == len(found)
    others = SUMS, CHANNELS
    assert (SUMS, False, ALONE) in found
    assert {one for each, _, one in found if each == CHANNELS} == set(range(4))
    for form in set(FORMS) - {SUMMING}:
        made = {each for each, _, one in found if one == form and each not in others}
        assert made == set(each_of(form))
    older = ahead.kernels_of("sm_80", approximate=True)
    assert {approximate for each, approximate, _ in older if each not in others} == {True}
    assert max(each for each, *_ in older) == 36 and max(each for each, *_ in found) == 64
    assert len(ahead.kernels_of("sm_120")) == len(found)


@pytest.mark.parametrize("arch", ["sm_75", "sm_9", "90", "sm_90;", "compute_90", ""])
def test_architectures_that_there_are_not(arch: str) -> None:
    with pytest.raises(BackendError, match="no architecture"):
        ahead.kernels_of(arch)


def test_what_is_on_disk_is_not_made_again(compiler: Compiler) -> None:
    wanted = ahead.kernels_of("sm_90")
    compiler.disk["sm_90", *wanted[0]] = b"a cubin"
    seen: list[tuple[int, int]] = []
    made = ahead.compile_ahead("sm_90", progress=lambda *counts: seen.append(counts))
    assert (made.kernels, made.compiled) == (len(wanted), len(wanted) - 1)
    assert seen[0] == (1, len(wanted)) and seen[-1] == (len(wanted), len(wanted))
    assert sorted(compiler.asked) == sorted(("sm_90", *key) for key in wanted[1:])
    again = ahead.compile_ahead("sm_90", jobs=1)
    assert again.compiled == 0 and len(compiler.asked) == len(wanted) - 1


def test_a_compiler_that_fails_ends_it(compiler: Compiler) -> None:
    compiler.error = BackendError("no room")
    with pytest.raises(BackendError, match="no room"):
        ahead.compile_ahead("sm_90", jobs=1)
    assert len(compiler.asked) < len(ahead.kernels_of("sm_90"))


def test_a_disk_that_keeps_nothing_is_told_of(compiler: Compiler) -> None:
    compiler.keeps = False
    with pytest.raises(BackendError, match="not kept") as error:
        ahead.compile_ahead("sm_90")
    assert "MAGJIT_CACHE_DIR" in str(error.value)


def test_no_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "compilers", list)
    with pytest.raises(BackendError, match="neither NVRTC nor nvcc"):
        ahead.compile_ahead("sm_90")
    assert not compiler.asked


def test_the_command(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    assert ahead.main(["compile", "--arch", "sm_90", "sm_80"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["sm_90", "sm_80"]
    assert ahead.main(["compile", "--arch", "sm_90", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert made["compiled"] == 0 and made["kernels"] == len(ahead.kernels_of("sm_90"))


def test_gpus_that_are_there_are_the_default(
    compiler: Compiler, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(there))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: there[index])
    assert ahead.main(["compile"]) == 1
    assert "--arch sm_90" in capsys.readouterr().err and not compiler.asked
    there += [(9, 0), (8, 6), (9, 0)]
    assert ahead.main(["compile", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert [one["arch"] for one in made] == ["sm_86", "sm_90"]


def test_errors_are_said(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    assert ahead.main(["compile", "--arch", "sm_70", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["error"] == "BackendError" and "sm_70" in said.err
    compiler.error = KeyboardInterrupt()
    assert ahead.main(["compile", "--arch", "sm_90", "--jobs", "1"]) == 130
    with pytest.raises(SystemExit):
        ahead.main(["compile", "--jobs", "0"])
    with pytest.raises(SystemExit):
        ahead.main([])


@needs_nvrtc
def test_what_is_compiled_is_what_calls_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command, in a process of its own; the kernels are real, but few."""
    program = (
        "import sys; from magjit_dvm.cuda import ahead; "
        f"ahead.kernels_of = lambda *given: [({SUMS}, False, {ALONE}), (8, False, {FLAT})]; "
        "sys.exit(ahead.main(['compile', '--arch', 'sm_90', '--json']))"
    )
    monkeypatch.setenv("MAGJIT_CACHE_DIR", str(tmp_path))
    for compiled in (2, 0):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        (made,) = json.loads(done.stdout)
        assert (made["kernels"], made["compiled"]) == (2, compiled)
    asked = (
        "from magjit_dvm.cuda.build import kept; "
        f"assert kept('sm_90', 8, False, {FLAT})[:4] == b'\\x7fELF'; "
        f"assert kept('sm_90', 8, False, {STACKED}) is None"
    )
    subprocess.run([sys.executable, "-c", asked], check=True)
