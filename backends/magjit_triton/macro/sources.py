"""Where a program's macro-kernels come from, in this order; the first that has a family counts.

    the user's file      what was measured on this device
    shipped files        what was measured on a device of this name
    the user's file      what was built and not measured: times from the device's description
    shipped files        of another device that runs the same machine code: times converted

Entries are read when a program has their family.  What is wrong with a file, or with an entry, is
a warning, and the next one is asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from magjit_triton.macro.building import retargeted
from magjit_triton.macro.device import DEVICES, Device
from magjit_triton.macro.errors import ForeignRepositoryError, MacroKernelError
from magjit_triton.macro.heuristics import converted, guessed
from magjit_triton.macro.loading import checked
from magjit_triton.macro.repository import Entry, Repository, default_path

__all__ = ["Entries", "shipped_paths"]


def shipped_paths() -> list[Path]:
    """The files of the wheel."""
    return sorted((Path(__file__).parent / "shipped").glob("*.sqlite"))


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    signature: str
    device: str


class Entries(Mapping[str, Entry]):
    """Signature → entry, of all files, for a device.

    Args:
        device: the current one.
        own: the user's file; it need not be there.
        shipped: files of the wheel.
    """

    def __init__(self, device: Device, own: Path, shipped: list[Path]) -> None:
        self._device = device
        self._own = own
        self._places: dict[str, list[_Place]] = {}
        self._known: dict[str, Entry | None] = {}
        for path in [one for one in (own, *shipped) if one.is_file()]:
            try:
                with Repository(path, read_only=True) as repository:
                    for signature, name in repository.listed():
                        place = _Place(path, signature, name)
                        self._places.setdefault(signature, []).append(place)
            except MacroKernelError as error:
                self._warn(path, error)
        for places in self._places.values():  # Those of this device first; files stay in order.
            places.sort(key=lambda one: one.device != device.name)

    @classmethod
    def here(cls) -> Entries:
        """Of the user's file, the wheel, and the current device.

        Raises:
            NoDeviceError: there is none.
        """
        return cls(Device.current(), default_path(), shipped_paths())

    def __getitem__(self, signature: str) -> Entry:
        if signature not in self._known:
            self._known[signature] = self._found(signature)
        found = self._known[signature]
        if found is None:
            raise KeyError(signature)
        return found

    def __bool__(self) -> bool:
        """Whether any file has anything."""
        return bool(self._places)

    def __iter__(self) -> Iterator[str]:
        return (one for one in self._places if one in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _found(self, signature: str) -> Entry | None:
        for heuristic in (False, True):
            for place in self._places.get(signature, ()):
                try:
                    with Repository(place.path, read_only=True) as repository:
                        entry = repository.get(signature, place.device)
                    assert entry is not None
                    usable = self._usable(checked(entry), heuristic)
                except MacroKernelError as error:
                    # What the wheel has for other Tritons and devices is nobody's mistake.
                    if place.path == self._own or not isinstance(error, ForeignRepositoryError):
                        self._warn(place.path, error)
                    continue
                if usable is not None and usable.stored:
                    return usable
        return None

    def _usable(self, entry: Entry, heuristic: bool) -> Entry | None:
        device = self._device
        if entry.device == device.name:
            if entry.measured:
                return None if heuristic else entry
            return guessed(entry, device) if heuristic else None
        if not heuristic or not entry.measured:
            return None
        known = {one.name: one for one in DEVICES.values()}
        if entry.facts.get("capability") != device.capability or entry.device not in known:
            return None
        return converted(entry, known[entry.device], retargeted(entry, device), device)

    def _warn(self, path: Path, error: MacroKernelError) -> None:
        warnings.warn(f"Products go on without {path}: {error}", stacklevel=2)
