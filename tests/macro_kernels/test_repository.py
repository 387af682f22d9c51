"""The file of macro-kernels: machine code for sm_90 in and out, damage, bounds; launching it."""

from __future__ import annotations

import importlib.util
import json
import lzma
import math
import random
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from wave_models import library, residuals
from wave_models import model as made_up

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.building import built, retargeted
from magjit_triton.macro.device import DEVICES
from magjit_triton.macro.errors import (
    CorruptRepositoryError,
    ForeignRepositoryError,
    NewerRepositoryError,
    RepositoryError,
    RepositoryFullError,
)
from magjit_triton.macro.families import named
from magjit_triton.macro.loading import Loaded, checked
from magjit_triton.macro.measuring import Bench, rectangle, wave_of
from magjit_triton.macro.refitting import calibrated
from magjit_triton.macro.repository import Entry, Repository
from magjit_triton.macro.rows import residuals_bytes
from magjit_triton.macro.selector import compiled
from magjit_triton.macro.waves import Candidate, Model

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
    pytest.mark.xdist_group("macro_repository"),
]

H200 = DEVICES["h200"]
CUTS = (
    Configuration(64, 64, 64, stages=3),
    Configuration(16, 128, 64, stages=4, split_k=4),
    Configuration(128, 128, 64, warps=8, programs=132),
)


@cache
def plain() -> Entry:
    """Built for a GPU that is not there."""
    return built(named("linear_gelu", torch.float16), H200, CUTS, workers=1)


def measured() -> Entry:
    waves = [one.wave for one in made_up(7).candidates]
    stored = [replace(one, wave=wave) for one, wave in zip(plain().stored, waves, strict=False)]
    stored[1] = replace(stored[1], sum_fixed=2e-6, sum_each=1e-12)
    return replace(plain(), stored=tuple(stored), library=library(random.Random(1)))


def corrected() -> Entry:
    """Of some configurations; with residuals that are no short text."""
    entry = measured()
    assert entry.library is not None
    random_ = random.Random(2)
    made = [
        replace(one, residuals=residuals(random_, entry.library)) if number else one
        for number, one in enumerate(entry.stored)
    ]
    return replace(entry, stored=tuple(made))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a folder, 100% odd?" / "kernels.sqlite"


def test_machine_code_is_a_gpus_and_says_what_it_needs() -> None:
    entry = plain()
    assert [one.configuration for one in entry.stored] == list(CUTS)
    for one in entry.stored:
        assert one.occupancy >= 1
        assert len(one.assembled.parts) == (2 if one.configuration.split_k > 1 else 1)
        assert one.assembled.workspace == (
            one.configuration.split_k if one.configuration.split_k > 1 else 0
        )
        for part in one.assembled.parts:
            # An ELF file for machine 190, which is CUDA, with the kernel's code in it.
            assert part.cubin[:4] == b"\x7fELF"
            assert int.from_bytes(part.cubin[18:20], "little") == 190
            assert f".text.{part.name}".encode() in part.cubin
            facts = json.loads(part.metadata)
            assert facts["target"] == {"backend": "cuda", "arch": 90, "warp_size": 32}
            assert (facts["name"], facts["shared"]) == (part.name, part.shared)
            assert facts["num_warps"] == part.warps
            assert not facts["extern_libs"]
            assert 16 <= part.registers <= 255 and part.stack == 0
            assert len(part.types) == len(part.arguments)
    first = entry.stored[0].assembled.parts[0]
    assert first.arguments == ("b0", "b1", "b2", "b3", "m", "k_units", "n")
    assert first.types == ("*fp16", "*fp16", "*fp16", "*fp16", "i32", "i32", "i32")
    product, sums = entry.stored[1].assembled.parts
    assert product.arguments == ("b0", "b1", "workspace", "m", "k_units", "n")
    assert sums.arguments == ("workspace", "b2", "b3", "m", "n")
    assert sums.grid is not None
    assert [axis.programs({"m": 100, "n": 256}) for axis in sums.grid] == [25, 1]


def test_kernels_that_do_not_fit_are_left_out() -> None:
    small = replace(H200, shared_per_block=20 * 1024)
    family = named("linear_gelu", torch.float16)
    assert [one.configuration for one in built(family, small, CUTS[:2], workers=1).stored] == []


