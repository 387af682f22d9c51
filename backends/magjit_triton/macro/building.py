"""An entry of a repository, built without a GPU: machine code of every configuration asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from magjit_triton.codegen.matmul.configuration import Configuration
from magjit_triton.macro.assemble import Assembled, assemble_all
from magjit_triton.macro.device import Device
from magjit_triton.macro.errors import ForeignRepositoryError
from magjit_triton.macro.families import K_UNIT, MacroFamily
from magjit_triton.macro.repository import Entry, Stored

__all__ = ["built", "entry_of", "facts_of", "retargeted", "stored"]

Progress = Callable[[Configuration, Assembled | None], None]


def facts_of(family: MacroFamily, device: Device) -> dict[str, Any]:
    """What an entry says of its family."""
    return {
        "dtype": str(family.family.dtype).removeprefix("torch."),
        "products": family.work.products,
        "itemsize": family.family.dtype.itemsize,
        "precision": family.family.precision,
        "unit": 16 if "k" in family.fixed else K_UNIT,
        "fixed": family.fixed,
        "buffers": len(family.family.buffers),
        "capability": device.capability,
    }


def stored(assembled: Assembled, device: Device) -> Stored | None:
    """A built configuration; None where not even one block fits, or registers are spilled."""
    occupancy = assembled.occupancy(device)
    if occupancy < 1 or assembled.spills:
        return None
    return Stored(assembled, occupancy)


def entry_of(family: MacroFamily, device: Device, found: Sequence[Stored]) -> Entry:
    """An entry without times."""
    return Entry(family.signature, str(family), device.name, facts_of(family, device), tuple(found))


def retargeted(entry: Entry, device: Device) -> Entry:
    """An entry without times for another device that runs the same machine code.

    Raises:
        ForeignRepositoryError: it does not.
    """
    if entry.facts.get("capability") != device.capability:
        raise ForeignRepositoryError(
            f"{entry.name} was built for {entry.device}, this is {device.name}",
            remedy="build it for this device: python -m magjit_triton tune",
        )
    found = (stored(one.assembled, device) for one in entry.stored)
    return replace(
        entry, device=device.name, stored=tuple(one for one in found if one), library=None
    )


def built(
    family: MacroFamily,
    device: Device,
    configurations: Sequence[Configuration],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Entry:
    """An entry of those configurations that compile, fit and spill nothing (the paper's pruning).

    Args:
        workers: compile so many at a time.
        progress: is told of each.
    """
    found = []
    for cut, assembled in assemble_all(family, configurations, device, workers):
        if progress is not None:
            progress(cut, assembled)
        one = None if assembled is None else stored(assembled, device)
        if one is not None:
            found.append(one)
    return entry_of(family, device, found)
