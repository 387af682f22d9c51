"""``python -m magjit_triton``: tuning, and what repositories hold."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table as Shown

from magjit_triton.macro.errors import MacroKernelError, RepositoryError
from magjit_triton.macro.families import DTYPES, FAMILIES, MacroFamily, named
from magjit_triton.macro.repository import LIMIT, Entry, Repository, default_path

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 with a typed error's text on standard error."""
    options = _parser().parse_args(arguments)
    try:
        found = options.run(options)
    except MacroKernelError as error:
        if options.json:
            print(
                json.dumps(
                    {"error": type(error).__name__, "reason": error.reason, "remedy": error.remedy}
                )
            )
        sys.stderr.write(f"{error}\n")
        return 1
    if options.json:
        print(json.dumps(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m magjit_triton", description="Macro-kernels of the triton backend."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(run=run)
        one.add_argument("--json", action="store_true", help="print the result as JSON")
        one.add_argument(
            "--repository", type=Path, default=None, help=f"the file; else {default_path()}"
        )
        return one

    one = command("tune", _tune, "measure a family's schedules and keep the best")
    one.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    one.set_defaults(family=None)
    one.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="the families of a model's products; "
        "the factory gives a module and a tuple of example inputs",
    )
    _family_options(one)
    one.add_argument(
        "--search", default="exhaustive", choices=("exhaustive", "regions", "random", "coordinate")
    )
    one.add_argument("--budget", type=int, default=64, help="configurations of each regime")
    one.add_argument("--count", type=int, default=24, help="how many are kept")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--table", type=Path, help="write all times that were measured to a file")
    one.add_argument(
        "--like",
        choices=FAMILIES,
        metavar="FAMILY",
        help="measure the schedules alone that are kept of a family that was tuned before",
    )
    one.add_argument(
        "--times-of",
        choices=("float16", "bfloat16"),
        help="take schedules and times over from the family in this type",
    )
    one.add_argument("--no-measure", action="store_true", help="build machine code alone")
    one = command("record", _record, "times of all that is built, and the choice, on given shapes")
    one.add_argument("families", nargs="+", choices=FAMILIES, metavar="FAMILY")
    _family_options(one)
    wanted = one.add_mutually_exclusive_group(required=True)
    wanted.add_argument(
        "--shapes", nargs="+", type=Path, help="files of JSON: a list of [batch, m, n, k]"
    )
    wanted.add_argument(
        "--grid",
        type=int,
        metavar="ROWS",
        help="what `refit` wants: the library's table, and so many random rows of each n and k",
    )
    one.add_argument("--seed", type=int, default=0, help="of the random rows")
    one.add_argument(
        "--tables", type=Path, metavar="FOLDER", help="write the times of each family and file"
    )
    one = command("refit", _refit, "the library's times, residuals and the hedges, without a GPU")
    one.add_argument("families", nargs="+", choices=FAMILIES, metavar="FAMILY")
    one.add_argument("--dtype", choices=DTYPES, default="float16")
    wanted = one.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--table", type=Path, help="what `record --grid` wrote")
    wanted.add_argument(
        "--times-of",
        choices=("float16", "bfloat16"),
        help="take all times over from the family in this type",
    )
    one.add_argument("--device", help="whose entry: h200, h100, a100; else the table's")
    one = command("compare", _compare, "searches replayed on a recorded table, over seeds")
    one.add_argument("family", choices=FAMILIES, metavar="FAMILY")
    one.add_argument("--dtype", choices=DTYPES, default="float16")
    one.add_argument("--table", type=Path, required=True)
    one.add_argument("--device", default="h200", help="whose limits the space has")
    one.add_argument("--budget", type=int, default=64)
    one.add_argument("--seeds", type=int, default=5)
    one.add_argument("--searches", nargs="+", default=["regions", "random", "coordinate"])
    one = command("list", _list, "the entries of a repository")
    one = command("export", _export, "copy entries into another file")
    one.add_argument("file", type=Path)
    one.add_argument("names", nargs="*")
    one = command("import", _import, "take entries over from another file")
    one.add_argument("file", type=Path)
    one.add_argument("names", nargs="*")
    return parser


def _family_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument(
        "--fixed", action="store_true", help="n and k are numbers: those of one layer"
    )
    parser.add_argument(
        "--layers", nargs="+", type=_layer, metavar="NxK", help="weights to tune for"
    )
    parser.add_argument("--rows", nargs="+", type=int, help="rows to tune for")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--built", type=Path, help="a repository with machine code")
    parser.add_argument(
        "--device", help="of which to build: h200, h100, a100; else the current one"
    )
    parser.add_argument("--workers", type=int, help="compile so many at a time")
    parser.add_argument("--limit", type=int, default=LIMIT, help="bytes of the file")


def _layer(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return int(n), int(k)


def _families(options: argparse.Namespace) -> Iterator[MacroFamily]:
    if getattr(options, "model", None):
        from magjit_triton.macro.matching import families_of_model

        name, _, factory = options.model.partition(":")
        try:
            make = getattr(importlib.import_module(name), factory)
        except (ImportError, AttributeError) as error:
            raise MacroKernelError(
                f"No factory {options.model!r}: {error}", remedy="name it as MODULE:FACTORY"
            ) from error
        found = families_of_model(*make())
        if not found:
            raise MacroKernelError(
                f"{options.model} has no product of a known family", remedy=", ".join(FAMILIES)
            )
        for family, layers in found:
            options.layers = layers
            yield family
        return
    names = getattr(options, "families", None) or [options.family]
    if names == [None]:
        raise MacroKernelError("Nothing to tune", remedy="name a FAMILY, or --model")
    fixed = {}
    if options.fixed:
        if not options.layers or len(options.layers) != 1:
            raise MacroKernelError("--fixed wants one layer", remedy="--layers NxK")
        fixed = dict(zip(("n", "k"), options.layers[0], strict=True))
    for name in names:
        yield named(name, DTYPES[options.dtype], **fixed)


def _prebuilt(options: argparse.Namespace, family: MacroFamily, device: Any) -> Entry | None:
    from magjit_triton.macro.building import built, retargeted
    from magjit_triton.macro.space import Space

    if options.like is not None:
        like = _tuned_entry(options, named(options.like, family.family.dtype), device)
        kept = [one.configuration for one in like.stored]
        cuts = Space(family.work, device).propagated(kept)
        return built(family, device, cuts, workers=options.workers)
    if options.built is None:
        return None
    with Repository(options.built, read_only=True) as there:
        for signature, name in there.listed():
            if signature == family.signature:
                found = there.get(signature, name)
                assert found is not None
                return found if name == device.name else retargeted(found, device)
    raise RepositoryError(
        f"{options.built} has nothing of {family}", remedy="build it: tune --no-measure --built"
    )


def _tuned_entry(options: argparse.Namespace, family: MacroFamily, device: Any) -> Entry:
    """What the repository has of a family.

    Raises:
        RepositoryError: it was not tuned on this device.
    """
    with _repository(options, read_only=True) as repository:
        entry = repository.get(family.signature, device.name)
    if entry is None or not entry.measured:
        raise RepositoryError(
            f"{family} was not tuned for {device.name}", remedy=f"tune {family.name}"
        )
    return entry


def _entry_of_programs(options: argparse.Namespace, family: MacroFamily, device: Any) -> Entry:
    """What programs are given of a family, where no file is named.

    Raises:
        RepositoryError: it was not tuned on this device.
    """
    from magjit_triton.macro.sources import Entries

    if options.repository is None:
        found = Entries.here().get(family.signature)
        if found is not None and found.measured:
            return found
    return _tuned_entry(options, family, device)


def _plan(options: argparse.Namespace) -> Any:
    from magjit_triton.macro.campaign import LAYERS, ROWS, Plan

    return Plan(
        getattr(options, "search", "exhaustive"),
        getattr(options, "budget", 64),
        getattr(options, "count", 24),
        tuple(options.layers or LAYERS),
        tuple(options.rows or ROWS),
        options.batch,
        getattr(options, "seed", 0),
    )


@contextmanager
def _bar(options: argparse.Namespace, title: str) -> Iterator[Any]:
    """A function that shows how far something has come."""
    console = Console(stderr=True)
    with Progress(console=console, disable=options.json or not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"{title}: {what}", total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress


def _repository(options: argparse.Namespace, *, read_only: bool = False) -> Repository:
    path = options.repository or default_path()
    return Repository(path, limit=getattr(options, "limit", LIMIT), read_only=read_only)


def _tune(options: argparse.Namespace) -> list[dict[str, Any]]:
    from magjit_triton.macro.campaign import borrowed, tuned
    from magjit_triton.macro.device import Device

    device = Device.named(options.device)
    found = []
    for family in _families(options):
        if options.no_measure:
            entry = _only_built(options, family, device)
        elif options.times_of:
            template = family.name.split(".")[0]
            other = _tuned_entry(options, named(template, DTYPES[options.times_of]), device)
            entry = borrowed(family, _plan(options), other)
        else:
            prebuilt = _prebuilt(options, family, device)
            with _repository(options) as store, _bar(options, str(family)) as progress:
                entry, table = tuned(
                    family, _plan(options), prebuilt, store=store, progress=progress
                )
            if options.table is not None:
                table.write(options.table)
        with _repository(options) as repository:
            repository.put(entry)
        found.append(_described(entry))
    _show(options, found)
    return found


def _only_built(options: argparse.Namespace, family: MacroFamily, device: Any) -> Entry:
    from magjit_triton.macro.building import built
    from magjit_triton.macro.heuristics import default_configurations
    from magjit_triton.macro.space import Space

    cuts = list(Space.small(family.work, device).aligned)
    if options.search != "exhaustive" or options.count < 24:
        cuts = default_configurations(family.work, device, options.count)
    done = 0
    with _bar(options, str(family)) as progress:

        def told(cut: Any, assembled: Any) -> None:
            nonlocal done
            done += 1
            progress("built", done, len(cuts))

        return built(family, device, cuts, workers=options.workers, progress=told)


def _record(options: argparse.Namespace) -> list[dict[str, Any]]:
    from magjit_triton.macro.campaign import recorded
    from magjit_triton.macro.device import Device
    from magjit_triton.macro.refitting import choices, shapes_of
    from magjit_triton.macro.selector import compiled

    device = Device.current()
    found = []
    for family in _families(options):
        entry = _entry_of_programs(options, family, device)
        selector = compiled(entry.model(device))
        for path in options.shapes or [None]:
            if path is None:
                shapes = shapes_of(entry, options.grid, options.seed, options.batch)
            else:
                shapes = [(b, m, n, k) for b, m, n, k in json.loads(path.read_text())]
            with _bar(options, str(family)) as progress:
                table = recorded(family, _plan(options), entry, shapes=shapes, progress=progress)
            table.facts["choices"] = choices(entry, device, table)
            table.facts["select_ns"] = selector.benchmark(*max(shapes), 20000)
            if options.tables is not None:
                stem = "grid" if path is None else path.stem
                table.write(options.tables / f"{family.name}.{options.dtype}.{stem}.json")
            told = {"shapes": table.facts["choices"], "select_ns": table.facts["select_ns"]}
            found.append({**_described(entry), **told})
    return found


def _refit(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The shipped files are refitted like this, too: no GPU is needed."""
    from magjit_triton.macro.device import DEVICES, Device
    from magjit_triton.macro.refitting import refitted, taken_over
    from magjit_triton.macro.space import Space
    from magjit_triton.macro.tuning import Table

    found = []
    for name in options.families:
        family = named(name, DTYPES[options.dtype])
        if options.times_of:
            device = Device.named(options.device)
            other = _tuned_entry(options, named(name, DTYPES[options.times_of]), device)
            entry = taken_over(_tuned_entry(options, family, device), other)
        else:
            space = Space.small(family.work, DEVICES["h200"])  # Nothing is searched in it.
            table = Table.read(options.table, space)
            if options.device is None and isinstance(table.facts.get("device"), dict):
                device = Device(**table.facts["device"])
            else:
                device = Device.named(options.device)
            entry = refitted(_tuned_entry(options, family, device), device, table)
        with _repository(options) as repository:
            repository.put(entry)
        found.append(_described(entry))
    _show(options, found)
    return found


def _compare(options: argparse.Namespace) -> dict[str, Any]:
    """Least cost so far over the least of the table, as a ratio of times, by regime and search."""
    from magjit_triton.macro.campaign import SEARCHES
    from magjit_triton.macro.device import Device
    from magjit_triton.macro.space import Space
    from magjit_triton.macro.tuning import Table, cost, regimes, searched

    work = named(options.family, DTYPES[options.dtype]).work
    table = Table.read(options.table, Space.small(work, Device.named(options.device)))
    found: dict[str, Any] = {}
    for regime, columns in regimes(table.shapes).items():
        least = min(cost(row, columns) for row in table.times.values())
        found[regime] = {}
        for name in options.searches:
            traces = [
                searched(SEARCHES[name](table.space, seed), table, columns, options.budget)
                for seed in range(options.seeds)
            ]
            found[regime][name] = [
                [round(math.exp(min(one - least, 50.0)), 4) for one in trace.so_far]
                for trace in traces
            ]
    if not options.json:
        shown = Shown("rows", "search", "found / best after the budget, by seed")
        for regime, searches in found.items():
            for name, traces_ in searches.items():
                shown.add_row(regime, name, ", ".join(f"{one[-1]:.3f}" for one in traces_))
        Console().print(shown)
    return found


def _list(options: argparse.Namespace) -> list[dict[str, Any]]:
    with _repository(options, read_only=True) as repository:
        found = [_described(entry) for entry in repository.entries()]
    _show(options, found)
    return found


def _export(options: argparse.Namespace) -> list[dict[str, Any]]:
    with _repository(options, read_only=True) as source, Repository(options.file) as target:
        found = [_described(entry) for entry in target.merge(source, options.names)]
    _show(options, found)
    return found


def _import(options: argparse.Namespace) -> list[dict[str, Any]]:
    with Repository(options.file, read_only=True) as source, _repository(options) as target:
        found = [_described(entry) for entry in target.merge(source, options.names)]
    _show(options, found)
    return found


def _described(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "device": entry.device,
        "signature": entry.signature,
        "configurations": [str(one.configuration) for one in entry.stored],
        "measured": entry.measured,
        "library": entry.library is not None,
        "bytes": entry.size,
        "facts": entry.facts,
        "versions": entry.versions,
    }


def _show(options: argparse.Namespace, found: Sequence[dict[str, Any]]) -> None:
    if options.json:
        return
    table = Shown("family", "device", "kernels", "measured", "machine code", "tuned in")
    for one in found:
        seconds = one["facts"].get("tuned_s")
        table.add_row(
            one["name"],
            one["device"],
            str(len(one["configurations"])),
            "yes" if one["measured"] else "no",
            f"{one['bytes'] / 2**20:.1f} MiB",
            "" if seconds is None else f"{seconds} s",
        )
    Console().print(table)