@pytest.mark.parametrize("entry", [plain, measured, corrected])
def test_what_is_put_is_found(entry: Any, path: Path) -> None:
    kept = entry()
    with Repository(path) as repository:
        repository.put(kept)
        repository.put(kept)
    with Repository(path, read_only=True) as repository:
        assert repository.get(kept.signature, kept.device) == kept
        assert repository.listed() == [(kept.signature, kept.device)]
        assert repository.get(kept.signature, "another GPU") is None
        assert repository.size < 200_000
    assert kept.measured == (entry is not plain)
    if kept.measured:
        reference = kept.model(H200)
        selector = compiled(reference)
        for m in (1, 17, 4000):
            assert selector.choose(1, m, 4096, 4096) == reference.choose(1, m, 4096, 4096)


@pytest.mark.parametrize("entry", [measured, corrected])
def test_entries_go_from_file_to_file(entry: Any, path: Path, tmp_path: Path) -> None:
    kept = entry()
    with Repository(path) as one, Repository(tmp_path / "other.sqlite") as other:
        one.put(kept)
        assert other.merge(one, ["unheard-of"]) == []
        assert other.merge(one) == [kept]
        assert list(other.entries(kept.device)) == [kept]
        other.remove(kept.signature, kept.device)
        assert list(other.entries()) == []


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(RepositoryError, match="no repository"):
        Repository(path, read_only=True)


@pytest.mark.parametrize("content", [b"", b"not a database at all" * 100])
def test_something_else_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(RepositoryError, match="way out"):
        Repository(path, read_only=True)


def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE theirs (one)")
    before = path.read_bytes()
    with pytest.raises(ForeignRepositoryError):
        Repository(path)
    assert path.read_bytes() == before


def test_a_newer_layout_is_refused(path: Path) -> None:
    Repository(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    with pytest.raises(NewerRepositoryError, match="layout 99"):
        Repository(path)


def older(path: Path) -> None:
    """A file as the version before residuals wrote it."""
    with sqlite3.connect(path) as raw:
        raw.execute("DROP TABLE residuals")
        raw.execute("PRAGMA user_version = 1")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_without_residuals_is_read_and_written(read_only: bool, path: Path) -> None:
    kept = measured()
    with Repository(path) as repository:
        repository.put(kept)
    older(path)
    with Repository(path, read_only=read_only) as repository:
        assert repository.get(kept.signature, kept.device) == kept
    with Repository(path) as repository:
        repository.put(corrected())
    with Repository(path, read_only=True) as repository:
        assert repository.get(kept.signature, kept.device) == corrected()


def test_residuals_go_with_their_entry(path: Path) -> None:
    with Repository(path) as repository:
        repository.put(corrected())
        repository.put(measured())
        assert repository.get(measured().signature, measured().device) == measured()
        repository.put(corrected())
        repository.remove(measured().signature, measured().device)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT count(*) FROM residuals").fetchone() == (0,)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        lzma.compress(b"1234567"),
        residuals_bytes([0.5]),
        residuals_bytes([math.nan] * len(library(random.Random(1)).points)),
        residuals_bytes([1e9] * len(library(random.Random(1)).points)),
        residuals_bytes(residuals(random.Random(0), library(random.Random(1))))[:-9],
    ],
)
def test_damaged_residuals_are_a_typed_error(content: bytes, path: Path) -> None:
    kept = corrected()
    with Repository(path) as repository:
        repository.put(kept)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE residuals SET logarithms = ?", (content,))
    with Repository(path, read_only=True) as repository:
        with pytest.raises(CorruptRepositoryError, match="way out"):
            repository.get(kept.signature, kept.device)


