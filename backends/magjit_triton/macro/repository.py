"""The file of macro-kernels: families, their configurations, machine code, times.

    Repository ::= Entry*               one for a family on a device; SQLite, bounded
    Entry      ::= family, device, versions, Library?, Stored+
    Stored     ::= Assembled, occupancy, Wave, seconds of sums, residuals

The header's application id says whose file it is, its user version which layout it has; layout 1
had no residuals.  Machine code is compressed and has its digest beside it.  Whatever is wrong with
a file is a ``RepositoryError``: products then go on without it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from magjit.plugin.cache import disk_cache
from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.assemble import Assembled
from magjit_triton.macro.device import Device
from magjit_triton.macro.errors import (
    CorruptRepositoryError,
    ForeignRepositoryError,
    NewerRepositoryError,
    RepositoryError,
    RepositoryFullError,
)
from magjit_triton.macro.rows import (
    cut_of,
    cut_text,
    launch_text,
    part_of,
    residuals_bytes,
    residuals_of,
)
from magjit_triton.macro.waves import MOST_RESIDUAL, Candidate, Library, Model, Wave

__all__ = ["LIMIT", "Entry", "Repository", "Stored", "default_path", "versions"]

LIMIT = 16 * 2**20
"""Bytes of a file."""
_APPLICATION = 0x4D4A4D4B  # "MJMK"
_LAYOUT = 2
_PAGE = 4096

_SCHEMA = """
CREATE TABLE families (
    id INTEGER PRIMARY KEY,
    signature TEXT NOT NULL, device TEXT NOT NULL, name TEXT NOT NULL,
    facts TEXT NOT NULL, versions TEXT NOT NULL, library TEXT,
    UNIQUE (signature, device));
CREATE TABLE configurations (
    id INTEGER PRIMARY KEY,
    family INTEGER NOT NULL REFERENCES families (id) ON DELETE CASCADE,
    place INTEGER NOT NULL, cut TEXT NOT NULL, workspace INTEGER NOT NULL,
    occupancy INTEGER NOT NULL, wave TEXT, sums TEXT NOT NULL,
    UNIQUE (family, place));
CREATE TABLE parts (
    configuration INTEGER NOT NULL REFERENCES configurations (id) ON DELETE CASCADE,
    place INTEGER NOT NULL, name TEXT NOT NULL, launch TEXT NOT NULL,
    digest TEXT NOT NULL, cubin BLOB NOT NULL,
    PRIMARY KEY (configuration, place));
CREATE TABLE measurements (
    run TEXT NOT NULL, cut TEXT NOT NULL, seconds TEXT NOT NULL,
    PRIMARY KEY (run, cut));
"""
_SCHEMA_OF_RESIDUALS = """
CREATE TABLE IF NOT EXISTS residuals (
    configuration INTEGER PRIMARY KEY REFERENCES configurations (id) ON DELETE CASCADE,
    logarithms BLOB NOT NULL)
"""


def default_path() -> Path:
    """The file in MagJIT's cache directory."""
    return disk_cache().directory / "macro_kernels.sqlite"


