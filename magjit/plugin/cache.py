"""The one disk cache: bytes by the hash of what they were made of.

::

    <cache_dir>/v1/<kind>/<first two hex digits>/<rest>
    file := MAGIC digest-of-payload payload

Any number of processes share a directory.  An entry is written to a temporary file and
renamed, so a reader sees all of it or nothing; a damaged entry counts as absent and is
removed; when the directory is full the least recently used entries go; a directory that
cannot be written makes a cache that stays empty.  Nothing here raises for the disk's sake.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from magjit import config
from magjit.errors import ArgumentError

__all__ = ["CacheStats", "DiskCache", "code_digest", "disk_cache", "fingerprint"]

logger = logging.getLogger(__name__)

_MAGIC = b"MagJIT\x00\x01"
_DIGEST_SIZE = 32
_LAYOUT = "v1"
# Eviction frees a little more than it must: it scans the whole directory.
_KEEP_FRACTION = 0.9
_PENDING = ".tmp-"


def fingerprint(*parts: str | bytes | int | bool | None) -> str:
    """The key of what is made from ``parts``: source text, architecture, options, versions.

    Boundaries and types count: ``("ab", "c")`` differs from ``("a", "bc")``, 1 from "1".
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(f"{type(part).__name__}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


@cache
def code_digest(*folders: Path) -> str:
    """Changes with the text of the Python files below some folders, and so with what they make."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(slots=True)
class CacheStats:
    """What happened since the cache object was made."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    writes: int = 0
    evicted: int = 0


class DiskCache:
    """A size-bounded, content-addressed store of bytes.

    Args:
        directory: is made when first written to, for this user only.
        limit_bytes: what all entries together may take; 0 keeps nothing.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory / _LAYOUT
        self.limit_bytes = limit_bytes
        self.stats = CacheStats()
        self._size: int | None = None

    def path(self, kind: str, key: str) -> Path:
        """Where an entry lies, or would lie.

        Raises:
            ArgumentError: ``kind`` is no plain name or ``key`` comes from elsewhere than
                ``fingerprint``.
        """
        if not kind.replace("_", "").replace("-", "").isalnum():
            raise ArgumentError(f"A cache kind must be a plain name, got {kind!r}")
        if len(key) < 16 or any(letter not in "0123456789abcdef" for letter in key):
            raise ArgumentError(f"A cache key must be a hexadecimal digest, got {key!r}")
        return self.directory / kind / key[:2] / key[2:]

    def get(self, kind: str, key: str) -> bytes | None:
        """The bytes put under ``key``, or ``None``."""
        path = self.path(kind, key)
        try:
            content = path.read_bytes()
        except OSError:
            self.stats.misses += 1
            return None
        payload = _payload(content)
        if payload is None:
            logger.debug("a damaged entry is removed: %s", path)
            self.stats.damaged += 1
            self.stats.misses += 1
            with suppress(OSError):
                path.unlink()
            return None
        self.stats.hits += 1
        with suppress(OSError):
            os.utime(path)
        return payload

    def put(self, kind: str, key: str, payload: bytes) -> Path | None:
        """Keep ``payload``; returns its file, or ``None`` when it could not be kept."""
        path = self.path(kind, key)
        size = len(_MAGIC) + _DIGEST_SIZE + len(payload)
        if size > self.limit_bytes:
            return None
        try:
            # What lies here is loaded and run: nobody else may write to it.
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write(path, _MAGIC + hashlib.sha256(payload).digest() + payload)
        except OSError:
            return None
        self.stats.writes += 1
        self._make_room(size)
        return path

    def get_or_make(self, kind: str, key: str, make: Callable[[], bytes]) -> bytes:
        """What is kept under ``key``, made and kept when there is none."""
        found = self.get(kind, key)
        if found is None:
            found = make()
            self.put(kind, key, found)
        return found

    def clear(self) -> None:
        """Remove all entries."""
        for path, _, _ in self._entries():
            with suppress(OSError):
                path.unlink()
        self._size = 0

    def size(self) -> int:
        """Bytes that all entries take on disk."""
        return sum(size for _, size, _ in self._entries())

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        handle, name = tempfile.mkstemp(prefix=_PENDING, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def _make_room(self, added: int) -> None:
        self._size = self.size() if self._size is None else self._size + added
        if self._size <= self.limit_bytes:
            return
        # Other processes write too: count again before anything is removed.
        entries = sorted(self._entries(), key=lambda entry: entry[2])
        total = sum(size for _, size, _ in entries)
        if total > self.limit_bytes:
            goal = int(self.limit_bytes * _KEEP_FRACTION)
            for path, size, _ in entries[:-1]:
                if total <= goal:
                    break
                with suppress(OSError):
                    path.unlink()
                    self.stats.evicted += 1
                total -= size
        self._size = total

    def _entries(self) -> Iterator[tuple[Path, int, int]]:
        """Path, size and time of last use (ns) of each file, left-over temporary ones too."""
        for folder, _, names in os.walk(self.directory):
            for name in names:
                path = Path(folder, name)
                with suppress(OSError):
                    status = path.stat()
                    yield path, status.st_size, status.st_mtime_ns


def _payload(content: bytes) -> bytes | None:
    start = len(_MAGIC) + _DIGEST_SIZE
    if len(content) < start or not content.startswith(_MAGIC):
        return None
    payload = content[start:]
    digest = content[len(_MAGIC) : start]
    return payload if hashlib.sha256(payload).digest() == digest else None


_open: dict[tuple[Path, int], DiskCache] = {}


def disk_cache() -> DiskCache:
    """The cache that the settings in force name; with ``disk_cache=False``, an empty one."""
    settings = config.current()
    limit = settings.cache_bytes if settings.disk_cache else 0
    place = (settings.cache_dir, limit)
    return _open.setdefault(place, DiskCache(*place))