DAMAGE = {
    "no library of residuals": "UPDATE families SET library = NULL",
    "text as residuals": "UPDATE residuals SET logarithms = 'abc'",
    "machine code": "UPDATE parts SET cubin = substr(cubin, 1, 100)",
    "another digest": "UPDATE parts SET digest = 'ab'",
    "no parts": "DELETE FROM parts",
    "facts": "UPDATE families SET facts = '{'",
    "a hedge": "UPDATE families SET facts = json_set(facts, '$.hedge_between', 1.5)",
    "a margin": "UPDATE families SET facts = json_set(facts, '$.margin_s', -1)",
    "text as a hedge": "UPDATE families SET facts = json_set(facts, '$.hedge', 'abc')",
    "a cut": "UPDATE configurations SET cut = '[1, 2]'",
    "a wave": "UPDATE configurations SET wave = '{}'",
    "a table": "DROP TABLE parts",
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_is_a_typed_error(name: str, path: Path) -> None:
    kept = corrected()
    with Repository(path) as repository:
        repository.put(kept)
    with sqlite3.connect(path) as raw:
        raw.execute(DAMAGE[name])
    expected = RepositoryError if name == "a table" else CorruptRepositoryError
    with Repository(path, read_only=True) as repository, pytest.raises(expected, match="way out"):
        repository.get(kept.signature, kept.device)


def test_bytes_over_written_are_a_typed_error(path: Path) -> None:
    kept = measured()
    with Repository(path) as repository:
        repository.put(kept)
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(255 for _ in content[4096:])
    path.write_bytes(content)
    with pytest.raises(RepositoryError), Repository(path) as repository:
        repository.get(kept.signature, kept.device)


def test_a_full_file_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "small.sqlite"
    kept = measured()
    with Repository(path, limit=80 * 1024) as repository:
        first = replace(kept, stored=kept.stored[:1])
        repository.put(first)
        with pytest.raises(RepositoryFullError, match="way out"):
            for number in range(30):
                repository.put(replace(first, signature=f"other {number}"))
        assert repository.get(kept.signature, kept.device) == first
        assert repository.size <= 80 * 1024


def test_machine_code_runs_on_its_like_only() -> None:
    there = retargeted(measured(), DEVICES["h100"])
    assert there.device == DEVICES["h100"].name
    assert not there.measured and there.library is None
    with pytest.raises(ForeignRepositoryError, match="A100"):
        retargeted(measured(), DEVICES["a100"])


def test_another_triton_is_refused() -> None:
    assert checked(plain()) is not None
    with pytest.raises(ForeignRepositoryError, match=r"0\.0"):
        checked(replace(plain(), versions={"triton": "0.0"}))


# Launching, with a driver that only writes down.


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    import triton.runtime.driver  # noqa: F401

    module = sys.modules["triton.runtime.driver"]
    found: list[tuple[Any, ...]] = []

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            self.types = tuple(source.signature.values())

        def __call__(self, *arguments: Any) -> None:
            found.append((self.types, *arguments))

    def load(
        name: str, cubin: bytes, shared: int, device: int
    ) -> tuple[object, str, int, int, int]:
        return object(), f"{name} of {len(cubin)}", 64

    active = SimpleNamespace(
        launcher_cls=Launcher,
        utils=SimpleNamespace(load_binary=load),
        get_current_device=lambda: 0,
    )
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    yield found


def test_launches_pass_addresses_and_sizes_in_the_kernels_order(
    launches: list[tuple[Any, ...]],
) -> None:
    one = plain().stored[1].assembled
    sizes = {"batch": 1, "m": 100, "n": 256, "k": 512, "k_units": 4}
    loaded = Loaded(one)
    assert loaded.workspace(sizes) == 4 * 100 * 256
    loaded(77, 56, [1000, 2000, 3000, 4000], sizes, 9000)
    (product, sums) = launches
    packed = (4, 1, one.parts[0].shared)
    types, first, second, third, stream, function, packed_, *hooks = product[:10]
    assert types == one.parts[0].types
    assert (first, second, third, stream) == (56, 1, 1, 77)
    assert function == f"{one.parts[0].name} of {len(one.parts[0].cubin)}"
    assert tuple(packed_)[:3] == packed
    assert hooks == [None, None, None]
    assert product[10:] == (1000, 2000, 9000, 100, 4, 256)
    assert sums[1:4] == (25, 1, 1)
    assert sums[10:] == (9000, 3000, 4000, 100, 256)


# Waves from times.


@pytest.mark.parametrize("number", range(3))
def test_waves_are_found_again_from_the_times_that_they_make(number: int) -> None:
    entry = measured()
    one = entry.stored[number]
    assert one.wave is not None
    if one.occupancy == 1:  # Then they are the same wave.
        one = replace(one, wave=replace(one.wave, full=one.wave.single))
    assert one.wave is not None
    model = Model(
        [Candidate(one.configuration, one.occupancy, one.wave)],
        None,
        multiprocessors=H200.multiprocessors,
        bandwidth=1e18,
    )
    found = wave_of(one, H200, {}, lambda shape: model.seconds(0, *shape))
    for steps in (8, 50, 300):
        # Splits leave some multiprocessors without a tile in the wave of one each.
        share = 0.06 if number == 1 else 0.03
        for name in ("lone", "single", "full", "steady"):
            real = getattr(one.wave, name).at(steps)
            assert getattr(found, name).at(steps) == pytest.approx(real, rel=share), name


def test_rectangles_use_nearly_all_tiles() -> None:
    for tiles in (1, 2, 7, 33, 108, 132, 528, 2112):
        for ratio in (0.1, 1.0, 8.0):
            rows, columns = rectangle(tiles, ratio)
            assert 0.97 * tiles <= rows * columns <= tiles
    assert rectangle(132, 1.0) in ((11, 12), (12, 11))


def test_calibration_meets_measured_times_on_average() -> None:
    entry = measured()
    shapes = [(1, m, 4096, 4096) for m in (16, 256, 4096)]
    model = entry.model(H200)
    times = {
        one.configuration: [1.7 * model.seconds(i, *shape) for shape in shapes]
        for i, one in enumerate(entry.stored)
    }
    times[CUTS[0]][1] = math.inf
    found = calibrated(entry, H200, shapes, times).model(H200)
    assert found.seconds(0, *shapes[2]) == pytest.approx(times[CUTS[0]][2])
    assert found.seconds(2, *shapes[0]) == pytest.approx(times[CUTS[2]][0])


# Measuring, with a driver that computes nothing.


def test_a_bench_launches_and_checks_what_it_measures(launches: list[tuple[Any, ...]]) -> None:
    family = named("linear_gelu", torch.float16)
    runs = []

    def timer(run: Any, least: float = math.inf) -> float:
        run()
        runs.append(run)
        return 1e-6 * len(runs)

    bench = Bench(family, timer, (1, 64, 64, 128), H200, where="cpu")
    one, split, _ = plain().stored
    assert math.isinf(bench.error(one, (1, 37, 64, 128)))  # nothing was written
    launches.clear()
    assert bench.seconds(split, (1, 70, 256, 256)) == 1e-6
    product, sums = launches
    assert product[1:4] == (5 * 2 * 4, 1, 1)
    places = [memory.data_ptr() for memory in bench.memory]
    assert product[10:12] == (places[0], places[1])
    assert product[13:] == (70, 2, 256)
    assert sums[11:13] == (places[2], places[3])
    launches.clear()
    small = replace(H200, multiprocessors=3)
    bench = Bench(family, timer, (1, 64, 64, 128), small, where="cpu")
    waved = bench.waved(replace(split, occupancy=2))
    assert waved.wave is not None
    assert waved.sum_each > 0
    # Two kernels of sums; eight waves of the product alone.
    assert [launch[0] for launch in launches[:2]] == [split.assembled.parts[1].types] * 2
    assert len(launches) == 2 + 8


def test_a_bench_sees_a_right_result(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = named("linear_gelu", torch.float16)
    bench = Bench(family, lambda run, least=0.0: 0.0, (1, 64, 64, 128), H200, where="cpu")
    one = plain().stored[0]

    def ours(stored: Any, shape: Any) -> Any:
        right = family.template.function(*bench.arguments(shape))  # type: ignore[union-attr]
        return lambda: bench.memory[-1][: right.numel()].copy_(right.flatten() * factor)

    monkeypatch.setattr(bench, "ours", ours)
    factor = 1.0
    assert bench.error(one, (1, 37, 64, 128)) == 0.0
    factor = 1.5
    assert bench.error(one, (1, 37, 64, 128)) > 0.4