def versions() -> dict[str, str]:
    """Of what machine code and times depend on."""
    found = {}
    for package in ("magjit", "torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


@dataclass(frozen=True, slots=True)
class Stored:
    """A configuration of an entry; without a wave it was built, not measured.

    Attributes:
        residuals: on the points of the entry's library, see ``Candidate``; none where the waves
            stand alone.
    """

    assembled: Assembled
    occupancy: int
    wave: Wave | None = None
    sum_fixed: float = 0.0
    sum_each: float = 0.0
    residuals: tuple[float, ...] = ()

    @property
    def configuration(self) -> Configuration:
        """The cut."""
        return self.assembled.configuration


@dataclass(frozen=True, slots=True)
class Entry:
    """A family on a device.

    Attributes:
        signature: see ``families.signature``.
        name: for people.
        device: the name of the GPU.
        facts: ``dtype``, ``products``, ``itemsize``, ``unit``, ``fixed`` sizes, ``buffers``,
            ``hedge``, ``hedge_between`` and ``margin_s`` (see ``Model``), ``tuned_s`` and whatever
            else is worth knowing; JSON values.
        stored: configurations, the most useful first.
        library: the library's times.
        versions: of the packages when it was made.
    """

    signature: str
    name: str
    device: str
    facts: dict[str, Any]
    stored: tuple[Stored, ...]
    library: Library | None = None
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def measured(self) -> bool:
        """Whether every configuration has times."""
        return bool(self.stored) and all(one.wave is not None for one in self.stored)

    def model(self, device: Device) -> Model:
        """The cost model; of measured configurations only."""
        candidates = [
            Candidate(
                one.configuration,
                one.occupancy,
                one.wave,
                one.sum_fixed,
                one.sum_each,
                one.residuals,
            )
            for one in self.stored
            if one.wave is not None
        ]
        return Model(
            candidates,
            self.library,
            multiprocessors=device.multiprocessors,
            bandwidth=device.bandwidth,
            products=int(self.facts["products"]),
            itemsize=int(self.facts["itemsize"]),
            unit=int(self.facts["unit"]),
            hedge=self.hedges[0],
            hedge_between=self.hedges[1],
            margin=float(self.facts.get("margin_s", 0.0)),
        )

    @property
    def hedges(self) -> tuple[float, float]:
        """On sizes of the library's table, and elsewhere, where it is never less."""
        hedge = float(self.facts.get("hedge", 0.0))
        return hedge, max(hedge, float(self.facts.get("hedge_between", hedge)))

    @property
    def bare(self) -> Entry:
        """Without residuals: what the waves say alone."""
        return replace(self, stored=tuple(replace(one, residuals=()) for one in self.stored))

    def only(self, chosen: Sequence[Configuration]) -> Entry:
        """With these configurations, in this order."""
        by_cut = {one.configuration: one for one in self.stored}
        return replace(self, stored=tuple(by_cut[one] for one in chosen))

    @property
    def size(self) -> int:
        """Bytes of machine code, not compressed."""
        return sum(one.assembled.size for one in self.stored)


class Repository:
    """A file of entries.

    Args:
        path: is made where it is missing, unless only reading is asked for.
        limit: bytes that the file may have.
        read_only: nothing is written.

    Raises:
        RepositoryError: the file is damaged, something else, or newer than this version.
    """

    def __init__(self, path: Path, *, limit: int = LIMIT, read_only: bool = False) -> None:
        self.path = Path(path)
        self.limit = limit
        if read_only and not self.path.is_file():
            raise RepositoryError(
                f"There is no repository {self.path}",
                remedy="python -m magjit_triton tune FAMILY makes one",
            )
        with self._typed():
            if not read_only:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = "ro" if read_only else "rwc"
            # The literal path, with whatever characters: a URI would need quoting.
            uri = f"{self.path.absolute().as_uri()}?mode={mode}"
            self._db = sqlite3.connect(uri, uri=True, timeout=10.0, check_same_thread=False)
        try:
            with self._typed():
                self._check(read_only)
        except BaseException:
            self._db.close()
            raise

    def _check(self, read_only: bool) -> None:
        application = self._number("application_id")
        layout = self._number("user_version")
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application == 0 and tables == 0 and not read_only:
            with self._db:
                self._db.executescript(_SCHEMA)
                self._db.execute(_SCHEMA_OF_RESIDUALS)
                self._db.execute(f"PRAGMA application_id = {_APPLICATION}")
                self._db.execute(f"PRAGMA user_version = {_LAYOUT}")
        elif application != _APPLICATION:
            raise ForeignRepositoryError(
                f"{self.path} is no repository of macro-kernels", remedy="name another file"
            )
        elif layout > _LAYOUT:
            raise NewerRepositoryError(
                f"{self.path} has layout {layout}, this MagJIT reads layout {_LAYOUT}",
                remedy="update MagJIT, or tune again into another file",
            )
        elif layout < _LAYOUT and not read_only:
            with self._db:
                self._db.execute(_SCHEMA_OF_RESIDUALS)
                self._db.execute(f"PRAGMA user_version = {_LAYOUT}")
        self._layout = self._number("user_version")
        self._db.execute("PRAGMA foreign_keys = ON")
        page = self._number("page_size") or _PAGE
        self._db.execute(f"PRAGMA max_page_count = {max(16, self.limit // page)}")

    def _number(self, name: str) -> int:
        return int(self._db.execute(f"PRAGMA {name}").fetchone()[0])

    def close(self) -> None:
        """Nothing can be asked afterwards."""
        self._db.close()

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "full" in str(error):
                raise RepositoryFullError(
                    f"{self.path} would exceed {self.limit} bytes",
                    remedy="remove a family, or export what is wanted into another file",
                ) from error
            raise RepositoryError(
                f"{self.path}: {error}", remedy="check the path and its permissions"
            ) from error
        except (
            sqlite3.DatabaseError,
            lzma.LZMAError,
            json.JSONDecodeError,
            KeyError,
            TypeError,
            ValueError,
        ) as error:
            raise CorruptRepositoryError(
                f"{self.path} is damaged: {error}", remedy="remove it, and tune or import again"
            ) from error
        except OSError as error:
            raise RepositoryError(f"{self.path}: {error}", remedy="check the path") from error

    # Entries.

    def put(self, entry: Entry) -> None:
        """Keep an entry, in place of the one of the same family and device.

        Raises:
            RepositoryFullError: the file would be too large; it stays as it was.
        """
        with self._typed(), self._db:
            self._remove(entry.signature, entry.device)
            library = None if entry.library is None else json.dumps(entry.library.as_json())
            cursor = self._db.execute(
                "INSERT INTO families (signature, device, name, facts, versions, library) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (
                    entry.signature,
                    entry.device,
                    entry.name,
                    json.dumps(entry.facts),
                    json.dumps(entry.versions),
                    library,
                ),
            )
            for place, one in enumerate(entry.stored):
                self._put_stored(cursor.lastrowid, place, one)

    def _put_stored(self, family: int | None, place: int, one: Stored) -> None:
        wave = None if one.wave is None else json.dumps(one.wave.as_json())
        cursor = self._db.execute(
            "INSERT INTO configurations (family, place, cut, workspace, occupancy, wave, sums) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                family,
                place,
                cut_text(one.configuration),
                one.assembled.workspace,
                one.occupancy,
                wave,
                json.dumps([one.sum_fixed, one.sum_each]),
            ),
        )
        if one.residuals:
            self._db.execute(
                "INSERT INTO residuals VALUES (?, ?)",
                (cursor.lastrowid, residuals_bytes(one.residuals)),
            )
        for number, part in enumerate(one.assembled.parts):
            self._db.execute(
                "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?)",
                (
                    cursor.lastrowid,
                    number,
                    part.name,
                    launch_text(part),
                    hashlib.sha256(part.cubin).hexdigest(),
                    lzma.compress(part.cubin),
                ),
            )

    def remove(self, signature: str, device: str) -> None:
        """Forget an entry, if it is there."""
        with self._typed(), self._db:
            self._remove(signature, device)

    def _remove(self, signature: str, device: str) -> None:
        self._db.execute(
            "DELETE FROM families WHERE signature = ? AND device = ?", (signature, device)
        )

    def get(self, signature: str, device: str) -> Entry | None:
        """The entry of a family on a device, if there is one.

        Raises:
            CorruptRepositoryError: it is damaged.
        """
        with self._typed():
            row = self._db.execute(
                "SELECT id, name, facts, versions, library FROM families "
                "WHERE signature = ? AND device = ?",
                (signature, device),
            ).fetchone()
            if row is None:
                return None
            number, name, facts, made, library = row
            rows = self._db.execute(
                "SELECT id, cut, workspace, occupancy, wave, sums FROM configurations "
                "WHERE family = ? ORDER BY place",
                (number,),
            ).fetchall()
            table = None if library is None else Library.from_json(json.loads(library))
            points = 0 if table is None else len(table.seconds)
            stored = tuple(self._stored(one, points) for one in rows)
            found = Entry(
                signature, name, device, json.loads(facts), stored, table, json.loads(made)
            )
            if not all(0.0 <= one <= 1.0 for one in found.hedges):
                raise ValueError(f"a hedge of {name} is out of range")
            if not 0.0 <= float(found.facts.get("margin_s", 0.0)) <= 1.0:
                raise ValueError(f"the margin of {name} is out of range")
            return found

    def _stored(self, row: tuple[Any, ...], points: int) -> Stored:
        number, cut, workspace, occupancy, wave, sums = row
        rows = self._db.execute(
            "SELECT name, launch, digest, cubin FROM parts WHERE configuration = ? ORDER BY place",
            (number,),
        ).fetchall()
        parts = []
        for name, launch, digest, compressed in rows:
            cubin = lzma.decompress(compressed)
            if hashlib.sha256(cubin).hexdigest() != digest:
                raise ValueError(f"the machine code of {cut} is not what was written")
            parts.append(part_of(name, cubin, launch))
        if not parts:
            raise ValueError(f"{cut} has no machine code")
        assembled = Assembled(cut_of(cut), tuple(parts), workspace)
        found = None if wave is None else Wave.from_json(json.loads(wave))
        fixed, each = json.loads(sums)
        return Stored(
            assembled, occupancy, found, fixed, each, self._residuals(number, cut, points)
        )

    def _residuals(self, number: int, cut: str, points: int) -> tuple[float, ...]:
        """Of a configuration, none or so many."""
        if self._layout < _LAYOUT:
            return ()
        row = self._db.execute(
            "SELECT logarithms FROM residuals WHERE configuration = ?", (number,)
        ).fetchone()
        if row is None:
            return ()
        found = residuals_of(row[0])
        if len(found) != points or not all(abs(one) <= MOST_RESIDUAL for one in found):
            raise ValueError(f"the residuals of {cut} are not of the library's {points} points")
        return found

    def listed(self) -> list[tuple[str, str]]:
        """Signature and device of every entry, by name."""
        with self._typed():
            query = "SELECT signature, device FROM families ORDER BY name, device"
            return [(str(one), str(other)) for one, other in self._db.execute(query)]

    def entries(self, device: str | None = None) -> Iterator[Entry]:
        """Every entry, or those of a device."""
        for signature, name in self.listed():
            if device in (None, name):
                found = self.get(signature, name)
                if found is not None:
                    yield found

    def merge(self, other: Repository, names: Sequence[str] = ()) -> list[Entry]:
        """Take over another file's entries, all or those with these names; gives what was taken."""
        taken = [one for one in other.entries() if not names or one.name in names]
        for one in taken:
            self.put(one)
        return taken

    def compact(self) -> None:
        """Give space that nothing uses back to the file system."""
        with self._typed():
            self._db.execute("VACUUM")

    @property
    def size(self) -> int:
        """Bytes of the file."""
        with suppress(OSError):
            return self.path.stat().st_size
        return 0

    # Measurements: what a search has seen, so that it can go on.

    def seen(self, run: str) -> dict[Configuration, list[float]]:
        """What was measured under a name."""
        with self._typed():
            rows = self._db.execute(
                "SELECT cut, seconds FROM measurements WHERE run = ? ORDER BY rowid", (run,)
            )
            return {cut_of(cut): json.loads(seconds) for cut, seconds in rows}

    def note(self, run: str, found: dict[Configuration, list[float]]) -> None:
        """Keep measurements under a name."""
        with self._typed(), self._db:
            self._db.executemany(
                "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?)",
                [(run, cut_text(cut), json.dumps(list(times))) for cut, times in found.items()],
            )

    def forget(self, run: str) -> None:
        """Drop the measurements under a name."""
        with self._typed(), self._db:
            self._db.execute("DELETE FROM measurements WHERE run = ?", (run,))
