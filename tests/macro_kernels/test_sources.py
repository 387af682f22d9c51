"""Which file a program's kernels come from, and what happens where one cannot be used."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
import torch

sys.path.insert(0, str(Path(__file__).parent))

from wave_models import library
from wave_models import model as made_up

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro import program, sources
from magjit_triton.macro.building import built
from magjit_triton.macro.device import DEVICES, Device
from magjit_triton.macro.families import named
from magjit_triton.macro.heuristics import HEDGE
from magjit_triton.macro.refitting import HEDGES
from magjit_triton.macro.repository import Entry, Repository
from magjit_triton.macro.selector import compiled

H200, H100 = DEVICES["h200"], DEVICES["h100"]
CUTS = (Configuration(64, 64, 64, stages=3), Configuration(128, 128, 64, warps=8))


@cache
def bare() -> Entry:
    """Built, not measured."""
    return built(named("linear_gelu", torch.float16), H200, CUTS, workers=1)


@cache
def measured(seed: int = 7) -> Entry:
    waves = [one.wave for one in made_up(seed).candidates]
    stored = [replace(one, wave=wave) for one, wave in zip(bare().stored, waves, strict=False)]
    return replace(bare(), stored=tuple(stored), library=library(random.Random(seed)))


def file(path: Path, *entries: Entry) -> Path:
    with Repository(path) as repository:
        for one in entries:
            repository.put(one)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own.sqlite"


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    return file(tmp_path / "shipped.sqlite", measured())


def found(own: Path, *shipped: Path, device: Device = H200) -> Entry | None:
    return sources.Entries(device, own, list(shipped)).get(bare().signature)


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_the_user_measured_comes_first_then_what_is_shipped(own: Path, shipped: Path) -> None:
    with silent():
        assert found(own, shipped) == measured()
        assert found(file(own, bare()), shipped) == measured()
        assert found(file(own, measured(8)), shipped) == measured(8)
        assert found(own / "nowhere") is None


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"", None])
def test_a_file_that_cannot_be_used_warns_and_the_next_one_serves(
    own: Path, shipped: Path, content: bytes | None
) -> None:
    if content is None:  # Damaged machine code.
        file(own, measured(8))
        import sqlite3

        with sqlite3.connect(own) as db:
            db.execute("UPDATE parts SET cubin = substr(cubin, 1, 100)")
    else:
        own.write_bytes(content)
    with pytest.warns(UserWarning, match=r"go on without .*own\.sqlite"):
        assert found(own, shipped) == measured()


def test_another_triton_is_a_warning_of_the_users_file_alone(own: Path, tmp_path: Path) -> None:
    other = replace(measured(), versions={**measured().versions, "triton": "1.0"})
    with silent():
        assert found(own, file(tmp_path / "old.sqlite", other)) is None
    with pytest.warns(UserWarning, match=r"built by Triton 1\.0"):
        assert found(file(own, other)) is None


def test_another_device_of_the_same_machine_code_has_converted_times(
    own: Path, shipped: Path
) -> None:
    slow = replace(H100, name="slow", clock=H200.clock / 2, bandwidth=H200.bandwidth / 3)
    with silent():
        entry = found(own, shipped, device=slow)
    assert entry is not None and entry.measured and entry.device == "slow"
    assert entry.hedges == (HEDGE, HEDGE)
    before, after = measured().stored[0].wave, entry.stored[0].wave
    assert before is not None and after is not None
    assert after.full.per_step == pytest.approx(2 * before.full.per_step)
    assert entry.library is not None and measured().library is not None
    ratios = {
        round(one / other, 6)
        for one, other in zip(entry.library.seconds, measured().library.seconds, strict=True)
    }
    assert ratios <= {2.0, 3.0} and 2.0 in ratios
    compiled(entry.model(slow)).choose(1, 512, 4096, 4096)
    with silent():
        assert found(own, shipped, device=DEVICES["a100"]) is None


def test_what_was_built_alone_has_times_from_the_devices_description(own: Path) -> None:
    with silent():
        entry = found(file(own, bare()))
    assert entry is not None and entry.measured and entry.library is not None
    selector = compiled(entry.model(H200))
    for m in (1, 64, 4096):
        index, programs, seconds = selector.choose(1, m, 4096, 4096)
        assert index in (-1, 0, 1) and (programs > 0) == (index >= 0) and 0 < seconds < 1e-2


def test_programs_ask_all_of_them(
    own: Path, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "default_path", lambda: own)
    monkeypatch.setattr(sources, "shipped_paths", lambda: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Device, "current", lambda: H200)
    assert program.macro_parts("macro") == {} == program.macro_parts("auto")
    monkeypatch.setattr(sources, "shipped_paths", lambda: [shipped])
    assert program.macro_parts("library") == {}
    parts = program.macro_parts("macro")
    assert bare().signature in parts["fusing"].keywords["kernels"].entries


def test_every_shipped_file_is_whole_and_within_the_bound() -> None:
    total = 0
    for path in sources.shipped_paths():
        with Repository(path, read_only=True) as repository:
            entries = list(repository.entries())
        assert entries and all(one.measured for one in entries)
        assert {one.device for one in entries} <= {one.name for one in DEVICES.values()}
        total += path.stat().st_size
    assert total <= 16 * 2**20


def test_the_wheels_choices_are_corrected() -> None:
    """All of them, in little space, and in C as in Python."""
    (path,) = sources.shipped_paths()
    assert path.stat().st_size < 6 * 2**20
    random_ = random.Random(0)
    with Repository(path, read_only=True) as repository:
        found = list(repository.entries(H200.name))
    assert len(found) == 16
    for entry in found:
        assert entry.library is not None
        assert all(len(one.residuals) == len(entry.library.points) for one in entry.stored)
        reference = entry.model(H200)
        selector = compiled(reference)
        for number in range(80):
            m = int(2 ** random_.uniform(0, 15))
            n, k = 16 * random_.randint(1, 1024), 128 * random_.randint(1, 128)
            if number % 2:
                n, k = random_.choice(entry.library.n), random_.choice(entry.library.k)
            assert selector.choose(1, m, n, k) == reference.choose(1, m, n, k)


def test_the_wheels_kernels_of_plain_products_are_for_measured_sizes() -> None:
    """Where a size was left out they lost to cuBLAS: nobody shall be slower for having them."""
    (path,) = sources.shipped_paths()
    with Repository(path, read_only=True) as repository:
        found = {one.name: one for one in repository.entries(H200.name)}
    for entry in found.values():
        hedge, between = entry.hedges
        assert hedge in HEDGES and between in (*HEDGES, 1.0) and hedge <= between
        assert {"hedge", "hedge_between", "hedge_of_waves"} <= set(entry.facts)
    for dtype in ("float16", "bfloat16"):
        entry = found[f"linear {dtype}"]
        assert entry.library is not None and 8192 not in entry.library.n
        selector = compiled(entry.model(H200))
        rows = [2**one for one in range(14)]
        assert {selector.choose(1, m, 8192, 3072)[0] for m in rows} == {-1}
        sizes = [(n, k) for n in entry.library.n for k in entry.library.k]
        assert any(selector.choose(1, m, *size)[0] >= 0 for m in rows for size in sizes)
