"""Settings: one frozen dataclass, changed for the process or for a block.

::

    from magjit import config

    config.update(record_limit=16)            # the process
    with config.override(verify=True):        # this block, in this thread or task
        ...
    config.current().record_limit
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magjit.errors import ArgumentError

__all__ = ["Settings", "current", "override", "update"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What can be set; each has a default that needs no thought.

    Attributes:
        record_limit: records kept for one function; past it, calls run eagerly, or streamed
            by a backend that does so, and a warning names the guards that fail.
        rehearse: run a program that sets itself up in its first call a second time, without a
            trace, to record the way that it goes from then on (``MAGJIT_REHEARSE=0``).
        single_operators: hand regions of one operator to the backend, too; the call of what it
            compiles usually costs more than it gains there.
        compile_late: leave a graph that is likely to be replaced uncompiled until a call needs it,
            such as that of an unrolled loop over an input (``MAGJIT_COMPILE_LATE=0``).
        unroll_limit: operators that a loop over a size of an input may come to when it is unrolled;
            of a longer one each turn is a region. Not with ``dynamic=False`` or
            ``fullgraph=True``.
        verify: check each intermediate representation after each pass.
        cache_dir: where compiled artefacts are kept (``MAGJIT_CACHE_DIR``; else
            ``$XDG_CACHE_HOME/magjit``, else ``~/.cache/magjit``).
        cache_bytes: what the disk cache may hold; the least recently used go first.
        disk_cache: whether the disk cache is used at all (``MAGJIT_DISK_CACHE=0``).
    """

    record_limit: int = 8
    rehearse: bool = True
    single_operators: bool = False
    compile_late: bool = True
    unroll_limit: int = 1000
    verify: bool = False
    cache_dir: Path = Path()
    cache_bytes: int = 2 << 30
    disk_cache: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), type(field.default)
            # bool is an int, and a Path has a class of its own on each system.
            if type(value) is not wanted and not (wanted is type(Path()) and type(value) is str):
                raise ArgumentError(
                    f"{field.name} must be of type {wanted.__name__}, got {value!r}"
                )
        if self.record_limit < 1:
            raise ArgumentError(f"record_limit must be at least 1, got {self.record_limit}")
        for name in ("cache_bytes", "unroll_limit"):
            if getattr(self, name) < 0:
                raise ArgumentError(f"{name} must not be negative, got {getattr(self, name)}")


def _from_environment(environment: Mapping[str, str]) -> Settings:
    given = environment.get("MAGJIT_CACHE_DIR")
    if given:
        cache_dir = Path(given)
    else:
        root = environment.get("XDG_CACHE_HOME")
        cache_dir = (Path(root) if root else Path.home() / ".cache") / "magjit"
    return Settings(
        cache_dir=cache_dir,
        disk_cache=environment.get("MAGJIT_DISK_CACHE", "1") != "0",
        verify=environment.get("MAGJIT_VERIFY", "0") != "0",
        rehearse=environment.get("MAGJIT_REHEARSE", "1") != "0",
        compile_late=environment.get("MAGJIT_COMPILE_LATE", "1") != "0",
    )


_process: Settings = _from_environment(os.environ)
_block: ContextVar[Mapping[str, Any] | None] = ContextVar("magjit_settings", default=None)


def current() -> Settings:
    """The settings in force here."""
    changes = _block.get()
    return _process if not changes else _changed(_process, changes)


def update(**changes: Any) -> None:
    """Change settings for the whole process.

    Raises:
        ArgumentError: a setting is unknown or a value is out of range.
    """
    global _process
    _process = _changed(_process, changes)


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Change settings for a block, in this thread (or asyncio task) only.

    Raises:
        ArgumentError: a setting is unknown or a value is out of range.
    """
    merged = {**(_block.get() or {}), **changes}
    settings = _changed(_process, merged)
    token = _block.set(merged)
    try:
        yield settings
    finally:
        _block.reset(token)


def _changed(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    known = [field.name for field in dataclasses.fields(Settings)]
    for name in changes:
        if name not in known:
            raise ArgumentError(f"No setting is named {name!r}", remedy=f"settings: {known}")
    return dataclasses.replace(settings, **changes)
