"""The disk cache: atomic, bounded, and indifferent to damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from magjit import config
from magjit.errors import ArgumentError
from magjit.plugin.cache import DiskCache, disk_cache, fingerprint


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path, 1 << 20)


def test_round_trip(cache: DiskCache) -> None:
    key = fingerprint("source", "sm_90", 3)
    assert cache.get("cubin", key) is None
    assert cache.put("cubin", key, b"\x00code") is not None
    assert cache.get("cubin", key) == b"\x00code"
    assert cache.get("other", key) is None
    assert (cache.stats.hits, cache.stats.misses, cache.stats.writes) == (1, 2, 1)


def test_fingerprint_tells_parts_and_types_apart() -> None:
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (b"abc",), (1,), ("1",), (True,), (None,), ()]
    assert len({fingerprint(*each) for each in parts}) == len(parts)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_damaged_entries_count_as_absent(cache: DiskCache, damage: str) -> None:
    key = fingerprint("x")
    path = cache.put("k", key, b"payload" * 10)
    assert path is not None
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncate": content[:-3],
            "flip": content[:-1] + bytes([content[-1] ^ 1]),
            "empty": b"",
            "foreign": b"something else entirely, and long enough to have a digest",
        }[damage]
    )
    assert cache.get("k", key) is None
    assert cache.stats.damaged == 1
    assert not path.exists()
    assert cache.get_or_make("k", key, lambda: b"again") == b"again"
    assert cache.get("k", key) == b"again"


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 10_000)
    keys = [fingerprint(i) for i in range(12)]
    for age, key in enumerate(keys[:9]):
        path = cache.put("k", key, b"x" * 1000)
        os.utime(path, (age, age))
    assert cache.get("k", keys[0]) is not None  # now the youngest
    cache.put("k", keys[9], b"x" * 1000)
    assert cache.size() <= 10_000
    assert cache.stats.evicted >= 1
    assert cache.get("k", keys[0]) is not None
    assert cache.get("k", keys[9]) is not None
    assert cache.get("k", keys[1]) is None


def test_too_large_and_disabled_keep_nothing(tmp_path: Path) -> None:
    assert DiskCache(tmp_path, 10).put("k", fingerprint(1), b"x" * 100) is None
    with config.override(cache_dir=tmp_path, disk_cache=False):
        assert disk_cache().put("k", fingerprint(1), b"x") is None
        assert disk_cache().get_or_make("k", fingerprint(1), lambda: b"y") == b"y"
    assert list(tmp_path.rglob("*")) == []


def test_unwritable_directory_is_an_empty_cache(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    cache = DiskCache(blocker, 1 << 20)
    assert cache.put("k", fingerprint(1), b"x") is None
    assert cache.get("k", fingerprint(1)) is None
    cache.clear()


def test_the_directory_is_the_users_own(tmp_path: Path) -> None:
    DiskCache(tmp_path / "new", 1 << 20).put("k", fingerprint(1), b"x")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


def test_interrupted_write_leaves_nothing(cache: DiskCache, monkeypatch) -> None:
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.put("k", fingerprint(1), b"x")
    monkeypatch.undo()
    assert cache.size() == 0
    assert cache.get("k", fingerprint(1)) is None


@pytest.mark.parametrize(
    "kind, key", [("../up", "0" * 64), ("k", "../../etc"), ("k", "Z" * 64), ("", "0" * 64)]
)
def test_names_stay_inside(cache: DiskCache, kind: str, key: str) -> None:
    with pytest.raises(ArgumentError):
        cache.get(kind, key)


def test_processes_share_a_directory(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from magjit.plugin.cache import DiskCache, fingerprint\n"
        "c = DiskCache(Path(sys.argv[1]), 1 << 20)\n"
        "for i in range(100):\n"
        "    c.put('k', fingerprint(i % 7), bytes([i % 7]) * 5000)\n"
        "    got = c.get('k', fingerprint(i % 7))\n"
        "    assert got is None or got == bytes([i % 7]) * 5000, i\n"
        "assert c.stats.damaged == 0\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    workers = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
        for _ in range(2)
    ]
    assert [worker.wait(120) for worker in workers] == [0, 0]


def test_settings_name_the_directory(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "MAGJIT_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    script = "from magjit.plugin.cache import disk_cache; print(disk_cache().directory)"
    out = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip().startswith(str(tmp_path))
